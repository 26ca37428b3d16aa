"""The bridge file: TOML in, validated lines out, every mistake with its line.

Reading happens without network and without Spark. Strings may name environment variables as ``${NAME}`` (``$${NAME}``
is the literal text); relative paths are relative to the file. Secrets are named by files, never written here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ValidationError

from towline.bridge.config.document import UNKNOWN, Document, FileValues, KeyPath, Mistakes
from towline.bridge.config.model import CHECKPOINT, Bridge, DownLine, Line
from towline.bridge.config.rules import (
    MQTT,
    ROOT,
    Violation,
    cluster_problems,
    dead_letter_topic,
    file_problems,
    gateway_problems,
    line_problems,
    member_problems,
    route_problems,
    topic_problems,
)
from towline.bridge.config.subscriptions import SubscribedRoute, repeatable, restricted, subscriptions
from towline.bridge.config.tables import (
    LINES,
    LISTENING,
    BridgeTable,
    DownlinkSection,
    DownlinkTable,
    KafkaSection,
    MemberSection,
    SparkSection,
    UplinkSection,
    UplinkTable,
)
from towline.bridge.kafka_source import java_client
from towline.bridge.profiles import Profile, graft, profile_of, shipped
from towline.errors import ConfigError
from towline.gateway.access import ServerCertificate, TokenFile
from towline.gateway.identity import MEMBERS
from towline.gateway.settings import GatewaySettings, ListenSettings, ShareSettings, ShareWay
from towline.guarantee import AckAfter, policy
from towline.net.settings import MqttSettings
from towline.spark.cadence import DEFAULT_DELAY_MS
from towline.spark.session import is_cluster

#: Client settings the sink sets by itself, from the guarantee or this file.
_OWNED: Final = frozenset(
    ["bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "request.required.acks", "isolation.level"]
)
#: Keys of a line and of the tables around it that its gateway is told under the same name.
_CONNECTION: Final = frozenset([*MqttSettings.model_fields, "ack_after", "listen", "receipts"])
#: Milliseconds that a gateway waits for more after a moment of silence, on a line whose batches rest longer.
_LINGER_MS: Final = 20.0
#: In place of a table or key with mistakes, so that what it has to do with others is looked at all the same.
_STAND_INS: Final[Mapping[str, Any]] = {
    "name": "x",
    "state_dir": "x",
    "mqtt": {"brokers": "mqtt://x"},
    "kafka": {"bootstrap_servers": "x:1"},
    "uplink": {"name": "x", "route": [{"from": "x", "topic": "x"}]},
    "downlink": {"name": "x", "from": "x"},
}


def load(file: Path, environ: Mapping[str, str] | None = None, *, master: str | None = None) -> Bridge:
    """Read a bridge file; ``environ`` is for ``${NAME}``, the process's own by default, ``master`` is Spark's instead.

    Raises:
        ConfigErrors: With every mistake of the file.
        ConfigError: If it can't be read at all.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("TL-C11", str(file), "the file is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        reason = (error.strerror or "it can't be read").lower()
        raise ConfigError("TL-C10", str(file), reason, "Name a bridge file; towline init makes one.") from error
    return parse(text, file, environ, master=master)


def parse(text: str, file: Path, environ: Mapping[str, str] | None = None, *, master: str | None = None) -> Bridge:
    """Read the text of a bridge file; `load` tells the rest."""
    document = Document(text, file, environ)
    spark = document.values.setdefault("spark", {})
    if master is not None and isinstance(spark, dict):
        spark["master"] = master
    return _Reader(document).bridge()


