"""``profile = "hono"``: Eclipse Hono's conventions for MQTT topics and Kafka records, as ordinary routes and mappings.

A line with the profile is what a user could write by hand: the functions here give the tables, and all that reads,
checks, runs and counts lines knows nothing of Hono.
"""

from towline.bridge.config.hono.profile import PROFILES, with_profile
from towline.bridge.config.hono.settings import HonoSettings

__all__ = ["PROFILES", "HonoSettings", "with_profile"]
