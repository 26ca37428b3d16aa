"""Long random runs: `python -m tests.fuzz --help`."""
