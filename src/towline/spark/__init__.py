"""What Spark sees: the source ``format("mqtt")``, a thin client of a gateway. Import its modules by name."""
