"""``[[downlink]]`` in a bridge file, and what ``towline check`` shows of it."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import content, told
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge, Downlink
from towline.bridge.runtime.plan import plan_text
from towline.errors import ConfigErrors, is_permanent
from towline.gateway.settings import OutboxSettings

GOOD = """\
name = "plant-7"
state_dir = "state"
mqtt = { brokers = ["mqtt://a:1883"] }
kafka = { bootstrap_servers = "k1:9092" }

[[downlink]]
name = "commands"
from = "commands"
topic = "command/{header.tenant}/{key}/req"
"""


def read(text: str, directory: Path) -> Bridge:
    return parse(text, directory / "bridge.toml", {})


def the_line(text: str, directory: Path) -> Downlink:
    (line,) = read(text, directory).downlinks
    return line


def test_a_small_table_gets_safe_defaults(tmp_path: Path) -> None:
    bridge = read(
        GOOD.replace('from = "commands"', 'from = { pattern = "c.*" }\npayload = { sql = "value" }'), tmp_path
    )
    (line,) = bridge.downlinks
    assert (line.qos, line.guarantee.value, line.parallelism) == (1, "at_least_once", 1)
    assert (line.starting_offsets, line.on_data_loss, line.control_characters) == ("earliest", "stop", "send")
    assert (line.gateway.subscriptions, line.gateway.mqtt_client_id) == ((), "plant-7-commands")
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    assert the_line(f'{GOOD}dead_letter_topic = "dead"\n', tmp_path).control_characters == "dead_letter"


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ("", 'line "commands": a record that MQTT can\'t carry stops the line'),
        ('mqtt = { protocol = "3.1.1" }', "MQTT 3.x has no negative answers"),
        ('mqtt = { protocol = "auto" }', "where the broker speaks no MQTT 5, MQTT 3.x has no negative answers"),
        ('on_data_loss = "go_on"', "what Kafka deletes before it was read is lost"),
    ],
)
def test_check_warns_of_what_weakens_a_promise(tmp_path: Path, keys: str, warning: str) -> None:
    shown = plan_text(read(GOOD + keys + "\n", tmp_path))
    assert warning in shown
    assert warning not in plan_text(read(f'{GOOD}dead_letter_topic = "dead"\n', tmp_path))


def test_the_gateway_knows_the_checkpoint_and_needs_no_restart_for_it(tmp_path: Path) -> None:
    """An older copy of the outbox is found before anything is sent; where the checkpoint is makes no other gateway."""
    line = read(GOOD.replace("[[downlink]]", '[[downlink]]\noutbox = { max_bytes = "2 GB" }'), tmp_path).lines[0]
    assert line.gateway.outbox == OutboxSettings(max_bytes=2_000_000_000, checkpoint=str(line.checkpoint))
    plain = line.gateway.model_copy(update={"outbox": OutboxSettings(max_bytes=2_000_000_000)})
    assert plain.digest() == line.gateway.digest()
    assert all(map(is_permanent, ("TL-G35", "TL-G36", "TL-G37")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('topic = "command', 'topic = "{nope}/', 'bridge.toml:9  downlink "commands": "{nope}//{header.tenant}/{key}/req" names {nope}, which a record does not have. Known are {key}, {value}, {value.JSON.PATH}, {header.NAME}, {kafka.topic}, {kafka.partition}, {kafka.offset}, {kafka.timestamp}.   [TL-C66]'),
        ("[[downlink]]\n", "[[downlink]]\nqos = 0\n", 'bridge.toml:7  downlink "commands": guarantee at_least_once publishes with QoS 1 or 2, not qos = 0. Change one of the two.   [TL-C12]'),
        *(("[[downlink]]\n", f'[[downlink]]\nfields = {{ "{name}" = "1" }}\n', f'bridge.toml:7  downlink "commands": the field "{shown}" has a name that {why}. Name it with small letters, digits and _, and as no column of the source and no wildcard.   [TL-C66]') for name, shown, why in [("key", "key", "is taken"), ("fault", "fault", "is taken"), ("A", "A", "is illegal in SQL"), ("a\\n", "a\\x0a", "is illegal in SQL")]),
        ('from = "commands"', 'from = "com mands"', 'bridge.toml:8  downlink "commands": "com mands" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Name one, several in a list, or { pattern = ... }.   [TL-C05]'),
        *(('from = "commands"', f'from = {source}\nguarantee = "exactly_once"\ndead_letter_topic = "bad"', f'bridge.toml:8  downlink "commands": it would read "{read}", which it writes itself: markers or dead letters. Choose another topic.   [TL-C95]') for source, read in [('["commands", "bad"]', "bad"), ('{ pattern = "^b" }', "bad"), ('{ pattern = "^towline" }', "towline.plant-7.commands.markers")]),
    ],
)  # fmt: skip
def test_an_error_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    line, *_ = told(GOOD.replace(old, new, 1), tmp_path)
    assert content(line) == content(message)


def test_each_template_and_sql_has_its_own_line(tmp_path: Path) -> None:
    """As those of a route, failure notices too."""
    own = 'payload = "{nope}"\nwhere = "key = \'{key}\'"\ndead_letter_topic = "dead"\n'
    notice = '[downlink.failure_notice]\ntopic = "{no.such}"\nheaders = { a = { sql = " " } }\n'
    with pytest.raises(ConfigErrors) as caught:
        read(GOOD + own + notice, tmp_path)
    last = GOOD.count("\n")
    errors = [(error.code, Path(error.location.split(" ")[0]).name) for error in caught.value.errors]
    assert errors == [
        ("TL-C66", f"bridge.toml:{last + 1}"),
        ("TL-C69", f"bridge.toml:{last + 2}"),
        ("TL-C66", f"bridge.toml:{last + 5}"),
        ("TL-C69", f"bridge.toml:{last + 6}"),
    ]


def test_qos_2_to_several_brokers_needs_shared_sessions(tmp_path: Path) -> None:
    several = GOOD.replace('["mqtt://a:1883"]', '["mqtt://a", "mqtt://b"]')
    assert the_line(several.replace("] }", "], brokers_share_sessions = true }", 1) + "qos = 2\n", tmp_path).qos == 2
    with pytest.raises(ConfigErrors, match=r'bridge.toml:3  downlink "commands": .*at_least_once and QoS 1.*TL-C90'):
        read(several + "qos = 2\n", tmp_path)
