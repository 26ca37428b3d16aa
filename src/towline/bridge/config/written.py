"""What a bridge file says with variables of the environment, for what is shown of it [I12]."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Final

from towline.bridge.config.places import REFERENCE, Document, names_variable
from towline.net.transport import Endpoint

#: A wildcard with a name, of a route's ``from``; braces after a dollar sign are a variable's.
_NAMED: Final = re.compile(r"(?<![${])\{[^{}]*\}")
_TOPICS: Final = ("topic", "fallback_topic", "dead_letter_topic", "from")
#: What is shown under another key than it is written under.
_OTHERS: Final = {
    "filter": ("from",),
    "kafka_topics": _TOPICS,
    "topics": _TOPICS,
    "bootstrap.servers": ("bootstrap_servers",),
}
#: What may be several, with commas between.
_LISTS: Final = ("bootstrap_servers", "bootstrap.servers", "brokers")


class WrittenValues:
    """Values of a file that name a variable, by the last part of their key, and how they are written.

    Args:
        document: The file; where it can't be read, nothing is known.
    """

    def __init__(self, document: Document) -> None:
        self._found: dict[tuple[str, str], str] = {}
        self._look(document.raw, "")

    def _look(self, said: object, key: str) -> None:
        for name, one in said.items() if isinstance(said, dict) else ((key, one) for one in _items(said)):
            self._look(one, name)
        if not isinstance(said, str) or not names_variable(said):
            return
        value = REFERENCE.sub(lambda one: one[0][1:] if one[1] else os.environ.get(one[2], ""), said)
        self._found[key.rpartition(".")[2], value] = said
        if key == "from":
            self._found[key, _NAMED.sub("+", value)] = _NAMED.sub("+", said)
        elif key == "brokers":
            with contextlib.suppress(ValueError):  # of another environment than the one that it was read with
                self._found[key, str(Endpoint.parse(value))] = said

    def shown(self, value: Any, key: str = "") -> Any:
        """A value, and all that is in it, as the file writes it; one that the file says without a variable as it is.

        Args:
            value: Text, or JSON values of such.
            key: Of the file, or of a plan, in which the value stands.
        """
        if isinstance(value, dict):
            return {name: self.shown(one, name) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.shown(one, key) for one in value]
        if key in _LISTS and isinstance(value, str) and "," in value:
            return re.sub(r"[^,\s]+", lambda one: str(self.shown(one[0], key)), value)
        keys = _OTHERS.get(key, (key.rpartition(".")[2],))
        return next((self._found[one, value] for one in keys if (one, value) in self._found), value)


def _items(said: object) -> list[Any]:
    return said if isinstance(said, list) else []
