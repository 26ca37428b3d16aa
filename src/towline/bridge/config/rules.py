"""What the tables of a bridge file may not say together: rules of a route, a line and the whole file. Pure.

A rule yields each mistake as code, key, what is wrong and what to do. Rules of one shape are rows of a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import KeyPath, sentence
from towline.bridge.config.model import DownLine, Line
from towline.bridge.config.subscriptions import SubscribedRoute, at_odds, restricted
from towline.bridge.config.tables import (
    BridgeTable,
    Dedupe,
    DownlinkSection,
    DownlinkTable,
    RouteSection,
    UplinkTable,
    said_in_sql,
)
from towline.bridge.messages import COLUMNS, record_column
from towline.bridge.messages import FIELDS as RECORD_FIELDS
from towline.bridge.patterns import FIELDS, PAYLOAD, Pattern, Template, allowed, column_of, kafka_name_problem
from towline.bridge.properties import USER_PREFIX
from towline.gateway.access import is_remote
from towline.gateway.settings import GatewaySettings, ShareWay
from towline.guarantee import Guarantee, conf_problem, policy, promise_problem, qos_problem, sharing_problem
from towline.kafka.deadletters import reserved
from towline.mqtt.filters import common
from towline.mqtt.rules import filter_problem
from towline.schema import EVENT_TIME, ROW_SCHEMA
from towline.spark.session import shares_files

#: Names no field may have: columns of the source and of the record.
_COLUMNS: Final = frozenset(("key", "value", "headers", "timestamp", EVENT_TIME, *ROW_SCHEMA.names))
#: And those of Spark's Kafka source and of the sink.
_RECORD_COLUMNS: Final = frozenset((*COLUMNS, "timestampType", "fault"))
_UNKNOWN: Final = "which a record does not have; known are " + ", ".join(
    f"{{{name}}}" for name in ("key", "value", "value.JSON.PATH", "header.NAME", *RECORD_FIELDS)
)
#: Tasks of a shuffle: more than one would mix up the order of a device's messages.
_SHUFFLE: Final = "spark.sql.shuffle.partitions"
#: Of a gateway's name, as rows have it.
_LONGEST_NAME: Final = 64
#: Begins a key that stands elsewhere than in the table that a rule looks at.
ROOT: Final = ""
#: Begins a key of a line's connection: it stands in the line's own ``mqtt``, or in that of all lines.
MQTT: Final = "mqtt"
#: Code, key from the table that the rule looks at (after `ROOT` from the root of the file), what is wrong, and
#: what to do where the code's explanation is too wide for it.
Violation: TypeAlias = tuple[str, KeyPath, str] | tuple[str, KeyPath, str, str]


# -- templates and SQL -----------------------------------------------------------------------------------------------

#: A field is a column for what comes after it; names that begin with towline_ are columns of ours.
_FIELD: Final = re.compile(r"(?!towline_)[a-z][a-z0-9_]*")
_BRACES: Final = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")


def _texts(
    section: RouteSection | DownlinkSection,
    templates: Mapping[KeyPath, str],
    column: Callable[[str], str | None],
    unknown: str,
    taken: Collection[str],
) -> Iterator[Violation]:
    """What is wrong with what a route or downlink says in templates and in SQL, and with the names of its fields.

    ``column`` gives the column behind a field of templates; ``unknown`` is said of a field without one. Names that are
    ``taken`` are columns.
    """
    for key, text in templates.items():
        try:
            Template.read(text, lambda name: "" if column(name) else unknown)
        except ValueError as error:
            yield "TL-C66", key, *sentence(error, "Correct it.")
    for key, text in said_in_sql(section):
        name = key[-2 if key[-1] == "sql" else -1]
        if not text.strip():
            kind = "a condition" if name == "where" else "an expression"
            yield "TL-C69", key, f"{name} is empty", f"Give {kind} in Spark SQL, or remove it."
        elif behind := [(field, found) for field in _BRACES.findall(text) if (found := column(field)) is not None]:
            what = f"{name} names {{{behind[0][0]}}}, which SQL takes for text"
            yield "TL-C69", key, what, f"Write the column {behind[0][1]}, without braces."
    for name in section.fields:
        if name in taken or not _FIELD.fullmatch(name):
            why = "is taken" if name in taken else "SQL could not say"
            do = "Name it with small letters, digits and _, and as no column of the source and no wildcard."
            yield "TL-C66", ("fields", name), f'the field "{name}" has a name that {why}', do


# -- a route ---------------------------------------------------------------------------------------------------------


def route_problems(route: RouteSection, guarantee: Guarantee, dedupe: Dedupe | None) -> Iterator[Violation]:
    """What is wrong with a route of a line with this promise and this ``dedupe``; keys are the route's."""
    dedupe = route.dedupe or dedupe
    captures, templates = tuple[str, ...](), dict[KeyPath, str]()
    try:
        captures = tuple(Pattern.parse(route.from_).names)
        templates = {**route.texts(), **({("dedupe",): dedupe.key} if dedupe and dedupe.templated else {})}
    except ValueError as error:
        yield "TL-C67", ("from",), *sentence(error, "Correct it.")
    names = (*captures, *route.fields)
    known = ", ".join(f"{{{name}}}" for name in (*names, *FIELDS, PAYLOAD, f"{PAYLOAD}.JSON.PATH"))
    unknown = f"which from does not capture; known are {known} and {{{USER_PREFIX}NAME}}"
    taken = (*_COLUMNS, *captures)
    yield from _texts(route, templates, lambda name: name if name in names else column_of(name), unknown, taken)
    yield from _qos(route, guarantee, keyed=dedupe is not None)
    yield from _names(route, captures, in_sql=any(said_in_sql(route)) or (dedupe is not None and not dedupe.templated))


