"""The bridge file: what may stand in it, where a mistake is, and the lines it becomes."""
