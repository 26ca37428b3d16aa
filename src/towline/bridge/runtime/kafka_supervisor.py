"""Waits for Kafka, looks every few seconds whether it still answers, and sees that topics are there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from towline.bridge.config.model import Bridge
from towline.bridge.lines.evidence import kafka_offsets, read_checkpoint
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.supervision import ChildSupervisor
from towline.errors import GatewayError, KafkaError, TowlineError
from towline.guarantee import AckAfter

#: Seconds between two looks at Kafka, for what is measured in one, and for its answer, which a busy one takes time for:
#: one that is gone, or stands still, shows within 10 s.
_LOOK_S, _ANSWER_S = 2.0, 5.0


class KafkaSupervisor(ChildSupervisor):
    """Waits for Kafka before any query begins, then follows how it is; a query looks at its topics when it starts.

    Args:
        bridge: Its Kafka.
        state: Where Kafka's state goes.
        stopping: Set when the bridge ends.
    """

    what = "Kafka's client"
    where = "kafka"

    def __init__(self, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__("kafka", state, stopping, 5.0)
        #: Set once Kafka has answered.
        self.ready = threading.Event()
        #: Called once then.
        self.on_ready: Callable[[], object] = lambda: None
        self.bridge = bridge

    def _round(self) -> None:
        """Look until Kafka does not answer, with one client: it goes where brokers tell clients to come, as all do."""
        from towline.kafka.admin import LastWord, answer, looking  # noqa: PLC0415 - loads librdkafka

        last = LastWord()
        with looking(self.bridge.kafka.client(), last) as admin:
            while self.wanted:
                answer(admin.describe_cluster(request_timeout=_ANSWER_S), _ANSWER_S)
                admin.poll(0)
                last.answered()
                self._answers()
                self._measure(admin)
                self._stopping.wait(_LOOK_S)

    def _answers(self) -> None:
        self._pauses.reset()
        with self._state.lock:
            waited = self._state.kafka_error is not None
            self._state.kafka, self._state.kafka_error = "reachable", None
        if waited:
            self._state.say(f"kafka: {self.bridge.kafka.bootstrap_servers} answers")
        if not self.ready.is_set():
            self.ready.set()
            self.on_ready()

    def _measure(self, admin: Any) -> None:
        """Measure how far each downlink is behind, by its checkpoint.

        It is unknown without a client, and for a line that was stopped: it may stand in a topic that is gone [I19].
        """
        from towline.kafka import faults  # noqa: PLC0415 - loads librdkafka
        from towline.kafka.admin import backlog  # noqa: PLC0415

        deadline = time.monotonic() + _LOOK_S
        for line in self.bridge.downlinks:
            taken, found = kafka_offsets(line.checkpoint, read_checkpoint(line.checkpoint).done), None
            stopped = self._state.lines[line.name].query == "stopped"
            if admin is not None and taken and not stopped and (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(*faults.FOREIGN):
                    found = backlog(admin, taken, left)
            hidden = found and (found[1] if line.isolation_level == "read_committed" else 0)
            with self._state.lock:
                view = self._state.lines[line.name]
                view.behind, view.hidden = found and found[0], hidden

    @property
    def _meanwhile(self) -> str:
        """What becomes of messages while Kafka is away."""
        at_broker = [f'"{line.name}"' for line in self.bridge.lines if line.gateway.acks is AckAfter.KAFKA]
        if at_broker and len(at_broker) == len(self.bridge.lines):
            return "intake stops at the broker's window, and the brokers keep what comes"
        apart = f", but those of {', '.join(at_broker)}, which the broker keeps" if at_broker else ""
        return f"messages go on being received and wait on disk{apart}"

    def _failed(self, error: TowlineError) -> None:
        if not isinstance(error, KafkaError | GatewayError) and not self.ready.is_set():
            self.fatal = error  # a wrong setting
            return
        self._measure(None)
        with self._state.lock:
            if self._state.kafka_error is None:
                self._state.say(f"{error}\nkafka: {self._meanwhile}; trying again")
            self._state.kafka, self._state.kafka_error = "unreachable", str(error)
        self._stopping.wait(self._pauses.next())


def see_to(bridge: Bridge, topics: Iterable[str]) -> str:
    """See that topics are there, and make them where the file says so; what was made, in words.

    Args:
        bridge: Says how they are made.
        topics: Their names.

    Raises:
        KafkaError: TL-B03, one is not there; TL-K01, Kafka does not answer; TL-K09, one can't be made.
    """
    from towline.kafka.admin import create_topics, reachable  # noqa: PLC0415 - loads librdkafka

    client, plan = bridge.kafka.client(), bridge.kafka.create_topics
    missing = sorted(set(topics) - set(reachable(client).topics))
    if missing and plan is None:
        raise _missing(bridge, missing)
    if not missing or plan is None:
        return ""
    created = create_topics(client, dict.fromkeys(missing, plan.partitions), replication=plan.replication_factor)
    return f"kafka: created {', '.join(created)} with {plan.partitions} partitions each"


def _missing(bridge: Bridge, missing: list[str]) -> KafkaError:
    names = ", ".join(f'"{name}"' for name in missing)
    what = f"the topic{'s' if len(missing) > 1 else ''} {names} {'are' if len(missing) > 1 else 'is'} not there"
    do = "Create it, or let Towline do it with create_topics = { partitions = 6 } in [kafka]."
    return KafkaError("TL-B03", bridge.kafka.bootstrap_servers, what, do)
