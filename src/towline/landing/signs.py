"""Signs of life of a journal's owner, and what a standby makes of them.

They only say when to try: that the owner is fenced, and everything it had acknowledged is here, follows from the
transactions alone [I8]. A sign too few costs a take-over that was not needed, and never a message.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer, TopicPartition

from towline.errors import TowlineError
from towline.kafka import admin, faults
from towline.kafka.clientconfig import QUIET, resolve
from towline.landing.place import LandingPlace, consumer_of

__all__ = ["Lookout", "Sign", "SignWatch", "Signs", "StandbyVerdict"]

#: Seconds between two signs, and between two looks.
_EVERY_S: Final = 0.3
#: Seconds without a sign until a standby tries, while Kafka answers it; and until it does because the owner can't reach
#: the broker of MQTT, and it can itself.
SILENCE_S: Final = 1.5
OFFLINE_S: Final = 5.0
#: Signs after which the older ones are removed.
_KEPT: Final = 1000
_LOOK_S: Final = 1.0


class Sign(NamedTuple):
    """What an owner says of itself.

    Attributes:
        epoch: Of its opening.
        incarnation: Of its opening.
        host: Where it runs.
        pid: Its process.
        online: Its MQTT session is online.
        ended: It has ended as asked, and will say no more.
    """

    epoch: int
    incarnation: str
    host: str
    pid: int
    online: bool
    ended: bool = False

    def encode(self) -> bytes:
        """As the record has it."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> Sign | None:
        """From a record; None for what is no sign."""
        try:
            return cls(**json.loads(value or b""))
        except (ValueError, TypeError):
            return None

    @property
    def who(self) -> str:
        """For people."""
        return f"the gateway with pid {self.pid} on {self.host}"


