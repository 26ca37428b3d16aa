"""``[[downlink]]`` in a bridge file, and what ``towline check`` shows of it."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import content
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge, Downlink
from towline.bridge.runtime.plan import bridge_plan, render
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
    line = the_line(GOOD, tmp_path)
    assert (line.qos, line.guarantee.value, line.parallelism) == (1, "at_least_once", 1)
    assert line.fixed_topics == ("commands",)
    assert line.gateway.subscriptions == ()
    assert line.gateway.outbox is not None
    assert line.gateway.mqtt_client_id == "plant-7-commands"
    assert (line.starting_offsets, line.on_data_loss) == ("earliest", "stop")


@pytest.mark.parametrize(("protocol", "warned"), [("5", False), ("auto", True), ("3.1.1", True), ("3.1", True)])
def test_check_warns_of_mqtt_3_without_negative_answers(tmp_path: Path, protocol: str, warned: bool) -> None:
    text = GOOD.replace("mqtt = {", f'mqtt = {{ protocol = "{protocol}",')
    for guarantee in ("at_most_once", "at_least_once"):
        warnings = bridge_plan(read(f'{text}guarantee = "{guarantee}"\n', tmp_path))["warnings"]
        shown = [warning for warning in warnings if "MQTT 3.x has no negative answers" in warning]
        assert bool(shown) is (warned and guarantee == "at_least_once")


def test_the_gateway_knows_the_checkpoint_and_needs_no_restart_for_it(tmp_path: Path) -> None:
    """An older copy of the outbox is found before anything is sent; where the checkpoint is makes no other gateway."""
    line = read(GOOD.replace("[[downlink]]", '[[downlink]]\noutbox = { max_bytes = "2 GB" }'), tmp_path).lines[0]
    assert line.gateway.outbox == OutboxSettings(max_bytes=2_000_000_000, checkpoint=str(line.checkpoint))
    plain = line.gateway.model_copy(update={"outbox": OutboxSettings(max_bytes=2_000_000_000)})
    assert plain.digest() == line.gateway.digest()
    assert all(map(is_permanent, ("TL-G35", "TL-G36", "TL-G37")))


def test_a_bridge_is_the_same_after_json(tmp_path: Path) -> None:
    text = GOOD + 'payload = { sql = "upper(value)" }\nexpiry = 5\nretain = false\noutbox = { max_bytes = "2 GB" }\n'
    bridge = read(text.replace('from = "commands"', 'from = { pattern = "c.*" }'), tmp_path)
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    assert bridge.downlinks[0].gateway.outbox is not None
    assert bridge.downlinks[0].gateway.outbox.max_bytes == 2_000_000_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('topic = "command', 'topic = "{nope}/', 'bridge.toml:9  downlink "commands": "{nope}//{header.tenant}/{key}/req" names {nope}, which a record does not have. Known are {key}, {value}, {value.JSON.PATH}, {header.NAME}, {kafka.topic}, {kafka.partition}, {kafka.offset}, {kafka.timestamp}.   [TL-C66]'),
        ('from = "commands"\n', "", 'bridge.toml:6  downlink "commands": "from" is missing. Add it.   [TL-C02]'),
        ("[[downlink]]\n", '[[downlink]]\ntransform = "x"\n', 'bridge.toml:7  downlink "commands": "transform" must be module:function. Correct the value.   [TL-C05]'),
        ("[[downlink]]\n", "[[downlink]]\nqos = 0\n", 'bridge.toml:7  downlink "commands": guarantee at_least_once publishes with QoS 1 or 2, not qos = 0. Change one of the two.   [TL-C12]'),
        ("[[downlink]]\n", '[[downlink]]\nguarantee = "exactly_once"\nisolation_level = "read_uncommitted"\n', 'bridge.toml:8  downlink "commands": guarantee exactly_once reads read_committed, not isolation_level = read_uncommitted. Change one of the two.   [TL-C12]'),
        ("[[downlink]]\n", "[[downlink]]\nqso = 1\n", 'bridge.toml:7  downlink "commands": unknown key "qso". Did you mean "qos"?   [TL-C01]'),
        *(("[[downlink]]\n", f'[[downlink]]\nfields = {{ "{name}" = "1" }}\n', f'bridge.toml:7  downlink "commands": the field "{shown}" has a name that {why}. Name it with small letters, digits and _, and as no column of the source and no wildcard.   [TL-C66]') for name, shown, why in [("key", "key", "is taken"), ("fault", "fault", "is taken"), ("A", "A", "is illegal in SQL"), ("a\\n", "a\\x0a", "is illegal in SQL")]),
        ("[[downlink]]\n", '[[downlink]]\nwhere = " "\n', 'bridge.toml:7  downlink "commands": where is empty. Give a condition in Spark SQL, or remove it.   [TL-C69]'),
        ('from = "commands"', 'from = "com mands"', 'bridge.toml:8  downlink "commands": "com mands" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Name one, several in a list, or { pattern = ... }.   [TL-C05]'),
        ("[[downlink]]\n", "[[downlink]]\nmqtt = { session_expiry_s = 0 }\n", 'bridge.toml:7  downlink "commands": guarantee at_least_once needs a session that outlives the connection. Raise session_expiry_s.   [TL-C12]'),
        ("[[downlink]]\n", '[[downlink]]\nname = "commands"\nfrom = "x"\n[[downlink]]\n', 'bridge.toml:10  downlink "commands": another line, or a member of one, is "commands" too. Rename one.   [TL-C18]'),
    ],
)  # fmt: skip
def test_an_error_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ConfigErrors) as caught:
        read(GOOD.replace(old, new, 1), tmp_path)
    assert content(str(caught.value.errors[0]).replace(f"{tmp_path}/", "")) == content(message)


@pytest.mark.parametrize("name", ["value.a", "value[0].b", "key", "header.x"])
@pytest.mark.parametrize(
    "setting",
    ["where = \"'NAME' = 'x'\"", "content_type = { sql = \"concat('NAME')\" }", "fields = { f = \"'NAME'\" }"],
)
def test_braces_in_sql_are_no_field(setting: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"which SQL takes for text\. Write the column .*TL-C69"):
        read(GOOD + setting.replace("NAME", f"{{{name}}}") + "\n", tmp_path)


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
    assert the_line(several, tmp_path).qos == 1
    assert the_line(several.replace("] }", "], brokers_share_sessions = true }", 1) + "qos = 2\n", tmp_path).qos == 2
    for setting, advice in (("qos = 2", "publish with QoS 1"), ('guarantee = "exactly_once"', "at_least_once")):
        with pytest.raises(ConfigErrors, match=rf'bridge.toml:3  downlink "commands": .*; or .*{advice}.*TL-C90'):
            read(several + setting + "\n", tmp_path)


def test_fields_of_a_record(tmp_path: Path) -> None:
    text = GOOD.replace(
        "command/{header.tenant}/{key}/req", "{key}/{value}/{value.a.b[0]}/{header.x}/{kafka.offset}{{}}"
    )
    assert the_line(text, tmp_path).templates[0].fields == ("key", "value", "value.a.b[0]", "header.x", "kafka.offset")
    with pytest.raises(ConfigErrors, match=r"which a record does not have\..*TL-C66"):
        read(text.replace("{header.x}", "{header.}"), tmp_path)


def test_check_shows_guarantee_cost_and_limits(tmp_path: Path) -> None:
    text = GOOD.replace('name = "commands"', 'name = "commands"\nguarantee = "exactly_once"')
    bridge = read(text, tmp_path)
    text = render(bridge_plan(bridge))
    for part in (
        "Kafka → MQTT",
        "read_committed",
        "QoS 2",
        "doubled   no",
        "limit ",
        "Spark's Kafka source for PySpark",
    ):
        assert part in text
    assert '  ! line "commands": a record that MQTT can\'t carry stops the line' in text
    assert json.loads(json.dumps(bridge_plan(bridge)))["lines"][0]["direction"] == "down"


def test_control_characters_are_dead_letters_where_there_are_any(tmp_path: Path) -> None:
    letters, send = GOOD + 'dead_letter_topic = "dead"\n', 'control_characters = "send"\n'
    assert the_line(letters, tmp_path).control_characters == "dead_letter"
    assert the_line(letters + send, tmp_path).control_characters == "send"
    assert the_line(GOOD, tmp_path).control_characters == "send"
    assert "with control characters a record is a dead letter" in render(bridge_plan(read(letters, tmp_path)))
    assert "with control characters it is sent" in render(bridge_plan(read(GOOD, tmp_path)))


def test_a_python_that_skips_assertions_refuses_a_template_too(tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD.replace("{key}", "{nope}"))
    command = [sys.executable, "-O", "-m", "towline", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "{nope}" in done.stdout + done.stderr
