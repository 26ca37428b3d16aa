"""What a bridge would do, for a person and as JSON: lines, filters, promises and what they cost, where state lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge, DownLine, Line
from towline.bridge.config.subscriptions import shadowed
from towline.bridge.kafka_source import source_text
from towline.gateway.settings import GatewaySettings, ShareWay
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecurities
from towline.mqtt.filters import overlapping
from towline.text import printable

#: A line, or all, as JSON values.
Plan: TypeAlias = dict[str, Any]
#: Texts, each with what has to hold for it.
Conditions: TypeAlias = Mapping[str, object]

#: What the promise costs beside the CPU, in words.
_COST_UP: Final = {
    Guarantee.AT_MOST_ONCE: "nothing is waited for, and losses are counted where they can be seen",
    Guarantee.AT_LEAST_ONCE: "an fdatasync before each acknowledgement; records are visible at once",
    Guarantee.EXACTLY_ONCE: "a transaction a batch: records are visible when it is committed",
}
_COST_DOWN: Final = {
    Guarantee.AT_MOST_ONCE: "an fdatasync a batch; nothing is waited for at the broker",
    Guarantee.AT_LEAST_ONCE: "an fdatasync a batch",
    Guarantee.EXACTLY_ONCE: "an fdatasync a batch and a chunk (packet ids); two more packets a message (QoS 2)",
}
_DOUBLED_DOWN: Final = {
    Guarantee.AT_MOST_ONCE: "no",
    Guarantee.AT_LEAST_ONCE: "yes: what was not acknowledged when a connection or a process failed",
    Guarantee.EXACTLY_ONCE: "no, for a subscriber with QoS 2",
}
#: What no promise keeps by itself, and a `dedupe` key on each route does.
_REPEATS: Final = {
    Guarantee.AT_LEAST_ONCE: ", and what a publisher sends again",
    Guarantee.EXACTLY_ONCE: "a message that its publisher sends twice as two messages is two messages",
}
#: What no switch can give.
_BROKERS_STORE: Final = "a broker that loses its store loses what only it held"
_ACKS: Final = {
    AckAfter.RECEIVED: "on receipt, before the message is on disk",
    AckAfter.JOURNAL: "when the message is on disk (fdatasync); Kafka may be down",
    AckAfter.KAFKA: "when Kafka has the message; the broker keeps what is on the way",
}
#: A value of a downlink in words.
_WORDS: Final = {
    "stop": "stops when Kafka deleted what it has not read",
    "go_on": "goes on when Kafka deleted records",
    "outbox": "a batch is written when it is on disk here",
    "broker": "a batch is written when the broker has it",
    "send": "with control characters it is sent; a broker that ends the connection at it gets it three times",
    "dead_letter": "with control characters a record is a dead letter: a broker may end the connection at it",
}
#: How the members of a line share it: what is in the order in which it was published, and what that costs.
_SHARED: Final = {
    ShareWay.FILTERS: (
        "kept for each topic, and for each device whose topics one member takes",
        "each member receives its own messages",
    ),
    ShareWay.SUBSCRIPTION: ("not kept", "the broker gives each message to one member"),
}
#: Keys of a line that name topics of Kafka.
_TOPICS: Final = ("topic", "fallback_topic", "dead_letter_topic", "from")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
#: What of a line is shown in another form than it has.
_OTHERWISE: Final = {"gateway", "members", "dead_letter_topics"}


def plan_of(bridge: Bridge) -> Plan:
    """The plan as JSON values; what the file says with a variable of the environment is as it stands there [I12]."""
    document = Document.again(bridge.file, bridge.file)
    return {
        "bridge": bridge.name,
        "file": str(bridge.file),
        "state_dir": str(bridge.state_dir),
        "kafka": {
            "bootstrap_servers": document.shown(bridge.kafka.bootstrap_servers, "bootstrap_servers"),
            "topics": document.shown(bridge.topics, *_TOPICS),
            "create_topics": bridge.kafka.create_topics is not None,
            "insecure": bool(insecurities(bridge.kafka.client())),
        },
        "spark": {"master": bridge.spark.master, "ui": bridge.spark.ui, "kafka_source": source_text(bridge)},
        "lines": [_line(line, document) for line in bridge.lines],
        "warnings": warnings(bridge, document),
    }


def _line(line: Line | DownLine, document: Document) -> Plan:
    """What the file says of a line, or leaves to its defaults, and whom it meets; in words under ``says``."""
    gateway, elsewhere = line.gateway, not line.each_gateway
    plan = document.shown(
        {
            **line.model_dump(mode="json", by_alias=True, exclude=_OTHERWISE),
            "brokers": [] if elsewhere else [str(broker) for broker in gateway.brokers],
            "client_id": None if elsewhere else gateway.mqtt_client_id,
            "state_dir": str(gateway.state_dir),
            "ack_after": gateway.acks.value,
        }
    )
    plan["kafka_topics"] = document.shown(line.fixed_topics, *_TOPICS)
    plan["subscriptions"] = _subscriptions(gateway, document)
    plan["share"] = [  # its members
        {"name": one.share.member, "client_id": one.mqtt_client_id, "subscriptions": _subscriptions(one, document)}
        for one in line.each_gateway
        if one.share
    ]
    rows = _uplink(line, plan) if isinstance(line, Line) else _downlink(line, plan)
    limits = _uplink_limits(line) if isinstance(line, Line) else _downlink_limits(line)
    return {**plan, "says": {label: text for label, text in rows if text}, "limits": _holding(limits)}


def _subscriptions(gateway: GatewaySettings, document: Document) -> list[Plan]:
    return [{"filter": document.shown(one.pattern, "from"), "qos": one.qos} for one in gateway.subscriptions]


def _keyed(line: Line) -> bool:
    return all(route.dedupe is not None for route in line.routes)


def _uplink(line: Line, plan: Plan) -> Iterator[tuple[str, str | list[str]]]:
    """What an uplink does, row by row."""
    gateway, promise, members = line.gateway, policy(line.guarantee), plan["share"]
    after_kafka = gateway.acks is AckAfter.KAFKA
    yield "gateways", plan["gateways"]
    if line.each_gateway:  # what the gateways of this file take in, and where
        yield from _broker(plan)
        yield "share", f"{line.way}   order {'; '.join(_SHARED[line.way])}" if line.way else ""
        yield "member", [f"{one['name']}   client id {one['client_id']}   {_filters(one)}" for one in members]
        yield "filters", "" if members else _filters(plan)
    for number, route in enumerate(plan["route"], start=1):
        yield f"route {number}", _route(route, route["dedupe"] or plan["dedupe"])
    yield "acks", _ACKS[gateway.acks] if line.each_gateway else ""
    several = line.parallelism > 1
    writes = "records as they come" + f", by {line.parallelism} tasks" * several
    if promise.transactions:
        writes = "one transaction a batch, all topics and the marker at once"
        if several:
            writes = f"{line.parallelism} transactions a batch, split by key: each becomes visible by itself"
    yield "kafka", f"{writes}   {_dead_letters(plan)}"
    yield "replay", f"a batch that a crash interrupted is {promise.replay}"
    kept = "the state directory is kept"
    yield "lost", promise.lost.replace(kept, "the broker keeps its session") if after_kafka else promise.lost
    yield "doubled", promise.doubled.replace(_REPEATS.get(line.guarantee, ""), "") if _keyed(line) else promise.doubled
    cost = {
        _COST_UP[line.guarantee]: True,
        "an acknowledgement waits for its batch in Kafka": after_kafka,
        "two more packets a message (QoS 2)": any(one.qos == 2 for one in gateway.subscriptions),
        "a place in Spark's state store for each message, some 200 B": line.within,
    }
    yield "cost", "; ".join(_holding(cost))
    where = "checkpoint and identity; the messages wait at the gateways"
    yield "state", f"{plan['state_dir']}   {where if line.gateways else _room('journal', gateway.journal.max_bytes)}"


def _uplink_limits(line: Line) -> Conditions:
    once, elsewhere = line.guarantee is Guarantee.EXACTLY_ONCE, not line.each_gateway
    after_kafka = line.gateway.acks is AckAfter.KAFKA
    machine = "the machine of a member" if line.members else "the machine that holds state_dir"
    lost, doubled = (_numbers(line, promise) for promise in (Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE))
    return {
        "a consumer without isolation.level=read_committed sees aborted records too": once,
        _REPEATS[Guarantee.EXACTLY_ONCE]: once and not _keyed(line),
        f"{lost}: a message is lost before it is in the journal, or in Kafka once": lost,
        f"{doubled}: a message comes twice where the broker sends it again": doubled,
        f"repeats are dropped for {line.within} at least, and longer while nothing else comes: "
        "a key must never name two messages": line.within,
        f"a jump of the gateway's clock ahead by more than {line.within} forgets what came before it": line.within,
        "a device's messages are in order as long as they come by one gateway": line.gateways,
        "a gateway that is away holds back its own messages only; a batch that was begun with them waits for it": (
            line.gateways
        ),
        "each gateway has settings of its own: what it acknowledges when, and up to how much it keeps, is said there": (
            elsewhere
        ),
        "the machine of a gateway holds what it acknowledged before Kafka had it": elsewhere,
        "while Kafka is down no more than the broker's window is received: its queue has to hold the rest": (
            after_kafka and not elsewhere
        ),
        f"{machine} holds what was acknowledged and is not yet in Kafka": not (after_kafka or elsewhere),
        _BROKERS_STORE: True,
        "Kafka with unclean leader election, replication factor 1 or min.insync.replicas 1 can lose what it took": True,
    }


def _numbers(line: Line, promise: Guarantee) -> str:
    """The routes that promise this, less than their line; "" for none."""
    numbers = [str(number) for number, one in enumerate(line.route, start=1) if one.promise is promise]
    return f"route{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""


def _downlink(line: DownLine, plan: Plan) -> Iterator[tuple[str, str | list[str]]]:
    """What a downlink does, row by row."""
    read, topic, start = plan["from"], plan["topic"], plan["starting_offsets"]
    names = ", ".join([read] if isinstance(read, str) else read)
    source = f"topics like {read['pattern']}" if isinstance(read, dict) else names
    topic = f"SQL {topic['sql']}" if isinstance(topic, dict) else topic
    start = start if isinstance(start, str) else "as listed"
    parts = {
        f"mqtt:{_cut(topic)}": True,
        f"QoS {line.qos}": True,
        f"properties {line.properties}": True,
        f"where {_cut(plan['where'] or '')}": line.where,
        f"transform {line.transform}": line.transform,
    }
    yield "kafka", f"{source}   {line.isolation_level}   from {start}   {_WORDS[line.on_data_loss]}"
    yield from _broker(plan)
    yield "publish", "   ".join(_holding(parts))
    yield "confirm", f"{_WORDS[line.confirm]}   {_dead_letters(plan)}"
    yield "text", _WORDS[line.control_characters]
    yield "replay", "a batch that a crash interrupted is served again; what is in the outbox stays out"
    yield "lost", policy(line.guarantee).lost.replace("from the broker's hand-over on", "from Kafka to the broker")
    yield "doubled", _DOUBLED_DOWN[line.guarantee]
    yield "cost", _COST_DOWN[line.guarantee] + ("; a transaction a batch" if line.transacts else "")
    outbox = line.gateway.outbox
    yield "state", f"{plan['state_dir']}   {_room('outbox', outbox.max_bytes if outbox else None)}"


def _downlink_limits(line: DownLine) -> Conditions:
    return {
        "a subscriber with QoS 0 or 1 may lose or double what the broker got once": (
            line.guarantee is Guarantee.EXACTLY_ONCE
        ),
        _BROKERS_STORE: True,
        "the machine that holds state_dir holds what was taken and is not yet delivered": True,
        "Kafka deletes by retention whether a line has read it or not": True,
    }


def _filters(one: Plan) -> str:
    return "   ".join(f"{s['filter']} (QoS {s['qos']})" for s in one["subscriptions"])


def _cut(sql: str, most: int = 100) -> str:
    """The beginning of a long expression."""
    return sql if len(sql) <= most else f"{sql[: most - 3]}..."


def _broker(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "broker", f"{', then '.join(plan['brokers'])}   client id {plan['client_id']}"


def _dead_letters(plan: Plan) -> str:
    return f"dead letters to {plan['dead_letter_topic']}" if plan["dead_letter_topic"] else "no dead letters"


def _room(store: str, most: int | None) -> str:
    return f"{store} up to {f'{most:,} B' if most else 'the disk'}"


def _holding(texts: Conditions) -> list[str]:
    return [text for text, holds in texts.items() if holds]


def _route(route: Plan, dedupe: Plan | None) -> str:
    parts = {
        f"{route['from']} → kafka:{route['topic']}": True,
        route["promise"]: route["promise"],
        "no key" if route["key"] is None else f"key {route['key']}": True,
        f"headers {', '.join(route['headers'])}": route["headers"],
        "no MQTT properties": route["properties"] == "none",
        f"where {_cut(route['where'] or '')}": route["where"],
        f"else kafka:{route['fallback_topic']}": route["fallback_topic"],
        "key required": route["key_required"],
        f"repeats by {(dedupe or {}).get('key')}": dedupe,
    }
    return "   ".join(_holding(parts))


# -- warnings --------------------------------------------------------------------------------------------------------


def warnings(bridge: Bridge, document: Document) -> list[str]:
    """What is allowed and yet deserves a thought."""
    texts = [f"insecure: [kafka] {text}" for text in insecurities(bridge.kafka.client())]
    lines: dict[str, list[str]] = {}
    for line in bridge.lines:
        own = _uplink_warnings(line, document) if isinstance(line, Line) else _downlink_warnings(line)
        for text in (*own, *_transport_warnings(line, document)):
            lines.setdefault(text, []).append(f'line "{line.name}"')
    return [*texts, *(f"{', '.join(names)}: {text}" for text, names in lines.items())]


def _uplink_warnings(line: Line, document: Document) -> Iterator[str]:
    for later, above in shadowed(line.routes):
        yield f"route {later + 1} never gets a message: route {above + 1} takes all of them."
    for pair in overlapping([] if line.within else [one.pattern for one in line.gateway.subscriptions]):
        one, other = document.shown(pair, "from")
        yield (
            f'the filters "{one}" and "{other}" overlap; '
            "a broker may send a message for each [MQTT-3.3.4-2], and it would be in Kafka twice. "
            "Subscribe to one wider filter, or make two lines."
        )
    for number, route in enumerate(line.routes, start=1):
        if route.topic.fields and route.fallback_topic is None and line.dead_letter_topic is None:
            yield (
                f"route {number} takes its topic from the message and has neither fallback nor dead letters: "
                "a name that is not legal or not allowed stops the line."
            )
        if route.dedupe is None and line.within:
            yield (
                f"route {number} drops no repeats, and yet its messages pass through the state store of those that do. "
                "Give it a line of its own."
            )
    yield from _share_warnings(line, document)


def _share_warnings(line: Line, document: Document) -> Iterator[str]:
    if line.way is ShareWay.FILTERS:
        taken = {one.pattern for member in line.members for one in member.subscriptions}
        for pattern in (one.pattern for one in line.gateway.subscriptions if one.pattern not in taken):
            shown = document.shown(pattern, "from")
            yield f'of "{shown}" only what the members\' filters take is received; the rest comes to nobody.'
    if line.way is ShareWay.SUBSCRIPTION:
        yield (
            "the order of a device's messages is not kept: the broker gives them to any member "
            '(share = "subscription").'
        )
        yield "what the broker has queued for a member that is away waits in its session, and is given to no other."
        yield "a shared subscription brings no retained messages."
        if line.within:
            yield "repeats may come to different members; one query that reads all of them drops them all the same."
    if line.way and line.gateway.receipts is not None:
        yield (
            "receipts: each member knows its own messages alone; a publisher whose messages come to several members "
            "never has all its receipts, and goes on sending."
        )


def _downlink_warnings(line: DownLine) -> Iterator[str]:
    if line.dead_letter_topic is None:
        if line.control_characters == "dead_letter":
            yield "a record with a control character in a topic or property stops the line, too."
        yield "a record that MQTT can't carry stops the line: there is no dead_letter_topic."
    if line.isolation_level == "read_uncommitted":
        yield "isolation_level = read_uncommitted: what a transaction aborts is delivered too."
    if line.on_data_loss == "go_on":
        yield "on_data_loss = go_on: what Kafka deletes before it was read is lost without an error."
    if line.qos and line.gateway.protocol != "5":
        where = "where the broker speaks no MQTT 5, " if line.gateway.protocol == "auto" else ""
        yield f"{where}MQTT 3.x has no negative answers: what the broker drops, as by its ACL, counts as delivered."
    if line.parallelism > 1 and line.guarantee is Guarantee.EXACTLY_ONCE and line.transform:
        yield "the transform has to be deterministic: a batch that a crash interrupted goes through it again."


def _transport_warnings(line: Line | DownLine, document: Document) -> Iterator[str]:
    if isinstance(line, Line) and line.gateways:
        return
    gateway = line.gateway
    if gateway.tls.insecure:
        yield "tls.insecure: the broker's certificate is not verified; anyone in between can read and change."
    open_to_all = [broker for broker in gateway.brokers if not broker.tls and broker.host not in _LOOPBACK]
    if gateway.password_file and open_to_all:
        where = document.shown(str(open_to_all[0]), "brokers")
        yield f"the password crosses the network in clear text to {where}. Use mqtts:// or wss://."


# -- as text ---------------------------------------------------------------------------------------------------------


def render(plan: Plan) -> str:
    """The plan as text."""
    kafka, lines = plan["kafka"], plan["lines"]
    notes = " (missing ones are created)" if kafka["create_topics"] else ""
    notes += "   insecure" if kafka["insecure"] else ""
    topics = ", ".join(kafka["topics"]) or "from messages only"
    out = [f'bridge "{plan["bridge"]}"   {len(lines)} line{"s" * (len(lines) != 1)}   {plan["file"]}']
    rows = {
        "kafka": f"{kafka['bootstrap_servers']}   topics {topics}{notes}",
        "state": plan["state_dir"],
        "spark": plan["spark"]["kafka_source"],
        "sql": plan.get("sql"),
    }
    out += [f"  {label:9} {text}" for label, text in rows.items() if text]
    out += [f"  ! {text}" for text in plan["warnings"]]
    for line in lines:
        down = line["direction"] == "down"
        out += ["", f'▸ line "{line["name"]}"   {line["guarantee"]}{"   Kafka → MQTT" if down else ""}']
        for label, said in line["says"].items():
            first, *others = [said] if isinstance(said, str) else said
            out += [f"  {label:9} {first}", *(f"  {'':9} {text}" for text in others)]
    out += ["", "What no promise covers:"]
    for text in dict.fromkeys(text for line in lines for text in line["limits"]):
        names = [line["name"] for line in lines if text in line["limits"]]  # said where it is not true of all
        out.append(f"  limit     {', '.join(names) + ': ' if len(names) < len(lines) else ''}{text}")
    out += ["", f"Nothing was contacted. Run it:   towline run {plan['file']}"]
    return "\n".join(map(printable, out)) + "\n"
