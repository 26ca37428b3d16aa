"""Records of MQTT messages as columns: `towline.kafka.columns` with the message that each record was.

The headers that every message has are made of flat columns, each once for all rows that say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from towline.kafka.columns import Columns, distinct_values, header_lists, longest, most
from towline.kafka.deadletters import A_HEADER, Reason
from towline.kafka.properties import USER_PREFIX, Header, in_bytes, property_headers
from towline.kafka.screening import Fault
from towline.schema import OPTIONAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RecordColumns"]

_WRITTEN: Final = frozenset(("topic", "key", "value", "headers", "timestamp"))
#: What a message has that says nothing more than all do.
_NOTHING: Final[Mapping[str, Any]] = dict.fromkeys(("retain", *OPTIONAL))
#: What headers take at most beside texts, topics and properties of users: names, digits, and microseconds since 1970.
_FIXED_BYTES: Final = 100
_RARE_BYTES: Final = 200


@dataclass(frozen=True)
class RecordColumns(Columns):
    """Batches of `towline.bridge.routes.RECORD_SCHEMA`."""

    topic: str | None = None
    present: frozenset[str] = _WRITTEN

    def refusals(self, batch: Any) -> list[Fault] | None:
        """Why its rows are refused, of a batch of those that the routes refuse."""
        reasons = batch.column("towline_reason")
        if reasons.null_count == batch.num_rows:
            return None
        details = batch.column("towline_detail").to_pylist()
        return [Fault(Reason(one), text) for one, text in zip(reasons.to_pylist(), details, strict=True)]

    def originals(self, batch: Any, at: int, headers: Sequence[Header]) -> list[Header]:  # noqa: ARG002 - not the record's
        """The headers of a row's dead letter: all properties of its message, and where it came from."""
        row = batch.slice(at, 1)
        ((topic, qos, received),) = _names(row)
        cells = {name: row.column(f"towline_{name}")[0].as_py() for name in ("gateway", "offset", "duplicate", "rare")}
        place = {"mqtt.gateway": cells["gateway"] or "", "mqtt.offset": str(cells["offset"])}
        place |= {"mqtt.duplicate": "true"} if cells["duplicate"] else {}
        made = property_headers(topic, qos, received, cells["rare"] or _NOTHING)
        return [*made, *((name, text.encode()) for name, text in place.items())]

    def largest(self, batch: Any) -> int:
        """As `Columns.largest`."""
        rest = _FIXED_BYTES + longest(batch.column("towline_topic")) + _most_of(batch.column("towline_rare"))
        return super().largest(batch) + rest

    def _headers(self, batch: Any) -> Iterator[Any]:
        own, travels = batch.column("headers"), batch.column("towline_properties").fill_null(False)
        ends = pc.min_max(travels).as_py()
        if not ends["max"]:
            return header_lists(own)
        rare, plain = batch.column("towline_rare"), _plain_headers(batch)
        some = rare.null_count < batch.num_rows
        if ends["min"] and not some and not len(own.flatten()):
            return plain
        more = rare.to_pylist() if some else repeat(None)
        flags = repeat(True) if ends["min"] else travels.to_pylist()
        return map(_joined, flags, plain, _names(batch), more, header_lists(own))


def _names(batch: Any) -> Iterator[tuple[bytes | None, int, int]]:
    """Topic, QoS, and the microseconds since 1970 of each message."""
    moments = distinct_values(batch.column("towline_received_at").cast(pa.int64()))
    # What is the same in all rows is repeated.
    topics = batch.column("towline_topic").cast(pa.binary()).to_pylist()
    return zip(topics, distinct_values(batch.column("towline_qos")), moments, strict=False)


def _plain_headers(batch: Any) -> Iterator[list[Header]]:
    """The headers that every message has; what several messages say is one tuple for all of them."""
    topics = _each_header(batch.column("towline_topic").cast(pa.binary()), "mqtt.topic")
    levels = _each_header(batch.column("towline_qos"), "mqtt.qos")
    moments = _each_header(batch.column("towline_received_at").cast(pa.int64()), "mqtt.received-at")
    return map(list, zip(topics, levels, moments, strict=True))


def _each_header(column: Any, name: str) -> Iterator[Header]:
    coded = column.dictionary_encode(null_encoding="encode")
    made = [(name, in_bytes(value)) for value in coded.dictionary.to_pylist()]
    return repeat(made[0], len(column)) if len(made) == 1 else map(made.__getitem__, coded.indices.to_pylist())


def _joined(
    travels: bool,  # noqa: FBT001 - of one row, mapped
    plain: list[Header],
    name: tuple[bytes | None, int, int],
    more: Mapping[str, Any] | None,
    own: list[Header],
) -> list[Header]:
    if not travels:
        return own
    topic, qos, received = name
    made = plain if more is None else property_headers(topic, qos, received, more)
    return [*made, *own] if own else made


def _most_of(rare: Any) -> int:
    """At least the bytes of the headers that any message's rare properties become."""
    if rare.null_count == len(rare):
        return 0
    parts = dict(zip(rare.type.names, rare.flatten(), strict=True))
    texts = sum(longest(parts[name]) for name in ("content_type", "response_topic", "correlation_data"))
    users, numbers = parts["user_properties"], parts["subscription_ids"]
    pairs = users.flatten()
    one = A_HEADER + len(USER_PREFIX) + longest(pairs.field("key")) + longest(pairs.field("value"))
    return _RARE_BYTES + texts + most(users) * one + most(numbers) * (A_HEADER + _RARE_BYTES)
