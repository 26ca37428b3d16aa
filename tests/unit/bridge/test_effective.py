"""What ``towline check -v`` shows is what the clients are given, with its source, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read, told
from tests.unit.cli.test_main import ran
from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.effective import line_settings
from towline.bridge.uplink.query import UplinkQuery
from towline.kafka import producers
from towline.kafka.producers import TransactionalProducer

FILE = """name = "plant"
state_dir = "state"
[mqtt]
brokers = "mqtts://b"
username = "${WHO}"
password_file = "secret"
tls = { server_name = "broker" }
keep_alive_s = 30
[kafka]
bootstrap_servers = "k:9092"
password_file = "secret"
[kafka.settings]
"linger.ms" = 7
sasl.mechanism = "PLAIN"
"sasl.username" = "${WHO}"
[[uplink]]
name = "up"
guarantee = "exactly_once"
parallelism = 3
mqtt = { receive_maximum = 77, keep_alive_s = 31 }
[[uplink.route]]
from = "a/{x}/#"
topic = "t"
[[downlink]]
name = "down"
from = "t"
topic = "c"
dead_letter_topic = "dead"
"""
SECRET, WHO = "n0t-to-be-shown", "envy-of-the-environment"
#: Whatever a route and a downlink may say with variables; SITE is a part of many words.
VARIABLES = """[[uplink]]
name = "other"
guarantee = "${PROMISE}"
ack_after = "${ACKS}"
dead_letter_topic = "dead.${WHO}"
mqtt = { brokers = "mqtts://${WHO}:1883,mqtts://b", brokers_share_sessions = true, will = { topic = "gone/${WHO}" } }
[[uplink.route]]
from = "${WHO}/{tenant}/#"
topic = "t.${WHO}"
key = "{tenant}-${WHO}"
headers = { by = "${WHO}" }
where = "topic <> '${WHO}' or ${SITE} = ${SITE}"
dedupe = { key = "{tenant}/${WHO}" }
[[downlink]]
name = "elsewhere"
from = ["r.${WHO}"]
topic = { sql = "concat('${WHO}', offset)" }
"""


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "bridge.toml").write_text(FILE)
    monkeypatch.setenv("WHO", WHO)
    return read(FILE, tmp_path, {"WHO": WHO})


def shown(bridge: Bridge, line: str, head: str) -> dict[str, tuple[str, str]]:
    document = Document.reread(bridge.file, Path(bridge.file.name))
    rows = dict(line_settings(bridge, bridge.line(line), document))[head]
    return {row["name"]: (row["value"], row["source"].replace("bridge.toml:", "")) for row in rows}


def test_the_connection_is_that_of_the_gateway(bridge: Bridge, tmp_path: Path) -> None:
    found = shown(bridge, "up", "MQTT")
    assert found.items() >= {
        ("brokers", ("mqtts://b:8883", "4")),
        ("client_id", ("plant-up", "17")),
        ("username", ("${WHO}", "5")),
        ("password_file", (str(tmp_path / "secret"), "6")),
        ("tls.server_name", ("broker", "7")),
        ("tls.strict", ("true", "default")),
        ("keep_alive_s", ("31", "20")),
        ("receive_maximum", ("77", "20")),
        ("session_expiry_s", ("for ever", "default")),
    }


class Captured(Exception):
    """Ends what would open a connection."""


def test_the_producer_is_given_what_is_shown(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks aside; secrets are read, and not shown."""
    given: dict[str, Any] = {}

    def client(config: dict[str, Any], **_: object) -> Any:
        given.update(config)
        raise Captured

    monkeypatch.setattr(producers, "Producer", client)
    settings = UplinkQuery(bridge, bridge.uplinks[0]).sink_settings()
    with pytest.raises(Captured):
        TransactionalProducer(settings, settings.transactional_id(settings.sink_id or "", 1), {})
    assert given.pop("sasl.password") == SECRET
    found = shown(bridge, "up", "Kafka producer")
    assert found.pop("sasl.password.file")[0].startswith("in /")
    plain = {name: value for name, value in given.items() if not callable(value)}
    assert found.keys() == plain.keys()
    for name in plain.keys() - {"transactional.id"}:
        text = str(plain[name]).lower() if isinstance(plain[name], bool) else str(plain[name])
        assert found[name][0] == (text.replace(WHO, "${WHO}") or '""'), name


