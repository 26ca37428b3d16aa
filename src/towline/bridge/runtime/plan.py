"""Plan of a bridge, as text and as JSON: lines, filters, guarantees and their cost, state directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.config.subscriptions import shadowed_routes
from towline.bridge.kafka_source import source_description
from towline.gateway.settings import GatewaySettings, ShareMethod
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecure_settings
from towline.mqtt.filters import overlapping_pairs
from towline.text import printable

#: JSON values of a line or of the whole bridge.
Plan: TypeAlias = dict[str, Any]
#: Texts, each with the condition under which it applies.
Conditions: TypeAlias = Mapping[str, object]

#: Cost of the guarantee beside CPU time.
_UPLINK_COST: Final = {
    Guarantee.AT_MOST_ONCE: "nothing is waited for, and losses are counted where they can be seen",
    Guarantee.AT_LEAST_ONCE: "an fdatasync before each acknowledgement; records are visible at once",
    Guarantee.EXACTLY_ONCE: "a transaction a batch: records are visible when it is committed",
}
_DOWNLINK_COST: Final = {
    Guarantee.AT_MOST_ONCE: "an fdatasync a batch; nothing is waited for at the broker",
    Guarantee.AT_LEAST_ONCE: "an fdatasync a batch",
    Guarantee.EXACTLY_ONCE: "an fdatasync a batch and a chunk (packet ids); two more packets a message (QoS 2)",
}
_DOWNLINK_DUPLICATES: Final = {
    Guarantee.AT_MOST_ONCE: "no",
    Guarantee.AT_LEAST_ONCE: "yes: what was not acknowledged when a connection or a process failed",
    Guarantee.EXACTLY_ONCE: "no, for a subscriber with QoS 2",
}
#: Repeats of publishers: no guarantee excludes them, a `dedupe` key on each route does.
_PUBLISHER_REPEATS: Final = {
    Guarantee.AT_LEAST_ONCE: ", and what a publisher sends again",
    Guarantee.EXACTLY_ONCE: "a message that its publisher sends twice as two messages is two messages",
}
#: Limit of every guarantee.
_BROKER_STORE_LIMIT: Final = "a broker that loses its store loses what only it held"
_ACK_TEXTS: Final = {
    AckAfter.RECEIVED: "on receipt, before the message is on disk",
    AckAfter.JOURNAL: "when the message is on disk (fdatasync); Kafka may be down",
    AckAfter.KAFKA: "when Kafka has the message; the broker keeps what is on the way",
}
#: Texts by value of a downlink's settings.
_DOWNLINK_TEXTS: Final = {
    "stop": "stops when Kafka deleted what it has not read",
    "go_on": "goes on when Kafka deleted records",
    "outbox": "a batch is written when it is on disk here",
    "broker": "a batch is written when the broker has it",
    "send": "with control characters it is sent; a broker that ends the connection at it gets it three times",
    "dead_letter": "with control characters a record is a dead letter: a broker may end the connection at it",
}
#: Order of messages and cost, by the way in which members share a line.
_SHARE_TEXTS: Final = {
    ShareMethod.FILTERS: (
        "kept for each topic, and for each device whose topics one member takes",
        "each member receives its own messages",
    ),
    ShareMethod.SUBSCRIPTION: ("not kept", "the broker gives each message to one member"),
}
#: Keys of a line with names of Kafka topics.
_TOPIC_KEYS: Final = ("topic", "fallback_topic", "dead_letter_topic", "from")
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
#: Fields of a line that the plan has in another form.
_EXCLUDED_FIELDS: Final = {"gateway", "members", "dead_letter_topics"}


def bridge_plan(bridge: Bridge) -> Plan:
    """Return the plan as JSON values, with environment variables of the file unexpanded [I12]."""
    document = Document.reread(bridge.file, bridge.file)
    return {
        "bridge": bridge.name,
        "file": str(bridge.file),
        "state_dir": str(bridge.state_dir),
        "kafka": {
            "bootstrap_servers": document.restore_references(bridge.kafka.bootstrap_servers, "bootstrap_servers"),
            "topics": document.restore_references(bridge.required_topics, *_TOPIC_KEYS),
            "create_topics": bridge.kafka.create_topics is not None,
            "insecure": bool(insecure_settings(bridge.kafka.client_settings())),
        },
        "spark": {"master": bridge.spark.master, "ui": bridge.spark.ui, "kafka_source": source_description(bridge)},
        "lines": [_line_plan(line, document) for line in bridge.lines],
        "warnings": plan_warnings(bridge, document),
    }


def _line_plan(line: Uplink | Downlink, document: Document) -> Plan:
    """Return the settings of a line with defaults, its broker and topics; ``says`` has the rows of the text form."""
    gateway, is_remote = line.gateway, not line.all_gateways
    plan = document.restore_references(
        {
            **line.model_dump(mode="json", by_alias=True, exclude=_EXCLUDED_FIELDS),
            "brokers": [] if is_remote else [str(broker) for broker in gateway.brokers],
            "client_id": None if is_remote else gateway.mqtt_client_id,
            "state_dir": str(gateway.state_dir),
            "ack_after": gateway.effective_ack_after.value,
        }
    )
    plan["kafka_topics"] = document.restore_references(line.fixed_topics, *_TOPIC_KEYS)
    plan["subscriptions"] = _filters(gateway, document)
    plan["share"] = [
        {"name": share.member, "client_id": gateway.mqtt_client_id, "subscriptions": _filters(gateway, document)}
        for gateway in line.all_gateways
        if (share := gateway.share)
    ]
    rows = _uplink_rows(line, plan) if isinstance(line, Uplink) else _downlink_rows(line, plan)
    limits = _uplink_limits(line) if isinstance(line, Uplink) else _downlink_limits(line)
    return {**plan, "says": {label: text for label, text in rows if text}, "limits": _applicable(limits)}


def _filters(gateway: GatewaySettings, document: Document) -> list[Plan]:
    filters = gateway.subscriptions
    return [{"filter": document.restore_references(filter_.pattern, "from"), "qos": filter_.qos} for filter_ in filters]


def _dedupes_every_route(line: Uplink) -> bool:
    return all(route.dedupe is not None for route in line.routes)


def _uplink_rows(line: Uplink, plan: Plan) -> Iterator[tuple[str, str | list[str]]]:
    gateway, line_policy, members = line.gateway, policy(line.guarantee), plan["share"]
    after_kafka = gateway.effective_ack_after is AckAfter.KAFKA
    yield "gateways", plan["gateways"]
    if line.all_gateways:  # gateways of this file: broker and filters
        yield from _broker_row(plan)
        yield "share", f"{line.share_way}   order {'; '.join(_SHARE_TEXTS[line.share_way])}" if line.share_way else ""
        texts = [f"{member['name']}   client id {member['client_id']}   {_filters_text(member)}" for member in members]
        yield "member", texts
        yield "filters", "" if members else _filters_text(plan)
    for number, route in enumerate(plan["route"], start=1):
        yield f"route {number}", _route_text(route, route["dedupe"] or plan["dedupe"])
    yield "acks", _ACK_TEXTS[gateway.effective_ack_after] if line.all_gateways else ""
    is_parallel = line.parallelism > 1
    write_text = "records as they come" + f", by {line.parallelism} tasks" * is_parallel
    if line_policy.transactions:
        write_text = "one transaction a batch, all topics and the marker at once"
        if is_parallel:
            write_text = f"{line.parallelism} transactions a batch, split by key: each becomes visible by itself"
    yield "kafka", f"{write_text}   {_dead_letter_text(plan)}"
    yield "replay", f"a batch that a crash interrupted is {line_policy.replay_text}"
    lost, doubled = line_policy.loss_text, line_policy.duplicates_text
    yield "lost", lost.replace("the state directory is kept", "the broker keeps its session") if after_kafka else lost
    repeats = _PUBLISHER_REPEATS.get(line.guarantee, "") if _dedupes_every_route(line) else ""
    yield "doubled", doubled.replace(repeats, "")
    cost = {
        _UPLINK_COST[line.guarantee]: True,
        "an acknowledgement waits for its batch in Kafka": after_kafka,
        "two more packets a message (QoS 2)": any(subscription.qos == 2 for subscription in gateway.subscriptions),
        "a place in Spark's state store for each message, some 200 B": line.dedupe_window,
    }
    yield "cost", "; ".join(_applicable(cost))
    contents = _store_limit("journal", gateway.journal.max_bytes)
    contents = "checkpoint and identity; the messages wait at the gateways" if line.gateways else contents
    yield "state", f"{plan['state_dir']}   {contents}"


def _uplink_limits(line: Uplink) -> Conditions:
    is_exactly_once, is_remote = line.guarantee is Guarantee.EXACTLY_ONCE, not line.all_gateways
    after_kafka = line.gateway.effective_ack_after is AckAfter.KAFKA
    machine_text = "the machine of a member" if line.members else "the machine that holds state_dir"
    lossy_routes = _routes_with_promise(line, Guarantee.AT_MOST_ONCE)
    repeating_routes = _routes_with_promise(line, Guarantee.AT_LEAST_ONCE)
    return {
        "a consumer without isolation.level=read_committed sees aborted records too": is_exactly_once,
        _PUBLISHER_REPEATS[Guarantee.EXACTLY_ONCE]: is_exactly_once and not _dedupes_every_route(line),
        f"{lossy_routes}: a message is lost before it is in the journal, or in Kafka once": lossy_routes,
        f"{repeating_routes}: a message comes twice where the broker sends it again": repeating_routes,
        f"repeats are dropped for {line.dedupe_window} at least, and longer while nothing else comes: "
        "a key must never name two messages": line.dedupe_window,
        f"if the gateway's clock jumps ahead by over {line.dedupe_window}, earlier keys are lost": line.dedupe_window,
        "a device's messages are in order as long as they come by one gateway": line.gateways,
        "an unavailable gateway delays its own messages only; a running batch with them waits for it": line.gateways,
        "each gateway has settings of its own, also for acknowledgements and for the limit of its journal": is_remote,
        "the machine of a gateway holds acknowledged messages that are not in Kafka yet": is_remote,
        "while Kafka is down only the broker's window is received: its queue has to hold the rest": after_kafka
        and not is_remote,
        f"{machine_text} holds what was acknowledged and is not yet in Kafka": not (after_kafka or is_remote),
        _BROKER_STORE_LIMIT: True,
        "Kafka with unclean leader election, replication factor 1 or min.insync.replicas 1 can lose what it took": True,
    }


def _routes_with_promise(line: Uplink, promise: Guarantee) -> str:
    """Return the routes with a weaker guarantee than their line, as text; "" for none."""
    route_numbers = [str(number) for number, route in enumerate(line.route, start=1) if route.promise is promise]
    return f"route{'s' * (len(route_numbers) > 1)} {', '.join(route_numbers)}" if route_numbers else ""


def _downlink_rows(line: Downlink, plan: Plan) -> Iterator[tuple[str, str | list[str]]]:
    source_topics, topic_text, starting_offsets = plan["from"], plan["topic"], plan["starting_offsets"]
    names = ", ".join([source_topics] if isinstance(source_topics, str) else source_topics)
    source_names = f"topics like {source_topics['pattern']}" if isinstance(source_topics, dict) else names
    topic_text = f"SQL {topic_text['sql']}" if isinstance(topic_text, dict) else topic_text
    starting_offsets = starting_offsets if isinstance(starting_offsets, str) else "as listed"
    parts = {
        f"mqtt:{_shorten(topic_text)}": True,
        f"QoS {line.qos}": True,
        f"properties {line.properties}": True,
        f"where {_shorten(plan['where'] or '')}": line.where,
        f"transform {line.transform}": line.transform,
    }
    data_loss_text = _DOWNLINK_TEXTS[line.on_data_loss]
    yield "kafka", f"{source_names}   {line.isolation_level}   from {starting_offsets}   {data_loss_text}"
    yield from _broker_row(plan)
    yield "publish", "   ".join(_applicable(parts))
    yield "confirm", f"{_DOWNLINK_TEXTS[line.confirm]}   {_dead_letter_text(plan)}"
    yield "text", _DOWNLINK_TEXTS[line.control_characters]
    yield "replay", "a batch that a crash interrupted is served again; what is in the outbox stays out"
    yield "lost", policy(line.guarantee).loss_text.replace("from the broker's hand-over on", "from Kafka to the broker")
    yield "doubled", _DOWNLINK_DUPLICATES[line.guarantee]
    yield "cost", _DOWNLINK_COST[line.guarantee] + ("; a transaction a batch" if line.transactional else "")
    outbox = line.gateway.outbox
    yield "state", f"{plan['state_dir']}   {_store_limit('outbox', outbox.max_bytes if outbox else None)}"


def _downlink_limits(line: Downlink) -> Conditions:
    return {
        "a subscriber with QoS 0 or 1 may lose or double messages": line.guarantee is Guarantee.EXACTLY_ONCE,
        _BROKER_STORE_LIMIT: True,
        "the machine that holds state_dir holds what was taken and is not yet delivered": True,
        "Kafka deletes by retention whether a line has read it or not": True,
    }


def _filters_text(member: Plan) -> str:
    return "   ".join(f"{filter_['filter']} (QoS {filter_['qos']})" for filter_ in member["subscriptions"])


def _shorten(sql: str, max_length: int = 100) -> str:
    return sql if len(sql) <= max_length else f"{sql[: max_length - 3]}..."


def _broker_row(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "broker", f"{', then '.join(plan['brokers'])}   client id {plan['client_id']}"


def _dead_letter_text(plan: Plan) -> str:
    return f"dead letters to {plan['dead_letter_topic']}" if plan["dead_letter_topic"] else "no dead letters"


def _store_limit(store: str, max_bytes: int | None) -> str:
    return f"{store} up to {f'{max_bytes:,} B' if max_bytes else 'the disk'}"


def _applicable(texts: Conditions) -> list[str]:
    return [text for text, applies in texts.items() if applies]


def _route_text(route: Plan, dedupe: Plan | None) -> str:
    parts = {
        f"{route['from']} → kafka:{route['topic']}": True,
        route["promise"]: route["promise"],
        "no key" if route["key"] is None else f"key {route['key']}": True,
        f"headers {', '.join(route['headers'])}": route["headers"],
        "no MQTT properties": route["properties"] == "none",
        f"where {_shorten(route['where'] or '')}": route["where"],
        f"else kafka:{route['fallback_topic']}": route["fallback_topic"],
        "key required": route["key_required"],
        f"repeats by {(dedupe or {}).get('key')}": dedupe,
    }
    return "   ".join(_applicable(parts))


# -- warnings --------------------------------------------------------------------------------------------------------


def plan_warnings(bridge: Bridge, document: Document) -> list[str]:
    """Return warnings about legal settings that weaken a guarantee, cost memory or order, or expose a password."""
    texts = [f"insecure: [kafka] {text}" for text in insecure_settings(bridge.kafka.client_settings())]
    lines_by_text: dict[str, list[str]] = {}
    for line in bridge.lines:
        line_warnings = _uplink_warnings(line, document) if isinstance(line, Uplink) else _downlink_warnings(line)
        for text in (*line_warnings, *_transport_warnings(line, document)):
            lines_by_text.setdefault(text, []).append(f'line "{line.name}"')
    return [*texts, *(f"{', '.join(names)}: {text}" for text, names in lines_by_text.items())]


def _uplink_warnings(line: Uplink, document: Document) -> Iterator[str]:
    for index, earlier_index in shadowed_routes(line.routes):
        yield f"route {index + 1} never gets a message: route {earlier_index + 1} takes all of them."
    patterns = [subscription.pattern for subscription in line.gateway.subscriptions]
    for pair in overlapping_pairs([] if line.dedupe_window else patterns):
        pattern, other_pattern = document.restore_references(pair, "from")
        yield (
            f'the filters "{pattern}" and "{other_pattern}" overlap; '
            "a broker may send a message for each [MQTT-3.3.4-2], and it would be in Kafka twice. "
            "Subscribe to one wider filter, or make two lines."
        )
    for number, route in enumerate(line.routes, start=1):
        if route.topic.fields and route.fallback_topic is None and line.dead_letter_topic is None:
            yield f"route {number} has neither fallback nor dead letters: an illegal or forbidden topic stops the line."
        if route.dedupe is None and line.dedupe_window:
            yield f"route {number} drops no repeats, but its messages pass the state store. Give it a line of its own."
    yield from _share_warnings(line, document)


def _share_warnings(line: Uplink, document: Document) -> Iterator[str]:
    if line.share_way is ShareMethod.FILTERS:
        member_patterns = {subscription.pattern for member in line.members for subscription in member.subscriptions}
        patterns = (subscription.pattern for subscription in line.gateway.subscriptions)
        for pattern in (pattern for pattern in patterns if pattern not in member_patterns):
            pattern_text = document.restore_references(pattern, "from")
            yield f'of "{pattern_text}" only what the members\' filters take is received; the rest comes to nobody.'
    if line.share_way is ShareMethod.SUBSCRIPTION:
        yield 'the order of a device\'s messages is not kept: any member gets them (share = "subscription").'
        yield "messages queued for an unavailable member wait in its session; no other member gets them."
        yield "a shared subscription brings no retained messages."
        if line.dedupe_window:
            yield "repeats may come to different members; one query that reads all of them drops them all the same."
    if line.share_way and line.gateway.receipts is not None:
        yield "receipts: a publisher whose messages come to several members never has all its receipts, and resends."


def _downlink_warnings(line: Downlink) -> Iterator[str]:
    if line.dead_letter_topic is None:
        if line.control_characters == "dead_letter":
            yield "a record with a control character in a topic or property stops the line, too."
        yield "a record that MQTT can't carry stops the line: there is no dead_letter_topic."
    if line.isolation_level == "read_uncommitted":
        yield "isolation_level = read_uncommitted: what a transaction aborts is delivered too."
    if line.on_data_loss == "go_on":
        yield "on_data_loss = go_on: what Kafka deletes before it was read is lost without an error."
    if line.qos and line.gateway.protocol != "5":
        condition = "where the broker speaks no MQTT 5, " if line.gateway.protocol == "auto" else ""
        yield f"{condition}MQTT 3.x has no negative answers: what the broker drops, as by its ACL, counts as delivered."
    if line.parallelism > 1 and line.guarantee is Guarantee.EXACTLY_ONCE and line.transform:
        yield "the transform has to be deterministic: a batch that a crash interrupted goes through it again."


def _transport_warnings(line: Uplink | Downlink, document: Document) -> Iterator[str]:
    if isinstance(line, Uplink) and line.gateways:
        return
    gateway = line.gateway
    if gateway.tls.insecure:
        yield "tls.insecure: the broker's certificate is not verified; anyone in between can read and change."
    plaintext_brokers = [broker for broker in gateway.brokers if not broker.tls and broker.host not in _LOOPBACK_HOSTS]
    if gateway.password_file and plaintext_brokers:
        broker_text = document.restore_references(str(plaintext_brokers[0]), "brokers")
        yield f"the password crosses the network in clear text to {broker_text}. Use mqtts:// or wss://."


# -- as text ---------------------------------------------------------------------------------------------------------


def render(plan: Plan) -> str:
    """Return the plan as text."""
    kafka, lines = plan["kafka"], plan["lines"]
    topic_notes = " (missing ones are created)" if kafka["create_topics"] else ""
    topic_notes += "   insecure" if kafka["insecure"] else ""
    topics = ", ".join(kafka["topics"]) or "from messages only"
    text_lines = [f'bridge "{plan["bridge"]}"   {len(lines)} line{"s" * (len(lines) != 1)}   {plan["file"]}']
    rows = {
        "kafka": f"{kafka['bootstrap_servers']}   topics {topics}{topic_notes}",
        "state": plan["state_dir"],
        "spark": plan["spark"]["kafka_source"],
        "sql": plan.get("sql"),
    }
    text_lines += [f"  {label:9} {text}" for label, text in rows.items() if text]
    text_lines += [f"  ! {text}" for text in plan["warnings"]]
    for line in lines:
        is_downlink = line["direction"] == "down"
        text_lines += ["", f'▸ line "{line["name"]}"   {line["guarantee"]}{"   Kafka → MQTT" if is_downlink else ""}']
        for label, row_texts in line["says"].items():
            first_text, *more_texts = [row_texts] if isinstance(row_texts, str) else row_texts
            text_lines += [f"  {label:9} {first_text}", *(f"  {'':9} {text}" for text in more_texts)]
    text_lines += ["", "What no promise covers:"]
    for text in dict.fromkeys(text for line in lines for text in line["limits"]):
        names = [line["name"] for line in lines if text in line["limits"]]  # named unless it applies to all lines
        text_lines.append(f"  limit     {', '.join(names) + ': ' if len(names) < len(lines) else ''}{text}")
    text_lines += ["", f"Nothing was contacted. Run it:   towline run {plan['file']}"]
    return "\n".join(map(printable, text_lines)) + "\n"
