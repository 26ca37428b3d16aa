"""Lines of either direction: identity, checkpoint and gateway status, recovery, account, SQL."""