class _Reader:
    """Reads one file: values, profiles, tables, and then what they say together."""

    def __init__(self, document: Document) -> None:
        self._document, self._file = document, document.file.absolute()
        self._mistakes = Mistakes(document)
        self._raw: dict[str, Any] = FileValues(document, self._mistakes).read(document.values)
        #: Places of tables that are stand-ins for others with mistakes.
        self._broken: set[KeyPath] = set()
        graft(document, self._file.parent)
        self._tables = self._validated(self._apply_profiles())
        self._state_dir = self._file.parent / self._tables.state_dir.expanduser()

    def bridge(self) -> Bridge:
        """Everything, or every mistake."""
        tables = self._tables
        spark = self._spark(tables.spark)
        self._judge_client(tables.kafka)
        self._judge_listening()
        lines = self._lines()
        self._note(file_problems(tables.name, lines))
        self._judge_java(lines)
        self._mistakes.raise_if_any()
        dead_letters = {one.dead_letter_topic for one in lines.values() if one.dead_letter_topic}
        named = {"dead_letter_topics": tuple(sorted(dead_letters))}
        own = {
            "file": self._file,
            "state_dir": self._state_dir,
            "spark": spark,
            "lines": [one.model_copy(update=named) if isinstance(one, Line) else one for one in lines.values()],
        }
        shared = Bridge.model_fields.keys() & BridgeTable.model_fields.keys()
        return Bridge.model_validate({**{key: getattr(tables, key) for key in shared}, **own})

    def _note(self, problems: Iterable[Violation], base: KeyPath = ()) -> bool:
        """Note mistakes, those that stand elsewhere as of the table at ``base`` too; whether there is any."""
        problems = list(problems)
        of_base = self._document.subject((*base, ""))
        for code, key, what, *do in problems:
            elsewhere = key[:1] == (ROOT,)
            place = key[1:] if elsewhere else self._said(base, str(key[1])) if key[:1] == (MQTT,) else (*base, *key)
            self._mistakes.add(code, place, what, *do, subject=of_base if place[: len(base)] != base else None)
        return bool(problems)

    def _said(self, line: KeyPath, *names: str) -> KeyPath:
        """Where the first of these settings of a line's connection is said: in its table, or for all lines."""
        around = (line, (*line, "mqtt"), ("mqtt",), ("gateway",))
        places = ((*table, name) for name in names if name in _CONNECTION for table in around)
        nowhere = ("mqtt", "brokers") if "brokers" in names else line
        return next((place for place in places if self._document.value(place) is not None), nowhere)

    # -- profiles and tables

    def _line_tables(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Kind, number and content of every table of a line."""
        for kind in LINES:
            tables = self._raw.get(kind, [])
            for number, table in enumerate(tables if isinstance(tables, list) else ()):
                if isinstance(table, dict):
                    yield kind, number, table

    def _apply_profiles(self) -> Sequence[str]:
        """Have each line with a profile say all that this says; the names of the tables with their parameters."""
        used: list[tuple[str, int, Profile, int]] = []
        for kind, number, table in (one for one in self._line_tables() if "profile" in one[2]):
            try:
                used.append((kind, number, *profile_of(self._file.parent, kind, str(table["profile"]))))
            except ConfigError as error:
                if error.where:
                    raise  # a mistake in the profile itself
                self._mistakes.add(error.code, (kind, number, "profile"), error.what, error.do)
                if error.code != "TL-C06":  # else its table of parameters would be unknown
                    self._mistakes.raise_if_any()
                self._replace(kind, number)
        tables = {one.file.table: one for one in (*shipped(), *(profile for _, _, profile, _ in used))}
        values = {one: self._parameters(one) for one in {*tables.values(), *(profile for _, _, profile, _ in used)}}
        for kind, number, profile, at in used:
            self._raw[kind][number] = profile.applied(kind, at, self._raw[kind][number], values[profile])
        for name in tables:
            self._raw.pop(name, None)
        return list(tables)

    def _parameters(self, profile: Profile) -> dict[str, Any]:
        """The parameters of a profile by their names, or its defaults where the table has mistakes."""
        kind, name = profile.parameters, profile.file.table
        try:
            table = kind.model_validate(self._raw.get(name, {}))
        except ValidationError as error:
            self._mistakes.add_details(error.errors(), kind, (name,))
            table = kind()
        return profile.values(table) | {"bridge": str(self._raw.get("name", "x"))}

    def _validated(self, parameters: Sequence[str]) -> BridgeTable:
        """All tables, with stand-ins for those that have mistakes; unknown keys hide no other mistake."""
        extra: Literal["forbid", "ignore"] = "forbid"
        while True:  # what a table says together is validated once its keys are right
            try:
                return BridgeTable.model_validate(self._raw, extra=extra)
            except ValidationError as error:
                details = error.errors()
            self._mistakes.add_details(details, BridgeTable, also=parameters)
            for place in (one["loc"] for one in details if one["type"] not in UNKNOWN):
                self._replace(*place)
            extra = "ignore"

    def _replace(self, key: str | int, *place: str | int) -> None:
        """Put a stand-in where a table has a mistake, or take it out."""
        number = place[:1] if key in LINES else ()
        if number:
            self._raw[str(key)][number[0]] = _STAND_INS[str(key)]
        elif key in _STAND_INS and key not in LINES:
            self._raw[str(key)] = _STAND_INS[str(key)]
        else:
            self._raw.pop(str(key), None)
        self._broken.add((key, *number))

    # -- what stands in more places than its table

    def _spark(self, section: SparkSection) -> SparkSection:
        if "spark.authenticate.secret" in section.conf:
            place, what = ("spark", "conf", "spark", "authenticate", "secret"), "Spark's secret stands in this file"
            do = "Write it into a file, mode 0600, and name that: secret_file in [spark]."
            self._mistakes.add("TL-C16", place, what, do)
        jars: dict[Path, None] = {}  # in order, each once
        for named in section.kafka_jars:
            folder, pattern = (named, "*.jar") if named.is_dir() else (named.parent, named.name)
            globbed = (folder / one for one in sorted(glob(pattern, root_dir=folder)))  # noqa: PTH207 - takes a**b
            files = dict.fromkeys(one for one in (named, *globbed) if one.is_file())
            jars |= files
            if not files:
                do = "Correct the path, or remove it: Maven brings the jars."
                self._mistakes.add("TL-C15", ("spark", "kafka_jars"), f"no jar is at {named}", do)
        return section.model_copy(update={"kafka_jars": tuple(jars)})

    def _judge_client(self, kafka: KafkaSection) -> None:
        """Let the client library judge its settings; it opens no connection for that."""
        from towline.kafka.clientconfig import check_client  # noqa: PLC0415 - loads librdkafka

        for key in _OWNED.intersection(kafka.settings):
            self._mistakes.add("TL-C68", ("kafka", "settings", key), f'"{key}" is set by Towline')
        if self._document.unset or ("kafka",) in self._broken:
            return
        try:
            check_client(kafka.client(), "[kafka]", "")
        except ConfigError as error:
            key = next((key for key in kafka.settings if f'"{key}"' in error.what), "")
            code, what, do = error.code, error.what.replace("option ", ""), error.do
            if code == "TL-C44":  # a secret: say it in the words of this file
                code, what = "TL-C16", f'"{key}" would put a secret into this file'
                do = "Use password_file or key_password_file, or write ${NAME}."
            place = ("kafka", "settings", key) if key else ("kafka", "bootstrap_servers")
            what = what.replace("bootstrap.servers", "bootstrap_servers")
            self._mistakes.add(code, place, what, do)

    def _judge_listening(self) -> None:
        """The files of what listens on a network have to be there and to go together."""
        section, monitor = self._tables.gateway, self._tables.monitor
        files = {name: getattr(section, name) for name in LISTENING}
        own = [table.get("listen") for _, _, table in self._line_tables()]
        listens = section.listen is not None or any(isinstance(one, str) for one in own)
        checks: list[tuple[str, Callable[[], object]]] = []
        if listens and all(file is not None and file.is_file() for file in files.values()):  # else it is noted
            address = ListenSettings.model_validate({"address": "localhost:0", **files})
            checks = [("gateway", partial(ServerCertificate.read, address))]
        for table, tokens in (("gateway", section.token_file), ("monitor", monitor.token_file)):
            if tokens is not None and os.access(tokens, os.R_OK):  # who may not, looks at the status all the same
                checks.append((table, partial(TokenFile, tokens)))
        for table, check in checks:
            try:
                check()
            except ConfigError as error:
                key = next((one for one in LISTENING if error.where.startswith(one)), "token_file")
                self._mistakes.add(error.code, (table, key), f"{key}: {error.what}", error.do)

    def _judge_java(self, lines: Mapping[KeyPath, Line | DownLine]) -> None:
        """Java's client has to take the settings of a downlink, and a cluster what its tasks need."""
        secrets: dict[str, str] = {}
        try:
            java_client(self._tables.kafka.client(), secrets)
        except ConfigError as error:  # a file that isn't here is told at the start
            if error.code == "TL-C77" and any(isinstance(line, DownLine) for line in lines.values()):
                self._mistakes.add(error.code, ("kafka", "settings"), error.what, error.do)
        master = self._tables.spark.master
        for path, line in lines.items() if is_cluster(master) else ():
            self._note(cluster_problems(line, master, secrets=bool(secrets)), path)

    # -- lines

    def _lines(self) -> dict[KeyPath, Line | DownLine]:
        """The lines that are without mistakes, by the places of their tables."""
        tables: dict[KeyPath, UplinkTable | DownlinkTable] = {
            (kind, number): table for kind in LINES for number, table in enumerate(getattr(self._tables, kind))
        }
        if not tables and not any(kind in self._raw or (kind,) in self._broken for kind in LINES):
            self._mistakes.add("TL-C60", ("uplink",), "[[uplink]] is missing: there is no line to run")
        lines: dict[KeyPath, Line | DownLine] = {}
        for path, table in tables.items():
            if path not in self._broken:
                self._note(line_problems(table, self._tables), path)
                line = self._uplink(path, table) if isinstance(table, UplinkTable) else self._downlink(path, table)
                lines |= {path: line} if line else {}
        return lines

    def _uplink(self, path: KeyPath, table: UplinkTable) -> Line | None:
        routes: list[SubscribedRoute] = []
        for number, section in enumerate(table.route):
            place = (*path, "route", number)
            if not self._note(route_problems(section, table.guarantee, table.dedupe), place):
                route = section.compile(table.guarantee, table.dedupe)
                routes += [] if self._note(topic_problems(route), place) else [route]
        if len(routes) < len(table.route):
            return None
        filters = subscriptions(routes)
        delay_ms = table.max_trigger_delay_ms
        if delay_ms is None:  # no rest where a broker or a publisher waits for Kafka
            waited_for = table.ack_after is AckAfter.KAFKA or table.receipts is not None
            delay_ms = 0 if waited_for else DEFAULT_DELAY_MS
        own: dict[str, Any] = {
            "subscriptions": filters,
            "repeatable": repeatable(routes, [one.pattern for one in filters]),
            "journal": table.journal,
            "receipts": table.receipts,
            "ack_after": table.ack_after,
            "checkpoint": str(self._state_dir / table.name / CHECKPOINT),
            "linger_after_silence_ms": _LINGER_MS if delay_ms else 0.0,
        }
        if table.gateways and not table.member:  # they run elsewhere: nothing is reached, and nothing listens here
            own |= {"brokers": "mqtt://x", "listen": None}
        if (gateway := self._gateway(path, table, own)) is None:
            return None
        wrong = self._note(member_problems(table, gateway), path)
        members = (
            self._settings(self._member(table, member, gateway, routes), (*path, "member", number))
            for number, member in enumerate(() if wrong else table.member)
        )
        resolved = {
            "gateway": gateway,
            "members": [one for one in members if one],
            "max_trigger_delay_ms": delay_ms,
            "dead_letter_topic": dead_letter_topic(table, self._tables),
        }
        line = Line.model_validate({**_fields(table, UplinkSection), **resolved})
        self._note(gateway_problems(line, routes), path)
        return line

    def _downlink(self, path: KeyPath, table: DownlinkTable) -> DownLine | None:
        checkpoint = str(self._state_dir / table.name / CHECKPOINT)
        own = {"subscriptions": (), "outbox": {**table.outbox.model_dump(), "checkpoint": checkpoint}}
        if (gateway := self._gateway(path, table, own)) is None:
            return None
        topic = dead_letter_topic(table, self._tables)
        resolved = {
            "gateway": gateway,
            "dead_letter_topic": topic,
            "qos": policy(table.guarantee).publish_qos if table.qos is None else table.qos,
            "control_characters": table.control_characters or ("dead_letter" if topic else "send"),
        }
        line = DownLine.model_validate({**_fields(table, DownlinkSection), **resolved})
        self._note(gateway_problems(line, ()), path)
        return line

    def _gateway(
        self, path: KeyPath, table: UplinkTable | DownlinkTable, own: Mapping[str, Any]
    ) -> GatewaySettings | None:
        """What the line's gateway is told; None where that has mistakes."""
        said = (self._tables.mqtt, table.mqtt)
        mqtt = {key: getattr(section, key) for section in said for key in section.model_fields_set}
        prefix = mqtt.pop("client_id_prefix", None) or self._tables.name
        network = self._tables.gateway
        address = network.listen if table.listen is None else table.listen  # false for nowhere
        files = {name: getattr(network, name) for name in LISTENING}
        values = {
            "client_id": f"{prefix}-{table.name}",
            **mqtt,
            "name": table.name,
            "state_dir": self._state_dir / table.name,
            "guarantee": table.guarantee,
            "listen": {"address": address, **files} if address else None,
            **own,
        }
        return self._settings(values, path)

    def _settings(self, values: Mapping[str, Any], path: KeyPath) -> GatewaySettings | None:
        """Settings of a gateway; None where they have mistakes, each at the key that it is of, or names first."""
        try:
            return GatewaySettings.model_validate(values)
        except ValidationError as error:
            for one in error.errors():
                words = [str(one["loc"][0])] if one["loc"] else re.findall(r"\w+", re.sub('".*?"', "", one["msg"]))
                place = self._said(path[:2], *words)
                at = (*path, *one["loc"][:1]) if place == path[:2] else place
                self._mistakes.add_details([one], GatewaySettings, at[:-1] if one["loc"] else at)
            return None

    def _member(
        self, table: UplinkTable, member: MemberSection, gateway: GatewaySettings, routes: Sequence[SubscribedRoute]
    ) -> dict[str, Any]:
        """What the gateway of a member is told, given what the line's would be told if it were the only one."""
        way, every = table.way or ShareWay.FILTERS, gateway.subscriptions
        names = tuple(sorted(one.name for one in table.member))
        share = ShareSettings(member=member.name, members=names, way=way, client_id=gateway.mqtt_client_id)
        prefix = f"$share/{table.share_group or f'{self._tables.name}-{table.name}'}"
        taken = tuple(replace(one, pattern=f"{prefix}/{one.pattern}") for one in every)
        taken = restricted(member.filters, every) if way is ShareWay.FILTERS else taken
        return {
            **_fields(gateway, GatewaySettings),
            "name": f"{gateway.name}-{member.name}",
            "client_id": share.id_of(member.name),
            "state_dir": gateway.state_dir / MEMBERS / member.name,
            "subscriptions": taken,
            "repeatable": repeatable(routes, [one.pattern for one in taken]),
            "share": share,
        }


def _fields(table: Any, section: type[BaseModel]) -> dict[str, Any]:
    """What a table says of a section, as that is made."""
    return {field.alias or name: getattr(table, name) for name, field in section.model_fields.items()}
