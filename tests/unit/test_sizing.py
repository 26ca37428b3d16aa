"""What a load needs: more of a load never needs less, and the page shows what the command prints."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.cli import main
from towline.guarantee import Guarantee
from towline.sizing import Load, requirements

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def amounts(load: Load) -> dict[str, float]:
    return {need.resource: need.amount for need in requirements(load)}


loads = st.builds(
    Load,
    rate=st.floats(0.01, 1e8),
    payload_bytes=st.integers(0, 10**6),
    outage_min=st.floats(0, 10_000),
    guarantee=st.sampled_from(Guarantee),
    sql=st.booleans(),
)
#: What is counted for all gateways together; what one of them needs falls when another is added.
WHOLE = ("Mosquittos", "gateways", "Spark cores", "parallelism", "Kafka partitions", "writes into Kafka")


@given(loads, st.floats(1, 10))
def test_a_higher_rate_never_needs_less(load: Load, times: float) -> None:
    less, more = amounts(load), amounts(replace(load, rate=load.rate * times))
    assert all(more[what] >= less[what] for what in WHOLE)
    assert more["disk of a gateway"] * more["gateways"] >= less["disk of a gateway"] * less["gateways"] * 0.999


def test_that_large_messages_cost_more_than_was_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for size, more in (("960", False), ("961", True)):
        with pytest.raises(SystemExit):
            main(["size", "--rate", "10", "--bytes", size])
        assert ("more than that has to be expected" in capsys.readouterr().out) is more


@given(loads)
def test_there_is_one_of_each_and_nobody_is_planned_beyond_half(load: Load) -> None:
    need = amounts(load)
    assert all(need[what] >= 1 for what in WHOLE[:-1])
    assert need["CPU of a gateway"] <= 0.5
    assert need["parallelism"] * 1e6 / 2.2 >= 2 * load.rate * 0.999


def shown() -> list[tuple[str, str]]:
    """The commands of the page, each with what stands below it."""
    blocks = re.findall(r"```\n\$ (towline size [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    return [(command, output) for command, output in blocks]


@pytest.mark.parametrize(("command", "output"), shown())
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str], command: str, output: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert ended.value.code == 0
    assert capsys.readouterr().out == output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--rate or --devices"),
        (["--rate", "0"], "--rate"),
        (["--devices", "5", "--every", "0"], "--every"),
        (["--rate", "5", "--every", "3"], "--every belongs to --devices"),
        (["--rate", "5", "--outage", "1e300"], "--outage"),
        (["--rate", "5", "--bytes", "268435456"], "--bytes"),
        (["--rate", "5", "--guarantee", "exactly"], "--guarantee"),
    ],
)
def test_a_mistake_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["size", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
