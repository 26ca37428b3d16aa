"""Reader of bridge files: TOML in, validated lines out, each error with its line.

All errors of a stage are reported together: environment variables and profiles, then keys and values of all tables,
then the rules across keys and tables. Reading needs neither network nor Spark. Texts may name environment variables as
``${NAME}`` (``$${NAME}`` is the literal text); relative paths are relative to the file. Secrets are in files of their
own that the bridge file names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from towline.bridge.config.document import Document, FileErrors, FileValues, KeyPath
from towline.bridge.config.model import CHECKPOINT, Bridge, Downlink, Uplink
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
from towline.bridge.config.subscriptions import repeatable_filters, restrict_filters, subscriptions
from towline.bridge.config.tables import (
    LINES,
    LISTENER_FILES,
    BridgeTable,
    DownlinkTable,
    KafkaSection,
    MemberSection,
    SparkSection,
    UplinkTable,
)
from towline.bridge.kafka_source import java_client
from towline.bridge.profiles import HonoSection, apply_profile, profile_lines
from towline.bridge.routes import Route
from towline.errors import ConfigError, did_you_mean
from towline.gateway.access import ServerCertificate, TokenFile
from towline.gateway.identity import MEMBERS_DIR
from towline.gateway.settings import GatewaySettings, ListenSettings, ShareMethod, ShareSettings
from towline.guarantee import AckAfter, policy
from towline.net.settings import MqttSettings
from towline.spark.batching import DEFAULT_DELAY_MS
from towline.spark.session import is_cluster

#: Client settings that the sink sets from the guarantee or this file.
_OWNED_SETTINGS: Final = frozenset(
    {
        *("bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "request.required.acks"),
        *("isolation.level", "delivery.timeout.ms", "message.timeout.ms", "transaction.timeout.ms"),
    }
)
#: Keys of a line and of the tables around it that are gateway settings of the same name.
_GATEWAY_KEYS: Final = frozenset([*MqttSettings.model_fields, "ack_after", "listen", "receipts"])
#: Milliseconds that a gateway waits for more messages after a pause, if batches have a trigger delay.
_LINGER_MS: Final = 20.0


def load(file: Path, environ: Mapping[str, str] | None = None) -> Bridge:
    """Read a bridge file; ``environ`` has the values of ``${NAME}``.

    Raises:
        ConfigErrors: All errors of the first stage that finds any.
        ConfigError: The file can't be read at all.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("TL-C11", str(file), "the file is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        reason = (error.strerror or "it can't be read").lower()
        raise ConfigError("TL-C10", str(file), reason, "Name a bridge file; towline init makes one.") from error
    return parse(text, file, environ)


def parse(text: str, file: Path, environ: Mapping[str, str] | None = None) -> Bridge:
    """Read the text of a bridge file; arguments and errors as in `load`."""
    return _FileReader(Document(text, file, environ)).read()


