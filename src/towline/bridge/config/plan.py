"""What a bridge would do, for a person and as JSON: lines, filters, promises and what they cost, where state lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from towline.bridge.config.downlink import KafkaPattern, Sql
from towline.bridge.config.kafka_source import source_text
from towline.bridge.config.members import render_share, share_plan, share_warnings
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.config.places import Document
from towline.bridge.config.subscriptions import SubscribedRoute, shadowed
from towline.bridge.config.written import WrittenValues
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecurities
from towline.mqtt.filters import overlapping
from towline.text import printable

__all__ = ["plan_of", "render", "warnings"]

#: What the promise of an uplink costs beside the CPU, in words; a downlink's is below.
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
_LOST_DOWN: Final = {
    Guarantee.AT_MOST_ONCE: "yes: what is on the way when a process or a broker fails",
    Guarantee.AT_LEAST_ONCE: "no, from Kafka to the broker, as long as the state directory is kept",
    Guarantee.EXACTLY_ONCE: "no, from Kafka to the broker, as long as the state directory is kept",
}
_DOUBLED_DOWN: Final = {
    Guarantee.AT_MOST_ONCE: "no",
    Guarantee.AT_LEAST_ONCE: "yes: what was not acknowledged when a connection or a process failed",
    Guarantee.EXACTLY_ONCE: "no, for a subscriber with QoS 2",
}
#: What no switch can give; first what a single promise has to say.
_LIMITS_UP_OF: Final = {
    Guarantee.EXACTLY_ONCE: ("a consumer without isolation.level=read_committed sees aborted records too",),
}
#: What no promise keeps by itself, and a `dedupe` key on each route does.
_REPEATS: Final = {
    Guarantee.AT_LEAST_ONCE: ", and what a publisher sends again",
    Guarantee.EXACTLY_ONCE: "a message that its publisher sends twice as two messages is two messages",
}
#: What a route gives up that promises less than its line, and what it keeps.
_LIMITS_OF_ROUTE: Final = {
    Guarantee.AT_MOST_ONCE: "a message is lost before it is in the journal, or in Kafka once",
    Guarantee.AT_LEAST_ONCE: "a message comes twice where the broker sends it again",
}
_LOST_AT_BROKER: Final = "no, from the broker's hand-over on, as long as the broker keeps its session"
#: Who holds what is not yet in Kafka, by what the broker is answered after.
_RESTS_ON: Final = {
    AckAfter.RECEIVED: "{machine} holds what was acknowledged and is not yet in Kafka",
    AckAfter.JOURNAL: "{machine} holds what was acknowledged and is not yet in Kafka",
    AckAfter.KAFKA: "while Kafka is down no more than the broker's window is received: its queue has to hold the rest",
}
_LIMITS_UP: Final = (
    "a broker that loses its store loses what only it held",
    "Kafka with unclean leader election, replication factor 1 or min.insync.replicas 1 can lose what it took",
)
_LIMITS_SEVERAL: Final = (
    "a device's messages are in order as long as they come by one gateway",
    "a gateway that is away holds back its own messages only; a batch that was begun with them waits for it",
)
#: Of gateways whose settings are in another file.
_LIMITS_ELSEWHERE: Final = (
    "each gateway has settings of its own: what it acknowledges when, and up to how much it keeps, is said there",
    "the machine of a gateway holds what it acknowledged before Kafka had it",
)
_LIMITS_DOWN_ONCE: Final = ("a subscriber with QoS 0 or 1 may lose or double what the broker got once",)
_LIMITS_DOWN: Final = (
    "a broker that loses its store loses what only it held",
    "the machine that holds state_dir holds what was taken and is not yet delivered",
    "Kafka deletes by retention whether a line has read it or not",
)
_ACKS: Final = {
    AckAfter.RECEIVED: "on receipt, before the message is on disk",
    AckAfter.JOURNAL: "when the message is on disk (fdatasync); Kafka may be down",
    AckAfter.KAFKA: "when Kafka has the message; the broker keeps what is on the way",
}
_DATA_LOSS: Final = {
    "stop": "stops when Kafka deleted what it has not read",
    "go_on": "goes on when Kafka deleted records",
}
_CONFIRM: Final = {
    "outbox": "a batch is written when it is on disk here",
    "broker": "a batch is written when the broker has it",
}
#: The policy for control characters in topics and properties, in words.
_CONTROLS: Final = {
    "send": "with control characters it is sent; a broker that ends the connection at it gets it three times",
    "dead_letter": "with control characters a record is a dead letter: a broker may end the connection at it",
}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def plan_of(bridge: Bridge) -> dict[str, Any]:
    """The plan as JSON values; what the file says with a variable of the environment is as it stands there [I12]."""
    plan = {
        "bridge": bridge.name,
        "file": str(bridge.file),
        "state_dir": str(bridge.state_dir),
        "kafka": {
            "bootstrap_servers": bridge.kafka.bootstrap_servers,
            "topics": list(bridge.topics),
            "create_topics": bridge.kafka.create_topics is not None,
            "insecure": bool(insecurities(bridge.kafka.client())),
        },
        "spark": {"master": bridge.spark.master, "ui": bridge.spark.ui, "kafka_source": source_text(bridge)},
        "lines": [
            _common(line) | (_uplink(line) if isinstance(line, Line) else _downlink(line)) for line in bridge.lines
        ],
        "warnings": warnings(bridge),
    }
    shown: dict[str, Any] = WrittenValues(Document.again(bridge.file, bridge.file)).shown(plan)
    return shown


def _common(line: Line | DownLine) -> dict[str, Any]:
    gateway = line.gateway
    elsewhere = isinstance(line, Line) and bool(line.gateways) and not line.members
    return {
        "name": line.name,
        "direction": line.direction,
        "guarantee": line.guarantee.value,
        "brokers": [] if elsewhere else [str(broker) for broker in gateway.brokers],
        "client_id": None if elsewhere else gateway.mqtt_client_id,
        "kafka_topics": list(line.fixed_topics),
        "state_dir": str(gateway.state_dir),
        "max_messages_per_trigger": line.max_messages_per_trigger,
        "parallelism": line.parallelism,
        "dead_letter_topic": line.dead_letter_topic,
    }


def _uplink(line: Line) -> dict[str, Any]:
    gateway, promise = line.gateway, policy(line.guarantee)
    return {
        "gateways": list(line.gateways),
        "lost": _LOST_AT_BROKER if gateway.acks is AckAfter.KAFKA else promise.lost,
        "doubled": promise.doubled.replace(_REPEATS.get(line.guarantee, ""), "") if _keyed(line) else promise.doubled,
        "cost": _uplink_cost(line),
        "limits": _uplink_limits(line),
        "replay": promise.replay,
        "ack_after": gateway.acks.value,
        "acks": _ACKS[gateway.acks],
        "subscriptions": [{"filter": s.pattern, "qos": s.qos} for s in gateway.subscriptions],
        "routes": [_route(route, one.promise) for route, one in zip(line.routes, line.sections, strict=True)],
        "journal_max_bytes": gateway.journal.max_bytes,
        "max_bytes_per_trigger": line.max_bytes_per_trigger,
        "max_trigger_delay_ms": line.max_trigger_delay_ms,
        "writes": _writes(line),
        "dedupe_within": line.within,
        "share": share_plan(line),
    }


def _downlink(line: DownLine) -> dict[str, Any]:
    section, outbox = line.section, line.gateway.outbox
    topic, start = section.topic, section.starting_offsets
    surcharge = "; a transaction a batch" if line.transacts else ""
    return {
        "lost": _LOST_DOWN[line.guarantee],
        "doubled": _DOUBLED_DOWN[line.guarantee],
        "cost": _COST_DOWN[line.guarantee] + surcharge,
        "limits": [*(_LIMITS_DOWN_ONCE if line.guarantee is Guarantee.EXACTLY_ONCE else ()), *_LIMITS_DOWN],
        "from": {"pattern": section.from_.pattern} if isinstance(section.from_, KafkaPattern) else section.topics,
        "isolation": section.isolation_level,
        "starting_offsets": start if isinstance(start, str) else "as listed",
        "on_data_loss": section.on_data_loss,
        "topic": {"sql": topic.sql} if isinstance(topic, Sql) else topic,
        "qos": line.qos,
        "properties": section.properties,
        "where": section.where,
        "transform": section.transform,
        "confirm": section.confirm,
        "outbox_max_bytes": outbox.max_bytes if outbox else None,
        "control_characters": line.control_characters,
    }


def _uplink_cost(line: Line) -> str:
    """What the line pays for its promise."""
    more = [_COST_UP[line.guarantee]]
    if line.gateway.acks is AckAfter.KAFKA:
        more.append("an acknowledgement waits for its batch in Kafka")
    if any(subscription.qos == 2 for subscription in line.gateway.subscriptions):
        more.append("two more packets a message (QoS 2)")
    if line.within:
        more.append("a place in Spark's state store for each message, some 200 B")
    return "; ".join(more)


def _keyed(line: Line) -> bool:
    """Whether each message of a line is recognised by a key when it comes again."""
    return all(route.dedupe is not None for route in line.routes)


def _uplink_limits(line: Line) -> list[str]:
    limits = list(_LIMITS_UP_OF.get(line.guarantee, ()))
    if line.guarantee is Guarantee.EXACTLY_ONCE and not _keyed(line):
        limits.append(_REPEATS[line.guarantee])
    for promise, text in _LIMITS_OF_ROUTE.items():
        if numbers := [str(number) for number, one in enumerate(line.sections, start=1) if one.promise is promise]:
            limits.append(f"route{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {text}")
    if line.within:
        limits.append(
            f"repeats are dropped for {line.within} at least, and longer while nothing else comes: "
            "a key must never name two messages"
        )
        limits.append(f"a jump of the gateway's clock ahead by more than {line.within} forgets what came before it")
    if line.gateways:
        limits += _LIMITS_SEVERAL
    if line.gateways and not line.members:
        return [*limits, *_LIMITS_ELSEWHERE, *_LIMITS_UP]
    machine = "the machine of a member" if line.members else "the machine that holds state_dir"
    return [*limits, _RESTS_ON[line.gateway.acks].format(machine=machine), *_LIMITS_UP]


def _writes(line: Line) -> str:
    """How a batch gets into Kafka."""
    if not policy(line.guarantee).transactions:
        return "records as they come" if line.parallelism == 1 else f"records as they come, by {line.parallelism} tasks"
    if line.parallelism == 1:
        return "one transaction a batch, all topics and the marker at once"
    return f"{line.parallelism} transactions a batch, split by key: each becomes visible by itself"


def _route(route: SubscribedRoute, promise: Guarantee | None) -> dict[str, Any]:
    return {
        "from": route.pattern.text,
        "filter": route.pattern.filter,
        "promise": promise.value if promise else None,
        "qos": route.qos,
        "topic": route.topic.text,
        "key": route.key.text if route.key else None,
        "headers": {name: template.text for name, template in route.headers},
        "properties": "all" if route.properties else "none",
        "where": route.where,
        "allowed_topics": list(route.allowed_topics),
        "fallback_topic": route.fallback_topic,
        "key_required": route.key_required,
        "dedupe": route.dedupe and {"key": getattr(route.dedupe, "text", route.dedupe)},
    }


def warnings(bridge: Bridge) -> list[str]:
    """What is allowed and yet deserves a thought."""
    written = WrittenValues(Document.again(bridge.file, bridge.file))
    texts = [f"insecure: [kafka] {text}" for text in insecurities(bridge.kafka.client())]
    lines: dict[str, list[str]] = {}
    for line in bridge.lines:
        own = _uplink_warnings(line, written) if isinstance(line, Line) else _downlink_warnings(line)
        for text in (*own, *_transport_warnings(line, written)):
            lines.setdefault(text, []).append(f'line "{line.name}"')
    return [*texts, *(f"{', '.join(names)}: {text}" for text, names in lines.items())]


def _uplink_warnings(line: Line, written: WrittenValues) -> list[str]:
    routes = line.routes
    texts = [
        f"route {later + 1} never gets a message: route {above + 1} takes all of them."
        for later, above in shadowed(routes)
    ]
    texts += [
        f'the filters "{written.shown(a, "filter")}" and "{written.shown(b, "filter")}" overlap; '
        "a broker may send a message once for each [MQTT-3.3.4-2], and it would be in Kafka twice. "
        "Subscribe to one wider filter, or make two lines."
        for a, b in overlapping([] if line.within else [one.pattern for one in line.gateway.subscriptions])
    ]
    texts += [
        f"route {index + 1} takes its topic from the message and has neither fallback nor dead letters: "
        "a name that is not legal or not allowed stops the line."
        for index, route in enumerate(routes)
        if route.topic.fields and route.fallback_topic is None and line.dead_letter_topic is None
    ]
    texts += [
        f"route {index + 1} drops no repeats, and yet its messages pass through the state store of those that do. "
        "Give it a line of its own."
        for index, route in enumerate(routes)
        if route.dedupe is None and line.within
    ]
    return [*texts, *share_warnings(line)]


def _downlink_warnings(line: DownLine) -> list[str]:
    texts = []
    if line.dead_letter_topic is None and line.control_characters == "dead_letter":
        texts.append("a record with a control character in a topic or property stops the line, too.")
    if line.dead_letter_topic is None:
        texts.append("a record that MQTT can't carry stops the line: there is no dead_letter_topic.")
    if line.section.isolation_level == "read_uncommitted":
        texts.append("isolation_level = read_uncommitted: what a transaction aborts is delivered too.")
    if line.section.on_data_loss == "go_on":
        texts.append("on_data_loss = go_on: what Kafka deletes before it was read is lost without an error.")
    if line.qos and line.gateway.protocol != "5":
        where = "where the broker speaks no MQTT 5, " if line.gateway.protocol == "auto" else ""
        texts.append(
            f"{where}MQTT 3.x has no negative answers: what the broker drops, as by its ACL, counts as delivered."
        )
    if line.parallelism > 1 and line.guarantee is Guarantee.EXACTLY_ONCE and line.section.transform:
        texts.append("the transform has to be deterministic: a batch that a crash interrupted goes through it again.")
    return texts


def _transport_warnings(line: AnyLine, written: WrittenValues) -> list[str]:
    if isinstance(line, Line) and line.gateways:
        return []
    gateway = line.gateway
    texts = []
    if gateway.tls.insecure:
        texts.append("tls.insecure: the broker's certificate is not verified; anyone in between can read and change.")
    open_to_all = [broker for broker in gateway.brokers if not broker.tls and broker.host not in _LOOPBACK]
    if gateway.password_file and open_to_all:
        where = written.shown(str(open_to_all[0]), "brokers")
        texts.append(f"the password crosses the network in clear text to {where}. Use mqtts:// or wss://.")
    return texts


def render(plan: dict[str, Any]) -> str:
    """The plan as text."""
    kafka = plan["kafka"]
    notes = " (missing ones are created)" if kafka["create_topics"] else ""
    notes += "   insecure" if kafka["insecure"] else ""
    topics = ", ".join(kafka["topics"]) or "from messages only"
    out = [
        f'bridge "{plan["bridge"]}"   {len(plan["lines"])} line{"s" * (len(plan["lines"]) != 1)}   {plan["file"]}',
        f"  kafka     {kafka['bootstrap_servers']}   topics {topics}{notes}",
        f"  state     {plan['state_dir']}",
    ]
    if source := plan["spark"]["kafka_source"]:
        out.append(f"  spark     {source}")
    if sql := plan.get("sql"):
        out.append(f"  sql       {sql}")
    out += [f"  ! {text}" for text in plan["warnings"]]
    for line in plan["lines"]:
        out += ["", *(_render_downlink(line) if line["direction"] == "down" else _render_uplink(line))]
    out += ["", *_render_limits(plan["lines"]), "", f"Nothing was contacted. Run it:   towline run {plan['file']}"]
    return "\n".join(map(printable, out)) + "\n"


def _render_limits(lines: list[dict[str, Any]]) -> Iterator[str]:
    """What no setting changes, each once, with the lines that it is true of where it is not true of all."""
    yield "What no promise covers:"
    for text in dict.fromkeys(text for line in lines for text in line["limits"]):
        names = [line["name"] for line in lines if text in line["limits"]]
        whose = f"{', '.join(names)}: " if len(names) < len(lines) else ""
        yield f"  limit     {whose}{text}"


def _render_uplink(line: dict[str, Any]) -> list[str]:
    filters = "   ".join(f"{s['filter']} (QoS {s['qos']})" for s in line["subscriptions"])
    return [
        f'▸ line "{line["name"]}"   {line["guarantee"]}',
        *(_render_gateways(line) if line["gateways"] else []),
        *(_render_taking(line, filters) if line["share"] or not line["gateways"] else []),
        *(f"  route {index}   {_render_route(route)}" for index, route in enumerate(line["routes"], start=1)),
        *([] if line["gateways"] and not line["share"] else [f"  acks      {line['acks']}"]),
        f"  kafka     {line['writes']}   {_render_dead_letters(line)}",
        f"  replay    a batch that a crash interrupted is {line['replay']}",
        *_render_promise(line, "journal"),
    ]


def _render_taking(line: dict[str, Any], filters: str) -> list[str]:
    """What the gateways of this file take in, and where."""
    return [_render_broker(line), *(render_share(line["share"]) if line["share"] else [f"  filters   {filters}"])]


def _render_gateways(line: dict[str, Any]) -> list[str]:
    """The gateways that are read; where the list is all there is to say, they are not asked for more here."""
    heads = ["gateways ", *[""] * (len(line["gateways"]) - 1)]
    return [f"  {head:9} {place}" for head, place in zip(heads, line["gateways"], strict=True)]


def _render_downlink(line: dict[str, Any]) -> list[str]:
    source = f"topics like {line['from']['pattern']}" if isinstance(line["from"], dict) else ", ".join(line["from"])
    topic = f"SQL {line['topic']['sql']}" if isinstance(line["topic"], dict) else line["topic"]
    loss = _DATA_LOSS[line["on_data_loss"]]
    parts = [f"mqtt:{_cut(topic)}", f"QoS {line['qos']}", f"properties {line['properties']}"]
    parts += [f"where {_cut(line['where'])}"] if line["where"] else []
    parts += [f"transform {line['transform']}"] if line["transform"] else []
    return [
        f'▸ line "{line["name"]}"   {line["guarantee"]}   Kafka → MQTT',
        f"  kafka     {source}   {line['isolation']}   from {line['starting_offsets']}   {loss}",
        _render_broker(line),
        f"  publish   {'   '.join(parts)}",
        f"  confirm   {_CONFIRM[line['confirm']]}   {_render_dead_letters(line)}",
        f"  text      {_CONTROLS[line['control_characters']]}",
        "  replay    a batch that a crash interrupted is served again; what is in the outbox stays out",
        *_render_promise(line, "outbox"),
    ]


def _cut(sql: str, most: int = 100) -> str:
    """The beginning of a long expression."""
    return sql if len(sql) <= most else f"{sql[: most - 3]}..."


def _render_broker(line: dict[str, Any]) -> str:
    return f"  broker    {', then '.join(line['brokers'])}   client id {line['client_id']}"


def _render_dead_letters(line: dict[str, Any]) -> str:
    return f"dead letters to {line['dead_letter_topic']}" if line["dead_letter_topic"] else "no dead letters"


def _render_promise(line: dict[str, Any], store: str) -> list[str]:
    """What it promises, what that costs, and where the journal or outbox is."""
    most = line[f"{store}_max_bytes"]
    limit = f"{most:,} B" if most else "the disk"
    where = f"{line['state_dir']}   {store} up to {limit}"
    if line.get("gateways"):
        where = f"{line['state_dir']}   checkpoint and identity; the messages wait at the gateways"
    return [
        f"  lost      {line['lost']}",
        f"  doubled   {line['doubled']}",
        f"  cost      {line['cost']}",
        f"  state     {where}",
    ]


def _render_route(route: dict[str, Any]) -> str:
    parts = [f"{route['from']} → kafka:{route['topic']}"]
    parts += [route["promise"]] if route["promise"] else []
    parts += [f"key {route['key']}"] if route["key"] is not None else ["no key"]
    parts += [f"headers {', '.join(route['headers'])}"] if route["headers"] else []
    parts += ["no MQTT properties"] if route["properties"] == "none" else []
    parts += [f"where {_cut(route['where'])}"] if route["where"] else []
    parts += [f"else kafka:{route['fallback_topic']}"] if route["fallback_topic"] else []
    parts += ["key required"] if route["key_required"] else []
    parts += [f"repeats by {route['dedupe']['key']}"] if route["dedupe"] else []
    return "   ".join(parts)
