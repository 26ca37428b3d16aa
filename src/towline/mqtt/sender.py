"""A blocking publisher on the `Session`: one thread, one connection, at most a window of messages in memory.

It holds nothing on disk: what was not acknowledged when the process ends is the caller's to send again. Connections
that break are made anew and the unacknowledged messages resent with their packet ids [MQTT-4.4.0-1].
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from mqtt5 import PublishPacket

from towline.errors import BrokerError, Unreachable
from towline.mqtt.codec import Decoder, MalformedPacket
from towline.mqtt.events import (
    Acknowledged,
    Close,
    Event,
    Lost,
    Malformed,
    Online,
    Opened,
    Publish,
    Received,
    Send,
    SessionConfig,
    Stop,
    Tick,
)
from towline.mqtt.session import Session
from towline.mqtt.transport import Endpoint, Proxy, Tls, Transport, connect

__all__ = ["Sender"]

#: Pause between two connection attempts, in seconds.
_PAUSE: Final = 0.5
#: Messages handed over before the caller has to wait for acknowledgements.
_AHEAD: Final = 1000


class Sender:
    """Publishes to one broker and waits for its acknowledgements.

    Args:
        broker: Its endpoint, its URI such as ``wss://broker.example``, or a bare host with `port`.
        port: TCP port of a bare host.
        client_id: MQTT client id.
        tls: How to encrypt; with a bare host None means plain TCP.
        proxy: On the way to the broker.
        username: MQTT user name.
        password: MQTT password.
        protocol: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1).
        patience_s: Seconds without any progress after which `publish` and `drain` give up.
        on_acknowledged: Called with (token, reason code) for each message the broker took or dropped.
    """

    def __init__(
        self,
        broker: Endpoint | str,
        port: int | None = None,
        *,
        client_id: str,
        tls: Tls | None = None,
        proxy: Proxy | None = None,
        username: str | None = None,
        password: bytes | None = None,
        protocol: int = 5,
        patience_s: float = 30.0,
        on_acknowledged: Callable[[int, int], None] = lambda _token, _reason: None,
    ) -> None:
        self._endpoint = _endpoint(broker, port, encrypted=tls is not None)
        self._tls, self._proxy = tls, proxy
        self._where = str(self._endpoint)
        self._patience = patience_s
        self._on_acknowledged = on_acknowledged
        config = SessionConfig(
            client_id,
            self._where,
            username=username,
            password=password,
            session_expiry_s=3600,  # long enough to resume after a broken connection, short enough to leave nothing
            unknown_session="adopt",
            durable=False,
            protocol=protocol,
        )
        self._session = Session(config)
        self._decoder = Decoder(version=self._session.config.protocol)
        self._transport: Transport | None = None
        self._progress_at = time.monotonic()
        self._token = 0
        self._problem: BrokerError | None = None
        #: Why the last connection ended, mendable or not.
        self._told: BrokerError | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Messages the broker has not acknowledged."""
        return len(self._session.outbound)

    @property
    def _unsent(self) -> int:
        return self._transport.unsent if self._transport is not None else 0

    def open(self) -> None:
        """Connect.

        Raises:
            BrokerError: No connection, or a refusal; not tried again.
        """
        self._connect()
        end = time.monotonic() + self._session.config.connect_timeout_s
        while self._session.state.value != "online":
            self._turn(max(0.0, end - time.monotonic()))
            if self._transport is None and (error := self._problem or self._told):
                raise error

    def publish(self, packet: PublishPacket) -> int:
        """Hand over a message and return its token; waits while a window of messages is unacknowledged.

        Raises:
            BrokerError: The broker refuses us, or nothing moved for `patience_s` seconds.
        """
        self._token += 1
        self._handle(Publish(self._token, packet))
        while len(self._session.outbound) > _AHEAD:
            self._step()
        return self._token

    def drain(self) -> None:
        """Wait until the broker has acknowledged everything.

        Raises:
            BrokerError: As `publish`.
        """
        while self._session.outbound or self._unsent:
            self._step()

    def close(self) -> None:
        """Say goodbye and close; what was not acknowledged is forgotten."""
        if self._transport is not None:
            self._handle(Stop())
        self._drop()

    def _step(self) -> None:
        self._turn(0.5)
        if self._problem is not None:
            raise self._problem
        if time.monotonic() - self._progress_at > self._patience:
            what = f"no acknowledgement for {self._patience:g} s, {self.waiting:,} messages are open"
            raise Unreachable("TL-M06", self._where, what, "Is the broker alive? Publish again what was not confirmed.")

    def _turn(self, timeout_s: float) -> None:
        if self._transport is None:
            self._reconnect()
            return
        deadline = self._session.deadline()
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - time.monotonic()))
        transport = self._transport
        wanted = [transport] if transport.unsent else []
        if not transport.decrypted:
            select.select([transport], wanted, [], timeout_s)
        self._receive(transport)
        if self._transport is transport and not transport.flush():
            self._lost()
        self._handle(Tick())

    def _receive(self, transport: Transport) -> None:
        data = transport.read()
        if data is None:
            return
        try:
            items = self._decoder.feed(data) if data else None
        except MalformedPacket as error:
            self._handle(Malformed(str(error), error.reason))
            return
        if items is None:
            self._lost()
        else:
            self._handle(Received(items))

    def _lost(self) -> None:
        told = self._transport.problem if self._transport is not None else None
        self._told = told or Unreachable("TL-M05", self._where, "the connection broke", "Is this an MQTT listener?")
        self._handle(Lost())
        self._drop()

    def _handle(self, event: Event) -> None:
        for action in self._session.handle(event, time.monotonic()):
            if isinstance(action, Send):
                if self._transport is not None:
                    self._transport.write(action.data)
            elif isinstance(action, Acknowledged):
                self._progress_at = time.monotonic()
                self._on_acknowledged(action.token, action.reason)
            elif isinstance(action, Online):
                self._progress_at = time.monotonic()
            elif isinstance(action, Close):
                self._problem = action.error if action.fatal else None
                self._told = action.error
                self._drop()

    def _connect(self) -> None:
        self._transport = connect(self._endpoint, tls=self._tls, proxy=self._proxy)
        self._decoder = Decoder(version=self._session.config.protocol)
        self._handle(Opened())

    def _reconnect(self) -> None:
        try:
            self._connect()
        except Unreachable as error:
            if time.monotonic() - self._progress_at > self._patience:
                raise error from None
            time.sleep(_PAUSE)

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.drain(1.0)
            self._transport.close()
            self._transport = None


def _endpoint(broker: Endpoint | str, port: int | None, *, encrypted: bool) -> Endpoint:
    if isinstance(broker, Endpoint):
        return broker
    if port is None:
        return Endpoint.parse(broker)
    return Endpoint("mqtts" if encrypted else "mqtt", broker, port)
