"""Which PySpark is there, asked without importing it, and what the name of a master says of where tasks run."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest

from towline.errors import SetupError
from towline.spark import session
from towline.spark.session import (
    check_pyspark,
    generates_secret,
    is_cluster,
    pyspark_version,
    shares_files,
    standalone_addresses,
    uses_loopback_only,
)


def test_the_one_that_is_here() -> None:
    assert pyspark_version() == pyspark.__version__
    assert check_pyspark() == (pyspark.__version__, True)


def test_one_that_no_package_manager_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "pyspark" / "version.py").write_text('__version__ = "4.2.1.dev0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert check_pyspark() == ("4.2.1.dev0", True)


def test_one_in_an_archive_as_workers_have_it_where_spark_home_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", "raise ImportError")
        archive.writestr("pyspark/version.py", '__version__: str = "4.2.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path / "pyspark.zip"))
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert check_pyspark() == ("4.2.0", True)


@pytest.mark.parametrize(
    ("installed", "what"),
    [
        (None, "PySpark is not installed, which runs the lines of a bridge; gateways, Publisher and pub don't need it"),
        ("4.1.1", "PySpark is 4.1.1; Towline works with 4.2 and 4.3"),
        ("3.5", "PySpark is 3.5; Towline works with 4.2 and 4.3"),
    ],
)
def test_one_that_does_not_do(monkeypatch: pytest.MonkeyPatch, installed: str | None, what: str) -> None:
    monkeypatch.setattr(session, "pyspark_version", lambda: installed)
    with pytest.raises(SetupError) as caught:
        check_pyspark()
    assert str(caught.value) == f'pyspark: {what}. Run: pip install "towline[spark]"   [TL-S20]'


def test_a_newer_one_is_taken_and_not_called_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "pyspark_version", lambda: "4.10.0")
    assert check_pyspark() == ("4.10.0", False)


@pytest.mark.parametrize(
    ("master", "cluster", "files", "here", "secret"),
    [
        ("local", False, True, True, True),
        ("local[*]", False, True, True, True),
        ("local[4,3]", False, True, True, True),
        ("local-cluster[2,1,512]", True, True, True, False),
        ("spark://127.0.0.1:7077", True, False, True, False),
        ("spark://localhost:7077,127.0.0.1:7078", True, False, True, False),
        ("spark://[::1]:7077", True, False, True, False),
        ("spark://m1:7077", True, False, False, False),
        ("spark://127.0.0.1:7077,m2:7077", True, False, False, False),
        ("yarn", True, False, False, True),
        ("k8s://https://api:443", True, False, False, False),
    ],
)
def test_each_kind_of_master(master: str, *, cluster: bool, files: bool, here: bool, secret: bool) -> None:
    said = (is_cluster(master), shares_files(master), uses_loopback_only(master), generates_secret(master))
    assert said == (cluster, files, here, secret)


@pytest.mark.parametrize(
    ("master", "found"),
    [
        ("local[2]", []),
        ("yarn", []),
        ("spark://m1:7077", [("m1", 7077)]),
        ("spark://[::1]:7077,m2:7078", [("::1", 7077), ("m2", 7078)]),
        ("spark://m1", []),
    ],
)
def test_the_addresses_of_standalone_masters(master: str, found: list[tuple[str, int]]) -> None:
    assert standalone_addresses(master) == found