def _qos(route: RouteSection, guarantee: Guarantee, *, keyed: bool) -> Iterator[Violation]:
    if route.promise is not None:
        if problem := promise_problem(guarantee, route.promise, route.qos):
            yield "TL-C12", ("promise",), *problem
    elif route.qos is not None and (problem := qos_problem(guarantee, route.qos, keyed=keyed)):
        yield "TL-C12", ("qos",), f"{problem[0]}, the route subscribes with qos = {route.qos}", problem[1]


def _names(route: RouteSection, captures: Sequence[str], *, in_sql: bool) -> Iterator[Violation]:
    """A wildcard is a column for SQL, so it has a name of its own; headers and topics have legal ones."""
    folded = [name.lower() for name in captures]
    columns = {*_COLUMNS, *(name for name in folded if name.startswith("towline_") or folded.count(name) > 1)}
    if in_sql and (doubled := [name for name in captures if name.lower() in columns]):
        what = f"the wildcard {{{doubled[0]}}} is a column for SQL, which has another of that name"
        yield "TL-C67", ("from",), what, "Give the wildcard another name."
    for name in filter(lambda name: name.startswith(("mqtt.", "towline.")), route.headers):
        yield "TL-C65", ("headers", name), f'a header "{name}" would be taken for one that Towline writes'
    for index, glob in enumerate(route.allowed_topics):
        if problem := kafka_name_problem(glob.replace("*", "x").replace("?", "x")):
            yield "TL-C62", ("allowed_topics", index), problem, "Use names, or globs with * and ?."
    if route.fallback_topic is not None and (problem := kafka_name_problem(route.fallback_topic)):
        yield "TL-C62", ("fallback_topic",), problem


def topic_problems(route: SubscribedRoute) -> Iterator[Violation]:
    """What is wrong with where a route that has no other mistakes sends its messages."""
    name = route.topic.constant
    if name is None and not route.topic.parts[0] and not route.allowed_topics:
        yield "TL-C63", ("topic",), f'topic "{route.topic.text}" lets a device name any Kafka topic'
    elif problem := kafka_name_problem("x" + "".join(route.topic.parts[::2]) if name is None else name):
        yield "TL-C62", ("topic",), problem.replace('"x', '"') if name is None else problem
    elif name is not None and not allowed(name, route.allowed_topics):
        yield "TL-C63", ("topic",), f'topic "{name}" is not among allowed_topics', "Add it there."


