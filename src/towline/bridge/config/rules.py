"""Rules across the tables of a bridge file: of a route, of a line and of the whole file. Pure.

A rule yields each violation as code, key, problem and remedy. Rules of the same form are rows of a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import KeyPath, problem_and_remedy
from towline.bridge.config.model import Downlink, Uplink
from towline.bridge.config.subscriptions import restrict_filters
from towline.bridge.config.tables import (
    BridgeTable,
    Dedupe,
    DownlinkTable,
    LineTable,
    RouteSection,
    UplinkTable,
    sql_texts,
)
from towline.bridge.messages import FIELDS as RECORD_FIELDS
from towline.bridge.messages import KAFKA_COLUMNS, record_column
from towline.bridge.patterns import FIELDS, PAYLOAD, Pattern, Template, is_allowed, kafka_name_problem, source_column
from towline.bridge.properties import USER_PREFIX
from towline.bridge.routes import Route
from towline.gateway.access import is_remote
from towline.gateway.settings import GatewaySettings, ShareMethod
from towline.guarantee import Guarantee, policy, promise_problem, qos_problem, sharing_problem, spark_conflict
from towline.kafka.deadletters import reserved_topics_pattern
from towline.mqtt.filters import common_filter
from towline.mqtt.rules import filter_problem
from towline.schema import EVENT_TIME, ROW_SCHEMA
from towline.spark.session import shares_files

#: Reserved names of fields: columns of the source and of the record.
_SOURCE_COLUMNS: Final = frozenset(("key", "value", "headers", "timestamp", EVENT_TIME, *ROW_SCHEMA.names))
#: Reserved names on a downlink: columns of Spark's Kafka source and of the sink.
_RECORD_COLUMNS: Final = frozenset((*KAFKA_COLUMNS, "timestampType", "fault"))
_UNKNOWN_RECORD_FIELD: Final = "which a record does not have; known are " + ", ".join(
    f"{{{name}}}" for name in ("key", "value", "value.JSON.PATH", "header.NAME", *RECORD_FIELDS)
)
#: Tasks of a shuffle: more than one would reorder a device's messages.
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
#: Limit of a gateway's name in rows.
_MAX_NAME_LENGTH: Final = 64
#: Prefix of a key outside the table that a rule checks.
ROOT: Final = ""
#: Prefix of a connection key: in the line's own ``mqtt`` table, or in the common one.
MQTT: Final = "mqtt"
#: Code, key relative to the checked table (after `ROOT`: to the root of the file), problem, and the remedy if it is
#: more specific than the code's explanation.
Violation: TypeAlias = tuple[str, KeyPath, str] | tuple[str, KeyPath, str, str]


# -- templates and SQL -----------------------------------------------------------------------------------------------

#: A field is a column for later SQL; names that begin with towline_ are internal columns.
_FIELD_NAME: Final = re.compile(r"(?!towline_)[a-z][a-z0-9_]*")
_BRACED: Final = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")


def _text_problems(
    section: RouteSection | DownlinkTable,
    templates: Mapping[KeyPath, str],
    column_of: Callable[[str], str | None],
    unknown_field: str,
    reserved_names: Collection[str],
) -> Iterator[Violation]:
    """Yield violations in templates, SQL and field names; ``column_of`` returns the column of a template's field."""
    for key, text in templates.items():
        try:
            Template.parse(text, lambda name: "" if column_of(name) else unknown_field)
        except ValueError as error:
            yield "TL-C66", key, *problem_and_remedy(error, "Correct it.")
    for key, text in sql_texts(section):
        name = key[-2 if key[-1] == "sql" else -1]
        if not text.strip():
            yield "TL-C69", key, f"{name} is empty", "Give it in Spark SQL, or remove it."
        elif braced := [(field, column) for field in _BRACED.findall(text) if (column := column_of(field)) is not None]:
            problem = f"{name} names {{{braced[0][0]}}}, which SQL takes for text"
            yield "TL-C69", key, problem, f"Write the column {braced[0][1]}, without braces."
    for name in section.fields:
        if name in reserved_names or not _FIELD_NAME.fullmatch(name):
            remedy = "Name it with small letters, digits and _, and as no column of the source and no wildcard."
            yield "TL-C66", ("fields", name), f'the field "{name}" has a name that is taken, or illegal in SQL', remedy


