"""Members of a line in a bridge file: what each is told, and the line each mistake gets."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read, told
from tests.unit.bridge.test_listening import LISTENING
from tests.unit.gateway.remote import Pki
from towline.bridge.config.model import Bridge
from towline.bridge.config.subscriptions import restrict_filters
from towline.bridge.runtime.plan import bridge_plan, render
from towline.bridge.runtime.supervisor import _check_members
from towline.errors import ConfigError
from towline.mqtt.events import Filter

MEMBERS = '\n[[uplink.member]]\nname = "g2"\n[[uplink.member]]\nname = "g1"\n'
FILTERS = '\n[[uplink.member]]\nname = "north"\nfilters = ["telemetry/n/#"]\n[[uplink.member]]\nname = "south"\nfilters = ["telemetry/s/#"]\n'


def with_line(keys: str, more: str = "", text: str = GOOD) -> str:
    return text.replace('name = "telemetry"\n', f'name = "telemetry"\n{keys}\n', 1) + more


def test_each_member_has_a_name_a_client_id_and_a_directory_of_its_own(tmp_path: Path) -> None:
    (line,) = read(with_line('share = "subscription"', MEMBERS), tmp_path).uplinks
    second, first = line.members
    assert [one.mqtt_client_id for one in line.members] == ["plant-7-telemetry-g2", "plant-7-telemetry-g1"]
    assert [one.name for one in line.members] == ["telemetry-g2", "telemetry-g1"]
    assert first.state_dir == tmp_path / "state" / "telemetry" / "members" / "g1"
    assert first.share is not None
    assert second.share is not None
    assert first.share.members == second.share.members == ("g1", "g2")


def test_by_filters_a_member_takes_its_part_of_the_routes(tmp_path: Path) -> None:
    (line,) = read(with_line("", FILTERS), tmp_path).uplinks
    assert [[s.pattern for s in one.subscriptions] for one in line.members] == [["telemetry/n/#"], ["telemetry/s/#"]]


def test_filters_narrow_what_the_routes_subscribe() -> None:
    subscriptions = (Filter("t/+/temp", 2), Filter("t/+/state/#", 1), Filter("u", 1))
    found = restrict_filters(("t/a/#", "+/b/+"), subscriptions)
    assert {(one.pattern, one.qos) for one in found} == {
        ("t/a/temp", 2),
        ("t/b/temp", 2),
        ("t/a/state/#", 1),
        ("t/b/state", 1),
    }
    assert restrict_filters(("t/#", "t/a/#"), (Filter("t/#", 1),)) == (Filter("t/#", 1),), "one covers the other"
    assert restrict_filters(("x/#",), subscriptions) == ()


def test_what_a_wider_filter_of_a_member_takes_too_is_subscribed_as_the_stronger_promise_needs() -> None:
    """What filters of routes that only overlap make of a member's filter may cover each other."""
    once, weaker = Filter("t/+/c", 2), Filter("t/b/+", 0)
    for subscriptions in ((once, weaker), (weaker, once)):
        assert restrict_filters(("t/b/#",), subscriptions) == (Filter("t/b/+", 2),)
        assert {(one.pattern, one.qos) for one in restrict_filters(("t/#",), subscriptions)} == {
            ("t/+/c", 2),
            ("t/b/+", 0),
        }


def test_by_subscription_the_broker_chooses(tmp_path: Path) -> None:
    (line,) = read(with_line('share = "subscription"', MEMBERS), tmp_path).uplinks
    assert {s.pattern for one in line.members for s in one.subscriptions} == {"$share/plant-7-telemetry/telemetry/+/#"}
    (line,) = read(with_line('share = "subscription"\nshare_group = "ours"', MEMBERS), tmp_path).uplinks
    assert line.members[0].subscriptions[0].pattern == "$share/ours/telemetry/+/#"


def test_a_bridge_with_members_travels_as_json(tmp_path: Path) -> None:
    bridge = read(with_line('share = "subscription"', MEMBERS), tmp_path)
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge


def test_a_member_is_found_by_its_name(tmp_path: Path) -> None:
    bridge = read(with_line('share = "subscription"', MEMBERS), tmp_path)
    (line,) = bridge.uplinks
    assert line.member_settings("g1", bridge.file).name == "telemetry-g1"
    with pytest.raises(ConfigError, match=r'has no member "g3"\. Known here: g1, g2\.   \[TL-C120\]'):
        line.member_settings("g3", bridge.file)


ONE_NAME = MEMBERS.replace("g2", "g1")
RECEIPTS = 'share = "subscription"\nreceipts = { key_file = "bridge.toml" }'
OLD = 'share = "subscription"\nmqtt = { protocol = "3.1.1" }'
NO_LOCAL = MEMBERS.replace("\n", "\nno_local = true\n", 1)


