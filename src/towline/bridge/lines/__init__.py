"""What lines of both directions share: their identity, what a checkpoint says, recovery, counting, SQL expressions."""
