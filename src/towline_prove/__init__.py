"""The proof harness: loads, faults, an independent referee, and the account of each run.

Nothing here judges Towline with Towline's own code: publishers speak MQTT through the bare `mqtt5` codec, and what
reached Kafka is read back with a plain consumer (or kcat), never through the bridge, the gateway or the journal.
"""
