"""A first bridge file: a template that is filled by answers, or from a Mosquitto's configuration."""
