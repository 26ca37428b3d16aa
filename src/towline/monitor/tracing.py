"""A span for each committed batch, through OpenTelemetry's API; the SDK that exports it is the user's.

Without an SDK the API does nothing. Spans are handed over on a thread of their own: an exporter that waits for its
server must not hold up the reports of Spark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from towline.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from towline.bridge.runtime.state import BatchDone, BridgeState, LineView

__all__ = ["BatchSpans", "tracer"]

#: Seconds between two looks; a line keeps more batches than it can do in that time.
_LOOK_S: Final = 1.0
#: Patience with an exporter at the end, in seconds.
_END_S: Final = 5.0


def tracer() -> Tracer:
    """OpenTelemetry's tracer of this name.

    Raises:
        ConfigError: TL-C148, its API is not installed.
    """
    try:
        from opentelemetry import trace  # noqa: PLC0415 - an extra
    except ImportError as error:
        what, do = "[monitor] traces needs OpenTelemetry's API", 'pip install "towline[otel]", and an SDK that exports.'
        raise ConfigError("TL-C148", "opentelemetry", what, do) from error
    return trace.get_tracer("towline")


class BatchSpans:
    """Makes spans of what a bridge's lines have done; a context manager.

    Args:
        made_by: Of OpenTelemetry.
    """

    def __init__(self, made_by: Tracer) -> None:
        self._tracer = made_by
        self._state: BridgeState | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def show(self, state: BridgeState) -> None:
        """Make spans of this bridge's batches."""
        self._state = state

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.look()
        self.look()

    def look(self) -> None:
        """Make spans of what was done since the last look."""
        state = self._state
        if state is None:
            return
        with state.lock:
            done = [(view, one) for view in state.lines.values() for one in _taken(view)]
        for view, batch in done:
            with contextlib.suppress(Exception):  # an exporter's fault is none of the bridge's
                self._span(state.name, view, batch)

    def _span(self, bridge: str, view: LineView, batch: BatchDone) -> None:
        facts: dict[str, Any] = {
            "messaging.system": "kafka",
            "messaging.batch.message_count": batch.rows,
            "towline.bridge": bridge,
            "towline.line": view.name,
            "towline.direction": view.direction,
            "towline.batch": batch.number,
        }
        if batch.transactions:
            facts["towline.transaction_seconds"] = list(batch.transactions)
        end = int(batch.at * 1e9)
        begin = end - int(batch.seconds * 1e9)
        span = self._tracer.start_span(f"batch {view.name}", start_time=begin, attributes=facts)
        span.end(end_time=end)


def _taken(view: LineView) -> Iterator[BatchDone]:
    while view.done:
        yield view.done.popleft()
