"""Any bytes against the decoders: `python -m tests.fuzz --help`."""
