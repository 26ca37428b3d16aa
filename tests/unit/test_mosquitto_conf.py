"""`towline.mosquitto_conf` reads what Mosquitto reads, and says of a damaged line where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.mosquitto_conf import DEFAULTS, MosquittoConf, read_conf

BRIDGE = """\
# the plant's broker
per_listener_settings false
persistence true
autosave_interval 60
max_queued_messages 5000
some_setting_of_2_9 yes
listener 8883 0.0.0.0
certfile /etc/server.pem
connection cloud
address one.example:8883 two.example
listener 9001
protocol websockets
topic telemetry/# out 1 plant/ cloud/
topic # in 2
topic "" both 0 a b
clientid plant
username towline
password s3cret words
"""


def write(path: Path, text: str, name: str = "mosquitto.conf") -> Path:
    """A file with this text."""
    file = path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def parsed(path: Path, text: str) -> MosquittoConf:
    """The configuration of this text."""
    return read_conf(write(path, text))


def test_settings_go_to_the_broker_the_listener_and_the_connection_that_they_belong_to(tmp_path: Path) -> None:
    """The name decides: a connection goes on behind a later listener."""
    conf = parsed(tmp_path, BRIDGE)
    assert conf.flag("persistence")
    assert (conf.number("autosave_interval"), conf.number("max_queued_messages")) == (60, 5000)
    assert [(one.port, one.address, one.text("certfile"), one.text("protocol")) for one in conf.listeners] == [
        (8883, "0.0.0.0", "/etc/server.pem", ""),  # noqa: S104 - what the file says
        (9001, "", "", "websockets"),
    ]
    (cloud,) = conf.connections
    assert cloud.addresses == ["one.example:8883", "two.example:1883"]
    assert cloud.topics == [
        ("out", "plant/telemetry/#", "cloud/telemetry/#"),
        ("in", "#", "#"),
        ("both", "a", "b"),
    ]
    assert cloud.text("clientid") == "plant"
    assert cloud.text("remote_username") == "towline"
    assert cloud.text("remote_password") == "s3cret words"
    found = conf.get("max_queued_messages")
    assert found is not None
    assert found.line == 5
    assert conf.text("some_setting_of_2_9") == "yes"


def test_a_value_may_begin_as_those_of_other_files_do(tmp_path: Path) -> None:
    """A password is anything; ``key = value`` and ``key {`` are of files that are none of Mosquitto's."""
    (bridge,) = parsed(tmp_path, "connection c\naddress b\nremote_password {=s3cret").connections
    assert bridge.text("remote_password", "") == "{=s3cret"
    for line in ("name = plant", "user = plant", "route {"):
        with pytest.raises(ConfigError, match=r"it is no mosquitto\.conf.*TL-C156"):
            parsed(tmp_path, line)


def test_no_password_in_repr(tmp_path: Path) -> None:
    """[I12]"""
    assert "s3cret" not in repr(parsed(tmp_path, BRIDGE))


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    """Without a listener Mosquitto listens on loopback and lets everybody in."""
    conf = parsed(tmp_path, "")
    assert {name: conf.number(name) for name in DEFAULTS} == dict(DEFAULTS)
    assert (conf.flag("persistence"), conf.number("memory_limit"), conf.session_expiry_s) == (False, 0, None)
    assert conf.local_only
    assert [one.port for one in conf.listeners] == [1883]
    assert not parsed(tmp_path, "listener 1884").local_only
    assert [one.port for one in parsed(tmp_path, "port 1885\nlistener 1884").listeners] == [1885, 1884]


def test_settings_of_listeners_where_each_has_its_own(tmp_path: Path) -> None:
    """``per_listener_settings`` moves what concerns access from the broker to the listener."""
    conf = parsed(tmp_path, "per_listener_settings true\nlistener 1\nallow_anonymous true\nlistener 2\n")
    assert [one.flag("allow_anonymous") for one in conf.listeners] == [True, False]
    assert conf.get("allow_anonymous") is None


def test_included_files_come_in_mosquitto_s_order(tmp_path: Path) -> None:
    """[mosquitto.conf(5), include_dir]: the order of its example; a nested include is passed over."""
    for name in ("b.conf", "A.conf", "01.conf", "a.conf", "B.conf", "00.conf", "no.txt"):
        write(tmp_path, f"include_dir nowhere\nmax_queued_messages {len(name)}\n", f"conf.d/{name}")
    conf = parsed(tmp_path, "include_dir conf.d\n")
    names = [one.file.name for one in conf.get_all("max_queued_messages")]
    assert names == ["00.conf", "01.conf", "A.conf", "a.conf", "B.conf", "b.conf"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("\nlistener 99999", 2, "port"),
        ("topic a/# out", 1, "before the first connection"),
        ("connection a\naddress\n", 2, "no value"),
        ("connection a\naddress b:x", 2, "port"),
        ("connection a\ntopic a sideways", 2, "in or both"),
        ('connection a\ntopic "" in 1', 2, "pattern"),
        ("persistence perhaps", 1, "true or false"),
        ("max_queued_messages many", 1, "whole number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, line: int, what: str) -> None:
    """One line: the file, the number, what is wrong."""
    with pytest.raises(ConfigError, match=what) as caught:
        everything(parsed(tmp_path, text))
    assert caught.value.code == "TL-C156"
    assert caught.value.location == f"{tmp_path / 'mosquitto.conf'}:{line}"


CAMEL = """\
- route:
    id: telemetry
    from:
      uri: "paho-mqtt5:telemetry/#"
      parameters:
        brokerUrl: "tcp://localhost:1883"
      steps:
        - to: "kafka:telemetry?brokers=localhost:9092"
"""


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        (CAMEL, 1, "-"),
        ("# ours\nservices:\n  broker:\n    image: eclipse-mosquitto:2\n", 2, "services:"),
        ('{\n  "connector.class": "io.confluent.connect.mqtt.MqttSourceConnector"\n}\n', 1, "{"),
        ('name = "plant-7"\nstate_dir = "state"\n\n[mqtt]\n', 1, "name"),
        ("name=mqtt-source\ntopics=telemetry\n", 1, "name=mqtt-source"),
        ("user   www-data\nworker_processes 4;\nhttp {\n}\n", 3, "http"),
        ("lorem ipsum dolor sit amet\n", None, ""),
    ],
)
def test_a_file_that_is_no_mosquitto_conf_is_refused(tmp_path: Path, text: str, line: int | None, name: str) -> None:
    """A route of Camel's, what Docker Compose, Kafka Connect, Towline, nginx and nobody reads."""
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, text)
    file = tmp_path / "mosquitto.conf"
    assert (caught.value.code, caught.value.location) == ("TL-C156", str(file) if line is None else f"{file}:{line}")
    assert name in caught.value.problem
    assert "Mosquitto" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Neither the file itself nor a directory that it includes."""
    with pytest.raises(ConfigError, match="no such file") as caught:
        read_conf(tmp_path / "nowhere.conf")
    assert caught.value.code == "TL-C155"
    with pytest.raises(ConfigError, match=r"include_dir conf.d can't be read"):
        parsed(tmp_path, "include_dir conf.d")
    (tmp_path / "mosquitto.conf").write_bytes(b"# gr\xfc\xdfe\nuser gr\xfc\xdfe\n")
    with pytest.raises(ConfigError, match=r"mosquitto.conf:2: it is not UTF-8"):
        read_conf(tmp_path / "mosquitto.conf")


@given(st.binary(max_size=300))
@example(b"\x1c")  # white space of Unicode alone
def test_no_bytes_do_more_than_fail_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A file from anywhere is read, or refused with a code."""
    file = tmp_path_factory.mktemp("conf") / "mosquitto.conf"
    file.write_bytes(data)
    try:
        everything(read_conf(file))
    except ConfigError as error:
        assert error.code in ("TL-C155", "TL-C156")  # noqa: PT017 - either is right


def everything(conf: MosquittoConf) -> None:
    """Ask for all that is computed late."""
    for name in DEFAULTS:
        conf.number(name)
    conf.flag("persistence")
    for one in conf.connections:
        assert len(one.topics) == len(one.get_all("topic"))
        assert one.addresses is not None
