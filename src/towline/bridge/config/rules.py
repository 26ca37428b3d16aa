"""What the tables of a bridge file may not say together: rules of a route, a line and the whole file. Pure.

Each rule yields what it finds; the table at the end of each part says which rules there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final, NamedTuple

from towline.bridge.config.members import LONGEST_NAME, restricted, share_way
from towline.bridge.config.mistakes import sentence
from towline.bridge.config.model import Dedupe, DownLine, Line, RouteSection
from towline.bridge.config.places import KeyPath
from towline.bridge.config.sqltext import check_sql, names_a_field
from towline.bridge.config.subscriptions import SubscribedRoute, at_odds
from towline.bridge.config.tables import BridgeTable, DownlinkTable, UplinkTable
from towline.bridge.patterns import Pattern, Template, allowed, column_of, kafka_name_problem
from towline.gateway.access import is_remote
from towline.gateway.settings import GatewaySettings, ShareWay
from towline.guarantee import Guarantee, conf_problem, policy, promise_problem, qos_problem, sharing_problem
from towline.kafka.reserved import reserved
from towline.mqtt.filters import common
from towline.mqtt.rules import filter_problem
from towline.schema import EVENT_TIME, ROW_SCHEMA
from towline.spark.session import shares_files

#: Keys of a line that say what its gateway does.
_OF_A_GATEWAY: Final = ("ack_after", "journal", "listen", "mqtt", "receipts")
#: Names no field may have: columns of the source and of the record.
_COLUMNS: Final = frozenset(("key", "value", "headers", "timestamp", EVENT_TIME, *ROW_SCHEMA.names))
#: Tasks of a shuffle: more than one would mix up the order of a device's messages.
_SHUFFLE: Final = "spark.sql.shuffle.partitions"


#: Begins a key that stands elsewhere than in the table that a rule looks at.
ROOT: Final = ""


class Violation(NamedTuple):
    """A mistake, where it is a matter of several keys.

    Attributes:
        code: Such as ``TL-C12``.
        key: Its place, from the table that the rule looks at; after `ROOT` from the root of the file.
        what: What is wrong.
        do: What to do.
    """

    code: str
    key: KeyPath
    what: str
    do: str


# -- a route ---------------------------------------------------------------------------------------------------------


def route_problems(route: RouteSection, guarantee: Guarantee, dedupe: Dedupe | None) -> list[Violation]:
    """What is wrong with a route of a line with this promise and this ``dedupe``; keys are the route's."""
    problems: list[Violation] = []
    try:
        captures = tuple(Pattern.parse(route.from_).names)
        problems += _templates(route, captures, route.dedupe or dedupe)
    except ValueError as error:
        captures = ()
        problems.append(Violation("TL-C67", ("from",), *sentence(error, "Correct it.")))
    problems += [
        *_fields(route, captures),
        *_qos(route, guarantee, keyed=(route.dedupe or dedupe) is not None),
        *_sql(route, captures, route.dedupe or dedupe),
        *_headers(route),
        *_lists(route),
    ]
    return problems or list(_topic(route.compile(guarantee, dedupe)))


def _refused(code: str, key: KeyPath, read: Callable[[], object]) -> Iterator[Violation]:
    """What reading a text refuses."""
    try:
        read()
    except ValueError as error:
        yield Violation(code, key, *sentence(error, "Correct it."))


def _templates(route: RouteSection, captures: Sequence[str], dedupe: Dedupe | None) -> Iterator[Violation]:
    names = (*captures, *route.fields)
    texts: dict[KeyPath, str | None] = {(key,): getattr(route, key) for key in ("topic", "key", "value", "timestamp")}
    texts |= {("headers", name): text for name, text in route.headers.items()}
    for key, text in texts.items():
        if text is not None:
            yield from _refused("TL-C66", key, partial(Template.parse, text, names))
    if dedupe:
        yield from _refused("TL-C66", ("dedupe",), partial(dedupe.compile, names))


