"""What the driver finds around it: Java, an environment it can live in, and a directory that does not grow."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import uuid
import venv
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.tables import NAME
from towline.bridge.runtime import supervisor
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.session import (
    SCRATCH_DIR,
    check_java,
    check_master,
    check_python,
    create_scratch_dir,
    driver_environment,
    socket_settings,
)
from towline.cli import main
from towline.errors import SetupError
from towline.gateway.endpoint import MAX_SOCKET_BYTES, socket_path


def java(place: Path, version: str) -> Path:
    """A program that says which version it is."""
    program = place / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return program


def complaint(environ: dict[str, str], *, version: bool = False) -> str:
    with pytest.raises(SetupError) as caught:
        check_java(environ, version=version)
    return str(caught.value)


def test_without_java_the_first_word_is_to_install_it(tmp_path: Path) -> None:
    do = "Install Java 17 (Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME.   [TL-S21]"
    head = "java: Spark needs Java 17 or newer, and"
    assert complaint({"PATH": str(tmp_path)}) == f"{head} there is none on PATH. {do}"
    assert complaint({"PATH": str(tmp_path), "JAVA_HOME": "/nowhere"}) == (
        f"{head} JAVA_HOME is /nowhere, which has no bin/java. {do}"
    )
    old = java(tmp_path / "old", "11.0.2")
    assert complaint({"PATH": str(old.parent)}, version=True) == f"{head} {old} is version 11. {do}"


def test_a_java_that_will_do_is_no_matter(tmp_path: Path) -> None:
    good, older = java(tmp_path / "good", "21.0.1"), java(tmp_path / "older", "1.8.0_402")
    check_java({"PATH": str(older.parent), "JAVA_HOME": str(good.parent.parent)}, version=True)
    check_java({"PATH": str(older.parent)})  # its version is asked only after it has failed
    check_java({"PATH": "", "SPARK_HOME": "/opt/spark"}, version=True)  # its own files may name one
    check_java({"PATH": "", "SPARK_CONF_DIR": "/etc/spark"}, version=True)


def refused_start(directory: Path, environ: dict[str, str]) -> str:
    """The one line of a `towline run` that does not start."""
    file = read(GOOD, directory).file
    command = [sys.executable, "-m", "towline", "run", str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


def test_no_java_ends_the_bridge_at_once(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    error = refused_start(tmp_path, {**environ, "PATH": str(tmp_path)})
    assert error.startswith("java: Spark needs Java 17 or newer, and there is none on PATH. Install Java 17")


def test_a_python_that_can_not_run_tasks_ends_the_bridge_at_once(tmp_path: Path) -> None:
    """Spark would start it for each task, and each would fail: "Python worker failed to connect back", for ever."""
    venv.create(tmp_path / "other")
    other = str(tmp_path / "other" / "bin" / "python")
    error = refused_start(tmp_path, {**os.environ, "PYSPARK_PYTHON": other})
    answer = "(ModuleNotFoundError: No module named 'pyspark'), and this is Python"
    assert error.startswith(f'PYSPARK_PYTHON: Spark would run tasks with "{other}" {answer} {sys.version_info[0]}.')
    assert error.endswith("this PySpark and Towline.   [TL-B60]\n")
    with pytest.raises(SetupError, match=r'"/nonexistent/python" \(no such file or directory\), and this is Python'):
        check_python("local[2]", {"PYSPARK_PYTHON": "/nonexistent/python"})
    check_python("spark://h:7077", {"PYSPARK_PYTHON": "./environment/bin/python"})  # each executor is asked
    check_python("local[2]", {"PYSPARK_PYTHON": Path(sys.executable).name, "PATH": str(Path(sys.executable).parent)})
    check_python("local[2]", {})


@pytest.mark.parametrize(
    ("given", "locale"),
    [
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "C.UTF-8"),
        ({"LANG": "de_DE"}, "C.UTF-8"),
        ({}, "C.UTF-8"),
        ({"LC_ALL": "", "LC_CTYPE": "C", "LANG": "en_US.UTF-8"}, "C.UTF-8"),
        ({"LANG": "en_US.utf8"}, None),
        ({"LC_ALL": "tr_TR.UTF-8", "LANG": "C"}, "tr_TR.UTF-8"),
    ],
)
def test_spark_can_name_any_file(tmp_path: Path, given: dict[str, str], locale: str | None) -> None:
    """A JVM whose locale is C can't open the checkpoint in a directory such as this."""
    assert driver_environment(read(GOOD, tmp_path), tmp_path, given).get("LC_ALL") == locale


