"""Plan of a bridge, as text and as JSON: lines, filters, guarantees, state directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.config.subscriptions import shadowed_routes
from towline.gateway.settings import GatewaySettings, ShareMethod
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecure_settings
from towline.mqtt.filters import overlapping_pairs
from towline.text import printable

#: JSON values of a line or of the whole bridge.
Plan: TypeAlias = dict[str, Any]
#: Row of a line: label and text; rows without text are not shown.
Row: TypeAlias = tuple[str, str]

_DOWNLINK_DUPLICATES: Final = {
    Guarantee.AT_MOST_ONCE: "no",
    Guarantee.AT_LEAST_ONCE: "yes: what was not acknowledged when a connection or a process failed",
    Guarantee.EXACTLY_ONCE: "no, for a subscriber with QoS 2",
}
#: Repeats of publishers, which no guarantee excludes, but a `dedupe` key on each route does.
_PUBLISHER_REPEATS: Final = ", and what a publisher sends again"
_ACK_TEXTS: Final = {
    AckAfter.RECEIVED: "on receipt, before the message is on disk",
    AckAfter.JOURNAL: "when the message is on disk (fdatasync); Kafka may be down",
    AckAfter.KAFKA: "when Kafka has the message; the broker keeps what is on the way",
}
#: Keys of a line with names of Kafka topics.
_TOPIC_KEYS: Final = ("topic", "dead_letter_topic", "from")
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
#: Fields of a line that the plan has in another form.
_EXCLUDED_FIELDS: Final = {"gateway", "mqtt", "profile", "member", "members", "dead_letter_topics"}
_MAX_SQL_LENGTH: Final = 100


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
        "spark": {"master": bridge.spark.master, "ui": bridge.spark.ui},
        "lines": [_line_plan(line, document) for line in bridge.lines],
        "warnings": plan_warnings(bridge, document),
    }


def _line_plan(line: Uplink | Downlink, document: Document) -> Plan:
    """Return the settings of a line with defaults, its broker and topics, and what may be lost and doubled."""
    gateway, is_remote, line_policy = line.gateway, not line.all_gateways, policy(line.guarantee)
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
    plan["acks"] = "" if is_remote else _ACK_TEXTS[gateway.effective_ack_after]
    plan["transactions"] = line.parallelism if line.transactional else 0
    plan["lost"], plan["doubled"] = line_policy.loss_text, line_policy.duplicates_text
    if isinstance(line, Downlink):
        plan["lost"] = plan["lost"].replace("from the broker's hand-over on", "from Kafka to the broker")
        plan["doubled"] = _DOWNLINK_DUPLICATES[line.guarantee]
    else:
        if gateway.effective_ack_after is AckAfter.KAFKA and not is_remote:
            plan["lost"] = plan["lost"].replace("the state directory is kept", "the broker keeps its session")
        if all(route.dedupe is not None for route in line.routes):
            plan["doubled"] = plan["doubled"].replace(_PUBLISHER_REPEATS, "")
    return dict(plan)


def _filters(gateway: GatewaySettings, document: Document) -> list[Plan]:
    filters = gateway.subscriptions
    return [{"filter": document.restore_references(filter_.pattern, "from"), "qos": filter_.qos} for filter_ in filters]


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
        if route.topic.fields and line.dead_letter_topic is None:
            yield f"route {number} has no dead letters: an illegal or forbidden topic stops the line."
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
    if line.share_way and line.gateway.receipts is not None:
        yield "receipts: a publisher whose messages come to several members never has all its receipts, and resends."


def _downlink_warnings(line: Downlink) -> Iterator[str]:
    if line.dead_letter_topic is None:
        if line.control_characters == "dead_letter":
            yield "a record with a control character in a topic or property stops the line, too."
        yield "a record that MQTT can't carry stops the line: there is no dead_letter_topic."
    if line.on_data_loss == "go_on":
        yield "on_data_loss = go_on: what Kafka deletes before it was read is lost without an error."
    if line.qos and line.gateway.protocol != "5":
        condition = "where the broker speaks no MQTT 5, " if line.gateway.protocol == "auto" else ""
        yield f"{condition}MQTT 3.x has no negative answers: what the broker drops, as by its ACL, counts as delivered."


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
    text_lines.append(f"  kafka     {kafka['bootstrap_servers']}   topics {topics}{topic_notes}")
    text_lines.append(f"  state     {plan['state_dir']}")
    text_lines += [f"  ! {text}" for text in plan["warnings"]]
    for line in lines:
        is_downlink = line["direction"] == "down"
        text_lines += ["", f'▸ line "{line["name"]}"   {line["guarantee"]}{"   Kafka → MQTT" if is_downlink else ""}']
        line_rows = _downlink_rows(line) if is_downlink else _uplink_rows(line)
        text_lines += [f"  {label:9} {text}" for label, text in line_rows if text]
    text_lines += ["", f"Nothing was contacted. Run it:   towline run {plan['file']}"]
    return "\n".join(map(printable, text_lines)) + "\n"


def _uplink_rows(line: Plan) -> Iterator[Row]:
    for gateway in line["gateways"]:
        yield "gateway", gateway
    yield "broker", _broker_text(line)
    for member in line["share"]:
        yield "member", f"{member['name']}   client id {member['client_id']}   {_filters_text(member)}"
    yield "filters", _filters_text(line) if line["brokers"] and not line["share"] else ""
    for number, route in enumerate(line["route"], start=1):
        yield f"route {number}", _route_text(route, route["dedupe"] or line["dedupe"])
    is_parallel = line["parallelism"] > 1
    write_text = f"records as they come, by {line['parallelism']} tasks" if is_parallel else "records as they come"
    if line["transactions"]:
        write_text = "one transaction a batch, all topics and the marker at once"
        write_text = f"{line['transactions']} transactions a batch, split by key" if is_parallel else write_text
    yield "kafka", f"{write_text}   {_dead_letter_text(line)}"
    yield from ((label, line[label]) for label in ("acks", "lost", "doubled"))
    yield "state", line["state_dir"]


def _downlink_rows(line: Plan) -> Iterator[Row]:
    topics, topic, offsets = line["from"], line["topic"], line["starting_offsets"]
    names = f"topics like {topics['pattern']}" if isinstance(topics, dict) else ", ".join(_as_list(topics))
    yield "kafka", f"{names}   from {offsets if isinstance(offsets, str) else 'as listed'}"
    yield "broker", _broker_text(line)
    topic_text = f"SQL {topic['sql']}" if isinstance(topic, dict) else topic
    parts = {
        f"mqtt:{_shorten(topic_text)}": True,
        f"QoS {line['qos']}": True,
        f"properties {line['properties']}": True,
        f"where {_shorten(line['where'] or '')}": line["where"],
    }
    yield "publish", _applicable(parts)
    yield "confirm", f"by the {line['confirm']}   {_dead_letter_text(line)}"
    yield from ((label, line[label]) for label in ("lost", "doubled"))
    yield "state", line["state_dir"]


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _broker_text(line: Plan) -> str:
    return f"{', then '.join(line['brokers'])}   client id {line['client_id']}" if line["brokers"] else ""


def _filters_text(member: Plan) -> str:
    return "   ".join(f"{filter_['filter']} (QoS {filter_['qos']})" for filter_ in member["subscriptions"])


def _dead_letter_text(line: Plan) -> str:
    return f"dead letters to {line['dead_letter_topic']}" if line["dead_letter_topic"] else "no dead letters"


def _route_text(route: Plan, dedupe: Plan | None) -> str:
    parts = {
        f"{route['from']} → kafka:{route['topic']}": True,
        route["promise"]: route["promise"],
        "no key" if route["key"] is None else f"key {route['key']}": True,
        f"headers {', '.join(route['headers'])}": route["headers"],
        "no MQTT properties": route["properties"] == "none",
        f"where {_shorten(route['where'] or '')}": route["where"],
        "key required": route["key_required"],
        f"repeats by {(dedupe or {}).get('key')}": dedupe,
    }
    return _applicable(parts)


def _shorten(sql: str) -> str:
    return sql if len(sql) <= _MAX_SQL_LENGTH else f"{sql[: _MAX_SQL_LENGTH - 3]}..."


def _applicable(parts: Mapping[str, object]) -> str:
    """Return the texts whose condition applies."""
    return "   ".join(text for text, applies in parts.items() if applies)
