"""HTTP endpoint with metrics and health of a bridge, a gateway or a publisher."""