def _fields(route: RouteSection, captures: Sequence[str]) -> Iterator[Violation]:
    """A field is a column for what comes after it, so it has a name of its own."""
    for name in route.fields:
        if not names_a_field(name, (*_COLUMNS, *captures)):
            taken = name in _COLUMNS or name in captures
            what = f'the field "{name}" has a name that ' + ("is taken" if taken else "SQL could not say")
            do = "Name it with small letters, digits and _, and as no column of the source and no wildcard."
            yield Violation("TL-C66", ("fields", name), what, do)


def _qos(route: RouteSection, guarantee: Guarantee, *, keyed: bool) -> Iterator[Violation]:
    if route.promise is not None:
        if problem := promise_problem(guarantee, route.promise, route.qos):
            yield Violation("TL-C12", ("promise",), *problem)
    elif route.qos is not None and (problem := qos_problem(guarantee, route.qos, keyed=keyed)):
        what = f"{problem[0]}, the route subscribes with qos = {route.qos}"
        yield Violation("TL-C12", ("qos",), what, problem[1])


def _sql(route: RouteSection, captures: Sequence[str], dedupe: Dedupe | None) -> Iterator[Violation]:
    """SQL names columns: those of the message, wildcards, and fields."""
    texts: dict[KeyPath, str | None] = {(key,): getattr(route, key) for key in ("where", "reject", "header_map")}
    texts |= {("fields", name): text for name, text in route.fields.items()}
    own = {name: name for name in (*captures, *route.fields)}
    for key, text in texts.items():
        column = partial(check_sql, str(key[-1]), text, lambda name: own.get(name) or column_of(name))
        yield from _refused("TL-C69", key, column)
    folded = [name.lower() for name in captures]
    columns = {*_COLUMNS, *(name for name in folded if name.startswith("towline_") or folded.count(name) > 1)}
    taken = [name for name in captures if name.lower() in columns]
    keyed = dedupe is not None and "{" not in dedupe.key
    if taken and (keyed or any(text is not None for text in texts.values())):
        what = f"the wildcard {{{taken[0]}}} is a column for SQL, which has another of that name"
        yield Violation("TL-C67", ("from",), what, "Give the wildcard another name.")


def _headers(route: RouteSection) -> Iterator[Violation]:
    for name in route.headers:
        if name.startswith(("mqtt.", "towline.")):
            what = f'a header "{name}" would be taken for one that Towline writes'
            yield Violation("TL-C65", ("headers", name), what, "Name it without the prefix mqtt. or towline.")


def _lists(route: RouteSection) -> Iterator[Violation]:
    for index, glob in enumerate(route.allowed_topics):
        if problem := kafka_name_problem(glob.replace("*", "x").replace("?", "x")):
            yield Violation("TL-C62", ("allowed_topics", index), problem, "Use names, or globs with * and ?.")
    if route.fallback_topic is not None and (problem := kafka_name_problem(route.fallback_topic)):
        yield Violation("TL-C62", ("fallback_topic",), problem, "Correct the name.")


def _topic(route: SubscribedRoute) -> Iterator[Violation]:
    name = route.topic.constant
    if name is None:
        if not route.topic.parts[0] and not route.allowed_topics:
            what = f'topic "{route.topic.text}" lets a device name any Kafka topic'
            yield Violation("TL-C63", ("topic",), what, "Begin it with a fixed prefix, or list allowed_topics.")
        elif problem := kafka_name_problem("x" + "".join(route.topic.parts[::2])):
            yield Violation("TL-C62", ("topic",), problem.replace('"x', '"'), "Correct the fixed part of the name.")
    elif problem := kafka_name_problem(name):
        yield Violation("TL-C62", ("topic",), problem, "Correct the name.")
    elif not allowed(name, route.allowed_topics):
        yield Violation("TL-C63", ("topic",), f'topic "{name}" is not among allowed_topics', "Add it there.")


# -- a line ----------------------------------------------------------------------------------------------------------


