"""A process with a root of its own: it sees what it is given, writes one directory, and keeps its pid."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline_prove.devstack import spark
from towline_prove.devstack.spark import enclose_command, towline_python_paths


def run(script: str, own: Path, *visible: Path, shared: tuple[Path, ...] = ()) -> str:
    try:
        command = enclose_command(["sh", "-c", script], own, visible, shared)
    except SetupError as error:
        lacking(str(error))
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.parametrize("way", spark._UNSHARE_COMMANDS, ids=["as root", "in a user namespace"])
def test_it_sees_its_own_and_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: tuple[str, ...]
) -> None:
    monkeypatch.setattr(spark, "_unshare", lambda: (*way, *spark._UNSHARE_OPTIONS))
    if subprocess.run([*way, *spark._UNSHARE_OPTIONS, "true"], capture_output=True, check=False).returncode:
        lacking(f"{' '.join(way)} is not allowed here")
    own, given, hidden = (tmp_path / name for name in ("own", "given", "hidden"))
    for place in (own, given, hidden):
        place.mkdir()
        (place / "file").write_text(f"{place.name}\n")
    said = run(f"pwd; cat {own}/file {given}/file; ls {tmp_path}; echo new > made", own, given)
    assert said.split() == [str(own), "own", "given", "given", "own"]
    assert (own / "made").read_text() == "new\n"


def test_what_it_is_given_it_cant_write(tmp_path: Path) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    own.mkdir()
    given.mkdir()
    assert run(f"echo x > {given}/file 2>/dev/null && echo written || echo refused", own, given) == "refused\n"


def test_a_single_file_is_given_alone_and_what_is_shared_may_be_written(tmp_path: Path) -> None:
    own, place, shared = tmp_path / "own", tmp_path / "place", tmp_path / "shared"
    for one in (own, place, shared):
        one.mkdir()
    (place / "given").write_text("given\n")
    (place / "hidden").write_text("hidden\n")
    said = run(f"ls {place}; cat {place}/given; echo x > {shared}/made", own, place / "given", shared=(shared,))
    assert said.split() == ["given", "given"]
    assert (shared / "made").read_text() == "x\n"


def test_it_keeps_its_pid(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    try:
        command = enclose_command(["sh", "-c", "echo $$"], own, ())
    except SetupError as error:
        lacking(str(error))
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
        assert int(said) == process.pid


def test_python_is_among_what_is_given_and_the_working_directory_is_not() -> None:
    places = towline_python_paths()
    assert all(place.is_absolute() for place in places)
    assert Path.cwd() not in places


def test_where_nobody_may_mount_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_UNSHARE_COMMANDS", (("false",), ("no-such-program",)))
    spark._unshare.cache_clear()
    try:
        with pytest.raises(SetupError) as caught:
            enclose_command(["true"], tmp_path, ())
    finally:
        spark._unshare.cache_clear()
    assert str(caught.value).startswith("unshare --mount: this user gets no mount namespaces")
    assert str(caught.value).endswith("[TL-S30]")
