"""The public surface: what is there, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import towline


@pytest.mark.parametrize("name", towline.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(towline, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        towline.nothing  # noqa: B018 - the look-up is the test


#: Modules that load none of some packages.
LIGHT = {
    "the package": ("gateway.client spark.link", "pyspark confluent_kafka pyarrow pydantic"),
    "look-ups": ("kafka.admin kafka.options", "pyspark"),
    # Each of Spark's workers pays for its imports when it starts: pydantic alone is 0.2 s of CPU.
    "workers": (
        "spark.reader spark.sink spark.kafka_sink bridge.uplink.sink bridge.downlink.sink",
        "pydantic structlog typer rich",
    ),
    # A gateway and a publisher are without a server, and `towline status` reads a monitor without one.
    "without an address": (
        "cli.gateway gateway.process monitor.serving monitor.table publisher cli.status bridge.runtime.status",
        "starlette uvicorn anyio",
    ),
}


@pytest.mark.parametrize("what", LIGHT)
def test_a_module_loads_what_it_needs(what: str) -> None:
    modules, absent = map(str.split, LIGHT[what])
    program = f"import sys, towline, {', '.join(f'towline.{name}' for name in modules)}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(answer.stdout.split()).isdisjoint(absent)


def test_discovery_finds_the_sink() -> None:
    package = import_module("pyspark_kafka_transactional")
    assert package.DefaultSource.name() == "kafka_transactional"


def test_discovery_never_raises() -> None:
    """One broken pyspark_* package would disable the discovery of all."""
    broken = "import sys; sys.modules['confluent_kafka'] = None; import pyspark_kafka_transactional as p"
    code = f"{broken}; assert not hasattr(p, 'DefaultSource')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