# -- a route ---------------------------------------------------------------------------------------------------------


def route_problems(route: RouteSection, guarantee: Guarantee, dedupe: Dedupe | None) -> Iterator[Violation]:
    """Yield violations of a route, given the line's guarantee and ``dedupe``; keys are relative to the route."""
    dedupe = route.dedupe or dedupe
    wildcards, templates = tuple[str, ...](), dict[KeyPath, str]()
    try:
        wildcards = tuple(Pattern.parse(route.from_).wildcards)
        templates = {**route.template_texts(), **({("dedupe",): dedupe.key} if dedupe and dedupe.is_template else {})}
    except ValueError as error:
        yield "TL-C67", ("from",), *problem_and_remedy(error, "Correct it.")
    names = (*wildcards, *route.fields)
    known_fields = ", ".join(f"{{{name}}}" for name in (*names, *FIELDS, PAYLOAD, f"{PAYLOAD}.JSON.PATH"))
    unknown_field = f"which from does not capture; known are {known_fields} and {{{USER_PREFIX}NAME}}"
    reserved_names = (*_SOURCE_COLUMNS, *wildcards)
    yield from _text_problems(
        route, templates, lambda name: name if name in names else source_column(name), unknown_field, reserved_names
    )
    yield from _qos_problems(route, guarantee, has_key=dedupe is not None)
    in_sql = any(sql_texts(route)) or (dedupe is not None and not dedupe.is_template)
    yield from _name_problems(route, wildcards, in_sql=in_sql)


def _qos_problems(route: RouteSection, guarantee: Guarantee, *, has_key: bool) -> Iterator[Violation]:
    if route.promise is not None:
        if problem := promise_problem(guarantee, route.promise, route.qos):
            yield "TL-C12", ("promise",), *problem
    elif route.qos is not None and (problem := qos_problem(guarantee, route.qos, dedupe=has_key)):
        yield "TL-C12", ("qos",), f"{problem[0]}, the route subscribes with qos = {route.qos}", problem[1]


def _name_problems(route: RouteSection, wildcards: Sequence[str], *, in_sql: bool) -> Iterator[Violation]:
    """Yield violations in names: wildcards that clash with SQL columns, reserved headers, illegal Kafka topics."""
    lowered = [name.lower() for name in wildcards]
    columns = {*_SOURCE_COLUMNS, *(name for name in lowered if name.startswith("towline_") or lowered.count(name) > 1)}
    if in_sql and (duplicates := [name for name in wildcards if name.lower() in columns]):
        problem = f"the wildcard {{{duplicates[0]}}} is a column for SQL, which has another of that name"
        yield "TL-C67", ("from",), problem, "Give the wildcard another name."
    for name in filter(lambda name: name.startswith(("mqtt.", "towline.")), route.headers):
        yield "TL-C65", ("headers", name), f'a header "{name}" looks like one that Towline writes'
    for index, glob in enumerate(route.allowed_topics):
        if name_problem := kafka_name_problem(glob.replace("*", "x").replace("?", "x")):
            yield "TL-C62", ("allowed_topics", index), name_problem, "Use names, or globs with * and ?."


def topic_problems(route: Route) -> Iterator[Violation]:
    """Yield violations in the Kafka topic of an otherwise valid route."""
    name = route.topic.constant
    if name is None and not route.topic.parts[0] and not route.allowed_topics:
        yield "TL-C63", ("topic",), f'topic "{route.topic.text}" lets a device name any Kafka topic'
    elif problem := kafka_name_problem("x" + "".join(route.topic.parts[::2]) if name is None else name):
        yield "TL-C62", ("topic",), problem.replace('"x', '"') if name is None else problem
    elif name is not None and not is_allowed(name, route.allowed_topics):
        yield "TL-C63", ("topic",), f'topic "{name}" is not among allowed_topics', "Add it there."


