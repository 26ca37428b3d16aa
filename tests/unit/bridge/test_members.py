"""Members and network listeners of lines in a bridge file: what each is told, and the line each mistake gets."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, content, read, told
from tests.unit.bridge.test_config import line as with_line
from tests.unit.gateway.remote import Pki
from towline.bridge.config.model import Bridge
from towline.bridge.config.subscriptions import restrict_filters
from towline.bridge.runtime.plan import plan_text
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import collect_status
from towline.bridge.runtime.status import render as render_status
from towline.bridge.runtime.supervisor import _check_members
from towline.errors import ConfigError
from towline.gateway.access import ClientAccess
from towline.mqtt.events import Filter

LISTENING = """\
[gateway]
listen = "0.0.0.0:8815"
cert_file = "pki/server.pem"
key_file = "pki/server.key"
token_file = "pki/token"
"""
OTHER = """
[[downlink]]
name = "commands"
from = "commands"
"""
MEMBERS = '\n[[uplink.member]]\nname = "g2"\n[[uplink.member]]\nname = "g1"\n'
FILTERS = '\n[[uplink.member]]\nname = "north"\nfilters = ["telemetry/n/#"]\n[[uplink.member]]\nname = "south"\nfilters = ["telemetry/s/#"]\n'


def test_each_member_has_a_name_a_client_id_and_a_directory_of_its_own(tmp_path: Path) -> None:
    bridge = read(with_line('share = "subscription"') + MEMBERS, tmp_path)
    (line,) = bridge.uplinks
    second, first = line.members
    assert [one.mqtt_client_id for one in line.members] == ["plant-7-telemetry-g2", "plant-7-telemetry-g1"]
    assert line.member_settings("g1", bridge.file) == first
    assert (first.name, first.state_dir) == ("telemetry-g1", tmp_path / "state" / "telemetry" / "members" / "g1")
    assert [one.share and one.share.members for one in (first, second)] == [("g1", "g2")] * 2
    assert [one.pattern for one in first.subscriptions] == ["$share/plant-7-telemetry/telemetry/+/#"]
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    with pytest.raises(ConfigError, match=r'has no member "g3"\. Known here: g1, g2\.   \[TL-C120\]'):
        line.member_settings("g3", bridge.file)
    (line,) = read(GOOD + FILTERS, tmp_path).uplinks
    assert [[s.pattern for s in one.subscriptions] for one in line.members] == [["telemetry/n/#"], ["telemetry/s/#"]]


def test_filters_narrow_what_the_routes_subscribe() -> None:
    """A filter that another one covers is left out, and the wider one gets the stronger QoS."""

    def restricted(filters: tuple[str, ...], *subscriptions: Filter) -> set[tuple[str, int]]:
        return {(one.pattern, one.qos) for one in restrict_filters(filters, subscriptions)}

    several = (Filter("t/+/temp", 2), Filter("t/+/state/#", 1), Filter("u", 1))
    narrowed = {("t/a/temp", 2), ("t/b/temp", 2), ("t/a/state/#", 1), ("t/b/state", 1)}
    assert restricted(("t/a/#", "+/b/+"), *several) == narrowed
    assert restricted(("t/#", "t/a/#"), Filter("t/#", 1)) == {("t/#", 1)}
    once, weaker = Filter("t/+/c", 2), Filter("t/b/+", 0)
    for subscriptions in ((once, weaker), (weaker, once)):
        assert restricted(("t/b/c",), *subscriptions) == {("t/b/c", 2)}
        assert restricted(("t/b/#",), *subscriptions) == {("t/b/+", 2)}
        assert restricted(("t/#",), *subscriptions) == {("t/+/c", 2), ("t/b/+", 0)}


ONE_NAME = MEMBERS.replace("g2", "g1")
OLD = 'share = "subscription"\nmqtt = { protocol = "3.1.1" }'


@pytest.mark.parametrize(
    ("keys", "more", "code", "line", "said"),
    [
        ("", MEMBERS, "TL-C122", 10, ["share is missing", 'share = "subscription"']),
        ('share = "subscription"', "", "TL-C111", 12, ["share has no effect without members", "[[uplink.member]]"]),
        ('journal = { max_bytes = "1 GiB" }\ngateways = ["/var/lib/g1"]', "", "TL-C111", 12, ["journal has no effect with gateways"]),
        ('share = "subscription"', FILTERS, "TL-C122", 20, ['"north" has filters', 'share = "subscription"']),
        ('share = "subscription"', ONE_NAME, "TL-C18", 21, ['"telemetry-g1"', "another line, or a member of one"]),
        ("", FILTERS.replace("telemetry/s/#", "+/n/x"), "TL-C121", 23, ['"north" and "south" both match "telemetry/n/x"']),
        ("", FILTERS.replace("telemetry/s/#", "alarms/#"), "TL-C124", 23, ['"alarms/#" of member "south" matches no topic']),
        ("", FILTERS.replace("telemetry/s/#", "telemetry/s#"), "TL-C67", 23, ['"telemetry/s#"', "stands alone and last"]),
        (OLD, MEMBERS, "TL-C05", 13, ["$share/", 'needs protocol "5"']),
        ('share = "subscription"', f'{MEMBERS}[[uplink.route]]\nfrom = "$share/g/a"\ntopic = "a"\n', "TL-C125", 10, ['"$share/g/a" is a shared subscription, and the line has members']),
        ('share = "subscription"', MEMBERS.replace("g2", "x" * 60), "TL-C125", 19, ["more than 64 characters"]),
    ],
)  # fmt: skip
def test_mistakes(keys: str, more: str, code: str, line: int, said: list[str], tmp_path: Path) -> None:
    found, *_ = told(with_line(keys) + more, tmp_path)
    assert (found.partition(" ")[0], found[-(len(code) + 2) :]) == (f"bridge.toml:{line}", f"[{code}]"), found
    assert [part for part in said if part not in found] == [], found


@pytest.mark.parametrize(
    ("keys", "more", "shown"),
    [
        ('share = "subscription"', MEMBERS, ["order of a device's messages is not kept"]),
        ('receipts = { key_file = "bridge.toml" }', FILTERS, ["never has all its receipts"]),
        ("", FILTERS, ["north   client id plant-7-telemetry-north   telemetry/n/# (QoS 1)", "only what the members' filters"]),
    ],
)  # fmt: skip
def test_check_says_what_it_does_to_order(keys: str, more: str, shown: list[str], tmp_path: Path) -> None:
    text = plan_text(read(with_line(keys) + more, tmp_path))
    assert [part for part in shown if part not in text] == [], text


def test_one_file_says_it_for_every_machine(tmp_path: Path) -> None:
    """Members for the machines of gateways, `gateways` for the one with the query; all else as each of them needs it."""
    Pki.made(tmp_path / "pki")
    keys = 'share = "subscription"\njournal = { max_bytes = "1 GiB" }\ngateways = ["grpc+tls://g1:8815"]'
    bridge = read(f"{with_line(keys)}{MEMBERS}\n{LISTENING}", tmp_path)
    (line,) = bridge.uplinks
    assert line.gateways == ("grpc+tls://g1:8815",)
    assert all(one.listen and one.listen.address == "0.0.0.0:8815" for one in line.members)
    assert all(one.journal.max_bytes == 1 << 30 for one in line.members)
    _check_members(bridge)


# -- listeners ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki.made(tmp_path / "pki")


def test_each_line_has_an_address(tmp_path: Path, pki: Pki) -> None:
    text = GOOD + OTHER + LISTENING
    (mistake,) = told(text, tmp_path)
    assert mistake.startswith(
        'bridge.toml:17  downlink "commands": its gateway would listen on "0.0.0.0:8815", as that'
    )
    assert mistake.endswith("[TL-C99]")
    bridge = read(text.replace('from = "commands"', 'from = "commands"\nlisten = "[::]:1"'), tmp_path)
    places = [line.gateway.listen and line.gateway.listen.location for line in bridge.lines]
    assert places == ["grpc+tls://0.0.0.0:8815", "grpc+tls://[::]:1"]
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    one = read(text.replace('from = "commands"', 'from = "commands"\nlisten = false'), tmp_path)
    assert [line.gateway.listen is None for line in one.lines] == [False, True]


def test_spark_elsewhere_gets_its_access(tmp_path: Path, pki: Pki) -> None:
    table = '[gateway]\ntoken_file = "pki/token"\nca_file = "pki/ca.pem"\nserver_name = "g1"\nticket_valid_s = 7200\n'
    bridge = read(GOOD + table, tmp_path)
    access = ClientAccess(str(pki.directory / "token"), str(pki.directory / "ca.pem"), "g1")
    assert (bridge.gateway.access(), bridge.lines[0].gateway.listen) == (access, None)
    assert bridge.gateway.spark_options()["gatewayTicketValidity"] == "7200"
    assert read(GOOD, tmp_path).gateway.access() == ClientAccess()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("pki/token", "pki/tokens", "bridge.toml:20  [gateway]: token_file pki/tokens is missing, mode 0600.   [TL-C15]"),
        ("pki/server.key", "pki/client.key", "bridge.toml:18  [gateway]: cert_file: no matching PEM in cert_file and key_file, or one with a password (key values mismatch).   [TL-C97]"),
        ("pki/token", "pki/open", "bridge.toml:20  [gateway]: token_file: every user may read it. chmod 600 it.   [TL-C98]"),
        ('listen = "0.0.0.0:8815"', 'listen = "host"', 'bridge.toml:17  [gateway]: it is no address. Write it as "127.0.0.1:9464".   [TL-C05]'),
        ('token_file = "pki/token"\n', "", 'bridge.toml:17  [gateway]: "token_file" is missing.   [TL-C02]'),
        ('token_file = "pki/token"', 'token = "abc"', 'bridge.toml:20  [gateway]: "token" would put a secret here. A file of mode 0600, token_file.   [TL-C16]'),
    ],
)  # fmt: skip
def test_a_mistake_of_a_listener_is_one_line(tmp_path: Path, pki: Pki, old: str, new: str, expected: str) -> None:
    (pki.directory / "open").write_text("hush-hush-hush-hush")
    (pki.directory / "open").chmod(0o644)
    lines = told(GOOD + LISTENING.replace(old, new), tmp_path)
    assert content(expected) in map(content, lines), lines
    assert all(line.startswith("bridge.toml:") for line in lines)
    assert "hush-hush" not in "".join(lines)


def test_status_shows_where_it_listens(tmp_path: Path) -> None:
    listen = {"location": "grpc+tls://0.0.0.0:8815", "certificate_until": "2027-02-03T04:05:06+00:00", "refused": 1200}
    BridgeState("b", tmp_path, {"telemetry": "up"}).save()
    status = collect_status(tmp_path)
    status["lines"]["telemetry"].update(gateway_running=True, gateway={"listen": listen})
    text = render_status(status)
    assert "network   grpc+tls://0.0.0.0:8815   token   certificate until 2027-02-03" in text
    assert "refused calls 1,200" in text
