"""The publisher's log: lines in the application's own logging."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from towline.text import printable

__all__ = ["LOG", "Log"]

#: The application's own logging: a library does not choose where its lines go.
LOG: Final = "towline.publisher"


class Log:
    """Writes there."""

    def info(self, event: str, **facts: object) -> None:
        """Write at level INFO."""
        logging.getLogger(LOG).info("%s%s", event, _facts(facts))

    def warning(self, event: str, **facts: object) -> None:
        """Write at level WARNING."""
        logging.getLogger(LOG).warning("%s%s", event, _facts(facts))


def _facts(facts: Mapping[str, object]) -> str:
    return "".join(f" {name}={printable(str(value))}" for name, value in facts.items())
