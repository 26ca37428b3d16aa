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
persistence true
max_queued_messages 4000
max_queued_messages 5000
some_setting_of_2_9 yes
persistent_client_expiration 2w
acl_file /etc/acl
listener 8883 0.0.0.0
use_username_as_clientid true
connection cloud
listener 9001
remote_password {=s3cret words
listener 0 /run/mosquitto.sock
"""


def parsed(path: Path, text: str) -> MosquittoConf:
    (path / "mosquitto.conf").write_text(text, encoding="utf-8")
    return read_conf(path / "mosquitto.conf")


def test_settings_are_the_broker_s_or_a_listener_s(tmp_path: Path) -> None:
    conf = parsed(tmp_path, BRIDGE)
    assert (conf.flag("persistence"), conf.number("max_queued_messages")) == (True, 5000)
    assert (conf.text("some_setting_of_2_9"), conf.session_expiry_s) == ("yes", 14 * 86400)
    assert [conf.shares_session(port) for port in (1883, 8883, 9001, 0)] == [False, True, False, False]
    assert [conf.access_control(port) for port in (1883, 9001)] == ["acl_file /etc/acl"] * 2
    assert conf.text("remote_password") == "{=s3cret words"
    assert "s3cret" not in repr(conf)


def test_access_is_a_listener_s_where_each_has_its_own(tmp_path: Path) -> None:
    rules = "per_listener_settings true\nplugin /0.so\nlistener 1\nacl_file /1\nlistener 2\nport 1885\n"
    conf = parsed(tmp_path, rules)
    assert [conf.access_control(port) for port in (1885, 1, 2)] == ["plugin /0.so", "acl_file /1", ""]


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    conf = parsed(tmp_path, "")
    assert {name: conf.number(name) for name in DEFAULTS} == dict(DEFAULTS)
    assert (conf.flag("persistence"), conf.number("memory_limit"), conf.session_expiry_s) == (False, 0, None)


def test_included_files_come_in_mosquitto_s_order(tmp_path: Path) -> None:
    """[mosquitto.conf(5), include_dir]: the order of its example; a nested include is passed over."""
    (tmp_path / "conf.d").mkdir()
    for name in ("b.conf", "A.conf", "01.conf", "a.conf", "B.conf", "00.conf", "no.txt"):
        (tmp_path / "conf.d" / name).write_text(f"include_dir nowhere\nmax_queued_messages {len(name)}\n")
    names = [one.file.name for one in parsed(tmp_path, "include_dir conf.d\n").settings]
    assert names == ["00.conf", "01.conf", "A.conf", "a.conf", "B.conf", "b.conf"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("\nlistener 99999", ":2", "port"),
        ("listener 0 localhost", ":1", "port"),
        ("connection a\naddress\n", ":2", "no value"),
        ("persistence perhaps", ":1", "true or false"),
        ("max_queued_messages many", ":1", "whole number"),
        ('- route:\n    id: "telemetry"\n', ":1", "no mosquitto.conf"),
        ("name=mqtt-source\ntopics=telemetry\n", ":1", "no mosquitto.conf"),
        ('user = "plant-7"\n', ":1", "no mosquitto.conf"),
        ("user   www-data\nworker_processes 4;\nhttp {\n}\n", ":3", "no mosquitto.conf"),
        ("lorem ipsum dolor sit amet\n", "", "no mosquitto.conf"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        everything(parsed(tmp_path, text))
    assert (caught.value.code, caught.value.location) == ("TL-C156", f"{tmp_path / 'mosquitto.conf'}{line}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*TL-C155"):
        read_conf(tmp_path / "nowhere.conf")
    with pytest.raises(ConfigError, match=r"mosquitto.conf:1: include_dir conf.d can't be read.*TL-C155"):
        parsed(tmp_path, "include_dir conf.d")


@given(st.binary(max_size=300))
@example(b"\x1c")  # white space of Unicode alone
@example(b"user gr\xfc\xdfe")
def test_no_bytes_do_more_than_fail_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("conf") / "mosquitto.conf"
    file.write_bytes(data)
    try:
        everything(read_conf(file))
    except ConfigError as error:
        assert error.code in ("TL-C155", "TL-C156")  # noqa: PT017 - either is right


def everything(conf: MosquittoConf) -> None:
    for name in DEFAULTS:
        conf.number(name)
    conf.flag("persistence")
