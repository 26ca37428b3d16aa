"""What a bridge would do, for a person and as JSON: lines, filters, promises and what they cost, where state lives."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from towline.bridge.config import downplan
from towline.bridge.config.jars import told
from towline.bridge.config.model import AnyLine, Bridge, Line
from towline.bridge.config.routes import Pattern, Route, covers, shadowed, subscriptions
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecurities
from towline.text import printable

__all__ = ["overlapping", "plan_of", "render", "warnings"]

#: What the promise costs beside the CPU, in words.
_COST = {
    Guarantee.AT_MOST_ONCE: "nothing is waited for, and losses are counted where they can be seen",
    Guarantee.AT_LEAST_ONCE: "an fdatasync before each acknowledgement; records are visible at once",
    Guarantee.EXACTLY_ONCE: "a transaction a batch: records are visible when it is committed",
}
#: What no switch can give.
_LIMITS = (
    "a broker that loses its store loses what only it held",
    "the machine that holds state_dir holds what was acknowledged and is not yet in Kafka",
    "Kafka with unclean leader election, replication factor 1 or min.insync.replicas 1 can lose what it took",
)
_LIMITS_ONCE = (
    "a consumer without isolation.level=read_committed sees aborted records too",
    "a message that its publisher sends twice as two messages is two messages",
)
_ACKS = {
    AckAfter.RECEIVED: "on receipt, before the message is on disk",
    AckAfter.JOURNAL: "when the message is on disk (fdatasync); Kafka may be down",
    AckAfter.KAFKA: "when Kafka has the message; the broker keeps what is on the way",
}


def plan_of(bridge: Bridge) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "bridge": bridge.name,
        "file": str(bridge.file),
        "state_dir": str(bridge.state_dir),
        "kafka": {
            "bootstrap_servers": bridge.kafka.bootstrap_servers,
            "topics": list(bridge.topics),
            "create_topics": bridge.kafka.create_topics is not None,
            "insecure": bool(insecurities(bridge.kafka.client())),
        },
        "spark": {"master": bridge.spark.master, "ui": bridge.spark.ui, "kafka_source": told(bridge)},
        "lines": [_line(line) if isinstance(line, Line) else downplan.plan_line(line) for line in bridge.lines],
        "warnings": warnings(bridge),
    }


def _line(line: Line) -> dict[str, Any]:
    gateway, promise = line.gateway, policy(line.guarantee)
    return {
        "name": line.name,
        "direction": "up",
        "guarantee": line.guarantee.value,
        "lost": promise.lost,
        "doubled": promise.doubled,
        "cost": _cost(line),
        "limits": _limits(line),
        "replay": promise.replay,
        "ack_after": gateway.acks.value,
        "acks": _ACKS[gateway.acks],
        "brokers": [str(broker) for broker in gateway.brokers],
        "client_id": gateway.mqtt_client_id,
        "subscriptions": [{"filter": s.filter, "qos": s.qos} for s in gateway.subscriptions],
        "routes": [_route(route) for route in line.routes],
        "kafka_topics": list(line.fixed_topics),
        "state_dir": str(gateway.state_dir),
        "journal_max_bytes": gateway.journal.max_bytes,
        "max_messages_per_trigger": line.max_messages_per_trigger,
        "max_bytes_per_trigger": line.max_bytes_per_trigger,
        "writes": _writes(line),
        "parallelism": line.parallelism,
        "dead_letter_topic": line.dead_letter_topic,
        "dedupe_within": line.within,
    }


def _cost(line: Line) -> str:
    """What the line pays for its promise."""
    more = [_COST[line.guarantee]]
    if any(subscription.qos == 2 for subscription in line.gateway.subscriptions):
        more.append("two more packets a message (QoS 2)")
    if line.within:
        more.append("a place in Spark's state store for each message, some 200 B")
    return "; ".join(more)


def _limits(line: Line) -> list[str]:
    found = list(_LIMITS_ONCE if line.guarantee is Guarantee.EXACTLY_ONCE else ())
    if line.within:
        found.append(
            f"repeats are dropped for {line.within} at least, and longer while nothing else comes: "
            "a key must never name two messages"
        )
        found.append(f"a jump of the gateway's clock ahead by more than {line.within} forgets what came before it")
    return [*found, *_LIMITS]


def _writes(line: Line) -> str:
    """How a batch gets into Kafka."""
    if not policy(line.guarantee).transactions:
        return "records as they come" if line.parallelism == 1 else f"records as they come, by {line.parallelism} tasks"
    if line.parallelism == 1:
        return "one transaction a batch, all topics and the marker at once"
    return f"{line.parallelism} transactions a batch, split by key: each becomes visible by itself"


def _route(route: Route) -> dict[str, Any]:
    return {
        "from": route.pattern.text,
        "filter": route.pattern.filter,
        "qos": route.qos,
        "topic": route.topic.text,
        "key": route.key.text if route.key else None,
        "headers": {name: template.text for name, template in route.headers},
        "properties": "all" if route.properties else "none",
        "where": route.where,
        "allowed_topics": list(route.allowed_topics),
        "fallback_topic": route.fallback_topic,
        "key_required": route.key_required,
        "dedupe": getattr(route.dedupe, "text", route.dedupe),
    }


def warnings(bridge: Bridge) -> list[str]:
    """What is allowed and yet deserves a thought."""
    found = [f"insecure: [kafka] {text}" for text in insecurities(bridge.kafka.client())]
    for line in bridge.lines:
        own = _line_warnings(line) if isinstance(line, Line) else downplan.warnings_of(line)
        found += [f'line "{line.name}": {text}' for text in (*own, *_transport_warnings(line))]
    return found


def _line_warnings(line: Line) -> list[str]:
    routes = line.routes
    found = [
        f"route {later + 1} never gets a message: route {above + 1} takes all of them."
        for later, above in shadowed(routes)
    ]
    found += [
        f'the filters "{a}" and "{b}" overlap; a broker may send a message once for each [MQTT-3.3.4-2], '
        "and it would be in Kafka twice. Subscribe to one wider filter, or make two lines."
        for a, b in overlapping(routes)
    ]
    found += [
        f"route {index + 1} takes its topic from the message and has neither fallback nor dead letters: "
        "a name that is not legal or not allowed stops the line."
        for index, route in enumerate(routes)
        if route.topic.fields and route.fallback_topic is None and line.dead_letter_topic is None
    ]
    found += [
        f"route {index + 1} drops no repeats, and yet its messages pass through the state store of those that do. "
        "Give it a line of its own."
        for index, route in enumerate(routes)
        if route.dedupe is None and line.within
    ]
    return found


def _transport_warnings(line: AnyLine) -> list[str]:
    gateway = line.gateway
    found = []
    if gateway.tls.insecure:
        found.append("tls.insecure: the broker's certificate is not verified; anyone in between can read and change.")
    if gateway.receipts is not None and gateway.receipts.trust_all_clients:
        found.append(
            "receipts.trust_all_clients: a client that may publish here can make other publishers' messages vanish."
        )
    open_to_all = [broker for broker in gateway.brokers if not broker.tls and broker.host not in _LOOPBACK]
    if gateway.password_file and open_to_all:
        found.append(f"the password crosses the network in clear text to {open_to_all[0]}. Use mqtts:// or wss://.")
    return found


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def overlapping(routes: tuple[Route, ...]) -> list[tuple[str, str]]:
    """Subscribed filters that share some topics without one covering the other."""
    filters = [Pattern.parse(s.filter) for s in subscriptions(routes)]
    return [(a.filter, b.filter) for a, b in combinations(filters, 2) if _meet(a, b)]


def _meet(a: Pattern, b: Pattern) -> bool:
    """Whether some topic matches both."""
    if covers(a, b) or covers(b, a):
        return True
    if (len(a.levels) > len(b.levels) and not b.deep) or (len(b.levels) > len(a.levels) and not a.deep):
        return False
    return all(x is None or y is None or x == y for x, y in zip(a.levels, b.levels, strict=False))


def render(plan: dict[str, Any]) -> str:
    """The plan as text."""
    kafka = plan["kafka"]
    made = " (missing ones are created)" if kafka["create_topics"] else ""
    made += "   insecure" if kafka["insecure"] else ""
    out = [
        f'bridge "{plan["bridge"]}"   {len(plan["lines"])} line{"s" * (len(plan["lines"]) != 1)}   {plan["file"]}',
        f"  kafka     {kafka['bootstrap_servers']}   topics {', '.join(kafka['topics']) or 'from messages only'}{made}",
        f"  state     {plan['state_dir']}",
    ]
    if source := plan["spark"]["kafka_source"]:
        out.append(f"  spark     {source}")
    if sql := plan.get("sql"):
        out.append(f"  sql       {sql}")
    for line in plan["lines"]:
        out += ["", *(downplan.render_line(line) if line["direction"] == "down" else _render_line(line))]
    out += ["", *(f"warning  {text}" for text in plan["warnings"])] if plan["warnings"] else []
    out += ["", f"Nothing was contacted. Start it with: towline run {plan['file']}"]
    return "\n".join(map(printable, out)) + "\n"


def _render_line(line: dict[str, Any]) -> list[str]:
    filters = "   ".join(f"{s['filter']} (QoS {s['qos']})" for s in line["subscriptions"])
    limit = f"journal up to {line['journal_max_bytes']:,} B" if line["journal_max_bytes"] else "journal up to the disk"
    return [
        f'▸ line "{line["name"]}"   {line["guarantee"]}',
        f"  broker    {', then '.join(line['brokers'])}   client id {line['client_id']}",
        f"  subscribe {filters}",
        *(f"  route {index}   {_render_route(route)}" for index, route in enumerate(line["routes"], start=1)),
        f"  acks      {line['acks']}",
        f"  kafka     {line['writes']}   "
        + (f"dead letters to {line['dead_letter_topic']}" if line["dead_letter_topic"] else "no dead letters"),
        f"  replay    a batch that a crash interrupted is {line['replay']}",
        f"  lost      {line['lost']}",
        f"  doubled   {line['doubled']}",
        f"  cost      {line['cost']}",
        *(f"  limit     {text}" for text in line["limits"]),
        f"  state     {line['state_dir']}   {limit}",
    ]


def _render_route(route: dict[str, Any]) -> str:
    parts = [f"{route['from']} → kafka:{route['topic']}"]
    parts += [f"key {route['key']}"] if route["key"] is not None else ["no key"]
    parts += [f"headers {', '.join(route['headers'])}"] if route["headers"] else []
    parts += ["no MQTT properties"] if route["properties"] == "none" else []
    parts += [f"where {route['where']}"] if route["where"] else []
    parts += [f"else kafka:{route['fallback_topic']}"] if route["fallback_topic"] else []
    parts += ["key required"] if route["key_required"] else []
    parts += [f"repeats by {route['dedupe']}"] if route["dedupe"] else []
    return "   ".join(parts)