@pytest.mark.parametrize(
    ("keys", "more", "code", "line", "said"),
    [
        ("", MEMBERS, "TL-C122", 10, ["share is missing", 'share = "subscription"']),
        ('share = "subscription"', "", "TL-C111", 12, ["share has no effect without members", "[[uplink.member]]"]),
        ('share_group = "x"', "", "TL-C111", 12, ["share_group has no effect without members"]),
        ('share = "subscription"', FILTERS, "TL-C122", 20, ['"north" has filters', 'share = "subscription"']),
        ('share = "filters"', MEMBERS, "TL-C122", 18, ['"g2" has no filters', 'share = "filters"']),
        ('share = "filters"\nshare_group = "x"', FILTERS, "TL-C111", 13, ['share_group has no effect with share = "filters"']),
        ('share = "subscription"', ONE_NAME, "TL-C18", 21, ['"telemetry-g1"', "another line, or a member of one"]),
        ("", FILTERS.replace("telemetry/s/#", "+/n/x"), "TL-C121", 23, ['"north" and "south" both match "telemetry/n/x"']),
        ("", FILTERS.replace("telemetry/s/#", "alarms/#"), "TL-C124", 23, ['"alarms/#" of member "south" matches no topic']),
        ("", FILTERS.replace("telemetry/s/#", "telemetry/s#"), "TL-C67", 23, ['"telemetry/s#"', "stands alone and last"]),
        ("", FILTERS.replace("telemetry/s/#", ""), "TL-C67", 23, ["it is empty"]),
        ("", FILTERS.replace('"tele', '"$share/g/tele'), "TL-C67", 20, ["it is a shared subscription"]),
        (RECEIPTS, MEMBERS, "TL-C05", 13, ["receipts need every message of a publisher", "$share/"]),
        (OLD, MEMBERS, "TL-C05", 13, ["$share/", 'needs protocol "5"']),
        ('share = "subscription"', NO_LOCAL, "TL-C05", 19, ["no_local can't be used with a shared subscription"]),
        ('share = "subscription"', MEMBERS.replace("g2", "x" * 65), "TL-C03", 19, ['"name"', "at most 64"]),
        ('share = "subscription"', MEMBERS.replace("g2", "x" * 60), "TL-C125", 19, ["more than 64 characters"]),
        ('share = "chance"', MEMBERS, "TL-C03", 12, ['"share" must be "filters" or "subscription"']),
    ],
)  # fmt: skip
def test_mistakes(keys: str, more: str, code: str, line: int, said: list[str], tmp_path: Path) -> None:
    found, *_ = told(with_line(keys, more), tmp_path)
    assert (found.partition(" ")[0], found[-(len(code) + 2) :]) == (f"bridge.toml:{line}", f"[{code}]"), found
    assert [part for part in said if part not in found] == [], found


def test_a_shared_route_and_members_are_two_ways_at_once(tmp_path: Path) -> None:
    text = with_line('share = "subscription"', MEMBERS).replace('from = "tele', 'from = "$share/g/tele')
    (found,) = told(text, tmp_path)
    assert "is a shared subscription, and the line has members" in found
    assert "[TL-C125]" in found


def test_no_two_gateways_have_one_name(tmp_path: Path) -> None:
    other = '\n[[uplink]]\nname = "telemetry-g1"\n[[uplink.route]]\nfrom = "x"\ntopic = "x"\n'
    (said,) = told(with_line('share = "subscription"', MEMBERS) + other, tmp_path)
    assert 'another line, or a member of one, is "telemetry-g1" too' in said
    assert "TL-C18" in said


@pytest.mark.parametrize(
    ("keys", "more", "shown"),
    [
        (
            'share = "subscription"',
            MEMBERS,
            [
                "share     subscription   order not kept; the broker gives each message to one member",
                "the order of a device's messages is not kept",
                "wait in its session; no other member gets them",
            ],
        ),
        (
            'share = "subscription"\ndedupe = { key = "{mqtt.user.id}" }',
            MEMBERS,
            ["repeats may come to different members; one query that reads all of them drops them all the same."],
        ),
        (
            "",
            FILTERS,
            [
                "share     filters   order kept for each topic",
                "member    north   client id plant-7-telemetry-north   telemetry/n/# (QoS 1)",
                'of "telemetry/+/#" only what the members\' filters take is received',
            ],
        ),
        (
            'receipts = { key_file = "bridge.toml" }',
            FILTERS,
            ["receipts: a publisher whose messages come to several members"],
        ),
    ],
)
def test_check_says_what_it_does_to_order(keys: str, more: str, shown: list[str], tmp_path: Path) -> None:
    text = render(bridge_plan(read(with_line(keys, more), tmp_path)))
    for part in shown:
        assert part in text, text


def test_a_filter_with_a_variable_is_told_as_the_file_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE", "telemetry")
    text = with_line("", FILTERS).replace('from = "telemetry/', 'from = "${SITE}/')
    (warning,) = bridge_plan(read(text, tmp_path, {"SITE": "telemetry"}))["warnings"]
    assert 'of "${SITE}/+/#" only what the members' in warning


def test_one_file_says_it_for_every_machine(tmp_path: Path) -> None:
    """Members for the machines of gateways, `gateways` for the one with the query; all else as each of them needs it."""
    Pki.made(tmp_path / "pki")
    keys = 'share = "subscription"\njournal = { max_bytes = "1 GiB" }\ngateways = ["grpc+tls://g1:8815", "grpc+tls://g2:8815"]'
    bridge = read(with_line(keys, f"{MEMBERS}\n{LISTENING}"), tmp_path)
    (line,) = bridge.uplinks
    assert line.gateways == ("grpc+tls://g1:8815", "grpc+tls://g2:8815")
    assert all(one.listen and one.listen.address == "0.0.0.0:8815" for one in line.members)
    assert all(one.journal.max_bytes == 1 << 30 for one in line.members)
    _check_members(bridge)
    text = render(bridge_plan(bridge))
    for part in (
        "gateways  grpc+tls://g1:8815",
        "broker    mqtt",
        "share     subscription",
        "g1   client id plant-7-telemetry-g1",
        "acks      when",
    ):
        assert part in text, text


def test_without_members_what_belongs_to_gateways_elsewhere_is_refused(tmp_path: Path) -> None:
    keys = 'journal = { max_bytes = "1 GiB" }\ngateways = ["/var/lib/g1"]'
    (mistake,) = told(with_line(keys), tmp_path)
    assert "journal has no effect with gateways" in mistake
