"""Plan of a bridge, as text: brokers, filters, topics, guarantees, state directories, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.config.subscriptions import shadowed_routes
from towline.bridge.config.tables import KafkaPattern, Sql
from towline.gateway.settings import GatewaySettings, ShareMethod
from towline.guarantee import AckAfter, Guarantee, policy
from towline.kafka.clientconfig import insecure_settings
from towline.mqtt.filters import overlapping_pairs
from towline.options import LOOPBACK_HOSTS
from towline.text import count_text, printable

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


def plan_text(bridge: Bridge, remarks: Iterable[str] = ()) -> str:
    """Return the plan as text, with environment variables of the file unexpanded [I12].

    Args:
        bridge: The bridge.
        remarks: Further warnings.
    """
    document, kafka = Document.reread(bridge.file, bridge.file), bridge.kafka
    written = document.restore_references
    topics = ", ".join(written(bridge.required_topics(), *_TOPIC_KEYS)) or "from messages only"
    topics += " (missing ones are created)" if kafka.create_topics else ""
    topics += "   insecure" if insecure_settings(kafka.client_settings()) else ""
    rows = [
        ("kafka", f"{written(kafka.bootstrap_servers, 'bootstrap_servers')}   topics {topics}"),
        ("state", str(bridge.state_dir)),
    ]
    text_lines = [
        f'bridge "{bridge.name}"   {count_text(len(bridge.lines), "line")}   {bridge.file}',
        *_row_lines(rows),
    ]
    text_lines += [f"  ! {text}" for text in (*plan_warnings(bridge, document), *remarks)]
    for line in bridge.lines:
        direction = "   Kafka → MQTT" if isinstance(line, Downlink) else ""
        head = f'▸ line "{written(line.name, "name")}"   {written(line.guarantee.value, "guarantee")}{direction}'
        text_lines += ["", head, *_row_lines(_line_rows(line, document))]
    text_lines += ["", f"Nothing was contacted. Run it:   towline run {bridge.file}"]
    return "\n".join(map(printable, text_lines)) + "\n"


def _row_lines(rows: Iterable[Row]) -> Iterator[str]:
    return (f"  {label:9} {text}" for label, text in rows if text)


def _line_rows(line: Uplink | Downlink, document: Document) -> Iterator[Row]:
    """Yield gateways and broker of a line, what becomes of its messages, and what may be lost and doubled."""
    gateway, written, line_policy = line.gateway, document.restore_references, policy(line.guarantee)
    shares = [(share.member, settings) for settings in line.all_gateways if (share := settings.share)]
    yield from (("gateway", written(location, "gateways")) for location in getattr(line, "gateways", ()))
    if line.all_gateways:
        brokers = ", then ".join(written([str(broker) for broker in gateway.brokers], "brokers"))
        yield "broker", f"{brokers}   client id {written(gateway.mqtt_client_id, 'client_id')}"
    for member, settings in shares:
        yield "member", f"{member}   client id {settings.mqtt_client_id}   {_filters_text(settings, document)}"
    lost, doubled = line_policy.loss_text, line_policy.duplicates_text
    letters = written(line.dead_letter_topic, "dead_letter_topic")
    letters_text = f"dead letters to {letters}" if letters else "no dead letters"
    if isinstance(line, Downlink):
        pattern = (
            f"topics like {written(line.from_.pattern, 'pattern')}" if isinstance(line.from_, KafkaPattern) else ""
        )
        yield "kafka", f"{pattern or ', '.join(written(line.topics, 'from'))}   {letters_text}"
        yield (
            "publish",
            f"mqtt:{'by SQL' if isinstance(line.topic, Sql) else written(line.topic, 'topic')}   QoS {line.qos}",
        )
        lost = lost.replace("from the broker's hand-over on", "from Kafka to the broker")
        doubled = _DOWNLINK_DUPLICATES[line.guarantee]
    else:
        yield "filters", _filters_text(gateway, document) if line.all_gateways and not shares else ""
        for number, route in enumerate(line.route, start=1):
            yield f"route {number}", f"{written(route.from_, 'from')} → kafka:{written(route.topic, 'topic')}"
        yield "kafka", f"{_write_text(line)}   {letters_text}"
        if line.all_gateways:
            yield "acks", _ACK_TEXTS[gateway.effective_ack_after]
            if gateway.effective_ack_after is AckAfter.KAFKA:
                lost = lost.replace("the state directory is kept", "the broker keeps its session")
        if all(route.dedupe is not None for route in line.routes):
            doubled = doubled.replace(_PUBLISHER_REPEATS, "")
    yield from (("lost", lost), ("doubled", doubled), ("state", str(gateway.state_dir)))


def _filters_text(gateway: GatewaySettings, document: Document) -> str:
    filters = (
        (document.restore_references(subscription.pattern, "from"), subscription.qos)
        for subscription in gateway.subscriptions
    )
    return "   ".join(f"{pattern} (QoS {qos})" for pattern, qos in filters)


def _write_text(line: Uplink) -> str:
    is_parallel = line.parallelism > 1
    if line.transactional:
        one_text = "one transaction a batch, all topics and the marker at once"
        return f"{line.parallelism} transactions a batch, split by key" if is_parallel else one_text
    return f"records as they come, by {line.parallelism} tasks" if is_parallel else "records as they come"


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
    plaintext_brokers = [broker for broker in gateway.brokers if not broker.tls and broker.host not in LOOPBACK_HOSTS]
    if gateway.password_file and plaintext_brokers:
        broker_text = document.restore_references(str(plaintext_brokers[0]), "brokers")
        yield f"the password crosses the network in clear text to {broker_text}. Use mqtts:// or wss://."
