"""What keeps the children running must not end itself: on a machine that is out of something for a while."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.helpers import wait_until
from towline.bridge import keepers
from towline.bridge.board import Board
from towline.bridge.keepers import DriverKeeper, GatewayKeeper


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board("plant", tmp_path, {"line": "up"})


def refusing(times: int, then: Any) -> Any:
    """A call that fails for want of a process so many times."""
    left = [times]

    def call(*_: object, **__: object) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return then()

    return call


def test_a_gateway_that_can_not_be_started_is_tried_again(
    board: Board, stopping: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line: Any = SimpleNamespace(name="line", gateway=SimpleNamespace(state_dir=tmp_path))
    keeper = GatewayKeeper(line, tmp_path / "bridge.toml", board, tmp_path / "log", stopping)

    def ended() -> Closing:
        stopping.set()
        return Closing()

    monkeypatch.setattr(keepers, "ensure", refusing(1, ended))
    keeper.start()
    keeper.join(20)
    assert not keeper.is_alive()
    assert keeper.up.is_set()
    assert any("[TL-B32]" in text for text in board.heard())


class Closing:
    """A client with nothing to say."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def test_a_driver_that_can_not_be_started_is_tried_again(
    board: Board, stopping: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge: Any = SimpleNamespace(
        lines=(SimpleNamespace(name="line"),),
        logs=tmp_path,
        state_dir=tmp_path,
        spark=SimpleNamespace(master="spark://x"),
        model_copy=lambda update: SimpleNamespace(model_dump_json=lambda **_: str(update)),
    )
    kafka: Any = SimpleNamespace(ready=threading.Event())
    monkeypatch.setattr(subprocess, "Popen", refusing(1, Driver))
    keeper = DriverKeeper(bridge, board, kafka, stopping)
    keeper.start()
    told = wait_until(lambda: [text for text in board.heard() if "ended by signal 9" in text], what="a driver")
    stopping.set()
    keeper.join(20)
    assert told
    assert board.spark_restarts >= 2


class Driver:
    """A driver that was killed at once."""

    pid = 1

    def __init__(self) -> None:
        self.stdin = io.StringIO()
        self.stdout = io.StringIO()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def poll(self) -> int:
        return -9

    def wait(self) -> int:
        return -9
