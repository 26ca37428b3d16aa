"""The processes of a bridge and what they say of themselves."""
