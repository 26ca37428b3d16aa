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


def imported_by(code: str) -> set[str]:
    program = f"{code}\nimport sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(answer.stdout.split())


def test_importing_the_package_is_light() -> None:
    heavy = {"pyspark", "confluent_kafka", "pyarrow"}
    assert imported_by("import towline, towline.gateway.client, towline.spark.link").isdisjoint({*heavy, "pydantic"})


def test_the_look_ups_need_no_spark() -> None:
    assert "pyspark" not in imported_by(
        "from towline.kafka.admin import KafkaAdmin; from towline.kafka.options import SinkSettings"
    )


def test_sparks_workers_load_no_models() -> None:
    """Each worker pays for its imports when it starts: pydantic alone is 0.2 s of CPU."""
    names = ("spark.reader", "spark.sink", "spark.kafka_sink", "bridge.uplink.sink", "bridge.downlink.sink")
    code = f"import {', '.join(f'towline.{name}' for name in names)}"
    assert imported_by(code).isdisjoint({"pydantic", "structlog", "typer", "rich"})


def test_a_server_is_loaded_where_an_address_asks_for_it() -> None:
    """A gateway and a publisher are without one, and `towline status` reads a monitor without one."""
    names = ("cli.gateway", "gateway.process", "monitor.serving", "monitor.table", "publisher", "cli.status")
    code = f"import {', '.join(f'towline.{name}' for name in (*names, 'bridge.runtime.status'))}"
    assert imported_by(code).isdisjoint({"starlette", "uvicorn", "anyio"})


def test_discovery_finds_the_sink() -> None:
    package = import_module("pyspark_kafka_transactional")
    assert package.DefaultSource.name() == "kafka_transactional"


def test_discovery_never_raises() -> None:
    """One broken pyspark_* package would disable the discovery of all."""
    broken = "import sys; sys.modules['confluent_kafka'] = None; import pyspark_kafka_transactional as p"
    code = f"{broken}; assert not hasattr(p, 'DefaultSource')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
