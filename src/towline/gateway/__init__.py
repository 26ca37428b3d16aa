"""The only process that speaks MQTT and the only one that owns a disk: transport pump, inbox, Flight service."""
