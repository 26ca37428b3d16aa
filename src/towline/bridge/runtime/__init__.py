"""Processes of a bridge: supervisor, Spark driver, status, plan and reload."""
