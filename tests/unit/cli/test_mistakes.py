"""A mistake in any command: exit code 2, nothing on stdout, and one line that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran

MEMBERS = '\n[[uplink.member]]\nname = "g1"\n[[uplink.member]]\nname = "g2"\n'
DOWNLINK = '\n[[downlink]]\nname = "commands"\nfrom = "commands"\ntopic = "c/{key}"\n'
#: A bridge file with one line, one whose line has two gateways, and one that is not there.
ALONE, SHARED, MISSING = "alone.toml", "shared.toml", "nowhere.toml"
#: One with two downlinks.
SEVERAL_DOWN = "several.toml"
SHOW = ("kafka", "marker", "show", "--kafka", "127.0.0.1:1", "--sink", "s", "-X", "securty.protocol=ssl")
PUB = ("pub", "mqtt://127.0.0.1:9")
NO_LETTERS = "no line has a dead-letter topic. Give the line dead_letter_topic"
NO_MEMBERS = 'line "telemetry" has no member "g1". Add it as [[uplink.member]], or omit --member.   [TL-C120]'
SEVERAL = 'line "telemetry" has several gateways: g1, g2. Name the one of this machine with --member.'

#: Arguments, and what is said; " … " stands for anything between.
MISTAKES: list[tuple[Sequence[str], str]] = [
    (("chek",), 'towline: there is no command "chek". Did you mean "check"?   [TL-C01]\n'),
    (("--nope",), 'towline: there is no option "--nope". See towline --help.   [TL-C01]\n'),
    *(((command, MISSING), "[TL-C10]\n") for command in ("check", "run", "gateway", "status", "doctor")),
    (("status", "--state-dir", "."), "no bridge has run here"),
    (("dlq", "replay", ALONE), NO_LETTERS),
    (
        ("dlq", "replay", ALONE, "--line", "telemetri"),
        'no line is named "telemetri". Did you mean "telemetry"?   [TL-C73]',
    ),
    (("doctor", ALONE, "--mosquitto-conf", "nowhere.conf"), "TL-C155"),
    (("explain", "TL-C999"), 'towline explain: there is no code "TL-C999". Did you mean "TL-C99"?   [TL-C21]\n'),
    (("explain", "M399"), 'towline explain: there is no code "M399". Did you mean "TL-M49"?   [TL-C21]\n'),
    (
        ("explain", "of\x1b[2J"),
        'no code "of\\x1b[2J". It stands at the end of an error\'s line, as TL-C12.   [TL-C21]\n',
    ),
    (("gateway", SHARED, "--line", "telemetry"), SEVERAL),
    (("gateway", SHARED, "--line", "telemetry", "--member", "g3"), 'has no member "g3". Known here: g1, g2.'),
    (("gateway", SHARED, "--line", "commands", "--member", "g1"), "a downlink has no members. Leave out --member."),
    (("gateway", ALONE, "--member", "g1"), NO_MEMBERS),
    (("message", MISSING, "--offset", "1"), "[TL-C10]\n"),
    (("message", SHARED, "--offset", "1"), 'line "telemetry" has the gateways … [TL-C120]\n'),
    (("message", SHARED, "--line", "commands", "--offset", "1"), 'line "commands" is a downlink. … [TL-C73]\n'),
    (("message", ALONE, "--line", "telemetri", "--offset", "1"), 'Did you mean "telemetry"?   [TL-C73]\n'),
    (("message", ALONE), "Give one of --offset, --kafka, --device and --receipt, … [TL-C21]\n"),
    (("message", ALONE, "--offset", "1", "--device", "d"), "Give one of … [TL-C21]\n"),
    (("message", ALONE, "--kafka", "t/1"), "Give one of … [TL-C21]\n"),
    (("message", ALONE, "--receipt", "p/x"), "Give one of … [TL-C21]\n"),
    (("run", SHARED), 'line "telemetry" has 2 gateways, and their locations are missing … TL-C127'),
    (("init", "new.toml", "--broker", "http://b"), "--broker: a broker is mqtt://HOST[:PORT], mqtts://, … [TL-C163]\n"),
    (("init", "new.toml", "--topic", "{device}"), "--topic: … [TL-C163]\n"),
    (
        ("init", "new.toml", "--guarantee", "exactly_once", "--broker", "mqtt://a,mqtt://b"),
        "--guarantee: QoS 2 with 2 brokers needs them to share sessions … [TL-C163]\n",
    ),
    (("init", "new.toml", "--name", "-x"), 'towline init: "name" must match pattern'),
    (SHOW, 'Did you mean "kafka.security.protocol"?'),
    *(
        ((*PUB, topic, "text", *more, *durable), "TL-C5")
        for topic, more in (("a/#", ()), ("\udcff", ()), ("a", ("--property", "a=\udcff")), ("x" * 70_000, ()))
        for durable in ((), ("--durable", "p"))
    ),
    (("refused", "show", "."), "TL-C93"),
    (("refused", "show", ".", "--line", "x"), "TL-C94"),
    (
        ("refused", "show", SEVERAL_DOWN, "--at", "0"),
        "there are several lines: commands, others. Name one with --line.",
    ),
    (("refused", "show", SHARED, "--at", "0"), "--at 0: no such message is there"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=[arguments[0] for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: Sequence[str],
    told: str,
) -> None:
    (tmp_path / ALONE).write_text(GOOD)
    shared = GOOD.replace('name = "telemetry"\n', 'name = "telemetry"\nshare = "subscription"\n')
    (tmp_path / SHARED).write_text(shared + MEMBERS + DOWNLINK)
    (tmp_path / SEVERAL_DOWN).write_text(GOOD + DOWNLINK + DOWNLINK.replace('name = "commands"', 'name = "others"'))
    monkeypatch.chdir(tmp_path)
    code, out, err = ran(capsys, *arguments)
    assert (code, out) == (2, "")
    assert all(part in err for part in told.split(" … "))
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    assert not (tmp_path / "new.toml").exists()
