"""``python -m towline.gateway``: run the gateway whose settings come as JSON on standard input.

Settings come this way, not as arguments, so that nothing of them stands in the list of processes.
"""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from towline.errors import ConfigError
from towline.gateway.process import EXIT_CONFIG, configure_logging, run
from towline.gateway.settings import GatewaySettings
from towline.logfile import MOST_BYTES, LogStream


def main() -> int:
    """Read the settings, run the gateway, return its exit code."""
    os.environ.pop("NOTIFY_SOCKET", None)  # the service is who started it
    try:
        configure_logging(LogStream(sys.stderr, MOST_BYTES))  # the file is ours, and nobody else looks after it
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    try:
        settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "settings"
        sys.stderr.write(f"{place}: {first['msg']}.   [TL-C01]\n")
        return EXIT_CONFIG
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
