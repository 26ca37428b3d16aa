"""Reads one ``[[uplink]]`` of a bridge file with its routes, or one ``[[downlink]]``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from towline.bridge.config.members import MembersReader
from towline.bridge.config.mistakes import Mistakes
from towline.bridge.config.model import (
    CHECKPOINT,
    Dedupe,
    DownLine,
    DownlinkSection,
    Line,
    RouteSection,
    UplinkSection,
)
from towline.bridge.config.places import KeyPath
from towline.bridge.config.services import LISTENING
from towline.bridge.config.sqltext import check_sql, names_a_field
from towline.bridge.config.subscriptions import SubscribedRoute, at_odds, repeatable, subscriptions
from towline.bridge.config.tables import Head, Tables
from towline.bridge.patterns import Pattern, Template, allowed, column_of, kafka_name_problem
from towline.gateway.access import is_remote
from towline.gateway.settings import GatewaySettings, ReceiptSettings
from towline.guarantee import AckAfter, Guarantee, conf_problem, policy, promise_problem, qos_problem, sharing_problem
from towline.schema import EVENT_TIME, ROW_SCHEMA
from towline.spark.cadence import DEFAULT_DELAY_MS
from towline.spark.gateway_options import gateway_list

__all__ = ["DownlinkReader", "LineReader"]

_BATCH_BYTES = "max_bytes_per_trigger"
#: Milliseconds that a gateway waits for more after a moment of silence, on a line whose batches rest longer.
_LINGER_MS = 20.0
#: Keys of a line that say what its gateway does.
_OF_A_GATEWAY = {"mqtt", "journal", "receipts", "ack_after", "listen"}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?i?B)\s*$")
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
#: Names no field may have: columns of the source and of the record.
_COLUMNS = frozenset(("key", "value", "headers", "timestamp", EVENT_TIME, *ROW_SCHEMA.names))
_T = TypeVar("_T")
_S = TypeVar("_S", bound=BaseModel)


class TableReader:
    """What reading a line has in common, whichever way it goes."""

    #: The table it reads.
    kind: ClassVar[str]

    def __init__(self, tables: Tables, head: Head, index: int, table: Any) -> None:
        self._tables = tables
        self._mistakes = tables.mistakes
        self._path: KeyPath = (self.kind, index)
        self._table: dict[str, Any] = table if isinstance(table, dict) else {}
        self._subject = f'{self.kind} "{self._table.get("name", index + 1)}"'
        self._head = head

    def _note(self, code: str, key: str | KeyPath, what: str, do: str) -> None:
        path = self._path + ((key,) if isinstance(key, str) else key)
        self._mistakes.add(code, path, self._subject, what, do)

    def _section(self, kind: type[_S], apart: tuple[str, ...]) -> _S | None:
        """The line's own keys."""
        table = dict(self._table)
        if _BATCH_BYTES in table:
            table[_BATCH_BYTES] = self._size((_BATCH_BYTES,), table[_BATCH_BYTES])
        return self._tables.model(kind, table, self._path, self._subject, apart)

    def _spark(self, guarantee: Guarantee) -> None:
        """What [spark.conf] must not undo."""
        if problem := conf_problem(guarantee, self._head.spark.conf):
            name, value = problem
            what = f"guarantee {guarantee} needs {name} = {value}"
            self._mistakes.add(
                "TL-C12", ("spark", "conf", *name.split(".")), self._subject, what, "Remove it from [spark.conf]."
            )

    def _dead_letters(self, named: str | Literal[False] | None) -> str | None:
        """The topic: as named, else `<bridge>.dead-letters` where missing topics are created."""
        if named is False or (named is None and not (self._head.kafka and self._head.kafka.create_topics)):
            return None
        name = named or self._head.dead_letters
        if problem := kafka_name_problem(name):
            self._note("TL-C62", "dead_letter_topic", problem, "Correct the name, or write false for none.")
        return name

    def _gateway(self, name: str, guarantee: Guarantee, own_values: Mapping[str, Any]) -> GatewaySettings | None:
        own = self._table.get("mqtt", {})
        own = self._tables.mqtt(own, (*self._path, "mqtt"), self._subject)
        merged = {**self._head.mqtt, **own}
        prefix = merged.pop("client_id_prefix", None) or self._head.bridge
        origin: dict[str, KeyPath] = {key: ("mqtt", key) for key in self._head.mqtt}
        origin |= {key: (*self._path, "mqtt", key) for key in own}
        if merged.get("session_expiry_s") == 0 and policy(guarantee).persistent:
            what = f"guarantee {guarantee} needs a session that outlives the connection, session_expiry_s is 0"
            self._mistakes.add(
                "TL-C12", origin["session_expiry_s"], self._subject, what, "Raise it; without the key it is for ever."
            )
            merged.pop("session_expiry_s")
        self._tls(merged, origin)
        values = {
            "client_id": f"{prefix}-{name}",
            **merged,
            "name": name,
            "state_dir": self._head.state_dir / name,
            "guarantee": guarantee,
            "listen": self._listen(),
            **own_values,
        }
        if "brokers" not in merged:
            values["brokers"] = "mqtt://x"  # its absence is noted for [mqtt]
        try:
            return GatewaySettings.model_validate(values)
        except ValidationError as error:
            origin |= {key: (*self._path, key) for key in ("journal", "outbox")}
            origin["listen"] = (*self._path, "listen") if "listen" in self._table else ("gateway", "listen")
            self._mistakes.add_details(error.errors(), GatewaySettings, self._path, self._subject, origin=origin)
            return None

    def _listen(self) -> dict[str, object] | None:
        """Where its gateway listens on a network; None for nowhere, and where what that needs is missing and noted."""
        section, own = self._head.gateway, self._table.get("listen")
        files = {name: getattr(section, name) for name in LISTENING}
        address = section.listen if own is None else own
        if not isinstance(address, str) or None in files.values():
            return None
        return {"address": address, **files}

    def _tls(self, merged: dict[str, Any], origin: dict[str, KeyPath]) -> None:
        brokers = merged.get("brokers", [])
        brokers = brokers.split(",") if isinstance(brokers, str) else brokers
        plain = isinstance(brokers, list) and not any(
            str(uri).strip().startswith(("mqtts:", "wss:")) for uri in brokers
        )
        if merged.get("tls") and plain and brokers:
            what = "tls is set, but no broker is reached by mqtts://, so nothing would be encrypted"
            self._mistakes.add("TL-C17", origin["tls"], self._subject, what, "Write mqtts://, or remove tls.")

    def _sharing(self, gateway: GatewaySettings, publish_qos: int | None = None) -> None:
        if problem := sharing_problem(gateway, publish_qos):
            own = self._table.get("mqtt")
            key = "brokers" if len(gateway.brokers) > 1 else "follow_redirects"
            path = (*self._path, "mqtt", key) if isinstance(own, dict) and key in own else ("mqtt", key)
            self._mistakes.add("TL-C90", path, self._subject, *problem)

    def _limits(self, name: str) -> Any:
        """The table ``journal`` or ``outbox``, sizes as numbers."""
        table = self._table.get(name, {})
        if not isinstance(table, dict):
            return table
        return {
            key: self._size((name, key), value) if key.endswith("_bytes") else value for key, value in table.items()
        }

    def _size(self, path: KeyPath, value: object) -> object:
        """Bytes from ``"20 GB"`` (powers of 1,000) or ``"20 GiB"`` (powers of 1,024)."""
        if not isinstance(value, str):
            return value
        if not (match := _SIZE.match(value)):
            self._note(
                "TL-C03",
                path,
                f'"{path[-1]}" must be a size',
                'Write bytes as a number, or as "20 GB" or "512 MiB".',
            )
            return 1 << 30
        unit = match[2].removesuffix("B")
        return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _UNITS[unit.removesuffix("i")])


