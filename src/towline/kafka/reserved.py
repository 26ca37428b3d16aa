"""Names of Kafka topics that no message may choose, because something else lives there.

A row's column ``topic``, or a bridge's template, often holds text of a device. It must not reach a marker topic, where
a record would be taken for a sink's memory, nor what is internal to Kafka (``__consumer_offsets``,
``__transaction_state``), nor, in a bridge, a dead-letter topic, whose records are carried on later.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What names of topics begin with that are internal, by Kafka's custom.
INTERNAL: Final = "__"
#: How the name of a marker topic ends; it begins with the sink's prefix and a dot.
MARKERS: Final = ".markers"


def reserved(names: Iterable[str] = (), prefix: str = "towline") -> str:
    """A regular expression, for Python's ``fullmatch`` and for Java, of the reserved names.

    Args:
        names: Further names, such as those of dead-letter topics.
        prefix: What the marker topics of all sinks begin with (``transactionalIdPrefix``).
    """
    made = [
        f"{INTERNAL}.*",
        f"{re.escape(prefix)}[.].*{re.escape(MARKERS)}",
        *map(re.escape, sorted(set(names))),
    ]
    return "|".join(made)
