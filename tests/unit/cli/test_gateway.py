"""`towline gateway` of a line with members: what it is told that can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran

MEMBERS = '\n[[uplink.member]]\nname = "g1"\n[[uplink.member]]\nname = "g2"\n'
DOWNLINK = '\n[[downlink]]\nname = "commands"\nfrom = "commands"\ntopic = "c/{key}"\n'


@pytest.fixture
def shared(tmp_path: Path) -> str:
    file = tmp_path / "bridge.toml"
    file.write_text(
        GOOD.replace('name = "telemetry"\n', 'name = "telemetry"\nshare = "subscription"\n') + MEMBERS + DOWNLINK
    )
    return str(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--line", "telemetry"],
            'line "telemetry" has several gateways: g1, g2. Name the one of this machine with --member.',
        ),
        (["--line", "telemetry", "--member", "g3"], 'line "telemetry" has no member "g3". Known here: g1, g2.'),
        (["--line", "commands", "--member", "g1"], "a downlink has no members. Leave out --member."),
    ],
)
def test_what_cant_be_is_one_line(
    shared: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ran(capsys, "gateway", shared, *options)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_line_without_members_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    code, _, err = ran(capsys, "gateway", str(file), "--member", "g1")
    assert code == 2
    assert 'line "telemetry" has no member "g1". Add it as [[uplink.member]], or omit --member.   [TL-C120]' in err


def test_a_bridge_does_not_start_what_belongs_to_other_machines(
    shared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = ran(capsys, "run", shared)
    assert code == 2
    assert 'line "telemetry" has 2 gateways, and their locations are missing' in err
    assert "TL-C127" in err
