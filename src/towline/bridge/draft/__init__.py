"""A first bridge file: from answers, or from a Mosquitto's configuration, with comments that say what is at stake."""
