"""State of another user: refused before anything is written, whoever comes second and by whichever command."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import gateway_settings
from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran
from towline import Publisher
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError
from towline.files import check_owner
from towline.gateway.launch import ensure_running
from towline.journal import Journal
from towline.schema import ROW_SCHEMA

for _module in ("bridge.runtime.supervisor", "bridge.runtime.screen", "monitor.serving", "cli.lines"):
    importlib.import_module(f"towline.{_module}")

#: A user without a name, and one with: who runs a service, and who comes by.
SERVICE, NOBODY = 64_123, 65_534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user comes to, with a bridge file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "bridge.toml").write_text(GOOD)
        (directory / "bridge.toml").chmod(0o644)
        yield directory


def made(directory: Path, owner: int, mode: int = 0o700) -> Path:
    """A directory of an owner."""
    directory.mkdir(mode=mode, parents=True)
    directory.chmod(mode)
    os.chown(directory, owner, owner)
    return directory


def seen(directory: Path) -> list[tuple[str, int, int, int]]:
    """Everything below a directory, and whether anybody has touched it."""
    stats = [(path, path.lstat()) for path in (directory, *sorted(directory.rglob("*")))]
    return [(str(path), stat.st_uid, stat.st_mode, stat.st_mtime_ns) for path, stat in stats]


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """What is opened meanwhile is opened by another user; all modules have to be loaded by then."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.mark.parametrize("command", [["run"], ["gateway"], ["gateway", "--drain"]])
def test_root_leaves_nothing_in_the_state_of_a_service(
    place: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (place / "state", place / "state" / "telemetry", place / "state" / "telemetry" / "inbox"):
        made(directory, SERVICE)
    before = seen(place)
    code, _, err = ran(capsys, command[0], str(place / "bridge.toml"), *command[1:])
    assert code == 2
    where = place / "state" / ("" if command == ["run"] else "telemetry")
    assert (
        f"{where}: it belongs to the user #64123, and this is root: what root writes there #64123 could not use any "
        f"more. Run this as #64123 (sudo -u), or hand it over: chown -R root {where}.   [TL-J23]"
    ) in err
    assert seen(place) == before


@pytest.mark.parametrize("roots", ["state", "state/telemetry", "state/telemetry/checkpoint/offsets"])
def test_a_user_is_told_of_what_root_has_left(place: Path, roots: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The bridge, its line, or what only Spark writes to."""
    for part in ("state", "state/telemetry", "state/telemetry/checkpoint", "state/telemetry/checkpoint/offsets"):
        made(place / part, 0 if part == roots else NOBODY, 0o755)
    before = seen(place)
    with acting_as(NOBODY):
        code, _, err = ran(capsys, "run", str(place / "bridge.toml"))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"{place / roots}: it belongs to the user root, and this is nobody: ")
    assert err.endswith(f"or hand it over: chown -R nobody {place / roots}.   [TL-J23]\n")
    assert seen(place) == before


def test_a_mounted_volume_of_roots_that_lets_the_user_in_is_none_of_another(place: Path) -> None:
    """As a pod has it with fsGroup: the volume is root's, and the group's; and ``lost+found`` is root's alone."""
    volume = made(place / "state", 0, 0o2775)
    os.chown(volume, 0, NOBODY)
    made(volume / "lost+found", 0)
    made(volume / "telemetry", NOBODY)
    with acting_as(NOBODY):
        check_owner(volume)
    check_owner(volume)  # root over NFS: the uid says that the owner is not known, which is not "another"


def test_whatever_writes_looks_first(tmp_path: Path) -> None:
    """A source's gateway, a journal, a publisher, what is kept beside Spark's logs."""
    foreign = made(tmp_path / "state", SERVICE)
    made(foreign / "outbox", SERVICE)
    settings = gateway_settings(state_dir=foreign, brokers="mqtt://127.0.0.1:1")
    before = seen(foreign)
    for opened in (
        lambda: ensure_running(settings, owner_pid=os.getpid()),
        lambda: Journal.open(foreign, schema=ROW_SCHEMA),
        lambda: Publisher("mqtt://127.0.0.1:1", state_dir=foreign),
        lambda: Checkpoint(str(foreign)).sync(),
    ):
        with pytest.raises(ConfigError, match=r"belongs to the user #64123, and this is root.*\[TL-J23\]"):
            opened()
    assert seen(foreign) == before
