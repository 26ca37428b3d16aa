"""What a gateway is told: one validated value, the same for a bridge line, a Spark option map and the command line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from towline.delivery.receipts.payload import PREFIX
from towline.errors import ConfigError
from towline.gateway.access import REMOTE
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Limits
from towline.mqtt.events import Filter
from towline.mqtt.filters import overlapping
from towline.mqtt.rules import filter_problem
from towline.net.settings import BrokerConnection, Brokers, MqttSettings
from towline.options import OptionText, host_port, label, parts
from towline.validation import SettingsModel


def subscriptions(text: str) -> list[dict[str, object]]:
    """Read ``telemetry/#:1, alarms/+`` or a JSON list of the same texts (for filters with a comma), or of objects.

    Raises:
        ValueError: For an empty list, or JSON that is none of these.
    """
    filters = parts(text, "filters", '["a,b/#:1"]', str | dict)
    if not filters:
        raise ValueError("it has no topic filter")
    return [_subscription(part) for part in filters]


#: Keys of a subscription as a JSON object, and what the gateway calls them [MQTT 5 section 3.8.3.1].
_SUBSCRIPTION: Final = {
    "filter": "pattern",
    "qos": "qos",
    "noLocal": "no_local",
    "retainAsPublished": "retain_as_published",
    "retainHandling": "retain_handling",
    "subscriptionId": "identifier",
}


def _subscription(said: str | dict[str, object]) -> dict[str, object]:
    if isinstance(said, dict):
        unknown = next((name for name in said if name not in _SUBSCRIPTION), None)
        if unknown is not None or "filter" not in said:
            known = ", ".join(_SUBSCRIPTION)
            raise ValueError(f'a subscription has {known}, and no "{unknown}"' if unknown else "a filter is missing")
        return {_SUBSCRIPTION[name]: value for name, value in said.items()}
    text = said.strip()
    match = re.fullmatch(r"(.*):([0-9]+)", text, re.DOTALL)
    return {"pattern": match[1], "qos": int(match[2])} if match else {"pattern": text}


def _life(text: str) -> bool:
    """Whether a gateway outlives who has it started."""
    if text.lower() not in ("query", "detached"):
        raise ValueError("must be query or detached")
    return text.lower() == "detached"


def _subscribable(value: Filter) -> Filter:
    if problem := filter_problem(value.pattern):
        raise ValueError(problem)
    if value.no_local and value.pattern.startswith("$share/"):
        raise ValueError("no_local can't be used with a shared subscription [MQTT-3.8.3-4]")
    return value


#: A topic filter and its options. What it leaves open about retained messages the gateway's own setting decides.
SubscribedFilter = Annotated[Filter, AfterValidator(_subscribable)]


class OutboxLimits(SettingsModel):
    """When the outbox takes no more, and when its messages are too old [I7].

    Attributes:
        max_bytes: Most bytes on disk; default no limit but the disk. More is refused until something was delivered; a
            partition of a batch has to fit (TL-J15).
        min_free_bytes: Space left free on the file system.
        segment_bytes: Size at which a new segment begins.
        max_age_s: Messages that came so many seconds ago are not sent any more, and counted as expired; default never.
    """

    max_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    min_free_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    segment_bytes: Annotated[int, Field(ge=64 << 10)] = 64 << 20
    max_age_s: Annotated[float, Field(gt=0)] | None = None


class OutboxSettings(OutboxLimits):
    """An outbox: its limits, and the query that writes to it.

    Attributes:
        checkpoint: Location of the checkpoint of a query that writes here: an outbox that is an older copy than what it
            remembers sends nothing [I14]. "" for one that is not known.
        number: Of the outbox, where that query writes to several.
    """

    checkpoint: str = ""
    number: Annotated[int, Field(ge=0)] = 0


class ReceiptSettings(SettingsModel):
    """End-to-end receipts for publishers that ask for them (docs/receipts.md).

    Attributes:
        key_file: Holds the line's keys; only publishers with one of them, or with one made of it, are heard.
        prefix: Receipts go to this topic, a slash, and the publisher's id.
        max_publishers: More are not known: their messages pass, get no receipt, and repeats are doubles.
        max_ranges: Ranges of one publisher's numbers with others missing between them; what would make one more is
            dropped and comes again.
        keep_s: A publisher that is silent for so long is forgotten, and with it what it had sent.
    """

    key_file: Path
    prefix: Annotated[str, Field(pattern=r"^[^+#\x00$/](?:[^+#\x00]{0,198}[^+#\x00/])?$")] = PREFIX
    max_publishers: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_ranges: Annotated[int, Field(ge=1, le=100_000)] = 256
    keep_s: Annotated[float, Field(ge=60)] = 30 * 86400


def _address(value: str) -> str:
    host_port(value)
    return value.strip() if ":" in value else f"127.0.0.1:{value.strip()}"


#: ``HOST:PORT``.
ListenAddress = Annotated[str, AfterValidator(_address)]
_NEEDED: Final = ("cert_file", "key_file", "token_file")


class ListenSettings(SettingsModel):
    """A network address of a gateway.

    There is no form without TLS and token, not on loopback either: whoever is on this machine has the unix socket,
    which the rights of a file protect and which needs neither.

    Attributes:
        address: ``HOST:PORT`` to listen on, or a port of 127.0.0.1 alone; ``0.0.0.0`` or ``[::]`` for every address of
            the machine, port 0 for one that is free.
        cert_file: Certificate chain of the gateway (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; each of them lets a client in, so that one can be replaced without a stop.
    """

    address: ListenAddress
    cert_file: Path
    key_file: Path
    token_file: Path

    @model_validator(mode="before")
    @classmethod
    def _secured(cls, value: Any) -> Any:
        missing = [name for name in _NEEDED if not value.get(name)] if isinstance(value, Mapping) else []
        if missing:
            what = f"what listens on a network has TLS and a token, and {' and '.join(missing)} is missing"
            raise ValueError(f"{what}; add it, in a bridge file to [gateway], or remove listen")
        return value

    @property
    def location(self) -> str:
        """As a location of Arrow Flight."""
        return f"{REMOTE}{self.address}"


class ShareWay(StrEnum):
    """How a line's messages are shared among its gateways."""

    #: Each member has filters of its own, and no topic is taken by two of them: order per topic and device.
    FILTERS = "filters"
    #: A shared subscription, ``$share/GROUP/FILTER``: the broker chooses, and order is not promised.
    SUBSCRIPTION = "subscription"


class ShareSettings(SettingsModel):
    """One member among the gateways of a line.

    Attributes:
        member: This one.
        members: The names of all, sorted.
        way: How they share.
        client_id: The line's, without the name of a member.
    """

    member: str = Field(min_length=1)
    members: tuple[str, ...] = Field(min_length=1)
    way: ShareWay
    client_id: str = ""

    def id_of(self, member: str) -> str:
        """The MQTT client id of a member."""
        return f"{self.client_id}-{member}"


#: A larger one costs Mosquitto, which looks through it for each answer, more than it spares the gateway.
_WINDOW_QOS_2: Final = 2000


class GatewaySettings(MqttSettings):
    """Everything one gateway needs; secrets only as names of files.

    Attributes:
        name: Names the gateway in rows, logs and metrics; default the last part of the state directory.
        state_dir: Directory of this gateway alone: journal, lock, endpoint.
        subscriptions: At least one, unless there is an outbox: ``FILTER:QOS``, several with commas or as a JSON list;
            ``$share/GROUP/FILTER`` works. A JSON object says more: ``[{"filter": "a/#", "qos": 1, "noLocal": true,
            "retainAsPublished": true, "retainHandling": 2, "subscriptionId": 7}]``.
        outbox: What to send is taken and delivered; None for a gateway that only receives.
        receipts: Publishers that ask for it learn what is in Kafka, and their repeats are dropped; None for neither.
        guarantee: Sets ``ack_after`` unless it is given.
        ack_after: When the broker is answered: ``journal``, ``kafka`` (committed by every consumer), ``received`` (at
            most once only). Default by guarantee.
        journal: How much disk the inbox may take.
        linger_after_silence_ms: How long it may wait after a moment of silence, for who is in no hurry.
        owner_pid: End when this process has died.
        detached: Go on when whoever had it started has ended: ``query`` ends with the driver; ``detached`` goes on
            receiving until ``towline gateway --stop DIR``, or whatever ends all processes of its service or container.
            While a query runs, one that was killed is started again at once (docs/guarantees.md#outage-budget).
        drain_s: Leave the line (`towline.gateway.sessions`), and end the session after so many seconds in which nothing
            came; None to take part.
        checkpoint: Location of the checkpoint of the query that reads here: a journal that it does not belong to takes
            nothing in [I14]. "" for one that is not known.
        listen: Where to listen on a network, besides the unix socket; None for not at all.
        share: Which member of a line this is; None for a line's only gateway.
        repeatable: Filters of which a message may come twice, because who reads drops repeats by a key, or promises at
            least once. Others may have no topic in common, unless the guarantee is at_least_once.
    """

    name: Annotated[str, AfterValidator(label)]
    state_dir: Path
    subscriptions: Annotated[tuple[SubscribedFilter, ...], OptionText("subscribe", subscriptions)] = ()
    outbox: OutboxSettings | None = None
    receipts: ReceiptSettings | None = None
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    ack_after: AckAfter | None = None
    linger_after_silence_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    journal: Limits = Limits()
    owner_pid: int | None = None
    detached: Annotated[bool, OptionText("gatewayLife", _life)] = False
    drain_s: Annotated[float, Field(ge=0)] | None = None
    checkpoint: str = ""
    listen: ListenSettings | None = None
    share: ShareSettings | None = None
    repeatable: tuple[str, ...] = ()
    brokers: Brokers = Field(min_length=1, description='Add it, as brokers = ["mqtt://localhost:1883"].')

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.check_connection(self.brokers)
        shared = [one.pattern for one in self.subscriptions if one.pattern.startswith("$share/")]
        problems = chain(self._contradictions(), self._problems_of_protocol(shared), self._problems_of_shares(shared))
        if problem := next(problems, None):
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        if not self.subscriptions and self.outbox is None:
            yield "subscriptions is empty, and there is no outbox: nothing to do"
        if len({s.pattern for s in self.subscriptions}) != len(self.subscriptions):
            yield "a topic filter is subscribed twice; give each filter one QoS"
        table = policy(self.guarantee)
        if table.persistent and self.session_expiry_s == 0:
            yield f"guarantee {self.guarantee} needs a session that outlives the connection; raise session_expiry_s"
        if self.acks not in table.acks:
            wanted = " or ".join(table.acks)
            yield f"guarantee {self.guarantee} needs ack_after {wanted}, not {self.acks}; change one of the two"
        if self.receipts is not None and not table.serves_again:
            yield f"receipts need guarantee at_least_once or exactly_once: {self.guarantee} gives messages up"
        if pair := next(overlapping(self.single), None):
            yield (
                f'"{pair[0]}" and "{pair[1]}" have topics in common, and a broker may send a message for each '
                f"[MQTT-3.3.4-2]: guarantee {self.guarantee} does not bear it; take one wider filter, a line or query "
                "for each, or a dedupe key of the line"
            )

    def _problems_of_protocol(self, shared: list[str]) -> Iterator[str]:
        if self.protocol != "5" and any((self.retain_handling, *(s.retain_handling for s in self.subscriptions))):
            yield 'retain_handling 1 and 2 need protocol "5": MQTT 3.x always sends retained messages'
        if shared and self.protocol in {"3.1.1", "3.1"}:
            yield f'"{shared[0]}" needs protocol "5": to MQTT 3.x it is a filter as any other, and nothing comes'
        if self.receipts is not None and self.protocol != "5":
            yield 'receipts need protocol "5": marks are user properties'

    def _problems_of_shares(self, shared: list[str]) -> Iterator[str]:
        if self.receipts is not None and shared:
            yield f'receipts need every message of a publisher, "{shared[0]}" shares them with others'
        if self.share is not None:
            if self.outbox is not None:
                yield "share is for what is received, and there is an outbox"
            if len(shared) != (len(self.subscriptions) if self.share.way is ShareWay.SUBSCRIPTION else 0):
                yield 'share = "subscription" and filters with $share/ go together, all of them'

    @property
    def filters(self) -> tuple[Filter, ...]:
        """What the session is to be subscribed to; the gateway's own retain handling where a filter has none."""
        return tuple(
            replace(one, retain_handling=self.retain_handling) if one.retain_handling is None else one
            for one in self.subscriptions
        )

    def least_qos(self, filters: Iterable[Filter]) -> int:
        """Messages with less are counted; with a dedupe key a line may subscribe with less than its promise takes."""
        return min(policy(self.guarantee).qos, min((one.qos for one in filters), default=0))

    @property
    def connection(self) -> BrokerConnection:
        """The gateway's connection and its session; secrets are read at each connection."""
        delivers = self.outbox is not None
        session = self.session(
            self.mqtt_client_id,
            self.name,
            self.filters,
            session_expiry_s=self.session_expiry_s,
            receive_maximum=self.window,
            unknown_session=self.unknown_session or ("adopt" if self.acks is AckAfter.KAFKA else "refuse"),
            durable=policy(self.guarantee).persistent,
            durable_ids=delivers,
            exactly_once=delivers and self.guarantee is Guarantee.EXACTLY_ONCE,
        )
        return BrokerConnection(
            settings=self,
            session=session,
            brokers=self.brokers,
            linger_s=self.linger_ms / 1000,
            linger_after_silence_s=self.linger_after_silence_ms / 1000 if self.linger_ms else 0.0,
        )

    def passing_problem(self, former: Iterable[str], where: str) -> ConfigError | None:
        """Why a session can't pass from former filters to these: TL-C170; None where it can.

        What may be neither lost nor doubled can't pass from a filter that goes to one that takes the same topics.
        """
        if self.guarantee is not Guarantee.EXACTLY_ONCE:
            return None
        former, wanted = list(former), {one.pattern for one in self.subscriptions}
        pairs = ((one, gone) for one in self.single if one not in former for gone in former if gone not in wanted)
        comes, goes = next((pair for pair in pairs if any(overlapping(pair))), ("", ""))
        what = (
            f'"{comes}" takes topics of "{goes}", which the session has and which goes: while both are subscribed a '
            "broker may send a message for each [MQTT-3.3.4-2], while neither is it keeps none, and exactly_once "
            "allows neither"
        )
        do = "Take filters that share no topic; or pass in two steps, first without the former: what comes between is "
        return ConfigError("TL-C170", where, what, do + "lost.") if goes else None

    @property
    def single(self) -> list[str]:
        """Filters of which no message may come twice."""
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            return []
        return [one.pattern for one in self.subscriptions if one.pattern not in self.repeatable]

    @property
    def window(self) -> int:
        """The Receive Maximum announced: as set, or by the highest QoS subscribed."""
        if self.receive_maximum is not None:
            return self.receive_maximum
        return _WINDOW_QOS_2 if any(s.qos == 2 for s in self.subscriptions) else 65534

    @property
    def acks(self) -> AckAfter:
        """The watermark that drives acknowledgements, from ``ack_after`` or the guarantee."""
        return self.ack_after or policy(self.guarantee).acks[0]

    @property
    def mqtt_client_id(self) -> str:
        """The client id sent in CONNECT."""
        return self.client_id or self.name

    @property
    def inbox(self) -> Path:
        """Directory of the inbox journal."""
        return self.state_dir / "inbox"

    @property
    def outgoing(self) -> Path:
        """Directory of the outbox journal."""
        return self.state_dir / "outbox"

    @property
    def refused(self) -> Path:
        """Directory of what the broker refused."""
        return self.state_dir / "refused"

    def digest(self) -> str:
        """Eight hex digits that change with any setting but owner and checkpoint: a running gateway has these."""
        apart: dict[str, Any] = {"owner_pid": True, "checkpoint": True, "outbox": {"checkpoint", "number"}}
        text = self.model_dump_json(exclude=apart)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
