"""Draft of a bridge file for `towline init`: a template, filled with answers or from a Mosquitto configuration."""