def _delay(uplink: UplinkSection) -> int:
    """Longest rest between two batches, in milliseconds: none where a broker or a publisher waits for Kafka."""
    waited_for = uplink.ack_after is AckAfter.KAFKA or uplink.receipts is not None
    default = 0 if waited_for else DEFAULT_DELAY_MS
    return default if uplink.max_trigger_delay_ms is None else uplink.max_trigger_delay_ms


class LineReader(TableReader):
    """Reads one ``[[uplink]]``."""

    kind = "uplink"

    def line(self) -> Line | None:
        """The line, or None with its mistakes noted."""
        uplink = self._uplink()
        guarantee = uplink.guarantee if uplink else Guarantee.AT_LEAST_ONCE
        sections, routes = self._routes(guarantee, uplink.dedupe if uplink else None)
        self._one_within(uplink, sections)
        gateways = self._gateways(uplink)
        filters = subscriptions(routes)
        own: dict[str, Any] = {"subscriptions": filters or ({"filter": "x"},)}
        own["repeatable"] = repeatable(routes, [one.pattern for one in filters])
        own["journal"] = self._limits("journal")
        if gateways and not self._has_members:
            own["listen"] = None
        if uplink and uplink.ack_after in policy(guarantee).acks:
            own["ack_after"] = uplink.ack_after
        if uplink and uplink.receipts:
            own["receipts"] = self._receipts(uplink.receipts)
        if uplink and _delay(uplink):
            own["linger_after_silence_ms"] = _LINGER_MS
        name = uplink.name if uplink else "x"
        own["checkpoint"] = str(self._head.state_dir / name / CHECKPOINT)
        gateway = self._gateway(name, guarantee, own)
        if uplink is None or gateway is None or not sections:
            return None
        if (
            guarantee is Guarantee.EXACTLY_ONCE
            and not (gateways and not self._has_members)
            and not (uplink.dedupe or all(one.dedupe or one.promise for one in sections))
        ):
            self._sharing(gateway)  # what a key names may come twice, and what a route promises less
        reader = MembersReader(self._tables, self._path, self._subject, self._table)
        return Line(
            name=uplink.name,
            guarantee=guarantee,
            gateway=gateway,
            sections=sections,
            max_messages_per_trigger=uplink.max_messages_per_trigger,
            max_bytes_per_trigger=uplink.max_bytes_per_trigger,
            max_trigger_delay_ms=_delay(uplink),
            parallelism=uplink.parallelism,
            dead_letter_topic=self._dead_letters(uplink.dead_letter_topic),
            dedupe=uplink.dedupe,
            gateways=gateways,
            removed_gateways=uplink.removed_gateways,
            members=reader.members(uplink, gateway, routes, self._head.bridge),
        )

    @property
    def _has_members(self) -> bool:
        """Whether the file also says what the gateways are told, because it is the same on every machine."""
        return "member" in self._table

    def _gateways(self, uplink: UplinkSection | None) -> tuple[str, ...]:
        """The gateways that the line reads instead of one of its own."""
        if uplink is None or "gateways" not in self._table:
            if uplink and uplink.removed_gateways:
                self._note("TL-C111", "removed_gateways", "it belongs to gateways", "Remove it.")
            return ()
        elsewhere = frozenset() if self._has_members else _OF_A_GATEWAY
        for key in sorted(elsewhere & self._table.keys()):
            what = f"{key} belongs to the gateways, which run elsewhere with settings of their own"
            self._note("TL-C111", key, what, "Remove it here, and set it where they run.")
        try:
            named = gateway_list(json.dumps([self._located(one) for one in uplink.gateways]))
        except ValueError as error:
            do = 'Write each as "grpc+tls://HOST:PORT" or as the state directory of a gateway of this machine.'
            self._note("TL-C110", "gateways", str(error), do)
            return ()
        if any(map(is_remote, named)) and self._head.gateway.token_file is None:
            what = "a gateway on a network lets nobody in without a token"
            self._note("TL-C112", "gateways", what, "Name its file as token_file in the table [gateway].")
        return named

    def _located(self, place: str) -> str:
        return place if "://" in place or not place else str(self._tables.directory / Path(place).expanduser())

    def _receipts(self, receipts: ReceiptSettings) -> ReceiptSettings:
        file = self._tables.secret_file(receipts.key_file, (*self._path, "receipts", "key_file"), self._subject)
        return receipts.model_copy(update={"key_file": file})

    def _uplink(self) -> UplinkSection | None:
        uplink = self._section(UplinkSection, ("mqtt", "journal", "route", "member"))
        if uplink is None:
            return None
        guarantee, acks = uplink.guarantee, policy(uplink.guarantee).acks
        if uplink.ack_after is not None and uplink.ack_after not in acks:
            what = f"guarantee {guarantee} acknowledges after {' or '.join(acks)}, not {uplink.ack_after}"
            self._note("TL-C12", "ack_after", what, "Remove ack_after, or take another guarantee.")
        self._spark(guarantee)
        return uplink

    def _one_within(self, uplink: UplinkSection | None, sections: tuple[RouteSection, ...]) -> None:
        """One query has one watermark, so all routes remember equally long; and one state, so that order is kept."""
        own = [(index, section.dedupe) for index, section in enumerate(sections) if section.dedupe]
        first = (uplink.dedupe if uplink else None) or next((dedupe for _, dedupe in own), None)
        for index, dedupe in own:
            if first is not None and dedupe.within != first.within:
                what = f'within = "{dedupe.within}" differs from "{first.within}" on the same line'
                self._note("TL-C72", ("route", index, "dedupe", "within"), what, "Make it one, or make two lines.")
        name = "spark.sql.shuffle.partitions"
        if first is not None and str(self._head.spark.conf.get(name, 1)) != "1":
            what = f"dedupe needs {name} = 1: more would mix up the order of a device's messages"
            self._mistakes.add(
                "TL-C12", ("spark", "conf", *name.split(".")), self._subject, what, "Remove the setting."
            )

    def _routes(
        self, guarantee: Guarantee, dedupe: Dedupe | None
    ) -> tuple[tuple[RouteSection, ...], tuple[SubscribedRoute, ...]]:
        tables = self._table.get("route", [])
        if not isinstance(tables, list) or not tables:
            self._note("TL-C61", "route", "a line needs at least one [[uplink.route]]", "Add one with from and topic.")
            return (), ()
        sections: list[RouteSection] = []
        routes: list[SubscribedRoute] = []
        for index, table in enumerate(tables):
            path = (*self._path, "route", index)
            subject = f"{self._subject} route {index + 1}"
            section = self._tables.model(RouteSection, table, path, subject)
            route = _RouteReader(self._mistakes, path, subject, guarantee, dedupe).route(section) if section else None
            if section is not None and route is not None:
                sections.append(section)
                routes.append(route)
        if len(routes) == len(tables) and (pair := at_odds(routes)):
            narrow, wide = (routes[number].pattern.text for number in pair)
            what = f'"{narrow}" is subscribed as part of "{wide}", with other options'
            do = "Give both routes the same no_local, retain_as_published, retain_handling and subscription_id."
            self._note("TL-C67", ("route", pair[0], "from"), what, do)
        return tuple(sections), tuple(routes)