class Signs:
    """Says every moment that its owner lives; a thread of its own.

    Args:
        place: Of the journal.
        opening: Epoch and incarnation.
        online: Whether the MQTT session is online.
    """

    def __init__(self, place: LandingPlace, opening: tuple[int, str], online: Callable[[], bool]) -> None:
        self._place, self._opening, self._online = place, opening, online
        self._stopped = threading.Event()
        self._last = 0
        self._deleted = 0
        config: dict[str, Any] = {
            **resolve(place.client, "kafka"),
            "linger.ms": 0,
            "message.timeout.ms": 2000,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 500,
            "error_cb": lambda _error: None,
        }
        self._producer = Producer(config, logger=QUIET)
        self._thread = threading.Thread(target=self._run, name="signs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._say(ended=False)
            self._producer.poll(0)
            self._trim()
            self._stopped.wait(_EVERY_S)

    def _say(self, *, ended: bool) -> None:
        sign = Sign(*self._opening, socket.gethostname(), os.getpid(), self._online(), ended)
        signs = self._place.signs
        with contextlib.suppress(BufferError, *faults.FOREIGN):  # the next one says the same
            self._producer.produce(signs.topic, sign.encode(), partition=signs.partition, on_delivery=self._said)

    def _said(self, error: Any, message: Any) -> None:
        if error is None:
            self._last = message.offset()

    def _trim(self) -> None:
        if self._last - self._deleted >= _KEPT:
            self._deleted = self._last
            signs = self._place.signs
            with contextlib.suppress(TowlineError):
                admin.delete_below(self._place.client, {(signs.topic, signs.partition): self._last}, _LOOK_S)

    def close(self, *, ended: bool) -> None:
        """Say no more; with `ended` say that, so that a standby need not wait."""
        self._stopped.set()
        self._thread.join()
        if ended:
            self._say(ended=True)
            with contextlib.suppress(*faults.FOREIGN):
                self._producer.flush(1.0)


class StandbyVerdict(enum.Enum):
    """What a standby does now."""

    WAIT = "wait"
    NONE = "there is no owner"
    ENDED = "the owner has ended"
    SILENT = "the owner has been silent"
    OFFLINE = "the owner can't reach the broker"


@dataclass
class Lookout:
    """Decides from what was seen, by the standby's own clock; pure.

    Attributes:
        began: When it began to look.
        silence_s: Seconds without a sign that are too many.
        offline_s: Seconds without the broker that are too many, where the standby can reach it.
        sign: The newest; None when none was seen.
        at: When the newest came, or when the one that was there at the beginning was found.
        offline_since: When the owner was first seen offline; None while it is online.
    """

    began: float
    silence_s: float = SILENCE_S
    offline_s: float = OFFLINE_S
    sign: Sign | None = None
    at: float = 0.0
    offline_since: float | None = None

    def seen(self, sign: Sign, now: float) -> None:
        """A sign came."""
        self.sign, self.at = sign, now
        if sign.online:
            self.offline_since = None
        elif self.offline_since is None:
            self.offline_since = now

    def verdict(self, now: float, *, contact: float, reachable: Callable[[], bool]) -> StandbyVerdict:
        """What to do.

        Args:
            now: Seconds on the same clock.
            contact: When Kafka answered last: a silence counts only while it does.
            reachable: Whether the broker of MQTT can be reached from here; asked when it matters.
        """
        if self.sign is None:
            return StandbyVerdict.NONE if contact >= self.began else StandbyVerdict.WAIT
        if self.sign.ended:
            return StandbyVerdict.ENDED
        if contact - self.at >= self.silence_s:
            return StandbyVerdict.SILENT
        if self.offline_since is not None and now - self.offline_since >= self.offline_s and reachable():
            return StandbyVerdict.OFFLINE
        return StandbyVerdict.WAIT


class SignWatch:
    """Looks at the signs of a journal's owner.

    Args:
        place: Of the journal.
        settings: ``silence_s`` and ``offline_s`` of `Lookout`, where they are not the usual ones.
        reachable: Whether the broker of MQTT can be reached from here.
    """

    def __init__(
        self, place: LandingPlace, settings: Mapping[str, float], reachable: Callable[[], bool] = lambda: False
    ) -> None:
        self._place = place
        self._reachable = reachable
        self._consumer = consumer_of(place.client, {"fetch.wait.max.ms": 100})
        self._lookout = Lookout(
            time.monotonic(), settings.get("silence_s", SILENCE_S), settings.get("offline_s", OFFLINE_S)
        )
        self._next: int | None = None
        self._contact = 0.0
        #: A sign came since this began to look: an owner lives.
        self.fresh = False

    @property
    def sign(self) -> Sign | None:
        """The newest that was seen."""
        return self._lookout.sign

    def look(self) -> StandbyVerdict:
        """Ask Kafka what is new, and decide; takes up to a second where Kafka does not answer."""
        with contextlib.suppress(*faults.FOREIGN):
            signs = self._place.signs
            first, end = admin.watermarks(self._consumer, signs, _LOOK_S)
            old = self._next is None
            if self._next is None:
                self._next = max(first, end - 1)
                self._consumer.assign([TopicPartition(signs.topic, signs.partition, self._next)])
            if self._read(end, old=old):  # what has not come yet may be a sign of life
                self._contact = time.monotonic()
        return self._lookout.verdict(time.monotonic(), contact=self._contact, reachable=self._reachable)

    def _read(self, end: int, *, old: bool) -> bool:
        """Take what is there; whether that is all."""
        assert self._next is not None
        deadline = time.monotonic() + _LOOK_S
        while self._next < end and time.monotonic() < deadline:
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is not None:
                self._next = None  # what was to be read was removed: begin with the newest
                return False
            self._next = message.offset() + 1
            sign = Sign.decode(message.value())
            if sign is not None:
                self._lookout.seen(sign, time.monotonic())
                self.fresh = self.fresh or not old
        return self._next >= end

    def close(self) -> None:
        """Let go of the connection."""
        with contextlib.suppress(*faults.FOREIGN, RuntimeError):
            self._consumer.close()