# -- a line ----------------------------------------------------------------------------------------------------------


#: Keys of a line that can be without effect: condition and reason.
_KEYS_WITHOUT_EFFECT: Final[Sequence[tuple[Sequence[str], Callable[[Any, BridgeTable], bool], str]]] = (
    (
        ("ack_after", "journal", "listen", "mqtt", "receipts"),
        lambda line, _: bool(getattr(line, "gateways", ()) and not line.member),
        "with gateways, which run elsewhere with settings of their own",
    ),
    (("removed_gateways",), lambda line, _: not line.gateways, "without gateways"),
    (("share",), lambda line, _: not line.member, "without members: [[uplink.member]] with a name"),
    (("failure_notice",), lambda line, file: dead_letter_topic(line, file) is None, "without a dead_letter_topic"),
)


def line_problems(line: UplinkTable | DownlinkTable, file: BridgeTable) -> Iterator[Violation]:
    """Yield violations of a line, its routes and members excepted; keys are relative to the line."""
    if conflict := spark_conflict(line.guarantee, file.spark.conf):
        problem = f"guarantee {line.guarantee} needs {conflict[0]} = {conflict[1]}"
        yield "TL-C12", (ROOT, "spark", "conf", *conflict[0].split(".")), problem, "Remove it from [spark.conf]."
    for keys, applies, reason in _KEYS_WITHOUT_EFFECT:
        for key in line.model_fields_set.intersection(keys):
            if getattr(line, key) not in (None, ()) and applies(line, file):
                yield "TL-C111", (key,), f"{key} has no effect {reason}"
    topic = dead_letter_topic(line, file)
    if topic is not None and (name_problem := kafka_name_problem(topic)):
        yield "TL-C62", ("dead_letter_topic",), name_problem, "Correct the name, or write false for none."
    if isinstance(line, UplinkTable):
        yield from _dedupe_problems(line, file)
        if any(map(is_remote, line.gateways)) and file.gateway.token_file is None:
            yield "TL-C112", ("gateways",), "token_file is required for a gateway on a network"
        return
    levels = policy(line.guarantee).publish_qos_choices
    if line.qos is not None and line.qos not in levels:
        problem = f"guarantee {line.guarantee} publishes with QoS {' or '.join(map(str, levels))}, not qos = {line.qos}"
        yield "TL-C12", ("qos",), problem
    yield from message_problems(line)


def message_problems(section: DownlinkTable) -> Iterator[Violation]:
    """Yield violations in the message fields and failure notices of a downlink."""
    column = partial(record_column, fields=section.fields)
    return _text_problems(section, section.template_texts(), column, _UNKNOWN_RECORD_FIELD, _RECORD_COLUMNS)


def dead_letter_topic(line: LineTable, file: BridgeTable) -> str | None:
    """Return the dead-letter topic as named, else ``<bridge>.dead-letters`` if missing topics are created."""
    if line.dead_letter_topic is False or (line.dead_letter_topic is None and not file.kafka.create_topics):
        return None
    return line.dead_letter_topic or f"{file.name}.dead-letters"


def _dedupe_problems(line: UplinkTable, file: BridgeTable) -> Iterator[Violation]:
    """Yield violations of dedupe: a query has one watermark, so one ``within``; and, for order, one partition."""
    route_dedupes = [(index, route.dedupe) for index, route in enumerate(line.route) if route.dedupe]
    reference = line.dedupe or next((dedupe for _, dedupe in route_dedupes), None)
    if reference is None:
        return
    for index, dedupe in route_dedupes:
        if dedupe.within != reference.within:
            problem = f'within = "{dedupe.within}" differs from "{reference.within}" on the same line'
            yield "TL-C72", ("route", index, "dedupe", "within"), problem
    if str(file.spark.conf.get(_SHUFFLE_PARTITIONS, 1)) != "1":
        problem = f"dedupe needs {_SHUFFLE_PARTITIONS} = 1: more would mix up the order of a device's messages"
        yield "TL-C12", (ROOT, "spark", "conf", *_SHUFFLE_PARTITIONS.split(".")), problem, "Remove the setting."