# -- a line ----------------------------------------------------------------------------------------------------------


#: Keys of a line that have no effect: where that is so, and why.
_IDLE: Final[Sequence[tuple[Sequence[str], Callable[[Any, BridgeTable], bool], str]]] = (
    (
        ("ack_after", "journal", "listen", "mqtt", "receipts"),
        lambda line, _: bool(getattr(line, "gateways", ()) and not line.member),
        "with gateways, which run elsewhere with settings of their own",
    ),
    (("removed_gateways",), lambda line, _: not line.gateways, "without gateways"),
    (("share", "share_group"), lambda line, _: not line.member, "without members: [[uplink.member]] with a name"),
    (("share_group",), lambda line, _: line.way is ShareWay.FILTERS, 'with share = "filters"'),
    (("failure_notice",), lambda line, file: dead_letter_topic(line, file) is None, "without a dead_letter_topic"),
)
#: Keys of which a guarantee takes some values alone: what it does with them, and the values.
_PROMISED: Final = (
    ("qos", "publishes with QoS", "publish_levels"),
    ("isolation_level", "reads", "isolations"),
)


def line_problems(line: UplinkTable | DownlinkTable, file: BridgeTable) -> Iterator[Violation]:
    """What is wrong with a line, its routes and members apart; keys are the line's."""
    promise = policy(line.guarantee)
    if problem := conf_problem(line.guarantee, file.spark.conf):
        what = f"guarantee {line.guarantee} needs {problem[0]} = {problem[1]}"
        yield "TL-C12", (ROOT, "spark", "conf", *problem[0].split(".")), what, "Remove it from [spark.conf]."
    for key, verb, values in _PROMISED:
        value, known = getattr(line, key, None), getattr(promise, values)
        if value is not None and value not in known:
            what = f"guarantee {line.guarantee} {verb} {' or '.join(map(str, known))}, not {key} = {value}"
            yield "TL-C12", (key,), what
    for keys, idle, why in _IDLE:
        for key in line.model_fields_set.intersection(keys):
            if getattr(line, key) not in (None, ()) and idle(line, file):
                yield "TL-C111", (key,), f"{key} has no effect {why}"
    topic = dead_letter_topic(line, file)
    if topic is not None and (name := kafka_name_problem(topic)):
        yield "TL-C62", ("dead_letter_topic",), name, "Correct the name, or write false for none."
    if isinstance(line, UplinkTable):
        yield from _one_within(line, file)
        if any(map(is_remote, line.gateways)) and file.gateway.token_file is None:
            yield "TL-C112", ("gateways",), "a gateway on a network lets nobody in without a token"
    else:
        yield from message_problems(line)


def message_problems(section: DownlinkSection) -> Iterator[Violation]:
    """What is wrong with what a downlink says of its messages and failure notices."""
    column = partial(record_column, fields=section.fields)
    return _texts(section, section.texts(), column, _UNKNOWN, _RECORD_COLUMNS)


def dead_letter_topic(line: UplinkTable | DownlinkTable, file: BridgeTable) -> str | None:
    """As named, else `<bridge>.dead-letters` where missing topics are created."""
    if line.dead_letter_topic is False or (line.dead_letter_topic is None and not file.kafka.create_topics):
        return None
    return line.dead_letter_topic or f"{file.name}.dead-letters"


def _one_within(line: UplinkTable, file: BridgeTable) -> Iterator[Violation]:
    """One query has one watermark, so all routes remember equally long; and one state, so that order is kept."""
    own = [(number, route.dedupe) for number, route in enumerate(line.route) if route.dedupe]
    first = line.dedupe or next((dedupe for _, dedupe in own), None)
    if first is None:
        return
    for number, dedupe in own:
        if dedupe.within != first.within:
            what = f'within = "{dedupe.within}" differs from "{first.within}" on the same line'
            yield "TL-C72", ("route", number, "dedupe", "within"), what
    if str(file.spark.conf.get(_SHUFFLE, 1)) != "1":
        what = f"dedupe needs {_SHUFFLE} = 1: more would mix up the order of a device's messages"
        yield "TL-C12", (ROOT, "spark", "conf", *_SHUFFLE.split(".")), what, "Remove the setting."


