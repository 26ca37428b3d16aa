"""The bridge file: TOML in, validated lines out, every mistake with its line.

Reading happens without network and without Spark. Strings may name environment variables as ``${NAME}`` (``$${NAME}``
is the literal text); relative paths are relative to the file. Secrets are named by files, never written here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from towline.bridge.config.kafka_source import java_client
from towline.bridge.config.line import DownlinkReader, LineReader
from towline.bridge.config.mistakes import Mistakes
from towline.bridge.config.model import NAME, Bridge, DownLine, KafkaSection, Line, SparkSection
from towline.bridge.config.places import REFERENCE, Document, KeyPath, names_variable
from towline.bridge.config.profiles import Profile, graft, profile_of, shipped
from towline.bridge.config.section import Section
from towline.bridge.config.services import LISTENING, GatewaySection, MonitorSection
from towline.bridge.config.tables import Head, Tables
from towline.errors import ConfigError
from towline.gateway.access import is_remote
from towline.gateway.listen import ListenSettings, ServerCertificate, TokenFile
from towline.guarantee import policy
from towline.kafka.reserved import reserved
from towline.options import path
from towline.spark.masters import is_cluster, shares_files

__all__ = ["Reader", "load", "parse"]

#: Client settings the sink sets by itself, from the guarantee or this file.
_OWNED = (
    "bootstrap.servers",
    "transactional.id",
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "isolation.level",
)


class FileTable(Section):
    """The whole file: its own keys, and the tables that are read one by one. A description is what to do without it."""

    name: str = Field(pattern=NAME, description="Name the bridge; it becomes part of the MQTT client ids.")
    state_dir: Path = Field(description="Name a directory on a local disk; the journals live there.")
    leave_waiting: tuple[str, ...] = ()
    mqtt: dict[str, Any] = Field(description="Add the table.")
    kafka: dict[str, Any] = Field(description="Add the table.")
    spark: dict[str, Any] = Field(default_factory=dict)
    gateway: dict[str, Any] = Field(default_factory=dict)
    monitor: dict[str, Any] = Field(default_factory=dict)
    uplink: Any = ()
    downlink: Any = ()

    @field_validator("state_dir", mode="before")
    @classmethod
    def _somewhere(cls, value: object) -> object:
        if value == "":
            raise PydanticCustomError("path_type", "Input is not a valid path")
        try:
            path(str(value))
        except ValueError as error:
            raise ValueError(f'"state_dir": {error}; name a directory on a local disk') from None
        return value


#: What to do where a file of [gateway] is missing.
_PEM: Final = "It is a file in PEM."
_MAKE: Final = {"token_file": "Make one: openssl rand -hex 32, mode 0600.", "key_file": "It is a private key in PEM."}
#: In place of what is missing or wrong, while the rest of the file is read.
_STAND_INS: dict[str, Any] = {"name": "x", "state_dir": Path(), "mqtt": {}, "kafka": {}}


def load(file: Path, environ: Mapping[str, str] | None = None, *, master: str | None = None) -> Bridge:
    """Read a bridge file.

    Args:
        file: TOML, UTF-8.
        environ: For ``${NAME}``; the process's own by default.
        master: Spark's, in place of the one in the file.

    Raises:
        ConfigMistakes: With every mistake of the file.
        ConfigError: If it can't be read at all.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("TL-C11", str(file), "the file is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        reason = (error.strerror or "it can't be read").lower()
        raise ConfigError("TL-C10", str(file), reason, "Name a bridge file; towline init makes one.") from error
    environ = os.environ if environ is None else environ
    return parse(text, file, environ, master=master)


def parse(text: str, file: Path, environ: Mapping[str, str], *, master: str | None = None) -> Bridge:
    """Read the text of a bridge file; `load` tells the rest."""
    document = Document(text, file)
    spark = document.raw.get("spark", {})
    if master is not None and isinstance(spark, dict):
        document.raw["spark"] = {**spark, "master": master}
    return Reader(document, environ).bridge()