def member_problems(line: UplinkTable, gateway: GatewaySettings) -> Iterator[Violation]:
    """Yield violations of members that can't share the line's messages; keys are relative to the line."""
    if line.member and line.share_way is None:
        yield "TL-C122", ("member",), "share is missing: how the members share the line's messages"
    if shared_filters := [route.from_ for route in line.route if line.member and route.from_.startswith("$share/")]:
        problem = f'"{shared_filters[0]}" is a shared subscription, and the line has members'
        yield "TL-C125", ("route",), problem, 'Write the plain filter, and share = "subscription".'
    for index, member in enumerate(line.member if line.share_way else ()):
        path, name = ("member", index, "filters"), f"{gateway.name}-{member.name}"
        if len(name) > _MAX_NAME_LENGTH:
            problem = f'"{name}" names this gateway in its rows, and has more than {_MAX_NAME_LENGTH} characters'
            yield "TL-C125", ("member", index, "name"), problem, "Shorten one of the two names."
        if bool(member.filters) is not (line.share_way is ShareMethod.FILTERS):
            problem = (
                f'member "{member.name}" has {"" if member.filters else "no "}filters, and share = "{line.share_way}"'
            )
            yield "TL-C122", path, problem
        for filter_index, topic_filter in enumerate(member.filters):
            share_error = "it is a shared subscription" if topic_filter.startswith("$share/") else None
            if filter_error := "it is empty" if not topic_filter else filter_problem(topic_filter) or share_error:
                problem = f'"{topic_filter}": {filter_error}'
                yield "TL-C67", (*path, filter_index), problem, 'Write a plain filter, as "telemetry/north/#".'
            elif not restrict_filters((topic_filter,), gateway.subscriptions):
                problem = f'"{topic_filter}" of member "{member.name}" matches no topic of a route'
                yield "TL-C124", (*path, filter_index), problem


def gateway_problems(line: Uplink | Downlink) -> Iterator[Violation]:
    """Yield settings of gateways that violate the line's guarantee; keys are relative to the line."""
    gateway = line.gateway
    if _needs_shared_sessions(line):
        brokers = len(gateway.brokers)
        yield "TL-C90", (MQTT, "brokers" if brokers > 1 else "follow_redirects"), *sharing_problem(brokers)
    if "tls" in gateway.model_fields_set and line.all_gateways and not any(broker.tls for broker in gateway.brokers):
        problem = "tls is set, but no broker is reached by mqtts://, so nothing would be encrypted"
        yield "TL-C17", (MQTT, "tls"), problem
    # A topic matched by two members would be stored twice.
    members = [member for member in line.all_gateways if member.share and member.share.way is ShareMethod.FILTERS]
    for (i, first_member), (j, second_member) in combinations(enumerate(members), 2):
        pairs = ((a.pattern, b.pattern) for a in first_member.subscriptions for b in second_member.subscriptions)
        shared_topic = next((topic for a, b in pairs if (topic := common_filter(a, b)) is not None), None)
        if shared_topic is not None and first_member.share and second_member.share:
            names = f'"{first_member.share.member}" and "{second_member.share.member}"'
            problem = f'members {names} both match "{shared_topic}", so it would be stored twice'
            yield "TL-C121", ("member", max(i, j), "filters"), problem


def _needs_shared_sessions(line: Uplink | Downlink) -> bool:
    """Return whether brokers must share sessions: for QoS 2, unless dedupe keys or weaker promises bear repeats."""
    if not line.gateway.connection.several_sessions:
        return False
    if isinstance(line, Downlink):
        return line.qos == 2
    bears_repeats = line.dedupe or all(route.dedupe or route.promise for route in line.route)
    return line.guarantee is Guarantee.EXACTLY_ONCE and not bears_repeats and bool(line.all_gateways)


# -- the file --------------------------------------------------------------------------------------------------------