def mqtt_problems(guarantee: Guarantee, mqtt: Mapping[str, Any]) -> Iterator[Violation]:
    """What a line says to its broker by ``[mqtt]`` and its own ``mqtt`` together, and can't; keys are theirs."""
    if mqtt.get("session_expiry_s") == 0 and policy(guarantee).persistent:
        what = f"guarantee {guarantee} needs a session that outlives the connection, session_expiry_s is 0"
        yield Violation("TL-C12", ("session_expiry_s",), what, "Raise it; without the key it is for ever.")
    if "tls" in mqtt and mqtt.get("brokers") and not any(broker.tls for broker in mqtt["brokers"]):
        what = "tls is set, but no broker is reached by mqtts://, so nothing would be encrypted"
        yield Violation("TL-C17", ("tls",), what, "Write mqtts://, or remove tls.")


def line_problems(line: UplinkTable | DownlinkTable, file: BridgeTable) -> Iterator[Violation]:
    """What is wrong with a line, its routes apart; keys are the line's."""
    if problem := conf_problem(line.guarantee, file.spark.conf):
        what = f"guarantee {line.guarantee} needs {problem[0]} = {problem[1]}"
        yield Violation("TL-C12", (ROOT, "spark", "conf", *problem[0].split(".")), what, "Remove it from [spark.conf].")
    topic = dead_letter_topic(line, file)
    if topic is not None and (name := kafka_name_problem(topic)):
        yield Violation("TL-C62", ("dead_letter_topic",), name, "Correct the name, or write false for none.")
    rules = _OF_UPLINKS if isinstance(line, UplinkTable) else _OF_DOWNLINKS
    for rule in rules:
        yield from rule(line, file)  # type: ignore[arg-type] # each table has rules of its kind


def dead_letter_topic(line: UplinkTable | DownlinkTable, file: BridgeTable) -> str | None:
    """As named, else `<bridge>.dead-letters` where missing topics are created."""
    if line.dead_letter_topic is False or (line.dead_letter_topic is None and not file.kafka.create_topics):
        return None
    return line.dead_letter_topic or f"{file.name}.dead-letters"


def _acks(line: UplinkTable, _: BridgeTable) -> Iterator[Violation]:
    acks = policy(line.guarantee).acks
    if line.ack_after is not None and line.ack_after not in acks:
        what = f"guarantee {line.guarantee} acknowledges after {' or '.join(acks)}, not {line.ack_after}"
        yield Violation("TL-C12", ("ack_after",), what, "Remove ack_after, or take another guarantee.")


def _one_within(line: UplinkTable, file: BridgeTable) -> Iterator[Violation]:
    """One query has one watermark, so all routes remember equally long; and one state, so that order is kept."""
    own = [(number, route.dedupe) for number, route in enumerate(line.route) if route.dedupe]
    first = line.dedupe or next((dedupe for _, dedupe in own), None)
    for number, dedupe in own:
        if first is not None and dedupe.within != first.within:
            what = f'within = "{dedupe.within}" differs from "{first.within}" on the same line'
            do = "Make it one, or make two lines."
            yield Violation("TL-C72", ("route", number, "dedupe", "within"), what, do)
    if first is not None and str(file.spark.conf.get(_SHUFFLE, 1)) != "1":
        what = f"dedupe needs {_SHUFFLE} = 1: more would mix up the order of a device's messages"
        yield Violation("TL-C12", (ROOT, "spark", "conf", *_SHUFFLE.split(".")), what, "Remove the setting.")


def _gateways(line: UplinkTable, file: BridgeTable) -> Iterator[Violation]:
    """The gateways that the line reads instead of one of its own."""
    if line.removed_gateways and not line.gateways:
        yield Violation("TL-C111", ("removed_gateways",), "it belongs to gateways", "Remove it.")
    for key in _OF_A_GATEWAY:
        if line.gateways and key in line.model_fields_set and not line.member:
            what = f"{key} belongs to the gateways, which run elsewhere with settings of their own"
            yield Violation("TL-C111", (key,), what, "Remove it here, and set it where they run.")
    if any(map(is_remote, line.gateways)) and file.gateway.token_file is None:
        what = "a gateway on a network lets nobody in without a token"
        yield Violation("TL-C112", ("gateways",), what, "Name its file as token_file in the table [gateway].")


