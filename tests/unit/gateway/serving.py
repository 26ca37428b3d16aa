"""A real gateway service on a real journal, filled by the test instead of a broker."""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyarrow import flight

from tests.helpers import gateway_settings
from towline.errors import JournalFailed, TowlineError
from towline.gateway.endpoint import error_from
from towline.gateway.service import GatewayService
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.processes import ProcessIdentity
from towline.schema import ROW_SCHEMA

_AT = datetime(2026, 1, 1, tzinfo=UTC)


def rows(start: int, count: int, *, gateway: str = "plant", payload: bytes = b"") -> pa.RecordBatch:
    """Rows as a broker with 50 devices would give them; every tenth has MQTT 5 properties."""
    numbers = range(start, start + count)
    rich = [n % 10 == 0 for n in numbers]
    columns = [
        [f"telemetry/d{n % 50}" for n in numbers],
        [payload + str(n).encode() for n in numbers],
        [1] * count,
        [False] * count,
        [n % 7 == 0 for n in numbers],
        ["text/plain" if r else None for r in rich],
        [True if r else None for r in rich],
        ["answer/here" if r else None for r in rich],
        [b"\x00\xff" if r else None for r in rich],
        [[{"key": "a", "value": "1"}, {"key": "a", "value": None}] if r else None for r in rich],
        [3600 if r else None for r in rich],
        [[1, 2] if r else None for r in rich],
        [_AT] * count,
        [gateway] * count,
        list(numbers),
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_SCHEMA)


class Served:
    """A journal and its service in one state directory."""

    def __init__(
        self,
        state_dir: Path,
        *,
        name: str = "plant",
        segment_bytes: int = 64 << 20,
        settings: GatewaySettings | None = None,
    ) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self.state_dir = state_dir
        self.failures: list[JournalFailed] = []
        #: Watermarks that were set.
        self.commits: list[int] = []
        #: What the MQTT side says of itself.
        self.reported: dict[str, object] = {"connected": True}
        limits = Limits(segment_bytes=segment_bytes, min_free_bytes=0)
        self.journal = Journal.open(state_dir / "inbox", schema=ROW_SCHEMA, limits=limits)
        told = settings or gateway_settings(name=name, state_dir=state_dir)
        self.name = told.name
        # A pump without a thread to wake, that never answers about what was refused.
        pump: Any = SimpleNamespace(
            set_committed=self.commits.append, wake=lambda: None, refused_messages=lambda *_: Future()
        )
        self.service = GatewayService(
            told, self.journal, pump, status=lambda: self.reported, report_failure=self.failures.append
        )
        if settings is None:  # whoever asks for any is served
            self.service.endpoint = replace(self.service.endpoint, settings="")
            self.service.endpoint.write(state_dir)

    @property
    def location(self) -> str:
        return self.service.endpoint.location

    def add(self, count: int, *, payload: bytes = b"") -> int:
        """Append rows, durable, and tell the waiting readers; the new end."""
        end = self.journal.append(rows(self.journal.end, count, gateway=self.name, payload=payload))
        self.service.notify()
        return end

    def close(self) -> None:
        self.service.close()
        self.journal.close()


def served(state_dir: Path, **more: Any) -> contextlib.closing[Served]:
    """Serve a journal while the block runs."""
    return contextlib.closing(Served(state_dir, **more))


def mark(pid: int | None = None) -> ProcessIdentity:
    """The mark of a process of this machine, default this one."""
    return ProcessIdentity.of(pid or os.getpid())


def raw(server: Served, action: str, body: object = None) -> Any:
    """One action as any program could send it."""
    text = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
    with flight.connect(server.location) as connection:
        return json.loads(next(iter(connection.do_action(flight.Action(action, text)))).body.to_pybytes())


def error_of(error: flight.FlightError) -> TowlineError:
    """The error that a gateway sent."""
    return error_from(json.loads(error.extra_info))
