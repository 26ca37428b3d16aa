"""The bridge file: what a right one becomes, and the line each mistake gets."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme

from towline.bridge.config.document import Document
from towline.bridge.config.file import load, parse
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.plan import bridge_plan
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee

GOOD = """\
name = "plant-7"
state_dir = "state"

[mqtt]
brokers = ["mqtt://a:1883"]

[kafka]
bootstrap_servers = "k1:9092"

[[uplink]]
name = "telemetry"

[[uplink.route]]
from = "telemetry/{device}/#"
topic = "telemetry"
"""


def read(text: str, directory: Path, environ: dict[str, str] | None = None) -> Bridge:
    file = directory / "bridge.toml"
    file.write_text(text)
    return parse(text, file, environ or {})


def told(text: str, directory: Path, environ: dict[str, str] | None = None) -> list[str]:
    """The lines of the mistakes, with the file's directory taken off."""
    with pytest.raises(ConfigError) as caught:
        read(text, directory, environ)
    return [line.replace(f"{directory}/", "") for line in str(caught.value).splitlines()]


def content(line: str) -> tuple[str, str, set[str]]:
    """Of the line of a mistake: its place, its code, and the names and values that it tells; prose aside."""
    place, _, rest = line.partition(": ")
    return (
        place,
        rest[rest.rindex("[") :],
        set(re.findall(r'"[^"]*"|\{[^}]*\}|[$\w]*[_/=+#*]\w*|\w+\.\w+|\d+', rest.rpartition("  ")[0])),
    )


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def test_a_small_file_gets_safe_defaults(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    (line,) = bridge.uplinks
    assert line.guarantee is Guarantee.AT_LEAST_ONCE
    assert line.gateway.effective_ack_after is AckAfter.JOURNAL
    assert line.gateway.client_id == "plant-7-telemetry"
    assert line.gateway.state_dir == tmp_path / "state" / "telemetry"
    assert line.checkpoint == tmp_path / "state" / "telemetry" / "checkpoint"
    assert [(s.pattern, s.qos) for s in line.gateway.subscriptions] == [("telemetry/+/#", 1)]
    assert line.fixed_topics == ("telemetry",)
    assert bridge.spark.master == "local[*]"
    assert bridge.spark.ui is False
    assert bridge.kafka.create_topics is None


def test_the_bridge_travels_as_json(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge


def test_the_example_is_right() -> None:
    bridge = load(Path(__file__).parents[3] / "examples" / "bridge.toml", {})
    assert [line.name for line in bridge.uplinks] == ["telemetry"]


def test_a_line_overrides_the_common_settings(tmp_path: Path) -> None:
    text = changed('name = "telemetry"', 'name = "telemetry"\nmqtt = { brokers = "mqtt://b", keep_alive_s = 7 }')
    (line,) = read(text, tmp_path).lines
    assert [str(broker) for broker in line.gateway.brokers] == ["mqtt://b:1883"]
    assert line.gateway.keep_alive_s == 7


def test_a_line_says_what_becomes_of_retained_messages(tmp_path: Path) -> None:
    text = changed("[kafka]", "retain_handling = 2\n[kafka]")
    assert read(text, tmp_path).lines[0].gateway.retain_handling == 2
    with pytest.raises(ConfigError, match=r'retain_handling 1 and 2 need protocol "5".*\[TL-C05\]'):
        read(changed("[kafka]", 'retain_handling = 2\nprotocol = "3.1.1"\n[kafka]'), tmp_path)


def test_a_shared_subscription_needs_mqtt_5(tmp_path: Path) -> None:
    """To a broker of 3.1.1 it is a filter that no topic matches: nothing would ever arrive."""
    text = changed("[kafka]", 'protocol = "3.1.1"\n[kafka]').replace('from = "', 'from = "$share/g/')
    with pytest.raises(ConfigError, match=r'needs protocol "5".*\[TL-C05\]'):
        read(text, tmp_path)


LIST = changed('["mqtt://a:1883"]', '["mqtt://a", "mqtt://b"]')
EXACT = 'name = "telemetry"\nguarantee = "exactly_once"'


def test_a_list_of_brokers_under_exactly_once_needs_a_word(tmp_path: Path) -> None:
    assert read(LIST, tmp_path).lines, "at least once needs nothing"
    told = (
        r'bridge.toml:5  uplink "telemetry": guarantee exactly_once with 2 brokers needs them to share sessions: a '
        r"takeover would double messages in flight. Set brokers_share_sessions = true if they are one such cluster, or "
        r"give one address; or take guarantee at_least_once.   [TL-C90]"
    )
    with pytest.raises(ConfigError) as caught:
        read(LIST.replace('name = "telemetry"', EXACT), tmp_path)
    assert str(caught.value).endswith(told)
    shared = LIST.replace("[kafka]", "brokers_share_sessions = true\n[kafka]").replace('name = "telemetry"', EXACT)
    assert read(shared, tmp_path).lines[0].gateway.brokers_share_sessions
    redirected = GOOD.replace("[kafka]", "follow_redirects = true\n[kafka]").replace('name = "telemetry"', EXACT)
    with pytest.raises(ConfigError, match=r"exactly_once with follow_redirects .*\[TL-C90\]"):
        read(redirected, tmp_path)


def test_what_a_key_names_may_come_from_several_brokers(tmp_path: Path) -> None:
    keyed = EXACT + '\ndedupe = { key = "{mqtt.user.id}" }'
    assert read(LIST.replace('name = "telemetry"', keyed), tmp_path).lines


def test_sizes_have_units(tmp_path: Path) -> None:
    text = changed(
        'name = "telemetry"', 'name = "telemetry"\njournal = { max_bytes = "20 GB", min_free_bytes = "1GiB" }'
    )
    (line,) = read(text, tmp_path).lines
    assert line.gateway.journal.max_bytes == 20_000_000_000
    assert line.gateway.journal.min_free_bytes == 1 << 30
    (line,) = read(changed("[kafka]", 'max_packet_bytes = "2 MiB"\n[kafka]'), tmp_path).lines
    assert line.gateway.max_packet_bytes == 2 << 20


def test_at_most_once_subscribes_with_qos_0(tmp_path: Path) -> None:
    text = changed('name = "telemetry"', 'name = "telemetry"\nguarantee = "at_most_once"')
    (line,) = read(text, tmp_path).lines
    assert line.gateway.subscriptions[0].qos == 0
    assert line.gateway.effective_ack_after is AckAfter.RECEIVED


def test_after_kafka_the_broker_keeps_what_kafka_has_not(tmp_path: Path) -> None:
    """Whoever starts elsewhere with an empty state directory takes the session over; after the journal it asks first."""
    for said, meets, shown in (
        ("kafka", "adopt", "its queue has to hold"),
        ("journal", "refuse", "holds what was ack"),
    ):
        bridge = read(changed('name = "telemetry"', f'name = "telemetry"\nack_after = "{said}"'), tmp_path)
        (line,) = bridge.uplinks
        assert line.gateway.connection.session.unknown_session == meets
        (plan,) = bridge_plan(bridge)["lines"]
        assert any(shown in text for text in plan["limits"])
        assert ("as long as the broker keeps its session" in plan["says"]["lost"]) is (said == "kafka")
    text = changed('name = "telemetry"', 'name = "telemetry"\nack_after = "kafka"')
    (line,) = read(text.replace("[mqtt]", '[mqtt]\nunknown_session = "refuse"'), tmp_path).uplinks
    assert line.gateway.connection.session.unknown_session == "refuse"


@pytest.mark.parametrize(
    ("keys", "delay_ms"),
    [
        ("", 1000),
        ('ack_after = "kafka"', 0),
        ('receipts = { key_file = "bridge.toml" }', 0),
        ('ack_after = "kafka"\nmax_trigger_delay_ms = 300', 300),
        ("max_trigger_delay_ms = 0", 0),
    ],
)
def test_a_line_rests_where_nobody_waits_for_kafka(tmp_path: Path, keys: str, delay_ms: int) -> None:
    bridge = read(changed('name = "telemetry"', f'name = "telemetry"\n{keys}'), tmp_path)
    assert [line.max_trigger_delay_ms for line in bridge.uplinks] == [delay_ms]
    assert [plan["max_trigger_delay_ms"] for plan in bridge_plan(bridge)["lines"]] == [delay_ms]


def test_exactly_once_sets_every_knob(tmp_path: Path) -> None:
    text = changed('name = "telemetry"', 'name = "telemetry"\nguarantee = "exactly_once"')
    (line,) = read(text, tmp_path).uplinks
    assert line.gateway.subscriptions[0].qos == 2
    assert line.gateway.effective_ack_after is AckAfter.JOURNAL
    assert (line.parallelism, line.dead_letter_topic, line.dedupe_window) == (1, None, None)


def test_a_dedupe_key_allows_qos_1(tmp_path: Path) -> None:
    text = changed(
        'name = "telemetry"\n',
        'name = "telemetry"\nguarantee = "exactly_once"\ndedupe = { key = "{mqtt.user.id}", within = "2 Hours" }\n',
    )
    (line,) = read(text + "qos = 1\n", tmp_path).uplinks
    assert line.gateway.subscriptions[0].qos == 1
    assert line.dedupe_window == "2 hours"
    assert line.routes[0].dedupe is not None


def test_dead_letters_have_a_topic_where_topics_are_created(tmp_path: Path) -> None:
    created = changed('"k1:9092"', '"k1:9092"\ncreate_topics = true')
    assert read(created, tmp_path).lines[0].dead_letter_topic == "plant-7.dead-letters"
    assert "plant-7.dead-letters" in read(created, tmp_path).lines[0].fixed_topics
    off = created.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = false')
    assert read(off, tmp_path).lines[0].dead_letter_topic is None
    named = changed('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    assert read(named, tmp_path).lines[0].fixed_topics == ("dead", "telemetry")


@pytest.mark.parametrize("created", [True, False])
def test_topics_that_a_list_names_are_created(tmp_path: Path, created: bool) -> None:
    """But for those that no message may become; where others make topics, none of them has to be there."""
    route = """
[[uplink.route]]
from = "event/{x}"
topic = "e{x}"
allowed_topics = ["e.t1", "e.*", "other", "e", "eat"]
[[uplink.route]]
from = "reserved/{x}"
topic = "_{x}"
allowed_topics = ["__consumer_offsets"]
[[uplink.route]]
from = "fixed/{x}"
topic = "fixed"
allowed_topics = ["fixed"]
"""
    text = changed('"k1:9092"', f'"k1:9092"\ncreate_topics = {str(created).lower()}')
    bridge = read(text + route, tmp_path)
    listed = {"e.t1", "e", "eat"} if created else set()
    assert set(bridge.required_topics) == {*bridge.lines[0].fixed_topics, *listed}


def test_the_environment_fills_in(tmp_path: Path) -> None:
    text = changed("k1:9092", "${SERVERS}").replace('"telemetry/{device}/#"', '"$${X}/#"'.replace("${X}", "${{X}}"))
    bridge = read(text.replace("$${{X}}", "x"), tmp_path, {"SERVERS": "k9:1"})
    assert bridge.kafka.bootstrap_servers == "k9:1"


def test_a_doubled_dollar_is_literal(tmp_path: Path) -> None:
    text = GOOD + "where = \"topic != '$${HOME}'\"\n"
    (line,) = read(text, tmp_path, {}).uplinks
    assert line.routes[0].where == "topic != '${HOME}'"


def test_secrets_of_kafka_travel_as_names(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("s3cret\n")
    text = changed(
        '"k1:9092"', '"k1:9092"\npassword_file = "pw"\nsettings = { "sasl.username" = "u", "linger.ms" = 5 }'
    )
    client = read(text, tmp_path).kafka.client_settings()
    assert client == {
        "bootstrap.servers": "k1:9092",
        "sasl.username": "u",
        "linger.ms": "5",
        "sasl.password.file": str(tmp_path / "pw"),
    }


def test_files_of_kafkas_client_are_named_as_from_the_bridge_file(tmp_path: Path) -> None:
    """A service starts in another directory than a person, and librdkafka's own word is "BIO lib"."""
    text = changed('"k1:9092"', '"k1:9092"\nsettings = { "security.protocol" = "ssl", "ssl.ca.location" = "ca.pem" }')
    (mistake,) = told(text, tmp_path)
    assert "[kafka]: ssl.ca.location ca.pem does not exist" in mistake
    assert mistake.endswith("[TL-C15]")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    assert read(text, tmp_path).kafka.client_settings()["ssl.ca.location"] == str(tmp_path / "ca.pem")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_login_with_its_password_in_a_file_is_whole(tmp_path: Path, mechanism: str) -> None:
    """librdkafka refuses a user name without password, and must not be asked without what the file will give."""
    (tmp_path / "pw").write_text("s3cret")
    settings = (
        f'"security.protocol" = "SASL_SSL", "sasl.mechanism" = "{mechanism}", "sasl.username" = "$ConnectionString"'
    )
    bridge = read(changed('"k1:9092"', f'"k1:9092"\npassword_file = "pw"\nsettings = {{ {settings} }}'), tmp_path)
    assert bridge.kafka.client_settings()["sasl.password.file"] == str(tmp_path / "pw")
    (mistake,) = told(changed('"k1:9092"', f'"k1:9092"\nsettings = {{ {settings} }}'), tmp_path)
    assert "sasl.username and sasl.password must be set" in mistake


def test_a_secret_reference_is_resolved_only_where_it_is_used(tmp_path: Path) -> None:
    text = changed('"k1:9092"', '"k1:9092"\nsettings = { "sasl.password" = "${PW}" }')
    bridge = read(text, tmp_path, {"PW": "s3cret"})
    assert bridge.kafka.client_settings()["sasl.password"] == "${PW}"
    assert "s3cret" not in bridge.model_dump_json()


def test_dotted_client_settings_may_be_a_table(tmp_path: Path) -> None:
    text = GOOD.replace("[[uplink]]", '[kafka.settings]\nsecurity.protocol = "SSL"\n\n[[uplink]]')
    assert read(text, tmp_path).kafka.settings == {"security.protocol": "SSL"}


ROUTE = 'topic = "telemetry"\n'

#: What was changed in GOOD, by what, and the line it gets.
MISTAKES = [
    ('name = "plant-7"\n', "", 'bridge.toml:1: "name" is missing. Name the bridge; it becomes part of the MQTT client ids.   [TL-C02]'),
    ('"plant-7"', '"plant 7"', 'bridge.toml:1: "name" has letters, digits, dots, - and _, begins with a letter or digit, at most 64. Rename it.   [TL-C03]'),
    ('state_dir = "state"\n', "", 'bridge.toml:1: "state_dir" is missing. Name a directory on a local disk; the journals live there.   [TL-C02]'),
    ('"state"', "7", 'bridge.toml:2: "state_dir" must be a path in quotes. Correct the value.   [TL-C03]'),
    ('"state"', '"s3://bucket/x"', 'bridge.toml:2: "state_dir": must be a path on a disk of this machine, not a URI. Name a directory on a local disk.   [TL-C05]'),
    ("state_dir", 'stat_dir = "x"\nstate_dir', 'bridge.toml:2: unknown key "stat_dir". Did you mean "state_dir"?   [TL-C01]'),
    ('["mqtt://a:1883"]', '["mqtt://a:1883"]\nclient_idd = "x"', 'bridge.toml:6  [mqtt]: unknown key "client_idd". Did you mean "client_id"?   [TL-C01]'),
    ('brokers = ["mqtt://a:1883"]\n', "", 'bridge.toml:4  [mqtt]: "brokers" is missing. Add it, as brokers = ["mqtt://localhost:1883"].   [TL-C02]'),
    ("[kafka]", "keep_alive_s = 2\n[kafka]", 'bridge.toml:7  [mqtt]: "keep_alive_s" must be at least 5. Change the number.   [TL-C03]'),
    ("[kafka]", 'keep_alive_s = "soon"\n[kafka]', 'bridge.toml:7  [mqtt]: "keep_alive_s" must be a whole number. Correct the value.   [TL-C03]'),
    ("[kafka]", "session_expiry_s = 0\n[kafka]", "bridge.toml:7  [mqtt]: guarantee at_least_once needs a session that outlives the connection. Raise session_expiry_s.   [TL-C12]"),
    ("[kafka]", 'unknown_session = "keep"\n[kafka]', 'bridge.toml:7  [mqtt]: "unknown_session" must be "refuse", "adopt" or "discard". Choose one.   [TL-C03]'),
    ("[kafka]", 'source_address = "eth0"\n[kafka]', 'bridge.toml:7  [mqtt]: "source_address" must be an IP address of this machine. Correct the value.   [TL-C05]'),
    ("[kafka]", 'token_provider = "x"\n[kafka]', 'bridge.toml:7  [mqtt]: "token_provider" must be module:function. Correct the value.   [TL-C05]'),
    ("[kafka]", f'client_id = "{"x" * 300}"\n[kafka]', 'bridge.toml:7  [mqtt]: "client_id" must have at most 256 characters. Correct the value.   [TL-C03]'),
    ("[kafka]", 'password = "hunter2"\n[kafka]', 'bridge.toml:7  [mqtt]: "password" would put a secret into this file. Write it into a file of mode 0600 and set password_file.   [TL-C16]'),
    ("[kafka]", 'password_file = "nowhere"\n[kafka]', "bridge.toml:7  [mqtt]: password_file nowhere does not exist. Write the secret into it, mode 0600.   [TL-C15]"),
    ("[kafka]", "tls = { insecure = true }\n[kafka]", 'bridge.toml:7  uplink "telemetry": tls is set, but no broker is reached by mqtts://, so nothing would be encrypted. Write mqtts://, or remove tls.   [TL-C17]'),
    ('[kafka]\nbootstrap_servers = "k1:9092"\n', "", "bridge.toml:1: [kafka] is missing. Add the table.   [TL-C02]"),
    ("k1:9092", "${KAFKA}", "bridge.toml:8  [kafka]: the environment variable KAFKA is not set. Set it, or write $${KAFKA} for the text itself.   [TL-C04]"),
    ("k1:9092", "k1", 'bridge.toml:8  [kafka]: "k1" in "bootstrap_servers" is not HOST:PORT. Name one or more HOST:PORT, with commas between.   [TL-C42]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { acks = "0" }', 'bridge.toml:9  [kafka]: "acks" is set by Towline. Remove it.   [TL-C68]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "isolation.level" = "read_committed" }', 'bridge.toml:9  [kafka]: "isolation.level" is set by Towline. Remove it.   [TL-C68]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "sasl.password" = "hunter2" }', 'bridge.toml:9  [kafka]: "sasl.password" would put a secret into this file. Use password_file or key_password_file, or write ${NAME}.   [TL-C16]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "lingerr.ms" = 1 }', 'bridge.toml:9  [kafka]: unknown "lingerr.ms". Did you mean "linger.ms"?   [TL-C01]'),
    ('name = "telemetry"', 'name = "telemetry"\nmqtt = 3', 'bridge.toml:12  uplink "telemetry": "mqtt" must be a table. Correct the value.   [TL-C03]'),
    (ROUTE, ROUTE + 'from_ = "x"\n', 'bridge.toml:16  uplink "telemetry" route 1: unknown key "from_". Did you mean "from"?   [TL-C01]'),
    ('name = "telemetry"', 'name = "telemetry"\nguarantee = "twice"', 'bridge.toml:12  uplink "telemetry": "guarantee" must be "at_most_once", "at_least_once" or "exactly_once". Choose one.   [TL-C03]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\nguarantee = "exactly_once"\nack_after = "kafka"\n\n', 'bridge.toml:13  uplink "telemetry": guarantee exactly_once needs ack_after journal, not kafka. Change one of the two.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\nqos = 1', 'bridge.toml:15  uplink "telemetry" route 1: guarantee exactly_once needs QoS 2, the route subscribes with qos = 1. Raise it, or give a dedupe key or promise = "at_least_once", which allow QoS 1.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\ndedupe = { key = "payload" }\n\n[[uplink.route]]\nqos = 0', 'bridge.toml:16  uplink "telemetry" route 1: guarantee exactly_once needs QoS 1 or 2, the route subscribes with qos = 0. Raise it, or give the route promise = "at_most_once", which takes QoS 0.   [TL-C12]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.speculation = true\n\n[[uplink]]\nguarantee = "exactly_once"\n', 'bridge.toml:11  uplink "telemetry": guarantee exactly_once needs spark.speculation = false. Remove it from [spark.conf].   [TL-C12]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\nguarantee = "exactly_once"\nmqtt = { session_expiry_s = 0 }\n\n', 'bridge.toml:13  uplink "telemetry": guarantee exactly_once needs a session that outlives the connection. Raise session_expiry_s.   [TL-C12]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndedupe = { key = "payload", within = "a while" }\n\n', 'bridge.toml:12  uplink "telemetry": within is a time of at most 30 days. Write it as "10 minutes" or "2 hours".   [TL-C05]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndedupe = { key = "{nope}" }\n\n', 'bridge.toml:14  uplink "telemetry" route 1: "{nope}" names {nope}, which from does not capture. Known are {device}, {mqtt.topic}, {mqtt.qos}, {mqtt.retain}, {mqtt.content_type}, {mqtt.response_topic}, {mqtt.message_expiry}, {mqtt.gateway}, {mqtt.offset}, {mqtt.received_at}, {payload}, {payload.JSON.PATH} and {mqtt.user.NAME}.   [TL-C66]'),
    ('topic = "telemetry"\n', 'topic = "telemetry"\ndedupe = { key = "payload", within = "1 hour" }\n\n[[uplink.route]]\nfrom = "x"\ntopic = "x"\ndedupe = { key = "payload", within = "2 hours" }\n', 'bridge.toml:21  uplink "telemetry" route 2: within = "2 hours" differs from "1 hours" on the same line. Make it one, or make two lines.   [TL-C72]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndead_letter_topic = "a b"\n\n', 'bridge.toml:12  uplink "telemetry": "a b" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Correct the name, or write false for none.   [TL-C62]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.sql.shuffle.partitions = 4\n\n[[uplink]]\ndedupe = { key = "payload" }\n', 'bridge.toml:11  uplink "telemetry": dedupe needs spark.sql.shuffle.partitions = 1: more would mix up the order of a device\'s messages. Remove the setting.   [TL-C12]'),
    ('name = "telemetry"', 'name = "telemetry"\nack_after = "received"', 'bridge.toml:12  uplink "telemetry": guarantee at_least_once needs ack_after journal or kafka, not received. Change one of the two.   [TL-C12]'),
    ('name = "telemetry"', 'name = "telemetry"\nguarantee = "at_most_once"\nack_after = "kafka"', 'bridge.toml:13  uplink "telemetry": guarantee at_most_once needs ack_after received, not kafka. Change one of the two.   [TL-C12]'),
    ('name = "telemetry"', 'name = "telemetry"\njournal = { max_bytes = "lots" }', 'bridge.toml:12  uplink "telemetry": "max_bytes" must be a size. Write bytes as a number, or as "20 GB", "512 MiB" or 512m.   [TL-C03]'),
    ("telemetry/{device}/#", "telemetry/#/{device}", 'bridge.toml:14  uplink "telemetry" route 1: # stands alone and last in a topic filter. Correct it.   [TL-C67]'),
    ("telemetry/{device}/#", "telemetry/d-{device}", 'bridge.toml:14  uplink "telemetry" route 1: "d-{device}" is no level of a filter. A wildcard {name} fills a whole level, a brace is written {{.   [TL-C67]'),
    ("telemetry/{device}/#", "{a}/{a}", 'bridge.toml:14  uplink "telemetry" route 1: the wildcard {a} stands twice in from. Give each its own name.   [TL-C67]'),
    (ROUTE, ROUTE + "qos = 0\n", 'bridge.toml:16  uplink "telemetry" route 1: guarantee at_least_once needs QoS 1 or 2, the route subscribes with qos = 0. Raise it, or take guarantee exactly_once and give the route promise = "at_most_once", which takes QoS 0.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\npromise = "at_most_once"\nqos = 1', 'bridge.toml:15  uplink "telemetry" route 1: promise = "at_most_once" subscribes with QoS 0, not 1. Remove qos, or promise.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\npromise = "at_least_once"\nqos = 2', 'bridge.toml:15  uplink "telemetry" route 1: promise = "at_least_once" subscribes with QoS 1, not 2. Remove qos, or promise.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\npromise = "exactly_once"', 'bridge.toml:15  uplink "telemetry" route 1: promise = "exactly_once" is what the line promises. Remove it, or write at_least_once or at_most_once.   [TL-C12]'),
    (ROUTE, ROUTE + 'promise = "at_most_once"\n', 'bridge.toml:16  uplink "telemetry" route 1: promise = "at_most_once" is for a route of a line with guarantee exactly_once, not at_least_once. Change one of the two.   [TL-C12]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.stage.ignoreDecommissionFetchFailure = true\n\n[[uplink]]\nguarantee = "at_most_once"\n', 'bridge.toml:11  uplink "telemetry": guarantee at_most_once needs spark.stage.ignoreDecommissionFetchFailure = false. Remove it from [spark.conf].   [TL-C12]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.stage.maxConsecutiveAttempts = 4\n\n[[uplink]]\nguarantee = "at_most_once"\n', 'bridge.toml:11  uplink "telemetry": guarantee at_most_once needs spark.stage.maxConsecutiveAttempts = 1. Remove it from [spark.conf].   [TL-C12]'),
    (ROUTE, ROUTE + "qos = 3\n", 'bridge.toml:16  uplink "telemetry" route 1: "qos" must be at most 2. Change the number.   [TL-C03]'),
    (ROUTE, 'topic = "tele metry"\n', 'bridge.toml:15  uplink "telemetry" route 1: "tele metry" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Correct the name.   [TL-C62]'),
    (ROUTE, 'topic = "{device}"\n', 'bridge.toml:15  uplink "telemetry" route 1: topic "{device}" lets a device name any Kafka topic. Begin it with a fixed prefix, or list allowed_topics.   [TL-C63]'),
    (ROUTE, ROUTE + 'allowed_topics = ["other.*"]\n', 'bridge.toml:15  uplink "telemetry" route 1: topic "telemetry" is not among allowed_topics. Add it there.   [TL-C63]'),
    (ROUTE, ROUTE + 'allowed_topics = ["a b"]\n', 'bridge.toml:16  uplink "telemetry" route 1: "a b" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Use names, or globs with * and ?.   [TL-C62]'),
    (ROUTE, ROUTE + 'key = "{devise}"\n', 'bridge.toml:16  uplink "telemetry" route 1: "{devise}" names {devise}, which from does not capture. Known are {device}, {mqtt.topic}, {mqtt.qos}, {mqtt.retain}, {mqtt.content_type}, {mqtt.response_topic}, {mqtt.message_expiry}, {mqtt.gateway}, {mqtt.offset}, {mqtt.received_at}, {payload}, {payload.JSON.PATH} and {mqtt.user.NAME}.   [TL-C66]'),
    (ROUTE, ROUTE + 'key = "{device"\n', 'bridge.toml:16  uplink "telemetry" route 1: "{device" has a lone brace. Write {{ or }} for a brace.   [TL-C66]'),
    (ROUTE, ROUTE + 'headers = { "mqtt.topic" = "x" }\n', 'bridge.toml:16  uplink "telemetry" route 1: a header "mqtt.topic" looks like one that Towline writes. Name it without the prefix mqtt. or towline.   [TL-C65]'),
    (ROUTE, ROUTE + 'where = " "\n', 'bridge.toml:16  uplink "telemetry" route 1: where is empty. Give a condition in Spark SQL, or remove it.   [TL-C69]'),
    (ROUTE, ROUTE + 'fields = { a = " " }\n', 'bridge.toml:16  uplink "telemetry" route 1: a is empty. Give an expression in Spark SQL, or remove it.   [TL-C69]'),
    *((ROUTE, ROUTE + f'fields = {{ "{name}" = "1" }}\n', f'bridge.toml:16  uplink "telemetry" route 1: the field "{shown}" has a name that {why}. Name it with small letters, digits and _, and as no column of the source and no wildcard.   [TL-C66]') for name, shown, why in [("qos", "qos", "is taken"), ("device", "device", "is taken"), ("A", "A", "is illegal in SQL"), ("a-b", "a-b", "is illegal in SQL"), ("a\\n", "a\\x0a", "is illegal in SQL"), ("towline_a", "towline_a", "is illegal in SQL")]),
    (ROUTE, ROUTE + """where = "'{device}' = topic"\n""", 'bridge.toml:16  uplink "telemetry" route 1: where names {device}, which SQL takes for text. Write the column device, without braces.   [TL-C69]'),
    (ROUTE, ROUTE + """reject = "concat('no {mqtt.user.id}')"\n""", 'bridge.toml:16  uplink "telemetry" route 1: reject names {mqtt.user.id}, which SQL takes for text. Write the column user_properties, without braces.   [TL-C69]'),
    ('"telemetry/{device}/#"', '"telemetry/{qos}/{Gateway}"\nwhere = "true"', 'bridge.toml:14  uplink "telemetry" route 1: the wildcard {qos} is a column for SQL, which has another of that name. Give the wildcard another name.   [TL-C67]'),
    (ROUTE, ROUTE + 'properties = "some"\n', 'bridge.toml:16  uplink "telemetry" route 1: "properties" must be "all" or "none". Choose one.   [TL-C03]'),
    ("[mqtt]", "[mqtt", "bridge.toml:4: not TOML: expected ']' at the end of a table declaration. Correct the line.   [TL-C11]"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    (line,) = told(changed(old, new), tmp_path)
    assert content(line) == content(expected)


def test_the_home_of_a_user_who_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    for key in ('password_file = "{}"', 'tls = {{ ca_file = "{}" }}'):
        found = told(changed("[kafka]", key.format("~no-such-user/pw") + "\n[kafka]"), tmp_path)
        assert any('"~no-such-user/pw" names the home of an unknown user' in line for line in found)
    named = changed('name = "telemetry"', 'name = "telemetry"\ngateways = ["~no-such-user/g"]')
    assert any("TL-C15" in line for line in told(named, tmp_path))
    profile = changed('name = "telemetry"', 'name = "telemetry"\nprofile = "~no-such-user/p.toml"')
    assert any("TL-C208" in line for line in told(profile, tmp_path))
    jars = GOOD.replace("[[uplink]]", '[spark]\nkafka_jars = ["~no-such-user/jars"]\n[[uplink]]', 1)
    assert any("TL-C15" in line for line in told(jars, tmp_path))


@pytest.mark.parametrize("uri", ["http://a", "mqtt://u:hunter2@a", "mqtt://a:99999", "mqtt://"])
def test_a_wrong_broker_is_told_at_its_line(tmp_path: Path, uri: str) -> None:
    (line,) = told(changed("mqtt://a:1883", uri), tmp_path)
    assert re.match(r"bridge\.toml:5  \[mqtt\]: .*\.   \[TL-C05\]$", line)
    assert "hunter2" not in line


def test_a_line_needs_a_route(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("[[uplink.route]]")]
    (line,) = told(text, tmp_path)
    assert content(line)[:2] == ('bridge.toml:10  uplink "telemetry"', "[TL-C61]")
    assert "[[uplink.route]]" in line


def with_receipts(more: str, directory: Path) -> GatewaySettings:
    return read(changed('name = "telemetry"\n', f'name = "telemetry"\n{more}\n'), directory).uplinks[0].gateway


def test_the_key_of_receipts_is_a_file_beside_the_bridge_file(tmp_path: Path) -> None:
    assert with_receipts("", tmp_path).receipts is None
    text = 'receipts = { prefix = "plant/done", keep_s = 3600, key_file = "receipts.key" }'
    with pytest.raises(ConfigError, match="TL-C15"):
        with_receipts(text, tmp_path)
    (tmp_path / "receipts.key").write_text("0" * 64)
    given = with_receipts(text, tmp_path).receipts
    assert given is not None
    assert (given.key_file, given.prefix, given.keep_s) == (tmp_path / "receipts.key", "plant/done", 3600)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("receipts = true", '"receipts" must be a table'),
        ('receipts = { prefix = "x" }', '"key_file" is missing'),
        ('receipts = { key_file = "k" }\nguarantee = "at_most_once"', "receipts need guarantee"),
        ('receipts = { key_file = "k" }\n[uplink.mqtt]\nprotocol = "3.1.1"', "receipts need protocol"),
        ('receipts = { prefixes = "x" }', "bridge.toml:"),
        ('[uplink.mqtt]\nreceipts = "x"', "unknown key"),
    ],
)
def test_contradictions_of_receipts_are_errors_of_the_file(more: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "k").write_text("0" * 64)
    with pytest.raises(ConfigError) as caught:
        with_receipts(more, tmp_path)
    assert problem in str(caught.value)


def test_a_bridge_needs_a_line(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("[[uplink]]")]
    (line,) = told(text, tmp_path)
    assert content(line)[:2] == ("bridge.toml:1", "[TL-C60]")
    assert "[[uplink]] is missing" in line


def test_two_lines_share_neither_name_nor_client_id(tmp_path: Path) -> None:
    second = GOOD[GOOD.index("[[uplink]]") :]
    (line,) = told(GOOD + "\n" + second, tmp_path)
    assert content(line) == ('bridge.toml:18  uplink "telemetry"', "[TL-C18]", {'"telemetry"'})
    text = GOOD.replace("[mqtt]", '[mqtt]\nclient_id = "one"') + "\n" + second.replace('"telemetry"', '"other"', 1)
    (line,) = told(text, tmp_path)
    assert content(line) == ('bridge.toml:18  uplink "other"', "[TL-C19]", {'"one"', '"telemetry"', "client_id"})


def test_every_mistake_is_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = changed('"plant-7"', '"plant 7"').replace("k1:9092", "k1").replace(ROUTE, ROUTE + "qos = 3\nxyz = 1\n")
    lines = told(text, tmp_path)
    assert [re.match(r"bridge\.toml:(\d+)", line)[1] for line in lines] == ["1", "8", "16", "17"]  # type: ignore[index]


def test_an_unknown_key_hides_no_other_mistake(tmp_path: Path) -> None:
    text = changed(ROUTE, 'topic = "tele metry"\nxyz = 1\n').replace("[kafka]", "xyz = 1\nkeep_alive_s = 2\n[kafka]")
    assert [line[-7:-1] for line in told(text, tmp_path)] == ["TL-C01", "TL-C03", "TL-C62", "TL-C01"]


def test_values_of_the_environment_are_never_shown(tmp_path: Path) -> None:
    text = changed('"telemetry"\n\n', '"${SECRET}"\n\n')
    assert "hunter2" not in "\n".join(told(text, tmp_path, {"SECRET": "hunter2 !"}))
    with pytest.raises(ConfigErrors) as caught:
        read(changed('topic = "telemetry"', 'topic = "${SECRET}"'), tmp_path, {"SECRET": "hunter2 !"})
    assert "hunter2" not in str(caught.value)
    assert "${SECRET}" in str(caught.value)


def test_a_line_is_found_by_its_name_whatever_gives_that() -> None:
    """What Spark says of its SQL is told as of its line."""
    text = GOOD + GOOD[GOOD.index("[[uplink]]") :].replace('"telemetry"', '"${SITE}"', 1)
    document = Document(text, Path("bridge.toml"), {"SITE": "west"})
    assert document.table_path("uplink", "west") == ("uplink", 1)
    assert document.location_text((*document.table_path("uplink", "west"), "route", 0, "topic")) == "bridge.toml:21"
    assert document.table_path("uplink", "telemetry") == ("uplink", 0)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_every_key_has_its_line(ends: str) -> None:
    """In tables, dotted keys, inline tables, and beside texts and lists of several lines."""
    lines = [
        "a.b = 1",
        'x = """',
        "[no]",
        'y = 2"""',
        "[[t]]",
        "k = [",
        " 1, # ]",
        "]",
        "[t.u]",
        '"c.d" = { e = 1 }',
        "[[t]]",
        "z=1",
    ]
    document = Document(ends.join(lines), Path("f"), {})
    places = {
        ("a", "b"): 1,
        ("x",): 2,
        ("t", 0, "k"): 6,
        ("t", 0, "k", 0): 6,
        ("t", 0, "u"): 9,
        ("t", 0, "u", "c", "d", "e"): 10,
        ("t", 0, "u", "c.d"): 10,
        ("t", 1, "z"): 12,
        ("t", 1, "missing"): 11,
        ("no",): 1,
    }
    assert {path: document.location(path)[1] for path in places} == places


def test_a_list_of_many_lines_has_one_place() -> None:
    rows = "".join(f'  ["topic.{number}", "x"],\n' for number in range(5000))
    document = Document(f"k = [\n{rows}] # a, b,\nz = {{ b = [\n 1 ] }}\nlast = 1\n", Path("f"), {})
    assert [document.location((key,))[1] for key in ("k", "z", "last")] == [1, 5003, 5005]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or directory\. .*\[TL-C10\]"):
        load(tmp_path / "bridge.toml")
    (tmp_path / "latin").write_bytes(b"name = '\xe4'")
    with pytest.raises(ConfigError, match=r"not UTF-8 text.*\[TL-C11\]"):
        load(tmp_path / "latin")


@pytest.mark.parametrize("text", ["uplink = 3", "uplink = [1]", "mqtt = 1", "kafka = [[1]]", "[uplink]\nname='x'", ""])
def test_nonsense_never_gets_a_traceback(tmp_path: Path, text: str) -> None:
    assert all("[TL-C" in line for line in told(text, tmp_path))


def test_an_unknown_line_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no line is named "telemetri"\. Did you mean "telemetry"\?   \[TL-C73\]'):
        read(GOOD, tmp_path).line("telemetri")


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ('topic = "__consumer_offsets"', 16),
        ('topic = "towline.other.markers"', 16),
        ('topic = "towline.{device}.markers"', 16),
        ('topic = "dead"', 16),
        ('topic = "telemetry"\nfallback_topic = "__x"', 17),
    ],
)
def test_a_reserved_topic_of_the_file_is_a_mistake(tmp_path: Path, where: str, line: int) -> None:
    text = changed('topic = "telemetry"', where).replace(
        'name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"'
    )
    (mistake,) = told(text, tmp_path)
    assert mistake.startswith(f'bridge.toml:{line}  uplink "telemetry" route 1: "')
    assert mistake.endswith("Choose another topic.   [TL-C95]")


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('"bad"', "bad"),
        ('["commands", "bad"]', "bad"),
        ('{ pattern = ".*" }', "towline.plant.down.markers"),
        ('{ pattern = "^towline" }', "towline.plant.down.markers"),
        ('{ pattern = "^b" }', "bad"),
        ('"commands"', None),
        ('{ pattern = "^cmd[.]" }', None),
    ],
)
def test_a_downlink_does_not_read_what_it_writes(tmp_path: Path, source: str, wrong: str | None) -> None:
    text = f"""
name = "plant"
state_dir = "state"
mqtt = {{ brokers = "mqtt://localhost" }}
kafka = {{ bootstrap_servers = "localhost:9092" }}
[[downlink]]
name = "down"
guarantee = "exactly_once"
topic = "c/x"
from = {source}
dead_letter_topic = "bad"
"""
    if wrong is None:
        assert read(text, tmp_path).downlinks
        return
    (mistake, *_) = told(text, tmp_path)
    assert mistake.startswith(f'bridge.toml:10  downlink "down": it would read "{wrong}"')
    assert mistake.endswith("[TL-C95]")


def test_every_route_knows_the_dead_letter_topics_of_all_lines(tmp_path: Path) -> None:
    second = GOOD[GOOD.index("[[uplink]]") :].replace('"telemetry"\n', '"second"\ndead_letter_topic = "dead.2"\n', 1)
    first = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead.1"')
    bridge = read(first + second, tmp_path)
    assert [line.routes[0].dead_letter_topics for line in bridge.uplinks] == [("dead.1", "dead.2")] * 2
    (mistake,) = told(first.replace('"dead.1"', '"__dead"'), tmp_path)
    assert "TL-C95" in mistake
