"""How Spark's JVM is tuned."""

from __future__ import annotations

import os

import pytest

from towline.errors import SetupError
from towline.spark import quickstart
from towline.spark.quickstart import Tier, jvm_options

ONE_COMPILER = "-XX:TieredStopAtLevel=1"


@pytest.mark.parametrize(("cores", "quick"), [(1, True), (2, True), (3, False), (16, False)])
def test_auto_takes_one_compiler_where_cores_are_few(monkeypatch: pytest.MonkeyPatch, cores: int, quick: bool) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert (ONE_COMPILER in jvm_options(Tier.AUTO)) is quick
    assert ONE_COMPILER in jvm_options(Tier.QUICK)
    assert ONE_COMPILER not in jvm_options(Tier.PEAK)


@pytest.mark.parametrize(("release", "known"), [(17, True), (23, True), (24, False), (None, False)])
def test_what_a_newer_java_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, release: int | None, known: bool
) -> None:
    monkeypatch.setattr(quickstart, "find_java", lambda: "java")
    monkeypatch.setattr(quickstart, "java_version", lambda _java: release)
    assert ("-Djdk.lang.Process.launchMechanism=VFORK" in jvm_options(Tier.PEAK)) is known


def test_a_java_that_only_spark_knows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise SetupError("TL-S14", "java", "none", "Install it.")

    monkeypatch.setattr(quickstart, "find_java", none)
    assert jvm_options(Tier.QUICK)
