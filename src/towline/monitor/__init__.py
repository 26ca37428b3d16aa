"""Metrics and health of a bridge, a gateway or a publisher, read from what they know of themselves when it is asked."""
