"""Proof harness: loads, faults, an independent referee, and the account of each run.

Towline's own code never checks Towline here: publishers speak MQTT through the bare `mqtt5` codec, and records are read
back from Kafka with a plain consumer (or kcat), never through the bridge, the gateway or the journal.
"""