class DownlinkReader(TableReader):
    """Reads one ``[[downlink]]``."""

    kind = "downlink"

    def line(self) -> DownLine | None:
        """The line, or None with its mistakes noted."""
        section = self._section(DownlinkSection, ("mqtt", "outbox"))
        guarantee = section.guarantee if section else Guarantee.AT_LEAST_ONCE
        own = {"subscriptions": (), "outbox": self._limits("outbox")}
        gateway = self._gateway(section.name if section else "x", guarantee, own)
        if section is None:
            return None
        self._spark(guarantee)
        self._qos(section)
        dead_letters = self._dead_letters(section.dead_letter_topic)
        if section.failure_notice is not None and dead_letters is None:
            what = "failure_notice tells of dead letters, and the line has none"
            self._note("TL-C79", "failure_notice", what, "Give the line a dead_letter_topic.")
        if gateway is None or gateway.outbox is None:
            return None
        outbox = gateway.outbox.model_copy(update={"checkpoint": str(gateway.state_dir / CHECKPOINT)})
        line = DownLine(
            name=section.name,
            guarantee=guarantee,
            gateway=gateway.model_copy(update={"outbox": outbox}),
            section=section,
            max_messages_per_trigger=section.max_messages_per_trigger,
            parallelism=section.parallelism,
            dead_letter_topic=dead_letters,
        )
        if line.qos == 2:
            self._sharing(gateway, publish_qos=2)
        return line

    def _qos(self, section: DownlinkSection) -> None:
        levels = policy(section.guarantee).publish_levels
        if section.qos is not None and section.qos not in levels:
            wanted = " or ".join(map(str, levels))
            what = f"guarantee {section.guarantee} publishes with QoS {wanted}, not {section.qos}"
            self._note("TL-C12", "qos", what, "Change one of the two.")
        isolations = policy(section.guarantee).isolations
        if section.isolation_level not in isolations:
            what = f"guarantee {section.guarantee} reads {' or '.join(isolations)}, not {section.isolation_level}"
            self._note("TL-C12", "isolation_level", what, "Change one of the two.")


