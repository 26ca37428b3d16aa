"""Ratios against honest rivals, each measured in one run on one broker: ``python -m benchmarks``."""