def test_sparks_folders_lie_in_the_state_directory(tmp_path: Path) -> None:
    place = tmp_path / 'a "b" c'
    place.mkdir()
    variables = driver_environment(read(GOOD, tmp_path), place, {"SPARK_SUBMIT_OPTS": "-Xlog:gc"})
    assert variables["SPARK_LOCAL_DIRS"] == str(place)
    options = shlex.split(variables["SPARK_SUBMIT_OPTS"])
    assert options[-2:] == ["-Xlog:gc", f"-Djava.io.tmpdir={place}"]  # of two that say the same the later counts
    users = read(GOOD + "\n[spark]\nconf = { 'spark.local.dir' = '/fast' }\n", tmp_path)
    assert "SPARK_LOCAL_DIRS" not in driver_environment(users, place, {})
    assert driver_environment(users, place, {"SPARK_LOCAL_DIRS": "/f"})["SPARK_LOCAL_DIRS"] == "/f"


def test_the_folders_of_those_who_have_ended_go(tmp_path: Path) -> None:
    left = tmp_path / SCRATCH_DIR / "spark-left"
    (left / "blockmgr-1").mkdir(parents=True)
    (left / "blockmgr-1" / "x").touch()
    first, lock = create_scratch_dir(tmp_path)
    assert not left.exists()
    holder = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    os.close(lock)
    second, other = create_scratch_dir(tmp_path)
    os.close(other)
    assert first.exists()  # its process lives
    holder.kill()
    holder.wait()
    third, lock = create_scratch_dir(tmp_path)
    assert [path.name for path in (tmp_path / SCRATCH_DIR).iterdir()] == [third.name]
    assert not second.exists()
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def test_no_line_lives_where_spark_drops_files() -> None:
    assert re.match(NAME, "tmp")
    assert not re.match(NAME, SCRATCH_DIR)


#: A path's bytes, and what Java says when a socket is bound to it.
JAVAS = (Path(__file__).parent / "java_17_0_15" / "socket_paths.txt").read_text().splitlines()
JAVAS_MOST = max(int(line.split()[0]) for line in JAVAS if line.endswith("bound"))


@pytest.mark.parametrize("temporary", ["/tmp", "/" + "t" * 99])  # noqa: S108
def test_sparks_sockets_are_never_too_long_for_java(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory of 44 bytes was one: Spark was started for ever."""
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    for length in range(2, 200):
        state_dir = Path("/" + "x" * (length - 1))
        spark = f"{state_dir}/{SCRATCH_DIR}/spark-abcdefgh"
        chosen = socket_settings(state_dir).get("spark.python.unix.domain.socket.dir")
        assert len(f"{chosen or spark}/.{uuid.uuid4()}.sock") <= JAVAS_MOST
        assert (chosen is None) == (length < 44), "a private directory where it is short enough"


def test_what_fits_into_the_state_directory_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 99)))
    near, far = (Path("/" + "x" * (JAVAS_MOST - len("/gateway.sock") + more - 1)) for more in (0, 1))
    assert socket_path(near) == near / "gateway.sock"
    elsewhere = socket_path(far)
    elsewhere.parent.rmdir()
    assert len(str(elsewhere)) < JAVAS_MOST == MAX_SOCKET_BYTES


PROGRAM = """
import os, signal, sys, time
from towline.bridge.runtime import supervisor
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.config.file import load
from towline.bridge.runtime.screen import PlainScreen
from towline.cli import main
def equipped(bridge):
    for _ in range(200):  # two that come at once may be one to the system (signal(7))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
supervisor.with_kafka_jars = equipped
supervisor.check_java = lambda: None
main(["run", sys.argv[1]])
"""


def test_a_second_ctrl_c_before_anything_runs(tmp_path: Path) -> None:
    """Maven may be at work for minutes; it used to end in an AttributeError."""
    read(GOOD, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "bridge.toml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_bridge_is_not_run_with_jars_of_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read(GOOD, tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    monkeypatch.setenv("TOWLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(supervisor, "check_java", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "bridge.toml")])
    assert ended.value.code == 2
    assert f"any user may write in {tmp_path}/cache" in capsys.readouterr().err


def test_a_master_that_does_not_answer_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SetupError) as caught:
        check_master(f"spark://127.0.0.1:{port}")
    found = failure_reason(caught.value, "spark")
    assert found.text == (
        f"spark: no master answers at 127.0.0.1:{port} (connection refused). "
        "Start it, or correct --master, or master in [spark].   [TL-S34]"
    )
    assert not found.permanent, "it is tried again: a master may be started later"


def test_one_master_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead, socket.create_server(("127.0.0.1", 0)) as server:
        gone, there = dead.getsockname()[1], server.getsockname()[1]
        dead.close()
        check_master(f"spark://127.0.0.1:{gone},127.0.0.1:{there}")


@pytest.mark.parametrize("master", ["local[*]", "yarn", "local-cluster[2,1,512]"])
def test_another_kind_of_master_is_left_to_spark(master: str) -> None:
    check_master(master)
