"""Configuration of a bridge: reading and checking its file, and the lines built from it."""