def _plain_filter_problem(text: str) -> str | None:
    if not text:
        return "it is empty"
    return filter_problem(text) or ("it is a shared subscription" if text.startswith("$share/") else None)


def _levels(line: DownlinkTable, _: BridgeTable) -> Iterator[Violation]:
    promise = policy(line.guarantee)
    if line.qos is not None and line.qos not in promise.publish_levels:
        wanted = " or ".join(map(str, promise.publish_levels))
        what = f"guarantee {line.guarantee} publishes with QoS {wanted}, not {line.qos}"
        yield Violation("TL-C12", ("qos",), what, "Change one of the two.")
    if line.isolation_level not in promise.isolations:
        what = f"guarantee {line.guarantee} reads {' or '.join(promise.isolations)}, not {line.isolation_level}"
        yield Violation("TL-C12", ("isolation_level",), what, "Change one of the two.")


def _notices(line: DownlinkTable, file: BridgeTable) -> Iterator[Violation]:
    if line.failure_notice is not None and dead_letter_topic(line, file) is None:
        what = "failure_notice tells of dead letters, and the line has none"
        yield Violation("TL-C79", ("failure_notice",), what, "Give the line a dead_letter_topic.")


_OF_UPLINKS: Final = (_acks, _one_within, _gateways)
_OF_DOWNLINKS: Final = (_levels, _notices)


def member_problems(line: UplinkTable, gateway: GatewaySettings) -> Iterator[Violation]:
    """Why members can't share what the line's only gateway would be told; keys are the line's.

    They share in one way, and filters stand exactly where they say something.
    """
    way = share_way(line)
    for key in ("share", "share_group"):
        if getattr(line, key) is not None and not line.member:
            what = f"{key} says how members share a line, and it has none"
            yield Violation("TL-C122", (key,), what, "Add [[uplink.member]] with a name, or remove it.")
    if line.member and way is None:
        do = 'Give each member filters, or write share = "subscription".'
        yield Violation("TL-C122", ("member",), "nothing says how the members share the line's messages", do)
    for number in range(len(line.member) if way else 0):
        yield from _member(line, number, gateway)
    if way is ShareWay.FILTERS and line.share_group is not None:
        yield Violation("TL-C122", ("share_group",), f'share_group says nothing with share = "{way}"', "Remove it.")
    if shared := [route.from_ for route in line.route if line.member and route.from_.startswith("$share/")]:
        what = f'"{shared[0]}" is a shared subscription, and the line has members'
        yield Violation("TL-C125", ("route",), what, 'Write the plain filter, and share = "subscription".')
    if way is ShareWay.SUBSCRIPTION:
        yield from _shared(gateway)


def _member(line: UplinkTable, number: int, gateway: GatewaySettings) -> Iterator[Violation]:
    member, way = line.member[number], share_way(line)
    key, name = ("member", number, "filters"), f"{gateway.name}-{member.name}"
    if member.name in [one.name for one in line.member[:number]]:
        yield Violation("TL-C122", ("member", number, "name"), f'two members are named "{member.name}"', "Rename one.")
    if len(name) > LONGEST_NAME:
        what = f'"{name}" names this gateway in its rows, and has more than {LONGEST_NAME} characters'
        yield Violation("TL-C125", ("member", number, "name"), what, "Shorten one of the two names.")
    if way is ShareWay.FILTERS and not member.filters:
        what = f'member "{member.name}" has no filters, so it would take nothing'
        yield Violation("TL-C122", key, what, "Give it some.")
    elif way is ShareWay.SUBSCRIPTION and member.filters:
        what = f'member "{member.name}" has filters, and share = "{way}" says what it takes'
        yield Violation("TL-C122", key, what, "Remove one of the two.")
    for at, text in enumerate(member.filters):
        if problem := _plain_filter_problem(text):
            do = 'Write a plain filter, as "telemetry/north/#".'
            yield Violation("TL-C67", (*key, at), f'"{text}": {problem}', do)
        elif not restricted((text,), gateway.subscriptions):
            what = f'"{text}" of member "{member.name}" takes nothing that a route of the line takes'
            yield Violation("TL-C124", (*key, at), what, "Correct it, or add a route.")