class _FileReader:
    """Reader of one file: values, profiles, tables, and then the rules across tables."""

    def __init__(self, document: Document) -> None:
        self._document, self._file = document, document.file.absolute()
        self._errors = FileErrors(document)
        for path, variable_names in document.unset.items():
            for name in variable_names:
                remedy = f"Set it, or write $${{{name}}} for the text itself."
                self._errors.add("TL-C04", path, f"the environment variable {name} is not set", remedy)
        self._values = document.values
        self._apply_profiles()
        self._errors.raise_if_any()
        self._tables = self._validate_tables()
        topics = (dead_letter_topic(line, self._tables) for line in (*self._tables.uplink, *self._tables.downlink))
        self._dead_letter_topics = tuple(sorted({topic for topic in topics if topic is not None}))

    def read(self) -> Bridge:
        """Return the bridge, or raise all errors of the file."""
        tables = self._tables
        spark = self._resolve_spark(tables.spark)
        self._check_client(tables.kafka)
        self._check_listeners()
        lines = self._build_lines()
        self._add_violations(file_problems(tables.name, lines))
        self._check_java_client(lines)
        self._errors.raise_if_any()
        values = {"file": self._file, "spark": spark, "lines": [*lines.values()]}
        return Bridge.model_validate({**dict(tables), **values}, extra="ignore")

    def _add_violations(self, violations: Iterable[Violation], base: KeyPath = ()) -> bool:
        """Add violations of rules of the table at ``base``; return whether there is any."""
        violations = list(violations)
        label = self._document.table_label((*base, ""))
        for code, key, problem, *remedy in violations:
            root = key[:1] == (ROOT,)
            path = key[1:] if root else self._setting_path(base, str(key[1])) if key[:1] == (MQTT,) else (*base, *key)
            self._errors.add(code, path, problem, *remedy, label=label if path[: len(base)] != base else None)
        return bool(violations)

    def _setting_path(self, line_path: KeyPath, *setting_names: str) -> KeyPath:
        """Return the path of the first of these connection settings that is set, in the line's table or for all."""
        tables = (line_path, (*line_path, "mqtt"), ("mqtt",), ("gateway",))
        paths = ((*table, name) for name in setting_names if name in _GATEWAY_KEYS for table in tables)
        default_path = ("mqtt", "brokers") if "brokers" in setting_names else line_path
        return next((path for path in paths if self._document.value(path) is not None), default_path)

    # -- profiles and tables

    def _apply_profiles(self) -> None:
        """Merge the profile of each line into its table."""
        try:
            section = HonoSection.model_validate(self._values.get("hono", {}))
        except ValidationError:  # reported with the other tables
            section = HonoSection()
        parameters = section.parameters(str(self._values.get("name", "x")))
        for kind in LINES:
            tables = self._values.get(kind)
            for index, table in enumerate(tables if isinstance(tables, list) else ()):
                if not isinstance(table, dict) or "profile" not in table:
                    continue
                name, profiles = str(table["profile"]), profile_lines()[kind]
                if name in profiles:
                    self._values[kind][index] = apply_profile(table, profiles[name], parameters)
                else:
                    problem, remedy = f'there is no profile "{name}"', did_you_mean(name, profiles)
                    self._errors.add("TL-C06", (kind, index, "profile"), problem, remedy)

    def _validate_tables(self) -> BridgeTable:
        try:
            tables = BridgeTable.model_validate(FileValues(self._document, self._errors).resolve(self._values))
        except ValidationError as error:
            self._errors.add_details(error.errors(), BridgeTable)
        self._errors.raise_if_any()
        return tables

    # -- rules beyond a single table

    def _resolve_spark(self, section: SparkSection) -> SparkSection:
        if "spark.authenticate.secret" in section.conf:
            path, problem = ("spark", "conf", "spark", "authenticate", "secret"), "Spark's secret is in this file"
            remedy = "Write it into a file, mode 0600, and set secret_file in [spark]."
            self._errors.add("TL-C16", path, problem, remedy)
        jars: dict[Path, None] = {}  # in order, each once
        for jar_path in section.kafka_jars:
            files = [
                file for file in (sorted(jar_path.glob("*.jar")) if jar_path.is_dir() else [jar_path]) if file.is_file()
            ]
            jars |= dict.fromkeys(files)
            if not files:
                remedy = "Correct the path, or remove it: Maven brings the jars."
                self._errors.add("TL-C15", ("spark", "kafka_jars"), f"no jar file is at {jar_path}", remedy)
        return section.model_copy(update={"kafka_jars": tuple(jars)})

    def _check_client(self, kafka: KafkaSection) -> None:
        """Check the Kafka settings by librdkafka itself; it opens no connection for that."""
        from towline.kafka.clientconfig import check_client  # noqa: PLC0415 - loads librdkafka

        for key in _OWNED_SETTINGS.intersection(kafka.settings):
            self._errors.add("TL-C68", ("kafka", "settings", key), f'"{key}" is set by Towline')
        try:
            check_client(kafka.client_settings(), "[kafka]", "")
        except ConfigError as error:
            key = next((key for key in kafka.settings if f'"{key}"' in error.problem), "")
            code, problem, remedy = error.code, error.problem.replace("option ", ""), error.remedy
            if code == "TL-C44":  # a secret: use this file's terms
                code, problem = "TL-C16", f'"{key}" would put a secret into this file'
                remedy = "Use password_file or key_password_file, or write ${NAME}."
            path = ("kafka", "settings", key) if key else ("kafka", "bootstrap_servers")
            problem = problem.replace("bootstrap.servers", "bootstrap_servers")
            self._errors.add(code, path, problem, remedy)

    def _check_listeners(self) -> None:
        """Check that the certificates and tokens of network listeners exist and fit together."""
        tables, gateway, monitor = self._tables, self._tables.gateway, self._tables.monitor
        files = {name: getattr(gateway, name) for name in LISTENER_FILES}
        listens = gateway.listen is not None or any(line.listen for line in (*tables.uplink, *tables.downlink))
        checks: list[tuple[str, Callable[[], object]]] = []
        if listens and all(file is not None and file.is_file() for file in files.values()):  # else it is an error
            listen_settings = ListenSettings.model_validate({"address": "localhost:0", **files})
            certificate = partial(ServerCertificate.read, listen_settings.cert_file, listen_settings.key_file)
            checks = [("gateway", certificate)]
        if problem := monitor.access_problem(monitor.listen, has_page=monitor.page):
            self._errors.add("TL-C211", ("monitor", "listen"), problem)
        for table, token_file in (("gateway", gateway.token_file), ("monitor", monitor.token_file)):
            if token_file is not None and os.access(token_file, os.R_OK):  # without access status works still
                checks.append((table, partial(TokenFile, token_file)))
        for table, check in checks:
            try:
                check()
            except ConfigError as error:
                key = next((name for name in LISTENER_FILES if error.location.startswith(name)), "token_file")
                self._errors.add(error.code, (table, key), f"{key}: {error.problem}", error.remedy)

    def _check_java_client(self, lines: Mapping[KeyPath, Uplink | Downlink]) -> None:
        """Check the Kafka settings of downlinks for the Java client, and the settings that tasks on a cluster need."""
        secrets: dict[str, str] = {}
        try:
            java_client(self._tables.kafka.client_settings(), secrets)
        except ConfigError as error:  # a missing file is an error at the start
            if error.code == "TL-C77" and any(isinstance(line, Downlink) for line in lines.values()):
                self._errors.add(error.code, ("kafka", "settings"), error.problem, error.remedy)
        master = self._tables.spark.master
        for path, line in lines.items() if is_cluster(master) else ():
            self._add_violations(cluster_problems(line, master, has_secrets=bool(secrets)), path)

    # -- lines

    def _build_lines(self) -> dict[KeyPath, Uplink | Downlink]:
        """Return the valid lines by the paths of their tables."""
        tables: dict[KeyPath, UplinkTable | DownlinkTable] = {
            (kind, index): table for kind in LINES for index, table in enumerate(getattr(self._tables, kind))
        }
        if not tables:
            self._errors.add("TL-C60", ("uplink",), "[[uplink]] is missing: there is no line to run")
        lines: dict[KeyPath, Uplink | Downlink] = {}
        for path, table in tables.items():
            self._add_violations(line_problems(table, self._tables), path)
            line = self._uplink(path, table) if isinstance(table, UplinkTable) else self._downlink(path, table)
            lines |= {path: line} if line else {}
        return lines

    def _uplink(self, path: KeyPath, table: UplinkTable) -> Uplink | None:
        routes: list[Route] = []
        for index, section in enumerate(table.route):
            route_path = (*path, "route", index)
            if not self._add_violations(route_problems(section, table.guarantee, table.dedupe), route_path):
                route = section.compile(table.guarantee, table.dedupe)
                routes += [] if self._add_violations(topic_problems(route), route_path) else [route]
        if len(routes) < len(table.route):
            return None
        filters = subscriptions(routes)
        delay_ms = table.max_trigger_delay_ms
        if delay_ms is None:  # no delay where a broker or a publisher waits for Kafka
            awaits_kafka = table.ack_after is AckAfter.KAFKA or table.receipts is not None
            delay_ms = 0 if awaits_kafka else DEFAULT_DELAY_MS
        overrides: dict[str, Any] = {
            "subscriptions": filters,
            "repeatable": repeatable_filters(routes, [subscription.pattern for subscription in filters]),
            "journal": table.journal,
            "receipts": table.receipts,
            "ack_after": table.ack_after,
            "checkpoint": str(self._tables.state_dir / table.name / CHECKPOINT),
            "linger_after_silence_ms": _LINGER_MS if delay_ms else 0.0,
        }
        if table.gateways and not table.member:  # remote gateways: nothing connects or listens here
            overrides |= {"brokers": "mqtt://x", "listen": None}
        if (gateway := self._gateway_settings(path, table, overrides)) is None:
            return None
        has_violations = self._add_violations(member_problems(table, gateway), path)
        members = (
            self._validate_gateway(self._member_values(table, member, gateway, routes), (*path, "member", index))
            for index, member in enumerate(() if has_violations else table.member)
        )
        line_values = {
            "gateway": gateway,
            "members": [settings for settings in members if settings],
            "max_trigger_delay_ms": delay_ms,
            "dead_letter_topic": dead_letter_topic(table, self._tables),
            "dead_letter_topics": self._dead_letter_topics,
        }
        line = Uplink.model_validate({**dict(table), **line_values})
        self._add_violations(gateway_problems(line), path)
        return line

    def _downlink(self, path: KeyPath, table: DownlinkTable) -> Downlink | None:
        checkpoint = str(self._tables.state_dir / table.name / CHECKPOINT)
        overrides = {"subscriptions": (), "outbox": {**table.outbox.model_dump(), "checkpoint": checkpoint}}
        if (gateway := self._gateway_settings(path, table, overrides)) is None:
            return None
        topic = dead_letter_topic(table, self._tables)
        line_values = {
            "gateway": gateway,
            "dead_letter_topic": topic,
            "qos": policy(table.guarantee).publish_qos_choices[0] if table.qos is None else table.qos,
            "control_characters": table.control_characters or ("dead_letter" if topic else "send"),
        }
        line = Downlink.model_validate({**dict(table), **line_values}, by_name=True)
        self._add_violations(gateway_problems(line), path)
        return line

    def _gateway_settings(
        self, path: KeyPath, table: UplinkTable | DownlinkTable, overrides: Mapping[str, Any]
    ) -> GatewaySettings | None:
        """Return the settings of the line's gateway; None if they are invalid."""
        sections = (self._tables.mqtt, table.mqtt)
        mqtt = {key: getattr(section, key) for section in sections for key in section.model_fields_set}
        gateway = self._tables.gateway
        address = gateway.listen if table.listen is None else table.listen  # false: no listener
        files = {name: file for name in LISTENER_FILES if (file := getattr(gateway, name))}
        values = {
            "client_id": f"{self._tables.name}-{table.name}",
            **mqtt,
            "name": table.name,
            "state_dir": self._tables.state_dir / table.name,
            "guarantee": table.guarantee,
            "listen": {"address": address, **files} if address else None,
            **overrides,
        }
        return self._validate_gateway(values, path)

    def _validate_gateway(self, values: Mapping[str, Any], path: KeyPath) -> GatewaySettings | None:
        """Validate gateway settings; return None if invalid, each error at its key or the first key that it names."""
        try:
            return GatewaySettings.model_validate(values)
        except ValidationError as error:
            for detail in error.errors():
                loc = detail["loc"][:1]
                names = [*map(str, loc)] or re.findall(r"\w+", re.sub('".*?"', "", detail["msg"]))
                setting_path = self._setting_path(path[:2], *names)
                error_path = (*path, *loc) if setting_path == path[:2] else setting_path
                self._errors.add_details([detail], GatewaySettings, error_path[:-1] if loc else error_path)
            return None

    def _member_values(
        self, table: UplinkTable, member: MemberSection, gateway: GatewaySettings, routes: Sequence[Route]
    ) -> dict[str, Any]:
        """Return the settings of a member's gateway, derived from the settings of the line's single gateway."""
        way, line_filters = table.share_way or ShareMethod.FILTERS, gateway.subscriptions
        names = tuple(sorted(each_member.name for each_member in table.member))
        share = ShareSettings(member=member.name, members=names, way=way, client_id=gateway.mqtt_client_id)
        prefix = f"$share/{self._tables.name}-{table.name}"
        filters = tuple(replace(item, pattern=f"{prefix}/{item.pattern}") for item in line_filters)
        filters = restrict_filters(member.filters, line_filters) if way is ShareMethod.FILTERS else filters
        return {
            **dict(gateway),
            "name": f"{gateway.name}-{member.name}",
            "client_id": share.member_client_id(member.name),
            "state_dir": gateway.state_dir / MEMBERS_DIR / member.name,
            "subscriptions": filters,
            "repeatable": repeatable_filters(routes, [item.pattern for item in filters]),
            "share": share,
        }
