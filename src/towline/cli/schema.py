"""``towline schema``: what a bridge file may say, for editors."""

from __future__ import annotations

import sys

from towline.cli.screen import json_text


def schema() -> None:
    """Print the JSON Schema (2020-12) of the bridge file.

    An editor with Taplo (Even Better TOML) reads it where the file begins with the line

        #:schema ./bridge.schema.json

    Example:  towline schema > bridge.schema.json
    """
    from towline.bridge.config.schema import bridge_schema  # noqa: PLC0415 - loaded when it is called

    sys.stdout.write(json_text(bridge_schema(), indent=2))
