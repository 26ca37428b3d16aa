"""Delivery between an MQTT session and the journals of a gateway or publisher: inbound, outbound, receipts."""