#: Facts that are unique among lines and members: else one takes over the session [MQTT-3.1.4-3], or hides the other.
_UNIQUE_FACTS: Final = {
    "name": ("TL-C18", 'another line, or a member of one, is "{0}" too'),
    "client_id": ("TL-C19", 'client id "{0}" is also that of line "{1}"; they would throw each other out'),
    "listen": ("TL-C99", 'its gateway would listen on "{0}", as that of line "{1}"'),
}


def file_problems(bridge: str, lines: Mapping[KeyPath, Uplink | Downlink]) -> Iterator[Violation]:
    """Yield conflicts between lines, given by the paths of their tables; keys are relative to the file's root."""
    dead_letters = tuple(sorted({line.dead_letter_topic for line in lines.values() if line.dead_letter_topic}))
    markers = [
        f"towline.{bridge}.{line.name}.markers" for line in lines.values() if policy(line.guarantee).transactions
    ]
    for path, line in lines.items():
        topics: list[tuple[KeyPath, str | None, str]] = [
            (("dead_letter_topic",), line.dead_letter_topic, reserved_topics_pattern())
        ]
        for i, section in enumerate(line.route if isinstance(line, Uplink) else ()):
            topics.append((("route", i, "topic"), section.topic, reserved_topics_pattern(dead_letters)))
        for key, name, pattern in topics:
            if name is not None and re.fullmatch(pattern, name):
                yield "TL-C95", (*path, *key), f'"{name}" is reserved: markers, dead letters, or Kafka\'s own'
        # A line that reads its own output never ends.
        own_topics = (*markers, *filter(None, [line.dead_letter_topic]))
        for name in filter(line.reads, own_topics) if isinstance(line, Downlink) else ():
            problem = f'it would read "{name}", which it writes itself: markers or dead letters'
            yield "TL-C95", (*path, "from"), problem
    owners: dict[tuple[str, ...], tuple[KeyPath, str]] = {}
    for fact_path, owner, fact, name in _line_facts(lines):
        first_owner, first_name = owners.setdefault(fact, (owner, name))
        if first_owner != owner:
            code, problem = _UNIQUE_FACTS[fact[0]]
            yield code, fact_path, problem.format(fact[-1], first_name)


def _line_facts(lines: Mapping[KeyPath, Uplink | Downlink]) -> Iterator[tuple[KeyPath, KeyPath, tuple[str, ...], str]]:
    """Yield each unique fact (kind first, value last) with its path, its owner and the owner's name."""
    for path, line in lines.items():
        yield (*path, "name"), path, ("name", line.name), line.name
        for index, gateway in enumerate(line.all_gateways):
            if gateway.share:
                member_path = (*path, "member", index, "name")
                yield member_path, member_path, ("name", gateway.name), gateway.name
            for broker in map(str, gateway.brokers):
                yield path, (gateway.name,), ("client_id", broker, gateway.mqtt_client_id), gateway.name
        address = line.gateway.listen.address if line.gateway.listen else ":0"
        if not address.endswith(":0"):
            yield (*path, "listen"), path, ("listen", address), line.name


def cluster_problems(line: Uplink | Downlink, master: str, *, has_secrets: bool) -> Iterator[Violation]:
    """Yield settings that work with a local master and not on a cluster; their key is ``master``."""
    key: KeyPath = (ROOT, "spark", "master")
    remote_gateways = line.gateways if isinstance(line, Uplink) else ()
    for endpoint in remote_gateways if not shares_files(master) else ():
        if not is_remote(endpoint):
            problem = f'its gateway "{endpoint}" is a directory of this machine, which executors of {master} don\'t see'
            yield "TL-C140", key, problem
    if not remote_gateways and line.gateway.listen is None and not shares_files(master):
        problem = f"its gateway has no network listener, and executors of {master} can't reach it otherwise"
        yield "TL-C140", key, problem
    if has_secrets and isinstance(line, Downlink):
        problem = f"Spark's Kafka source would need [kafka]'s secrets or certificates on executors of {master}"
        yield "TL-C142", key, problem