def gateway_problems(line: Line | DownLine, routes: Sequence[SubscribedRoute], mqtt: KeyPath) -> Iterator[Violation]:
    """What contradicts a line's promise in what its gateway is told; keys are the line's, `mqtt` those of its brokers.

    Args:
        line: With its gateway.
        routes: Its routes, compiled; none of a downlink.
        mqtt: Where the brokers are named, or redirects allowed.
    """
    if pair := at_odds(routes):
        narrow, wide = (routes[number].pattern.text for number in pair)
        what = f'"{narrow}" is subscribed as part of "{wide}", with other options'
        do = "Give both routes the same no_local, retain_as_published, retain_handling and subscription_id."
        yield Violation("TL-C67", ("route", pair[0], "from"), what, do)
    if problem := _sharing(line):
        yield Violation("TL-C90", mqtt, *problem)
    yield from _apart([one for one in line.each_gateway if one.share and one.share.way is ShareWay.FILTERS])


def _sharing(line: Line | DownLine) -> tuple[str, str] | None:
    """QoS 2 needs brokers that share sessions; what a key names may come twice, and what a route promises less."""
    if isinstance(line, DownLine):
        return sharing_problem(line.gateway, publish_qos=2) if line.qos == 2 else None
    keyed = line.dedupe or all(route.dedupe or route.promise for route in line.sections)
    if line.guarantee is not Guarantee.EXACTLY_ONCE or keyed or (line.gateways and not line.members):
        return None
    return sharing_problem(line.gateway)


def _shared(gateway: GatewaySettings) -> Iterator[Violation]:
    problems = {
        "route": any(one.no_local for one in gateway.subscriptions) and "no_local [MQTT-3.8.3-4]",
        "receipts": gateway.receipts is not None and "receipts, which need every message of a publisher",
        "mqtt": gateway.protocol in {"3.1.1", "3.1"} and "MQTT 3.x, which has no shared subscriptions",
    }
    for key, problem in problems.items():
        if problem:
            what = f'share = "subscription" does not go with {problem}'
            yield Violation("TL-C125", (key,), what, 'Change it, or take share = "filters".')


def _apart(members: Sequence[GatewaySettings]) -> Iterator[Violation]:
    """No topic is taken by two members: it would be stored twice."""
    for (first, one), (second, other) in combinations(enumerate(members), 2):
        pairs = ((a.pattern, b.pattern) for a in one.subscriptions for b in other.subscriptions)
        both = next((topic for a, b in pairs if (topic := common(a, b)) is not None), None)
        if both is not None and one.share and other.share:
            names = f'"{one.share.member}" and "{other.share.member}"'
            what = f'members {names} both take "{both}", so that it would be doubled'
            do = "Give the members filters that have no topic in common."
            yield Violation("TL-C121", ("member", max(first, second), "filters"), what, do)


# -- the file --------------------------------------------------------------------------------------------------------


def file_problems(bridge: str, lines: Mapping[KeyPath, Line | DownLine]) -> Iterator[Violation]:
    """What lines can't have together; keys are from the file's root.

    Args:
        bridge: Its name.
        lines: By the places of their tables.
    """
    dead_letters = tuple(sorted({line.dead_letter_topic for line in lines.values() if line.dead_letter_topic}))
    for path, line in lines.items():
        yield from _reserved(path, line, dead_letters)
        if isinstance(line, DownLine):
            yield from _circles(path, line, bridge, list(lines.values()))
    yield from _identities(lines)
    yield from _addresses(lines)


