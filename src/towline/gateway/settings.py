"""Settings of a gateway: one validated model for bridge lines, Spark options and the command line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from towline.delivery.receipts.payload import TOPIC_PREFIX
from towline.errors import ConfigError
from towline.gateway.access import REMOTE_SCHEME
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Limits
from towline.mqtt.events import Filter
from towline.mqtt.filters import overlapping_pairs
from towline.net.settings import BrokerConnection, Brokers, MqttSettings, Subscriptions
from towline.options import Option, parse_host_port, parse_label, parse_list
from towline.validation import SettingsModel


def parse_subscriptions(text: str) -> list[dict[str, object]]:
    """Parse ``telemetry/#:1, alarms/+``, or a JSON list of such texts (for filters with a comma) or of objects.

    Raises:
        ValueError: The list is empty, or the JSON is neither.
    """
    filters = parse_list(text, "filters", '["a,b/#:1"]', str | dict)
    if not filters:
        raise ValueError("it has no topic filter")
    return [_parse_subscription(part) for part in filters]


#: Key of a subscription as a JSON object → field of `Filter` [MQTT 5 section 3.8.3.1].
_SUBSCRIPTION_KEYS: Final = {
    "filter": "pattern",
    "qos": "qos",
    "noLocal": "no_local",
    "retainAsPublished": "retain_as_published",
    "retainHandling": "retain_handling",
    "subscriptionId": "identifier",
}


def _parse_subscription(entry: str | dict[str, object]) -> dict[str, object]:
    if isinstance(entry, dict):
        unknown = next((name for name in entry if name not in _SUBSCRIPTION_KEYS), None)
        if unknown is not None or "filter" not in entry:
            keys = ", ".join(_SUBSCRIPTION_KEYS)
            raise ValueError(f'a subscription has {keys}, and no "{unknown}"' if unknown else "a filter is missing")
        return {_SUBSCRIPTION_KEYS[name]: value for name, value in entry.items()}
    text = entry.strip()
    match = re.fullmatch(r"(.*):([0-9]+)", text, re.DOTALL)
    return {"pattern": match[1], "qos": int(match[2])} if match else {"pattern": text}


class OutboxLimits(SettingsModel):
    """Size and age limits of an outbox [I7].

    Attributes:
        max_bytes: Maximum bytes on disk; default no limit but the disk. More is refused until messages are delivered; a
            partition of a batch has to fit (TL-J15).
        min_free_bytes: Bytes left free on the file system.
        segment_bytes: Size in bytes at which a new segment begins.
        max_age_s: Messages older than this, in seconds, are not sent, and counted as expired; default no limit.
    """

    max_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    min_free_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    segment_bytes: Annotated[int, Field(ge=64 << 10)] = 64 << 20
    max_age_s: Annotated[float, Field(gt=0)] | None = None


class OutboxSettings(OutboxLimits):
    """Limits of an outbox, and the query that writes to it.

    Attributes:
        checkpoint: Location of the checkpoint of the query that writes here: an outbox that is an older copy than the
            checkpoint records sends nothing [I14]. "" if unknown.
    """

    checkpoint: str = ""


class ReceiptSettings(SettingsModel):
    """End-to-end receipts for publishers that request them (docs/publishers.md#receipts).

    Attributes:
        key_file: File of the line's keys; only publishers with one of them, or with one derived from it, get receipts.
        prefix: Receipts go to this topic, a slash, and the publisher's id.
        max_publishers: Maximum number of publishers. Messages of further ones pass without receipt and deduplication.
        keep_s: Seconds until the state of a silent publisher is removed.
    """

    key_file: Path
    prefix: Annotated[str, Field(pattern=r"^[^+#\x00$/](?:[^+#\x00]{0,198}[^+#\x00/])?$")] = TOPIC_PREFIX
    max_publishers: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    keep_s: Annotated[float, Field(ge=60)] = 30 * 86400


def _parse_address(value: str) -> str:
    parse_host_port(value)
    return value.strip() if ":" in value else f"127.0.0.1:{value.strip()}"


#: ``HOST:PORT``.
ListenAddress = Annotated[str, AfterValidator(_parse_address)]


class ListenSettings(SettingsModel):
    """Network address of a gateway, with its TLS and token files.

    TLS and token are required on loopback too: local clients use the unix socket, which its file mode protects and
    which needs neither.

    Attributes:
        address: ``HOST:PORT`` to listen on, or a port of 127.0.0.1 alone; ``0.0.0.0`` or ``[::]`` for every address of
            the machine, port 0 for a free one.
        cert_file: Certificate chain of the gateway (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; each is accepted, so that one can be replaced without a stop.
    """

    address: ListenAddress
    cert_file: Path
    key_file: Path
    token_file: Path

    @property
    def location(self) -> str:
        """Arrow Flight location of the address."""
        return f"{REMOTE_SCHEME}{self.address}"


class ShareMethod(StrEnum):
    """Method by which the gateways of a line share its messages."""

    #: Each member has filters of its own, which share no topic: order per topic and device.
    FILTERS = "filters"
    #: A shared subscription, ``$share/GROUP/FILTER``: the broker chooses, and order is not promised.
    SUBSCRIPTION = "subscription"


class ShareSettings(SettingsModel):
    """Place of one member among the gateways of a line.

    Attributes:
        member: Name of this member.
        members: Names of all members, sorted.
        way: Method of sharing.
        client_id: Client id of the line, without a member's name.
    """

    member: str = Field(min_length=1)
    members: tuple[str, ...] = Field(min_length=1)
    way: ShareMethod
    client_id: str = ""

    def member_client_id(self, member: str) -> str:
        """Return the MQTT client id of a member."""
        return f"{self.client_id}-{member}"


#: Mosquitto searches the window for each answer: a larger one costs it more than it saves the gateway.
_QOS_2_WINDOW: Final = 2000


class GatewaySettings(MqttSettings):
    """Settings of one gateway; secrets only as file names.

    Attributes:
        name: Name of the gateway in rows, logs and metrics; default the last part of the state directory.
        state_dir: Directory of this gateway alone: journal, lock, endpoint.
        subscriptions: At least one, unless there is an outbox: ``FILTER:QOS``, several with commas or as a JSON list;
            ``$share/GROUP/FILTER`` works. A JSON object says more: ``[{"filter": "a/#", "qos": 1, "noLocal": true,
            "retainAsPublished": true, "retainHandling": 2, "subscriptionId": 7}]``.
        outbox: Outbox for messages to send; None for a gateway that only receives.
        receipts: Receipts and deduplication for publishers that request them; None for neither.
        guarantee: Sets ``ack_after`` unless it is given.
        ack_after: When the broker gets its acknowledgement: ``journal``, ``kafka`` (committed by every consumer),
            ``received`` (at most once only). Default by guarantee.
        journal: Disk limits of the inbox.
        linger_after_silence_ms: Milliseconds to wait for more messages after a pause, for throughput over latency.
        owner_pid: Process whose end ends the gateway.
        detached: Go on receiving after the driver has ended, until ``towline gateway --stop DIR``, or until its service
            or container ends. While a query runs, a killed gateway is restarted at once
            (docs/guarantees.md#outage-budget).
        drain_s: Drain the gateway (`towline.gateway.sessions`), and end the session after so many seconds without a
            message; None for normal operation.
        checkpoint: Location of the checkpoint of the query that reads here: a journal of another query receives nothing
            [I14]. "" if unknown.
        listen: Network address besides the unix socket; None for none.
        share: This member of a line; None for a line's only gateway.
        repeatable: Filters whose messages may come twice, because the reader deduplicates them by a key or promises at
            least once. Other filters may have no topic in common, unless the guarantee is at_least_once.
    """

    name: Annotated[str, AfterValidator(parse_label)]
    state_dir: Path
    subscriptions: Annotated[Subscriptions, Option("subscribe", parse=parse_subscriptions)] = ()
    outbox: OutboxSettings | None = None
    receipts: ReceiptSettings | None = None
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    ack_after: AckAfter | None = None
    linger_after_silence_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    journal: Limits = Limits()
    owner_pid: int | None = None
    detached: Annotated[bool, Option("gatewayDetached")] = False
    drain_s: Annotated[float, Field(ge=0)] | None = None
    checkpoint: str = ""
    listen: ListenSettings | None = None
    share: ShareSettings | None = None
    repeatable: tuple[str, ...] = ()
    brokers: Brokers = Field(min_length=1, description='Add it, as brokers = ["mqtt://localhost:1883"].')

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        self.check_connection(self.brokers)
        if problem := next(chain(self._conflicts(), self._shared_filter_conflicts()), None):
            raise ValueError(problem)
        return self

    def _conflicts(self) -> Iterator[str]:
        if not self.subscriptions and self.outbox is None:
            yield "subscriptions is empty, and there is no outbox: nothing to do"
        guarantee_policy = policy(self.guarantee)
        if guarantee_policy.persistent_session and self.session_expiry_s == 0:
            yield f"guarantee {self.guarantee} needs a session that outlives the connection; raise session_expiry_s"
        if self.effective_ack_after not in guarantee_policy.ack_choices:
            allowed_acks = " or ".join(guarantee_policy.ack_choices)
            needs = f"guarantee {self.guarantee} needs ack_after {allowed_acks}"
            yield f"{needs}, not {self.effective_ack_after}; change one of the two"
        if self.receipts is not None and not guarantee_policy.replays_batches:
            yield f"receipts need guarantee at_least_once or exactly_once: {self.guarantee} may drop messages"
        if overlapping_filters := next(overlapping_pairs(self.unrepeatable_filters), None):
            first_filter, second_filter = overlapping_filters
            yield (
                f'"{first_filter}" and "{second_filter}" have topics in common, and a broker may send one message '
                f"for each [MQTT-3.3.4-2]: guarantee {self.guarantee} does not allow it; use one wider filter, a line "
                "or query for each, or a dedupe key of the line"
            )
        if self.protocol != "5" and any((self.retain_handling, *(s.retain_handling for s in self.subscriptions))):
            yield 'retain_handling 1 and 2 need protocol "5": MQTT 3.x always sends retained messages'
        if self.receipts is not None and self.protocol != "5":
            yield 'receipts need protocol "5": marks are user properties'

    def _shared_filter_conflicts(self) -> Iterator[str]:
        for pattern in (s.pattern for s in self.subscriptions if s.is_shared):
            if self.protocol in {"3.1.1", "3.1"}:
                yield f'"{pattern}" needs protocol "5": for MQTT 3.x it is a plain filter, and matches nothing'
            if self.receipts is not None:
                yield f'receipts need every message of a publisher, "{pattern}" shares them with others'

    @property
    def filters(self) -> tuple[Filter, ...]:
        """Topic filters to subscribe to; a filter without retain handling gets the gateway's."""
        default = self.retain_handling
        return tuple(
            replace(s, retain_handling=default) if s.retain_handling is None else s for s in self.subscriptions
        )

    @property
    def least_qos(self) -> int:
        """QoS below which messages are counted as `lower_qos`; filters with a dedupe key may lower it."""
        return min(policy(self.guarantee).qos, min((s.qos for s in self.subscriptions), default=0))

    @property
    def connection(self) -> BrokerConnection:
        """Broker connection of the gateway with its session; secrets are read at each connection."""
        has_outbox = self.outbox is not None
        session = self.session_config(
            self.mqtt_client_id,
            self.name,
            self.filters,
            session_expiry_s=self.session_expiry_s,
            receive_maximum=self.receive_window,
            unknown_session=self.unknown_session
            or ("adopt" if self.effective_ack_after is AckAfter.KAFKA else "refuse"),
            durable=policy(self.guarantee).persistent_session,
            durable_ids=has_outbox,
            exactly_once=has_outbox and self.guarantee is Guarantee.EXACTLY_ONCE,
        )
        return BrokerConnection(
            settings=self,
            session=session,
            brokers=self.brokers,
            linger_s=self.linger_ms / 1000,
            linger_after_silence_s=self.linger_after_silence_ms / 1000 if self.linger_ms else 0.0,
        )

    def filter_change_error(self, old_filters: Iterable[str], location: str) -> ConfigError | None:
        """Return TL-C170 if a session can't change from the previous filters to these; None if it can.

        With exactly_once a new filter must not share topics with a removed one: messages could be lost or duplicated.
        """
        if self.guarantee is not Guarantee.EXACTLY_ONCE:
            return None
        old_filters = list(old_filters)
        patterns = {s.pattern for s in self.subscriptions}
        removed_filters = [old for old in old_filters if old not in patterns]
        pairs = ((new, old) for new in self.unrepeatable_filters if new not in old_filters for old in removed_filters)
        new_filter, old_filter = next((pair for pair in pairs if any(overlapping_pairs(pair))), ("", ""))
        problem = (
            f'"{new_filter}" has topics of "{old_filter}", which the session has and which is removed: while both '
            "are subscribed a broker may send a message for each [MQTT-3.3.4-2], while neither is it keeps none, and "
            "exactly_once allows neither"
        )
        remedy = "Use filters that share no topic, or first remove the old filter: what comes in between is lost."
        return ConfigError("TL-C170", location, problem, remedy) if old_filter else None

    @property
    def unrepeatable_filters(self) -> list[str]:
        """Filters whose messages must not come twice."""
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            return []
        return [s.pattern for s in self.subscriptions if s.pattern not in self.repeatable]

    @property
    def receive_window(self) -> int:
        """Receive Maximum to announce: as set, or by the highest QoS subscribed."""
        if self.receive_maximum is not None:
            return self.receive_maximum
        return _QOS_2_WINDOW if any(s.qos == 2 for s in self.subscriptions) else 65534

    @property
    def effective_ack_after(self) -> AckAfter:
        """Watermark that drives acknowledgements, from ``ack_after`` or the guarantee."""
        return self.ack_after or policy(self.guarantee).ack_choices[0]

    @property
    def mqtt_client_id(self) -> str:
        """Client id sent in CONNECT."""
        return self.client_id or self.name

    @property
    def inbox_dir(self) -> Path:
        """Directory of the inbox journal."""
        return self.state_dir / "inbox"

    @property
    def outbox_dir(self) -> Path:
        """Directory of the outbox journal."""
        return self.state_dir / "outbox"

    @property
    def refused_dir(self) -> Path:
        """Directory of the messages that the broker refused."""
        return self.state_dir / "refused"

    def digest(self) -> str:
        """Return eight hex digits that identify the settings of a running gateway, without owner and checkpoint."""
        excluded_fields: dict[str, Any] = dict.fromkeys(("owner_pid", "checkpoint", "repeatable"), True)
        excluded_fields["outbox"] = {"checkpoint"}
        text = self.model_dump_json(exclude=excluded_fields)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
