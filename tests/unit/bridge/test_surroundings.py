"""What the driver finds around it: Java, an environment it can live in, and a directory that does not grow."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import socket
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.cli.test_main import ran
from towline.bridge.config.tables import NAME
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.session import (
    SCRATCH_DIR,
    check_master,
    create_scratch_dir,
    driver_environment,
    socket_settings,
)
from towline.errors import SetupError
from towline.gateway.endpoint import MAX_SOCKET_BYTES, socket_path


def test_a_bridge_is_not_run_with_jars_of_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("towline.bridge.runtime.supervisor.check_java", lambda: None)
    code, _, err = ran(capsys, "run", str(read(GOOD, tmp_path).file))
    assert (code, f"any user may write in {tmp_path}/cache" in err) == (2, True)


def test_the_drivers_environment(tmp_path: Path) -> None:
    """Another Python may lack what the tasks import, and each would fail: "Python worker failed to connect back"."""
    place = tmp_path / 'a "b" c'
    place.mkdir()
    users = {"SPARK_SUBMIT_OPTS": "-Xlog:gc", "PYSPARK_PYTHON": "jupyter", "PYSPARK_DRIVER_PYTHON": "jupyter"}
    variables = driver_environment(read(GOOD, tmp_path), place, users)
    assert variables["PYSPARK_PYTHON"] == variables["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert variables["SPARK_LOCAL_DIRS"] == str(place)
    assert variables["LC_ALL"] == "C.UTF-8", "a JVM whose locale is C can't open each directory"
    assert "LC_ALL" not in driver_environment(read(GOOD, tmp_path), place, {"LANG": "en_US.utf8"})
    options = shlex.split(variables["SPARK_SUBMIT_OPTS"])
    assert options[-2:] == ["-Xlog:gc", f"-Djava.io.tmpdir={place}"]  # of two that say the same the later counts
    own = read(GOOD + "\n[spark]\nconf = { 'spark.local.dir' = '/fast' }\n", tmp_path)
    assert "SPARK_LOCAL_DIRS" not in driver_environment(own, place, {})
    assert not re.match(NAME, SCRATCH_DIR), "no line lives where Spark drops files"


def test_the_folders_of_those_who_have_ended_go(tmp_path: Path) -> None:
    """A process that lives holds the lock that it has inherited."""
    left = tmp_path / SCRATCH_DIR / "spark-left"
    (left / "blockmgr-1").mkdir(parents=True)
    first, lock = create_scratch_dir(tmp_path)
    assert not left.exists()
    second, other = create_scratch_dir(tmp_path)
    assert first.exists()
    for handle in (lock, other):
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
    third, lock = create_scratch_dir(tmp_path)
    assert [path.name for path in (tmp_path / SCRATCH_DIR).iterdir()] == [third.name]
    assert not second.exists()
    os.close(lock)


#: A path's bytes, and what Java says when a socket is bound to it.
JAVAS = (Path(__file__).parent / "java_17_0_15" / "socket_paths.txt").read_text().splitlines()
JAVAS_MOST = max(int(line.split()[0]) for line in JAVAS if line.endswith("bound"))


@pytest.mark.parametrize("temporary", ["/tmp", "/" + "t" * 99])  # noqa: S108
def test_sockets_are_never_too_long_for_java(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory of 44 bytes was one: Spark was started for ever."""
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    for length in range(2, 200):
        state_dir = Path("/" + "x" * (length - 1))
        spark = f"{state_dir}/{SCRATCH_DIR}/spark-abcdefgh"
        chosen = socket_settings(state_dir).get("spark.python.unix.domain.socket.dir")
        assert len(f"{chosen or spark}/.{uuid.uuid4()}.sock") <= JAVAS_MOST == MAX_SOCKET_BYTES
        assert (chosen is None) == (length < 44), "a private directory where it is short enough"


def test_what_fits_into_the_state_directory_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 99)))
    near, far = (Path("/" + "x" * (JAVAS_MOST - len("/gateway.sock") + more - 1)) for more in (0, 1))
    assert socket_path(near) == near / "gateway.sock"
    elsewhere = socket_path(far)
    elsewhere.parent.rmdir()
    assert len(str(elsewhere)) < JAVAS_MOST


def test_a_master_that_does_not_answer_is_told_in_one_line() -> None:
    """It is tried again: one may be started later; and one of several is enough."""
    with socket.create_server(("127.0.0.1", 0)) as dead, socket.create_server(("127.0.0.1", 0)) as server:
        gone, there = dead.getsockname()[1], server.getsockname()[1]
        dead.close()
        with pytest.raises(SetupError) as caught:
            check_master(f"spark://127.0.0.1:{gone}")
        check_master(f"spark://127.0.0.1:{gone},127.0.0.1:{there}")
    found = failure_reason(caught.value, "spark")
    assert (found.text, found.permanent) == (
        str(caught.value),
        False,
    )
    assert found.text.startswith(f"spark: no master answers at 127.0.0.1:{gone} (connection refused). Start it")
    assert found.text.endswith("[TL-S34]")
    for master in ("local[*]", "yarn"):
        check_master(master)