def _reserved(path: KeyPath, line: Line | DownLine, dead_letters: Sequence[str]) -> Iterator[Violation]:
    """Topics of the file hold no markers and are not internal to Kafka; what a route writes is no dead letter."""
    names: list[tuple[KeyPath, str | None, str]] = [(("dead_letter_topic",), line.dead_letter_topic, reserved())]
    for number, section in enumerate(line.sections if isinstance(line, Line) else ()):
        names.append((("route", number, "topic"), section.topic, reserved(dead_letters)))
        names.append((("route", number, "fallback_topic"), section.fallback_topic, reserved(dead_letters)))
    for key, name, pattern in names:
        if name is not None and re.fullmatch(pattern, name):
            what = f'"{name}" is reserved: markers, dead letters, or Kafka\'s own'
            yield Violation("TL-C95", (*path, *key), what, "Choose another topic.")


def _circles(path: KeyPath, line: DownLine, bridge: str, lines: Sequence[Line | DownLine]) -> Iterator[Violation]:
    """A line that reads what its own batches write, markers or dead letters, never comes to an end."""
    written = [f"towline.{bridge}.{one.name}.markers" for one in lines if policy(one.guarantee).transactions]
    written += [line.dead_letter_topic] if line.dead_letter_topic else []
    for name in filter(line.section.reads, written):
        what = f'it would read "{name}", and make a batch of each batch: markers, or dead letters of its own'
        yield Violation("TL-C95", (*path, "from"), what, "Choose other topics.")


def _identities(lines: Mapping[KeyPath, Line | DownLine]) -> Iterator[Violation]:
    """Two lines never share a name, nor a client id on one broker [MQTT-3.1.4-3]: each would throw the other out."""
    names: set[str] = set()
    for path, line in lines.items():
        if line.name in names:
            yield Violation("TL-C18", (*path, "name"), "another line has this name", "Rename one.")
        names.add(line.name)
    seen: dict[tuple[str, str], str] = {}
    for path, line in lines.items():
        for gateway in line.each_gateway:
            if gateway.name != line.name and gateway.name in names:
                what = f'the gateway of a member would be "{gateway.name}" in its rows, as another line is'
                yield Violation("TL-C18", path, what, "Rename one.")
            for broker in gateway.brokers:
                client_id = gateway.mqtt_client_id
                if (other := seen.setdefault((str(broker), client_id), gateway.name)) != gateway.name:
                    what = f'client id "{client_id}" is also that of line "{other}"; they would throw each other out'
                    yield Violation("TL-C19", path, what, "Give each line its own client_id.")


def _addresses(lines: Mapping[KeyPath, Line | DownLine]) -> Iterator[Violation]:
    """Each line has a gateway of its own, so no two listen on one address."""
    seen: dict[str, str] = {}
    for path, line in lines.items():
        address = line.gateway.listen.address if line.gateway.listen else ":0"
        other = line.name if address.endswith(":0") else seen.setdefault(address, line.name)
        if other != line.name:
            what = f'its gateway would listen on "{address}", as that of line "{other}"'
            yield Violation("TL-C99", (*path, "listen"), what, "Give each line a listen of its own, or listen = false.")


def cluster_problems(line: Line | DownLine, master: str, *, secrets: bool) -> Iterator[Violation]:
    """What is fine with a local master, and not where tasks run on other machines; its key is that of ``master``."""
    key: KeyPath = (ROOT, "spark", "master")
    elsewhere = line.gateways if isinstance(line, Line) else ()
    for place in elsewhere if not shares_files(master) else ():
        if not is_remote(place):
            what = f'its gateway "{place}" is a directory of this machine, which executors of {master} don\'t see'
            yield Violation("TL-C140", key, what, "Let it listen, and name it grpc+tls://HOST:PORT.")
    if not elsewhere and line.gateway.listen is None and not shares_files(master):
        what = f"its gateway listens on no network, and executors of {master} have no other way to it"
        yield Violation("TL-C140", key, what, "Set listen in [gateway], with certificate and token.")
    if secrets and isinstance(line, DownLine):
        what = f"Spark's Kafka source would need [kafka]'s secrets or certificates on executors of {master}"
        do = "They never travel: run this line with a local master, in a bridge file of its own."
        yield Violation("TL-C142", key, what, do)