class Reader:
    """Reads one file, section by section, noting mistakes as it goes."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._file = document.file.absolute()
        self._mistakes = Mistakes(document)
        self._environ = environ
        #: Whether a variable was missing, so that values may be stand-ins.
        self._unset = False
        self._raw: dict[str, Any] = self._expand(document.raw, ())
        if _elsewhere(self._raw):
            self._raw.setdefault("mqtt", {})
        self._tables = Tables(self._file.parent, self._mistakes)
        graft(document, self._file.parent)

    def bridge(self) -> Bridge:
        """Everything, or every mistake."""
        table = self._file_table()
        state_dir = self._file.parent / table.state_dir.expanduser()
        kafka = self._kafka(table.kafka) if "kafka" in self._raw else None
        spark = self._spark(table.spark)
        mqtt = self._tables.mqtt(table.mqtt, ("mqtt",), "[mqtt]")
        monitor = self._monitor(table.monitor)
        gateway = self._gateway(table.gateway)
        lines = self._lines(Head(table.name, state_dir, mqtt, kafka, spark, gateway))
        if kafka is not None:
            environ = self._read_by_java(kafka, lines)
            if is_cluster(spark.master):
                self._cluster(spark.master, environ, lines)
        self._mistakes.raise_if_any()
        assert kafka is not None, "a section that failed has left a mistake"
        return Bridge(
            name=table.name,
            file=self._file,
            state_dir=state_dir,
            leave_waiting=table.leave_waiting,
            kafka=kafka,
            spark=spark,
            gateway=gateway,
            monitor=monitor,
            lines=lines,
        )

    def _file_table(self) -> FileTable:
        """The file's own keys, with stand-ins for those that are mistakes."""
        apart = self._profiled()
        own = {key: value for key, value in self._raw.items() if key not in apart}
        try:
            return FileTable.model_validate(own)
        except ValidationError as error:
            details = error.errors()
        self._mistakes.add_details(details, FileTable, (), "", also=apart)
        wrong = {one["loc"][0] for one in details}
        return FileTable.model_validate(_STAND_INS | {k: v for k, v in own.items() if k not in wrong})

    def _expand(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self._expand(item, (*path, *key.split("."))) for key, item in value.items()}
        if isinstance(value, list):
            return [self._expand(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or _stays(path):
            return value
        expanded = REFERENCE.sub(lambda found: self._variable(found, path), value)
        if names_variable(value):
            self._mistakes.hide(path, expanded, value)
        return expanded

    def _variable(self, found: re.Match[str], path: KeyPath) -> str:
        name = found[2]
        if found[1]:
            return found[0][1:]
        if name not in self._environ:
            what = f"the environment variable {name} is not set"
            self._mistakes.add(
                "TL-C04", path, _subject(path), what, f"Set it, or write $${{{name}}} for the text itself."
            )
            self._unset = True
            return "x"
        return self._environ[name]

    def _kafka(self, table: dict[str, Any]) -> KafkaSection | None:
        path: KeyPath = ("kafka",)
        table = dict(table)
        if isinstance(table.get("bootstrap_servers"), list):
            table["bootstrap_servers"] = ",".join(str(server) for server in table["bootstrap_servers"])
        if table.get("create_topics") is True:
            table["create_topics"] = {}
        elif table.get("create_topics") is False:
            del table["create_topics"]
        settings = table.get("settings", {})
        for key in settings if isinstance(settings, dict) else ():
            if key in _OWNED:
                what = f'"{key}" is set by Towline'
                self._mistakes.add("TL-C68", (*path, "settings", key), "[kafka]", what, "Remove it.")
        section = self._tables.model(KafkaSection, table, path, "[kafka]")
        if section is None:
            return None
        names = ("password_file", "key_password_file")
        files = {name: self._tables.secret_file(getattr(section, name), (*path, name), "[kafka]") for name in names}
        settings = {key: self._located(key, value, path) for key, value in section.settings.items()}
        section = section.model_copy(update={**files, "settings": settings})
        if not self._unset:
            self._judge_client(section)
        return section

    def _located(self, key: str, value: Any, path: KeyPath) -> Any:
        """A setting of Kafka's client that names a file, or a directory of certificates, as from this file."""
        if not key.endswith(".location") or value == "probe" or self._unset:
            return value
        file = Path(str(value)).expanduser()
        if not (place := self._file.parent / file).is_dir():
            do = "Name it as from this file, or by its whole path."
            self._tables.there(file, (*path, "settings", key), "[kafka]", do)
        return str(place)

    def _spark(self, table: dict[str, Any]) -> SparkSection:
        section = self._tables.model(SparkSection, table, ("spark",), "[spark]") or SparkSection()
        if "spark.authenticate.secret" in section.conf:
            place, what = ("spark", "conf", "spark", "authenticate", "secret"), "Spark's secret stands in this file"
            do = "Write it into a file, mode 0600, and name that: secret_file in [spark]."
            self._mistakes.add("TL-C16", place, "[spark.conf]", what, do)
        secret = self._tables.secret_file(section.secret_file, ("spark", "secret_file"), "[spark]")
        jars: dict[Path, None] = {}  # in order, each once
        for named in (self._file.parent / jar.expanduser() for jar in section.kafka_jars):
            folder, pattern = (named, "*.jar") if named.is_dir() else (named.parent, named.name)
            globbed = (folder / one for one in sorted(glob(pattern, root_dir=folder)))  # noqa: PTH207 - takes a**b
            found = dict.fromkeys(one for one in (named, *globbed) if one.is_file())
            jars |= found
            if not found:
                do = "Correct the path, or remove it: Maven brings the jars."
                self._mistakes.add("TL-C15", ("spark", "kafka_jars"), "[spark]", f"no jar is at {named}", do)
        return section.model_copy(update={"kafka_jars": tuple(jars), "secret_file": secret})

    def _gateway(self, table: Any) -> GatewaySection:
        """``[gateway]``; its files have to be there and to go together."""
        path, subject = ("gateway",), "[gateway]"
        section = self._tables.model(GatewaySection, table, path, subject) or GatewaySection()
        names = (*LISTENING, "ca_file")
        files = {
            name: self._tables.there(getattr(section, name), (*path, name), subject, _MAKE.get(name, _PEM))
            for name in names
        }
        section = section.model_copy(update=files)
        own = [line.get("listen") for _, _, line in self._line_tables() if isinstance(line, Mapping)]
        listens = section.listen is not None or any(isinstance(one, str) for one in own)
        missing = [name for name in LISTENING if files[name] is None]
        if listens and missing:
            what = f"what listens on a network has TLS and a token, and {' and '.join(missing)} is missing"
            self._mistakes.add("TL-C02", (*path, "listen"), subject, what, "Add it to [gateway], or remove listen.")
        elif listens and all(file is None or file.is_file() for file in files.values()):  # else noted
            try:
                served = {name: files[name] for name in LISTENING}
                ServerCertificate.read(ListenSettings.model_validate({"address": "localhost:0", **served}))
            except ConfigError as error:
                key = next(name for name in names if error.where.startswith(name))
                self._mistakes.add(error.code, (*path, key), subject, f"{key}: {error.what}", error.do)
        self._judge_tokens(section.token_file, "gateway")
        return section

    def _monitor(self, table: Any) -> MonitorSection:
        section = self._tables.model(MonitorSection, table, ("monitor",), "[monitor]") or MonitorSection()
        place = ("monitor", "token_file")
        file = self._tables.there(section.token_file, place, "[monitor]", _MAKE["token_file"])
        self._judge_tokens(file, "monitor")
        return section.model_copy(update={"token_file": file})

    def _judge_tokens(self, file: Path | None, table: str) -> None:
        """A file of tokens has to hold some; who may not read it looks at the status all the same."""
        try:
            if file is not None and os.access(file, os.R_OK):
                TokenFile(file)
        except ConfigError as error:
            what = f"token_file: {error.what}"
            self._mistakes.add(error.code, (table, "token_file"), f"[{table}]", what, error.do)

    def _read_by_java(self, kafka: KafkaSection, lines: Sequence[Line | DownLine]) -> dict[str, str]:
        """The secrets of Java's client, whose settings have to be such as a downlink's can have."""
        environ: dict[str, str] = {}
        try:
            java_client(kafka.client(), environ)
        except ConfigError as error:  # a file that isn't here is told at the start
            if error.code == "TL-C77" and any(isinstance(line, DownLine) for line in lines):
                self._mistakes.add(error.code, ("kafka", "settings"), "[kafka]", error.what, error.do)
        return environ

    def _cluster(self, master: str, environ: Mapping[str, str], lines: Sequence[Line | DownLine]) -> None:
        """What is fine with a local master, and not where tasks run on other machines."""
        for line in lines:
            found = [] if shares_files(master) else [*_unreachable(line, master)]
            if environ and isinstance(line, DownLine):
                what = f"Spark's Kafka source would need [kafka]'s secrets or certificates on executors of {master}"
                do = "They never travel: run this line with a local master, in a bridge file of its own."
                found.append(("TL-C142", what, do))
            for code, what, do in found:
                self._mistakes.add(code, ("spark", "master"), f'{line.kind} "{line.name}"', what, do)

    def _judge_client(self, kafka: KafkaSection) -> None:
        """Let the client library judge its settings; it opens no connection for that."""
        from towline.kafka.clientconfig import check_client  # noqa: PLC0415 - loads librdkafka

        try:
            check_client(kafka.client(), "[kafka]", "")
        except ConfigError as error:
            path = next(
                (("settings", key) for key in kafka.settings if f'"{key}"' in error.what), ("bootstrap_servers",)
            )
            what = error.what.replace("option ", "").replace("bootstrap.servers", "bootstrap_servers")
            if error.code == "TL-C44":  # a secret: say it in the words of this file
                what = f'"{path[-1]}" would put a secret into this file'
                error = ConfigError("TL-C16", "", what, "Use password_file or key_password_file, or write ${NAME}.")
            self._mistakes.add(error.code, ("kafka", *path), "[kafka]", what, error.do)

    def _lines(self, head: Head) -> tuple[Line | DownLine, ...]:
        places = list(self._line_tables())
        if not places:
            if not any(kind in self._raw for kind in _READERS):
                what = "[[uplink]] is missing: there is no line to run"
                self._mistakes.add(
                    "TL-C60", ("uplink",), "", what, "Add one with a name and a route, or a [[downlink]]."
                )
            return ()
        tables = [table for _, _, table in places]
        if "brokers" not in head.mqtt and any(
            "brokers" not in (t.get("mqtt") or {}) for t in tables if isinstance(t, dict) and "gateways" not in t
        ):
            self._mistakes.add(
                "TL-C02",
                ("mqtt", "brokers"),
                "[mqtt]",
                '"brokers" is missing',
                'Add it, as brokers = ["mqtt://localhost:1883"].',
            )
        read = [_READERS[kind](self._tables, head, index, table).line() for kind, index, table in places]
        lines = [line for line in read if line is not None]
        self._twice(places, lines)
        dead_letters = tuple(sorted({line.dead_letter_topic for line in lines if line.dead_letter_topic}))
        for (kind, index, _), line in zip(places, read, strict=True):
            if line is not None:
                self._reserved((kind, index), line, dead_letters)
                if isinstance(line, DownLine):
                    self._circles((kind, index), line, head.bridge, lines)
        named = {"dead_letter_topics": dead_letters}
        return tuple(line.model_copy(update=named) if isinstance(line, Line) else line for line in lines)

    def _profiled(self) -> Collection[str]:
        """Have each line with a profile say all that this says; the names of the tables with their parameters."""
        lines = [one for one in self._line_tables() if isinstance(one[2], dict) and "profile" in one[2]]
        profiles = [self._profile(*one) for one in lines]
        apart = {one.file.table: one for one in (*shipped(), *(profile for profile, _ in profiles))}
        values = {one: self._parameters(one) for one in (*apart.values(), *(profile for profile, _ in profiles))}
        for (kind, index, table), (profile, number) in zip(lines, profiles, strict=True):
            self._raw[kind][index] = profile.applied(kind, number, table, values[profile])
        return apart.keys()

    def _profile(self, kind: str, index: int, table: dict[str, Any]) -> tuple[Profile, int]:
        """The profile of a line; of another name than there is the first one, so that other mistakes are found too."""
        try:
            return profile_of(self._file.parent, kind, str(table["profile"]))
        except ConfigError as error:
            if error.where:
                raise  # a mistake in the profile itself
            subject = f'{kind} "{table.get("name", index + 1)}"'
            self._mistakes.add(error.code, (kind, index, "profile"), subject, error.what, error.do)
            if error.code != "TL-C06":
                self._mistakes.raise_if_any()
            return shipped()[0], 0

    def _parameters(self, profile: Profile) -> dict[str, Any]:
        name, kind = profile.file.table, profile.parameters
        table = self._tables.model(kind, self._raw.get(name, {}), (name,), f"[{name}]") or kind()
        return profile.values(table) | {"bridge": str(self._raw.get("name", "x"))}

    def _reserved(self, path: KeyPath, line: Line | DownLine, dead_letters: Sequence[str]) -> None:
        """Topics of the file hold no markers and are not internal to Kafka; what a route writes is no dead letter."""
        named: list[tuple[KeyPath, str | None, str]] = [(("dead_letter_topic",), line.dead_letter_topic, reserved())]
        for number, section in enumerate(line.sections if isinstance(line, Line) else ()):
            named.append((("route", number, "topic"), section.topic, reserved(dead_letters)))
            named.append((("route", number, "fallback_topic"), section.fallback_topic, reserved(dead_letters)))
        for key, name, taken in named:
            if name is not None and re.fullmatch(taken, name):
                what = f'"{name}" is reserved: markers, dead letters, or Kafka\'s own'
                self._mistakes.add("TL-C95", (*path, *key), f'{path[0]} "{line.name}"', what, "Choose another topic.")

    def _circles(self, path: KeyPath, line: DownLine, bridge: str, lines: Sequence[Line | DownLine]) -> None:
        """A line that reads what its own batches write, markers or dead letters, never comes to an end."""
        written = [f"towline.{bridge}.{one.name}.markers" for one in lines if policy(one.guarantee).transactions]
        written += [line.dead_letter_topic] if line.dead_letter_topic else []
        for name in filter(line.section.reads, written):
            what = f'it would read "{name}", and make a batch of each batch: markers, or dead letters of its own'
            self._mistakes.add("TL-C95", (*path, "from"), f'downlink "{line.name}"', what, "Choose other topics.")

    def _line_tables(self) -> Iterator[tuple[str, int, Any]]:
        """Kind, index and content of every table of a line."""
        for kind in _READERS:
            tables = self._raw.get(kind, [])
            if kind in self._raw and (not isinstance(tables, list) or not tables):
                what = f"[[{kind}]] must be written [[{kind}]]"
                self._mistakes.add("TL-C60", (kind,), "", what, "Add one with a name.")
            else:
                yield from ((kind, index, table) for index, table in enumerate(tables))

    def _twice(self, places: list[tuple[str, int, Any]], lines: Sequence[Line | DownLine]) -> None:
        """Two lines never share a name, nor a client id on one broker [MQTT-3.1.4-3].

        Each would throw the other out.
        """
        named: dict[object, KeyPath] = {}
        for kind, index, table in places:
            name = table.get("name") if isinstance(table, dict) else None
            if not isinstance(name, str):
                continue  # noted
            if name in named:
                subject, what = f'{kind} "{name}"', "another line has this name"
                self._mistakes.add("TL-C18", (kind, index, "name"), subject, what, "Rename one.")
            named.setdefault(name, (kind, index))
        self._same_address(named, lines)
        seen: dict[tuple[str, str], str] = {}
        for line, gateway in [(one, each) for one in lines for each in one.each_gateway]:
            whose = gateway.name
            path = named[line.name]
            subject = f'{path[0]} "{line.name}"'
            if whose != line.name and whose in named:
                what = f'the gateway of a member would be "{whose}" in its rows, as another line is'
                self._mistakes.add("TL-C18", path, subject, what, "Rename one.")
            for broker in gateway.brokers:
                identity = (str(broker), gateway.mqtt_client_id)
                other = seen.setdefault(identity, whose)
                if other != whose:
                    what = f'client id "{identity[1]}" is also that of line "{other}"; they would throw each other out'
                    self._mistakes.add("TL-C19", path, subject, what, "Give each line its own client_id.")

    def _same_address(self, named: Mapping[object, KeyPath], lines: Sequence[Line | DownLine]) -> None:
        """Each line has a gateway of its own, so no two listen on one address."""
        seen: dict[str, str] = {}
        for line in lines:
            address = line.gateway.listen.address if line.gateway.listen else ":0"
            other = line.name if address.endswith(":0") else seen.setdefault(address, line.name)
            if other != line.name:
                path = named[line.name]
                what = f'its gateway would listen on "{address}", as that of line "{other}"'
                do = "Give each line a listen of its own, or listen = false."
                self._mistakes.add("TL-C99", (*path, "listen"), f'{path[0]} "{line.name}"', what, do)


#: The tables of lines, and who reads them.
_READERS: dict[str, type[LineReader | DownlinkReader]] = {"uplink": LineReader, "downlink": DownlinkReader}


def _elsewhere(raw: Mapping[str, Any]) -> bool:
    """Whether every line reads gateways that run elsewhere, so that nothing here speaks MQTT."""
    tables = [raw.get(kind) for kind in _READERS]
    lines = [one for table in tables if isinstance(table, list) for one in table]
    return bool(lines) and all(isinstance(one, dict) and "gateways" in one for one in lines)


def _unreachable(line: Line | DownLine, master: str) -> Iterator[tuple[str, str, str]]:
    """Why executors don't come to a line's gateways: code, what, what to do."""
    elsewhere, listen = line.gateways if isinstance(line, Line) else (), line.gateway.listen
    if elsewhere:
        for place in elsewhere:
            if not is_remote(place):
                what = f'its gateway "{place}" is a directory of this machine, which executors of {master} don\'t see'
                yield "TL-C140", what, "Let it listen, and name it grpc+tls://HOST:PORT."
    elif listen is None:
        what = f"its gateway listens on no network, and executors of {master} have no other way to it"
        yield "TL-C140", what, "Set listen in [gateway], with certificate and token."


def _stays(path: KeyPath) -> bool:
    """Whether a reference is left for the process that connects: a secret of Kafka's client never travels [I12]."""
    return path[:2] == ("kafka", "settings") and "." in (key := ".".join(map(str, path[2:]))) and _secret(key)


def _secret(key: str) -> bool:
    return "password" in key or "secret" in key or key.endswith((".pem", ".passphrase", ".extensions", "endpoint.url"))


def _subject(path: KeyPath) -> str:
    return f"[{path[0]}]" if len(path) > 1 and isinstance(path[0], str) and path[0] not in _READERS else ""