def test_each_setting_of_kafka_has_its_source(bridge: Bridge) -> None:
    producer = shown(bridge, "up", "Kafka producer")
    assert producer["transactional.id"] == ("towline.plant.up.0 to towline.plant.up.2", "guarantee = exactly_once")
    sources = {name: source for name, (_, source) in producer.items()}
    assert sources["bootstrap.servers"] == "10"
    assert sources["linger.ms"] == "13"
    assert sources["sasl.mechanism"] == "14"
    assert sources["sasl.password.file"] == "11"
    assert sources["acks"] == sources["message.timeout.ms"] == "guarantee = exactly_once"
    assert (sources["batch.size"], sources["delivery.report.only.error"]) == ("default", "always")
    source = shown(bridge, "down", "Kafka consumer (Spark's source)")
    assert source["isolation.level"] == ("read_committed", "always")
    assert source["bootstrap.servers"] == ("k:9092", "10")
    assert shown(bridge, "down", "Kafka producer of dead letters")["acks"] == ("all", "guarantee = at_least_once")


@pytest.mark.parametrize("topic", ["${WHO}/x", "${WHO} {x}"])
def test_a_mistake_quotes_what_the_file_says(tmp_path: Path, topic: str) -> None:
    """Also where it is about a part of a value."""
    (tmp_path / "secret").touch()
    text = FILE.replace('topic = "t"', f'topic = "{topic}"').replace('name = "up"', 'name = "${SITE}"')
    (line,) = told(text, tmp_path, {"SITE": "a", "WHO": "n0t-2b-5een"})
    assert f'uplink "${{SITE}}" route 1: "{topic}" is no Kafka topic name' in line
    assert "n0t-2b" not in line


def test_what_a_variable_holds_is_shown_as_the_file_writes_it(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By where a value came from, and not by what it looks like: ``SITE=a`` used to make ``f${SITE}lse`` of false."""
    bridge.file.write_text(
        (FILE + VARIABLES).replace('"k:9092"', '["${WHO}:9092", "k:9092"]').replace("mqtts://b", "mqtts://${WHO}")
    )
    for name, value in (("SITE", "a"), ("PROMISE", "at_least_once"), ("ACKS", "kafka")):
        monkeypatch.setenv(name, value)
    code, out, error = ran(capsys, "check", str(bridge.file), "-v")
    assert (code, error) == (0, "")
    assert [value for value in (WHO, SECRET, "f${") if value in out] == []
    written = ["${WHO}:9092,k:9092", "mqtts://${WHO}:1883", "${WHO}/+/#", "t.${WHO}", "dead.${WHO}", "r.${WHO}"]
    written += ["gone/${WHO}", "when Kafka has the message"]
    assert [value for value in written if value not in out] == []


def test_a_secret_of_kafka_is_refused_and_a_variable_stays_one(tmp_path: Path) -> None:
    """It is resolved where the connection is opened."""
    url = "sasl.oauthbearer.token.endpoint.url"
    settings = f"""[kafka.settings]
"sasl.mechanism" = "OAUTHBEARER"
"sasl.oauthbearer.method" = "oidc"
"sasl.oauthbearer.client.id" = "c"
"sasl.oauthbearer.client.secret" = "${{WHO}}"
"{url}" = "${{URL}}"
[[uplink]]"""
    text = GOOD.replace("[[uplink]]", settings, 1)
    environ = {"WHO": SECRET, "URL": f"https://me:{SECRET}@idp/token"}
    (line,) = told(text.replace("${URL}", environ["URL"]), tmp_path, environ)
    assert f'"{url}" would put a secret into this file' in line
    assert SECRET not in line
    bridge = read(text, tmp_path, environ)
    client = bridge.kafka.client_settings()
    assert (client[url], client["sasl.oauthbearer.client.secret"]) == ("${URL}", "${WHO}")
    assert SECRET not in bridge.model_dump_json()
