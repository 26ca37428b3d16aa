"""Signs of life of a reader on another machine, whose process the gateway can't see."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from towline.errors import Fenced, GatewayError
from towline.threads import guarded_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BEAT_S", "Heartbeat"]

#: Seconds between two signs. A batch may take longer than any lease, and Spark asks for nothing meanwhile.
BEAT_S: Final = 10


class Heartbeat:
    """Calls on a thread of its own until it is stopped, or the lease is somebody else's.

    Args:
        sign: One sign; a gateway that does not answer is asked again with the next.
    """

    def __init__(self, sign: Callable[[], object]) -> None:
        self._sign = sign
        self._stopped = threading.Event()
        guarded_thread(self._beat, "heartbeat", again_s=BEAT_S).start()

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self._sign()
            except Fenced:
                return  # the next call of the reader says so
            except GatewayError:
                continue
