"""`towline.doctor.mosquitto` reads what Mosquitto reads, and says of a damaged line where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.doctor.mosquitto import DEFAULTS, MosquittoConf, read_conf
from towline.errors import ConfigError

BROKER = """\
# the plant's broker
persistence true
max_queued_messages 4000
max_queued_messages 5000
some_setting_of_2_9 yes
persistent_client_expiration 2w
per_listener_settings true
listener 8883 0.0.0.0
use_username_as_clientid true
acl_file /etc/acl
connection cloud
listener 9001
use_username_as_clientid false
remote_password {=s3cret words
"""


def parsed(path: Path, text: str) -> MosquittoConf:
    (path / "mosquitto.conf").write_text(text, encoding="utf-8")
    return read_conf(path / "mosquitto.conf")


def test_the_last_setting_of_a_name_counts_and_a_rule_of_any_listener(tmp_path: Path) -> None:
    conf = parsed(tmp_path, BROKER)
    assert (conf.flag("persistence"), conf.number("max_queued_messages")) == (True, 5000)
    assert (conf.text("some_setting_of_2_9"), conf.session_expiry_s) == ("yes", 14 * 86400)
    assert (conf.shares_session, conf.access_control) == (True, "acl_file /etc/acl")
    assert conf.text("remote_password") == "{=s3cret words"
    assert "s3cret" not in repr(conf)


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    conf = parsed(tmp_path, "")
    assert {name: conf.number(name) for name in DEFAULTS} == dict(DEFAULTS)
    assert (conf.flag("persistence"), conf.number("memory_limit"), conf.session_expiry_s) == (False, 0, None)
    assert (conf.shares_session, conf.access_control) == (False, "")


def test_included_files_come_in_mosquitto_s_order(tmp_path: Path) -> None:
    """[mosquitto.conf(5), include_dir]: the order of its example; a nested include is passed over."""
    (tmp_path / "conf.d").mkdir()
    for name in ("b.conf", "A.conf", "01.conf", "a.conf", "B.conf", "00.conf", "no.txt"):
        (tmp_path / "conf.d" / name).write_text(f"include_dir nowhere\nuser {name}\n")
    names = [one.value for one in parsed(tmp_path, "user first\ninclude_dir conf.d\nuser last\n").settings]
    included = ["00.conf", "01.conf", "A.conf", "a.conf", "B.conf", "b.conf"]
    assert [name for name in names if name not in ("nowhere", "conf.d")] == ["first", *included, "last"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("\npersistence perhaps", ":2", "true or false"),
        ("persistence", ":1", "true or false"),
        ("max_queued_messages many", ":1", "whole number"),
        ('- route:\n    id: "telemetry"\n', ":1", "no mosquitto.conf"),
        ("name=mqtt-source\ntopics=telemetry\n", ":1", "no mosquitto.conf"),
        ('user = "plant-7"\n', ":1", "no mosquitto.conf"),
        ("user   www-data\nworker_processes 4;\nhttp {\n}\n", ":4", "no mosquitto.conf"),
        ("Lorem ipsum dolor sit amet\n", ":1", "no mosquitto.conf"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        everything(parsed(tmp_path, text))
    assert (caught.value.code, caught.value.location) == ("TL-C156", f"{tmp_path / 'mosquitto.conf'}{line}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*TL-C155"):
        read_conf(tmp_path / "nowhere.conf")
    with pytest.raises(ConfigError, match=r"conf.d: it can't be read .no such file.*TL-C155"):
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
