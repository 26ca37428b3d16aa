"""A first bridge file: whatever is answered, it says that and is right, or the answer is refused."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bridge.config.file import parse
from towline.bridge.draft.answers import (
    DEFAULTS,
    QUESTIONS,
    ImportedSettings,
    collect_answers,
    default_name,
    draft_text,
    first_error,
    legal_name,
    settings_from_conf,
    write,
)
from towline.errors import ConfigError
from towline.mosquitto_conf import read_conf

FILE = Path("bridge.toml")
HEAD = {"name": "plant-7", "state_dir": "state"}
NOBODY: dict[str, str | None] = dict.fromkeys(QUESTIONS)


def made(answers: Mapping[str, str]) -> str:
    return draft_text(answers, FILE, HEAD)


def test_the_template_is_a_right_file() -> None:
    text = files("towline.bridge.draft").joinpath("template.toml").read_text()
    assert parse(text, FILE, {}) == parse(draft_text(DEFAULTS, FILE, {"name": "bridge"}), FILE, {})


def test_the_defaults_are_a_right_file() -> None:
    text = made(DEFAULTS)
    bridge = parse(text, FILE, {})
    (line,) = bridge.uplinks
    assert (line.name, line.guarantee.value, line.routes[0].key and line.routes[0].key.text) == (
        "telemetry",
        "at_least_once",
        "{device}",
    )
    assert max(map(len, text.splitlines())) <= 120
    assert "password =" not in text


def test_what_is_at_hand_in_comments_is_right_too(tmp_path: Path) -> None:
    """Every comment that begins with a key may be taken out of its comment."""
    text = made(DEFAULTS | {"broker": "mqtts://b.example"})
    ready = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    assert ready.count("password_file") == text.count("password_file") > 1
    for name in ("mqtt.password", "kafka.password", "ca.pem"):
        (tmp_path / name).write_text("secret")
    bridge = parse(ready, tmp_path / "bridge.toml", {})
    assert bridge.lines[0].gateway.tls.ca_file == tmp_path / "ca.pem"
    assert bridge.kafka.password_file == tmp_path / "kafka.password"


@pytest.mark.parametrize(
    ("answers", "key"),
    [
        ({"topics": "telemetry/{tenant}/{device}/#"}, "{tenant}/{device}"),
        ({"topics": "a/+/b", "topic": "x", "guarantee": "exactly_once"}, "{mqtt.topic}"),
        ({"topics": "a/{d}, b/{d}", "topic": "x.{d}", "guarantee": "at_most_once"}, "{d}"),
    ],
)
def test_the_key_is_what_the_filter_names(answers: dict[str, str], key: str) -> None:
    (line,) = parse(made(DEFAULTS | answers), FILE, {}).uplinks
    assert {route.key.text for route in line.routes if route.key} == {key}
    assert len(line.routes) == answers["topics"].count(",") + 1


@given(st.text(max_size=12), st.sampled_from([*QUESTIONS]))
def test_any_answer_is_said_or_refused(text: str, key: str) -> None:
    draft = made(DEFAULTS | {key: text})
    mistake = first_error(draft, FILE)
    if mistake is None:
        raw = tomllib.loads(draft)
        said = {"kafka": raw["kafka"]["bootstrap_servers"], "topic": raw["uplink"][0]["route"][0]["topic"]}
        said |= {"broker": ",".join(raw["mqtt"]["brokers"]), "guarantee": raw["uplink"][0]["guarantee"]}
        said |= {"topics": ",".join(one["from"] for one in raw["uplink"][0]["route"])}
        assert re.sub(r"\s*,\s*", ",", text.strip()).strip(",") == said[key].strip() or said[key] == text
    else:
        assert "\n" not in str(mistake)


@given(st.text(max_size=20))
def test_a_string_is_read_as_it_was(text: str) -> None:
    assert tomllib.loads(draft_text(DEFAULTS, FILE, {"name": text}))["name"] == text


@given(st.text(max_size=80))
def test_a_name_is_legal(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", legal_name(text, "otherwise"))
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", default_name())


def test_options_answer_and_the_rest_is_asked() -> None:
    asked: list[tuple[str, str]] = []

    def ask(words: str, default: str, judge: object) -> str:
        asked.append((words, default))
        assert callable(judge)
        assert judge(default) is None
        return default

    answers = collect_answers({**NOBODY, "kafka": "k:1", "guarantee": "at_most_once"}, FILE, HEAD, ask)
    assert (answers["kafka"], answers["guarantee"]) == ("k:1", "at_most_once")
    assert asked == [(QUESTIONS[key], DEFAULTS[key]) for key in ("broker", "topics", "topic")]
    assert collect_answers(NOBODY, FILE, HEAD, None) == DEFAULTS


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("broker", "http://b", '--broker: "http://" is not a broker scheme. Use mqtt://'),
        ("broker", "mqtt://u:p@b", "--broker: a broker URI carries no user or password. Use username and password_file"),
        ("topics", "a/#/b", "--topics: "),
        ("kafka", "k1", '--kafka: "k1" in "bootstrap_servers" is not HOST:PORT.'),
        ("topic", "a b", '--topic: "a b" is no Kafka topic name'),
        ("topic", "{device}", "--topic: "),
        ("guarantee", "exactly", '--guarantee: "guarantee" must be "at_most_once", '),
        ("guarantee", "exactly_once", "--guarantee: guarantee exactly_once with 2 brokers needs them to share sessions"),
    ],
)  # fmt: skip
def test_an_option_that_cant_be_is_one_line(key: str, text: str, told: str) -> None:
    said = {**NOBODY, key: text} | ({"broker": "mqtt://a,mqtt://b"} if text == "exactly_once" else {})
    with pytest.raises(ConfigError) as found:
        collect_answers(said, FILE, HEAD, None)
    assert str(found.value).startswith(told)
    assert str(found.value).endswith("[TL-C163]")


def test_files_are_made_whole_or_not_at_all(tmp_path: Path) -> None:
    broker = {"brokers": "mqtt://b", "username": "u", "password_file": "b.password"}
    text, secrets = draft_text(DEFAULTS, FILE, HEAD, ImportedSettings(broker=broker)), {"b.password": "p"}
    file = tmp_path / "bridge.toml"
    assert write(text, file, secrets, force=False) == [file, tmp_path / "b.password"]
    assert [oct(one.stat().st_mode & 0o777) for one in sorted(tmp_path.iterdir())] == ["0o600", "0o600"]
    assert parse(file.read_text(), file, {}).lines[0].gateway.password_file == tmp_path / "b.password"
    file.write_text("mine")
    (tmp_path / "b.password").unlink()
    with pytest.raises(ConfigError, match=r"the file exists.*TL-C162"):
        write(text, file, secrets, force=False)
    assert [one.name for one in tmp_path.iterdir()] == ["bridge.toml"], "the password went with it"
    assert file.read_text() == "mine"
    write(text, file, secrets, force=True)
    assert "mine" not in file.read_text()
    with pytest.raises(ConfigError, match=r"can't be written \(no such file or directory\).*TL-C164"):
        write(text, tmp_path / "no" / "bridge.toml", secrets, force=False)


# -- from Mosquitto's configuration ----------------------------------------------------------------------------------

CONF = """\
listener 8883
certfile /none.pem
listener 1884 127.0.0.1
allow_anonymous true
connection cloud
address remote.example:8883 other.example
bridge_cafile {ca}
bridge_keyfile nowhere.pem
remote_username plant ${{x}}
remote_password s3cret words
remote_clientid mine
cleansession true
start_type automatic
round_robin true
keepalive_interval 3
topic sensors/{{x}}/# in 1 here/ there/
topic sensors/{{x}}/# in 1 here/ there/
topic telemetry/# out 0
topic both/+ both 2
"""


def drafted(directory: Path, text: str) -> tuple[str, ImportedSettings]:
    conf, ca = directory / "mosquitto.conf", directory / "ca.pem"
    ca.write_text("a certificate")
    conf.write_text(text.format(ca=ca) if "{ca}" in text else text)
    known = settings_from_conf(read_conf(conf), FILE)
    return draft_text(DEFAULTS, FILE, HEAD, known), known


def test_a_connection_becomes_a_line_for_each_side(tmp_path: Path) -> None:
    draft, known = drafted(tmp_path, CONF)
    file = tmp_path / "bridge.toml"
    write(draft, file, known.secrets, force=False)
    raw = tomllib.loads(file.read_text())
    out, came = raw["uplink"]
    assert raw["mqtt"] == {}, "what one broker is told must not be told to the other"
    assert (out["name"], out["mqtt"]["brokers"]) == ("cloud-out", ["mqtt://127.0.0.1:1884"])
    assert [one["from"] for one in out["route"]] == ["telemetry/#", "both/+"]
    assert came["mqtt"] == {
        "brokers": ["mqtts://remote.example:8883", "mqtts://other.example:1883"],
        "username": "plant $${x}",
        "password_file": "bridge.cloud-in.password",
        "tls": {"ca_file": str(tmp_path / "ca.pem")},
    }
    assert [one["from"] for one in came["route"]] == ["there/sensors/{{x}}/#"]
    assert (tmp_path / "bridge.cloud-in.password").read_text() == "s3cret words\n"
    assert "s3cret" not in file.read_text() + repr(known)
    (left,) = (note for note in known.notes if note.startswith('Not imported of connection "cloud": '))
    place = f"{tmp_path}/mosquitto.conf"
    for number, name in enumerate(("remote_clientid", "cleansession", "start_type", "round_robin"), 11):
        assert f"{name} ({place}:{number})" in left
    assert "remote_password" not in left
    assert any(note.startswith("line cloud-in: tls.key_file is missing") for note in known.notes)
    assert "for out and both this one" in known.notes[-1]
    told = " ".join(file.read_text().replace("#", " ").split())
    assert all(" ".join(note.replace("#", " ").split()) in told for note in known.notes), "the file says it too"


def test_each_connection_keeps_its_own_password(tmp_path: Path) -> None:
    each = "connection clo{}ud\naddress {}\nremote_username u\nremote_password {}\ntopic a in 1\n"
    draft, known = drafted(tmp_path, each.format("&", "x", "one") + each.format("-", "y", "two"))
    said = [line["mqtt"] for line in tomllib.loads(draft)["uplink"]]
    passwords = {one["brokers"][0]: known.secrets[one["password_file"]] for one in said}
    assert passwords == {"mqtt://x:1883": "one", "mqtt://y:1883": "two"}


@pytest.mark.parametrize(
    ("setting", "uri", "tls"),
    [
        ("bridge_insecure true", "mqtt://x:1883", None),
        ("bridge_alpn mqtt", "mqtt://x:1883", None),
        ("bridge_tls_use_os_certs true\nbridge_alpn mqtt", "mqtts://x:1883", {"alpn": "mqtt"}),
        ("bridge_identity plant\nbridge_psk ab", "mqtts://x:1883", None),
    ],
)
def test_a_connection_is_secure_where_mosquittos_is(tmp_path: Path, setting: str, uri: str, tls: object) -> None:
    """What says something of TLS alone makes none; and a key instead of certificates is no reason to do without."""
    draft, _ = drafted(tmp_path, f"connection other\naddress x\n{setting}\ntopic a in 1\n")
    said = tomllib.loads(draft)["mqtt"]
    assert (said["brokers"], said.get("tls")) == ([uri], tls)
    assert first_error(draft, FILE) is None


@pytest.mark.parametrize("topic", ["a/${x}/#", "a/$${x}/#", "a/{x}/#", "a/${/#"])
def test_a_topic_is_subscribed_as_mosquitto_has_it(tmp_path: Path, topic: str) -> None:
    draft, _ = drafted(tmp_path, f"connection other\naddress x\ntopic {topic} in 1\n")
    (line,) = parse(draft, FILE, {}).uplinks
    assert [one.pattern for one in line.gateway.subscriptions] == [topic]


@pytest.mark.parametrize(
    ("text", "uri", "said"),
    [
        ("", "mqtt://localhost:1883", ""),
        ("listener 0 /run/m.sock\nallow_anonymous true", "unix:///run/m.sock", ""),
        ("listener 9001\nprotocol websockets", "ws://localhost:9001", "requires a password"),
        ("listener 8883 ::1\ncertfile c\nrequire_certificate true", "mqtts://[::1]:8883", "a client certificate"),
        ("listener 1\nrequire_certificate true\nlistener 2\nprotocol websockets", "ws://localhost:2", "a password"),
    ],
)
def test_a_listener_becomes_the_broker(tmp_path: Path, text: str, uri: str, said: str) -> None:
    draft, known = drafted(tmp_path, text)
    assert tomllib.loads(draft)["mqtt"]["brokers"] == [uri]
    assert said in " ".join(known.notes)
    assert first_error(draft, tmp_path / "b.toml") is None


def test_connections_with_a_topic_become_lines(tmp_path: Path) -> None:
    two = f"{CONF}connection clo&ud\naddress x\ntopic a in 1\nconnection clo.ud\naddress x\ntopic a in 1\n"
    two += "connection clo&ud\naddress x\ntopic b in 1\nconnection empty\naddress y\n"
    raw = tomllib.loads(drafted(tmp_path, two)[0])
    names = [one["name"] for one in raw["uplink"]]
    assert names == ["cloud-out", "cloud-in", "clo-ud-in", "clo.ud-in", "clo-ud-in-2"]
    raw = tomllib.loads(drafted(tmp_path, "connection other\naddress x\ntopic a in 1\n")[0])
    assert raw["mqtt"]["brokers"] == ["mqtt://x:1883"], "one broker stands in [mqtt]"
    assert "mqtt" not in raw["uplink"][0]
    with pytest.raises(ConfigError, match=r"mosquitto.conf:1: connection \"c\" has no address.*TL-C165"):
        drafted(tmp_path, "connection c\ntopic a in\n")
