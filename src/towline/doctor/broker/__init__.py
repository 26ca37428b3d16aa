"""What an MQTT broker keeps of what a bridge promises: asked of the broker itself, and read from its configuration.

`wire` and `probes` touch the broker and return the facts of `facts`; everything that judges them is pure. `targets`
says which brokers there are, `load` what comes in, `examiner` puts it together.
"""
