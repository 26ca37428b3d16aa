"""A blocking publisher on the `Session`: one thread, one connection, at most a window of messages in memory.

It holds nothing on disk: what was not acknowledged when the process ends is the caller's to send again. Connections
that break are made anew and the unacknowledged messages resent with their packet ids [MQTT-4.4.0-1].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from mqtt5 import PublishPacket

from towline.errors import Unreachable
from towline.mqtt.events import Acknowledged, Action, Online, Publish, SessionConfig
from towline.mqtt.session import Session
from towline.net.driver import Hooks, SessionDriver, Way
from towline.net.transport import Endpoint, Proxy, Tls
from towline.text import counted

__all__ = ["Sender"]

#: Longest pause between two connection attempts, in seconds: its user waits.
_PAUSE: Final = 0.5
#: Patience in seconds with the goodbye.
_GOODBYE: Final = 1.0
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
        endpoint = _endpoint(broker, port, encrypted=tls is not None)
        self._where = str(endpoint)
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
        way = Way((endpoint,), tls, proxy, config.connect_timeout_s, longest_pause_s=_PAUSE)
        hooks = Hooks(new_session=lambda _level: Session(config), perform=self._perform)
        self._driver = SessionDriver(way, hooks, (protocol,))
        self._progress_at = time.monotonic()
        self._token = 0

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Messages the broker has not acknowledged."""
        return len(self._driver.session.outbound)

    def open(self) -> None:
        """Connect.

        Raises:
            BrokerError: No connection, or a refusal; not tried again.
            ConfigError: Files or a proxy that can't be used.
        """
        self._progress_at = time.monotonic()
        while not self._driver.online:
            self._driver.turn(1.0)
            if self._driver.error is not None:
                raise self._driver.error

    def publish(self, packet: PublishPacket) -> int:
        """Hand over a message and return its token; waits while a window of messages is unacknowledged.

        Raises:
            BrokerError: The broker refuses us, or nothing moved for `patience_s` seconds.
        """
        self._token += 1
        self._driver.handle(Publish(self._token, packet))
        while self.waiting > _AHEAD:
            self._step()
        return self._token

    def drain(self) -> None:
        """Wait until the broker has acknowledged everything.

        Raises:
            BrokerError: As `publish`.
        """
        while self.waiting or self._driver.unsent:
            self._step()

    def close(self) -> None:
        """Say goodbye and close, for good; what was not acknowledged is forgotten."""
        self._driver.leave(_GOODBYE)
        self._driver.dispose()

    def _step(self) -> None:
        self._driver.turn(0.5)
        if self._driver.fatal is not None:
            raise self._driver.fatal
        if time.monotonic() - self._progress_at > self._patience:
            if not self._driver.connected and self._driver.error is not None:
                raise self._driver.error
            what = f"no acknowledgement for {self._patience:g} s, {counted(self.waiting)} without an answer"
            raise Unreachable("TL-M33", self._where, what, "Is the broker alive? Publish again what was not confirmed.")

    def _perform(self, action: Action) -> None:
        if isinstance(action, Acknowledged | Online):
            self._progress_at = time.monotonic()
        if isinstance(action, Acknowledged):
            self._on_acknowledged(action.token, action.reason)


def _endpoint(broker: Endpoint | str, port: int | None, *, encrypted: bool) -> Endpoint:
    if isinstance(broker, Endpoint):
        return broker
    if port is None:
        return Endpoint.parse(broker)
    return Endpoint("mqtts" if encrypted else "mqtt", broker, port)