def member_problems(line: UplinkTable, gateway: GatewaySettings) -> Iterator[Violation]:
    """Why members can't share what the line's only gateway would be told; keys are the line's."""
    if line.member and line.way is None:
        yield "TL-C122", ("member",), "nothing says how the members share the line's messages"
    if shared := [route.from_ for route in line.route if line.member and route.from_.startswith("$share/")]:
        what = f'"{shared[0]}" is a shared subscription, and the line has members'
        yield "TL-C125", ("route",), what, 'Write the plain filter, and share = "subscription".'
    for number, member in enumerate(line.member if line.way else ()):
        key, name = ("member", number, "filters"), f"{gateway.name}-{member.name}"
        if len(name) > _LONGEST_NAME:
            what = f'"{name}" names this gateway in its rows, and has more than {_LONGEST_NAME} characters'
            yield "TL-C125", ("member", number, "name"), what, "Shorten one of the two names."
        if bool(member.filters) is not (line.way is ShareWay.FILTERS):
            what = f'member "{member.name}" has {"" if member.filters else "no "}filters, and share = "{line.way}"'
            yield "TL-C122", key, what
        for at, text in enumerate(member.filters):
            shares = "it is a shared subscription" if text.startswith("$share/") else None
            if problem := "it is empty" if not text else filter_problem(text) or shares:
                yield "TL-C67", (*key, at), f'"{text}": {problem}', 'Write a plain filter, as "telemetry/north/#".'
            elif not restricted((text,), gateway.subscriptions):
                what = f'"{text}" of member "{member.name}" takes nothing that a route of the line takes'
                yield "TL-C124", (*key, at), what


def gateway_problems(line: Line | DownLine, routes: Sequence[SubscribedRoute]) -> Iterator[Violation]:
    """What contradicts a line's promise in what its gateways are told, given its routes; keys are the line's."""
    gateway = line.gateway
    if pair := at_odds(routes):
        narrow, wide = (routes[number].pattern.text for number in pair)
        what = f'"{narrow}" is subscribed as part of "{wide}", with other options'
        do = "Give both routes the same no_local, retain_as_published, retain_handling and subscription_id."
        yield "TL-C67", ("route", pair[0], "from"), what, do
    if problem := _sharing(line):
        yield "TL-C90", (MQTT, "brokers" if len(gateway.brokers) > 1 else "follow_redirects"), *problem
    if "tls" in gateway.model_fields_set and line.each_gateway and not any(broker.tls for broker in gateway.brokers):
        what = "tls is set, but no broker is reached by mqtts://, so nothing would be encrypted"
        yield "TL-C17", (MQTT, "tls"), what
    # No topic is taken by two members: it would be stored twice.
    members = [one for one in line.each_gateway if one.share and one.share.way is ShareWay.FILTERS]
    for (first, one), (second, other) in combinations(enumerate(members), 2):
        pairs = ((a.pattern, b.pattern) for a in one.subscriptions for b in other.subscriptions)
        both = next((topic for a, b in pairs if (topic := common(a, b)) is not None), None)
        if both is not None and one.share and other.share:
            names = f'"{one.share.member}" and "{other.share.member}"'
            what = f'members {names} both take "{both}", so that it would be doubled'
            yield "TL-C121", ("member", max(first, second), "filters"), what


def _sharing(line: Line | DownLine) -> tuple[str, str] | None:
    """QoS 2 needs brokers that share sessions; what a key names may come twice, and what a route promises less."""
    if isinstance(line, DownLine):
        safe, qos = line.qos != 2, line.qos
    else:
        keyed = line.dedupe or all(route.dedupe or route.promise for route in line.route)
        alone = line.gateways and not line.members
        safe = line.guarantee is not Guarantee.EXACTLY_ONCE or bool(keyed) or bool(alone)
        qos = None
    if safe or not line.gateway.connection.several_sessions:
        return None
    return sharing_problem(line.guarantee, len(line.gateway.brokers), qos)