class _RouteReader:
    """Judges one ``[[uplink.route]]``."""

    def __init__(
        self, mistakes: Mistakes, path: KeyPath, subject: str, guarantee: Guarantee, dedupe: Dedupe | None
    ) -> None:
        self._mistakes = mistakes
        self._path = path
        self._subject = subject
        self._guarantee = guarantee
        self._dedupe = dedupe
        self._clean = True

    def route(self, section: RouteSection) -> SubscribedRoute | None:
        """The route, or None with its mistakes noted."""
        captures = self._captures(section.from_)
        self._fields(section, captures or ())
        if captures is not None:
            names = (*captures, *section.fields)
            for key, text in self._templates(section):
                self._attempt("TL-C66", key, partial(Template.parse, text, names))
            if dedupe := section.dedupe or self._dedupe:
                self._attempt("TL-C66", ("dedupe",), partial(dedupe.compile, names))
        self._qos(section)
        self._sql(section, captures or ())
        self._headers(section)
        self._lists(section)
        if not self._clean:
            return None
        route = section.compile(self._guarantee, self._dedupe)
        return route if self._topic_clean(route) else None

    def _note(self, code: str, key: KeyPath, what: str, do: str) -> None:
        self._clean = False
        self._mistakes.add(code, self._path + key, self._subject, what, do)

    def _attempt(self, code: str, key: KeyPath, reading: Callable[[], _T]) -> _T | None:
        try:
            return reading()
        except ValueError as error:
            what, _, advice = str(error).partition("; ")
            self._note(code, key, what, f"{advice[:1].upper()}{advice[1:]}." if advice else "Correct it.")
            return None

    def _captures(self, text: str) -> tuple[str, ...] | None:
        pattern = self._attempt("TL-C67", ("from",), lambda: Pattern.parse(text))
        return None if pattern is None else tuple(pattern.names)

    @staticmethod
    def _templates(section: RouteSection) -> list[tuple[KeyPath, str]]:
        said = ((name, getattr(section, name)) for name in ("topic", "key", "value", "timestamp"))
        templates: list[tuple[KeyPath, str]] = [((name,), text) for name, text in said if text is not None]
        return templates + [(("headers", name), text) for name, text in section.headers.items()]

    def _qos(self, section: RouteSection) -> None:
        if section.promise is not None:
            if problem := promise_problem(self._guarantee, section.promise, section.qos):
                self._note("TL-C12", ("promise",), *problem)
            return
        keyed = (section.dedupe or self._dedupe) is not None
        if section.qos is None or (problem := qos_problem(self._guarantee, section.qos, keyed=keyed)) is None:
            return
        what, do = problem
        self._note("TL-C12", ("qos",), f"{what}, the route subscribes with qos = {section.qos}", do)

    def _fields(self, section: RouteSection, captures: Sequence[str]) -> None:
        """A field is a column for what comes after it, so it has a name of its own."""
        for name in section.fields:
            taken = name in _COLUMNS or name in captures
            if not names_a_field(name, (*_COLUMNS, *captures)):
                what = f'the field "{name}" has a name that ' + ("is taken" if taken else "SQL could not say")
                do = "Name it with small letters, digits and _, and as no column of the source and no wildcard."
                self._note("TL-C66", ("fields", name), what, do)

    def _sql(self, section: RouteSection, captures: Sequence[str]) -> None:
        """SQL names columns: those of the message, wildcards, and fields."""
        keys = ("where", "reject", "header_map")
        said: list[tuple[KeyPath, str | None]] = [((key,), getattr(section, key)) for key in keys]
        said += [(("fields", name), text) for name, text in section.fields.items()]
        own = {name: name for name in (*captures, *section.fields)}
        for key, text in said:
            self._attempt("TL-C69", key, partial(check_sql, str(key[-1]), text, lambda n: own.get(n) or column_of(n)))
        dedupe = section.dedupe or self._dedupe
        keyed = dedupe is not None and "{" not in dedupe.key
        folded = [name.lower() for name in captures]
        columns = {*_COLUMNS, *(name for name in folded if name.startswith("towline_") or folded.count(name) > 1)}
        taken = [name for name in captures if name.lower() in columns]
        if taken and (keyed or any(text is not None for _, text in said)):
            what = f"the wildcard {{{taken[0]}}} is a column for SQL, which has another of that name"
            self._note("TL-C67", ("from",), what, "Give the wildcard another name.")

    def _headers(self, section: RouteSection) -> None:
        for name in section.headers:
            if name.startswith(("mqtt.", "towline.")):
                what = f'a header "{name}" would be taken for one that Towline writes'
                self._note("TL-C65", ("headers", name), what, "Name it without the prefix mqtt. or towline.")

    def _lists(self, section: RouteSection) -> None:
        for index, glob in enumerate(section.allowed_topics):
            if problem := kafka_name_problem(glob.replace("*", "x").replace("?", "x")):
                self._note("TL-C62", ("allowed_topics", index), problem, "Use names, or globs with * and ?.")
        if section.fallback_topic is not None and (problem := kafka_name_problem(section.fallback_topic)):
            self._note("TL-C62", ("fallback_topic",), problem, "Correct the name.")

    def _topic_clean(self, route: SubscribedRoute) -> bool:
        name = route.topic.constant
        if name is None:
            if not route.topic.parts[0] and not route.allowed_topics:
                what = f'topic "{route.topic.text}" lets a device name any Kafka topic'
                self._note("TL-C63", ("topic",), what, "Begin it with a fixed prefix, or list allowed_topics.")
            elif problem := kafka_name_problem("x" + "".join(route.topic.parts[::2])):
                self._note("TL-C62", ("topic",), problem.replace('"x', '"'), "Correct the fixed part of the name.")
        elif problem := kafka_name_problem(name):
            self._note("TL-C62", ("topic",), problem, "Correct the name.")
        elif not allowed(name, route.allowed_topics):
            self._note("TL-C63", ("topic",), f'topic "{name}" is not among allowed_topics', "Add it there.")
        return self._clean
