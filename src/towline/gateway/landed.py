"""A gateway whose journals lie in Kafka: the one place that meets `towline.landing`, loaded when a gateway wants it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError
from towline.journal import Journal, Limits
from towline.journal.directory import prepare, segment_names
from towline.journal.disk import Disk
from towline.journal.lock import Lock
from towline.net.transport import Endpoint
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

    from towline.gateway.settings import GatewaySettings
    from towline.landing.owner import Owner

__all__ = ["Landed", "owned"]

#: Seconds that the way to a broker may take when a standby looks whether there is one.
_REACH_S: Final = 1.0


class Landed:
    """The journals of a gateway in Kafka, and the right to its state directory.

    Attributes:
        owner: Has them.
    """

    def __init__(self, owner: Owner, lock: Lock) -> None:
        self.owner = owner
        self._lock = lock

    def close(self, *, ended: bool) -> None:
        """Say no more, and let another process have the directory."""
        self.owner.close(ended=ended)
        self._lock.release()


def owned(
    settings: GatewaySettings, outbox: Limits | None, *, standby: bool, stopped: threading.Event
) -> Landed | None:
    """Wait for the journals' turn and open them; None when `stopped` was set before.

    Args:
        settings: Of the gateway, with a landing.
        outbox: Limits of its outbox; None for a gateway that only receives.
        standby: Wait for as long as another gateway has them.
        stopped: Gives the waiting up.

    Raises:
        JournalLocked: TL-J03, another process has the state directory.
        ConfigError: TL-C130, there are rows of an inbox on disk; TL-J35.
        GatewayError: TL-J38.
        KafkaError: Kafka can't be used.
        JournalError: As `towline.landing.opening.open_journal`.
    """
    from towline.landing.owner import Owner, OwnerConfig  # noqa: PLC0415 - needs Kafka's client
    from towline.landing.place import LandingPlace  # noqa: PLC0415
    from towline.landing.topics import NewTopics  # noqa: PLC0415

    landing = settings.landing
    assert landing is not None
    prepare(settings.inbox, Disk())
    _check_disk(settings.inbox)
    lock = Lock(settings.inbox)
    wanted = OwnerConfig(
        settings.name,
        LandingPlace(landing.client, landing.name or settings.name, landing.partition),
        ROW_SCHEMA,
        settings.journal,
        NewTopics(landing.partitions, landing.replication) if landing.create else None,
        landing.consumers,
        None if outbox is None else (OUTBOX_SCHEMA, outbox),
        standby,
        {"silence_s": landing.standby_after_s, "offline_s": landing.give_way_after_s},
    )
    owner = Owner(wanted, stopped, lambda: any(map(_reachable, settings.brokers)))
    try:
        taken = owner.take()
    except BaseException:
        lock.release()
        raise
    if not taken:
        lock.release()
        return None
    return Landed(owner, lock)


def _check_disk(directory: Path) -> None:
    """Refuse to leave rows behind that were acknowledged into an inbox on disk."""
    if not segment_names(directory):
        return
    with Journal.open(directory, schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as journal:
        waiting = journal.end - journal.committed
    if waiting:
        what = f"the inbox on disk holds {waiting:,} messages that wait, and the line now wants one in Kafka"
        do = 'Run the line with inbox = "disk" until nothing waits, then change it.'
        raise ConfigError("TL-C130", str(directory), what, do)


def _reachable(broker: Endpoint) -> bool:
    """Whether something takes connections there."""
    with contextlib.suppress(OSError):
        if broker.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_REACH_S)
                probe.connect(broker.path)
                return True
        socket.create_connection((broker.host, broker.port), _REACH_S).close()
        return True
    return False