# -- the file --------------------------------------------------------------------------------------------------------

#: What no two lines or members have in common: each would throw the other out [MQTT-3.1.4-3], or hide it.
_UNIQUE: Final = {
    "name": ("TL-C18", 'another line, or a member of one, is "{0}" too'),
    "client_id": ("TL-C19", 'client id "{0}" is also that of line "{1}"; they would throw each other out'),
    "listen": ("TL-C99", 'its gateway would listen on "{0}", as that of line "{1}"'),
}


def file_problems(bridge: str, lines: Mapping[KeyPath, Line | DownLine]) -> Iterator[Violation]:
    """What lines can't have together, by the places of their tables; keys are from the file's root."""
    dead_letters = tuple(sorted({line.dead_letter_topic for line in lines.values() if line.dead_letter_topic}))
    written = [f"towline.{bridge}.{one.name}.markers" for one in lines.values() if policy(one.guarantee).transactions]
    for path, line in lines.items():
        names: list[tuple[KeyPath, str | None, str]] = [(("dead_letter_topic",), line.dead_letter_topic, reserved())]
        for number, section in enumerate(line.route if isinstance(line, Line) else ()):
            keys = {key: getattr(section, key) for key in ("topic", "fallback_topic")}
            names += [(("route", number, key), name, reserved(dead_letters)) for key, name in keys.items()]
        for key, name, pattern in names:
            if name is not None and re.fullmatch(pattern, name):
                yield "TL-C95", (*path, *key), f'"{name}" is reserved: markers, dead letters, or Kafka\'s own'
        # A line that reads what its own batches write never comes to an end.
        own = (*written, *filter(None, [line.dead_letter_topic]))
        for name in filter(line.reads, own) if isinstance(line, DownLine) else ():
            what = f'it would read "{name}", and make a batch of each batch: markers, or dead letters of its own'
            yield "TL-C95", (*path, "from"), what
    seen: dict[tuple[str, ...], tuple[KeyPath, str]] = {}
    for place, whose, fact, name in _facts(lines):
        owner, other = seen.setdefault(fact, (whose, name))
        if owner != whose:
            code, what = _UNIQUE[fact[0]]
            yield code, place, what.format(fact[-1], other)


def _facts(lines: Mapping[KeyPath, Line | DownLine]) -> Iterator[tuple[KeyPath, KeyPath, tuple[str, ...], str]]:
    """Each fact of `_UNIQUE`, the value last, with its place, whose it is, and the name of that."""
    for path, line in lines.items():
        yield (*path, "name"), path, ("name", line.name), line.name
        for number, gateway in enumerate(line.each_gateway):
            if gateway.share:
                place = (*path, "member", number, "name")
                yield place, place, ("name", gateway.name), gateway.name
            for broker in map(str, gateway.brokers):
                yield path, (gateway.name,), ("client_id", broker, gateway.mqtt_client_id), gateway.name
        address = line.gateway.listen.address if line.gateway.listen else ":0"
        if not address.endswith(":0"):
            yield (*path, "listen"), path, ("listen", address), line.name


def cluster_problems(line: Line | DownLine, master: str, *, secrets: bool) -> Iterator[Violation]:
    """What is fine with a local master, and not where tasks run on other machines; its key is that of ``master``."""
    key: KeyPath = (ROOT, "spark", "master")
    elsewhere = line.gateways if isinstance(line, Line) else ()
    for place in elsewhere if not shares_files(master) else ():
        if not is_remote(place):
            what = f'its gateway "{place}" is a directory of this machine, which executors of {master} don\'t see'
            yield "TL-C140", key, what
    if not elsewhere and line.gateway.listen is None and not shares_files(master):
        what = f"its gateway listens on no network, and executors of {master} have no other way to it"
        yield "TL-C140", key, what
    if secrets and isinstance(line, DownLine):
        what = f"Spark's Kafka source would need [kafka]'s secrets or certificates on executors of {master}"
        yield "TL-C142", key, what
