"""``profile = "hono"`` in a bridge file: what it stands for, and its mistakes."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import content, read, told
from towline.bridge.config.tables import KafkaPattern
from towline.bridge.patterns import sql_literal

FILE = """
name = "plant"
state_dir = "state"
[mqtt]
brokers = ["mqtt://h"]
[kafka]
bootstrap_servers = "k:9092"
create_topics = true
[hono.tenants.t1]
[[uplink]]
name = "up"
profile = "hono"
[[downlink]]
name = "commands"
profile = "hono"
[[downlink]]
name = "errors"
profile = "hono-errors"
"""


def test_a_profile_is_what_a_user_could_write_by_hand(tmp_path: Path) -> None:
    bridge = read(FILE, tmp_path)
    (up,) = bridge.uplinks
    assert (up.guarantee, {one.promise for one in up.route}) == ("exactly_once", {"at_least_once"})
    filters = "telemetry/# t/# event/# e/# command/+/+/res/# c/+/+/s/#"
    assert " ".join(one.pattern for one in up.gateway.subscriptions) == filters
    assert {one.qos for one in up.gateway.subscriptions} == {1}
    assert {route.allowed_topics for route in up.routes[:2]} == {("hono.telemetry.t1",)}
    assert [line.topics for line in bridge.downlinks] == [("hono.command.t1",), ("plant.dead-letters",)]
    topics = [f"hono.{kind}.t1" for kind in ("command", "command_response", "event", "telemetry")]
    assert bridge.required_topics() == (*topics, "plant.dead-letters")


def test_what_the_line_says_goes_before_its_profile(tmp_path: Path) -> None:
    """Without tenants in the file every tenant may send."""
    own = 'profile = "hono"\nguarantee = "at_least_once"\nroute = [{ from = "own/#", topic = "own" }]\n'
    text = FILE.replace('profile = "hono"\n[[downlink]]', f"{own}[[downlink]]", 1).replace("[hono.tenants.t1]\n", "")
    text = text.replace('profile = "hono-errors"', 'profile = "hono-errors"\nfrom = "elsewhere"')
    bridge = read(text, tmp_path)
    (up,) = bridge.uplinks
    assert [(one.promise, one.qos) for one in up.route] == [(None, None), *[(None, 1)] * 6]
    assert (up.routes[0].topic.text, up.routes[1].allowed_topics) == ("own", ("hono.telemetry.*",))
    assert bridge.downlinks[0].from_ == KafkaPattern(pattern=r"hono\.command\..+")
    assert bridge.downlinks[1].topics == ("elsewhere",)


def test_a_parameter_is_a_constant_in_sql(tmp_path: Path) -> None:
    """Variables of the environment stand in the table."""
    hono = (
        '[hono]\nmount = "/in/{device}/"\ndevice = "${DEVICE}"\n[hono.tenants.t1.defaults]\nttl = 3\nnote = "it\'s"\n'
    )
    (up,) = read(FILE.replace("[hono.tenants.t1]\n", hono), tmp_path, {"DEVICE": "d-1"}).uplinks
    fields = dict(up.routes[0].fields)
    assert up.gateway.subscriptions[0].pattern == "in/+/telemetry/#"
    assert "THEN hono_device_level\n  ELSE 'd-1' END" in fields["hono_client_device"]
    tenants = {"t1": {"defaults": {"ttl": 3, "note": "it's"}, "resource-limits": {}, "devices": {}, "gateways": []}}
    assert sql_literal(json.dumps(tenants)) in fields["hono_defaults"]


MISTAKES = [
    ('"hono-errors"', '"hono-error"', 'bridge.toml:18  downlink "errors": there is no profile "hono-error". Did you mean "hono-errors"?   [TL-C06]'),
    ("[hono.tenants.t1]", '[hono.tenants."a b"]', 'bridge.toml:9  [hono]: "a b" must match pattern \'^[a-zA-Z0-9._-]+$\'. Correct the value.   [TL-C03]'),
    ("[hono.tenants.t1]", '[hono]\nmount = "{x}"', 'bridge.toml:10  [hono]: "mount" must match pattern \'^/?((\\{tenant\\}|\\{device\\}|\\{device\\}@\\{tenant\\}|[^{}+#/]+)(/(\\{tenant\\}|\\{device\\}|\\{device\\}@\\{tenant\\}|[^{}+#/]+))*)?/?$\'. Correct the value.   [TL-C03]'),
    ("[hono.tenants.t1]", "[hono.tenants.t1]\ndefaults = { qos = 1 }", 'bridge.toml:10  [hono]: "qos" is a header that the profile makes. Remove it.   [TL-C05]'),
    ("[hono.tenants.t1]", '[hono.tenants.t1]\ndefaults = { ttl = "1h" }', 'bridge.toml:10  [hono]: "ttl" is a time in whole seconds. Write a number.   [TL-C05]'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert FILE.count(old) == 1
    (line,) = told(FILE.replace(old, new), tmp_path)
    assert content(line) == content(expected)
