"""The bridge file: what may stand in it, where a mistake is, and what it plans."""
