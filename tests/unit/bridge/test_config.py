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
from towline.errors import ConfigError

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


def test_files_of_kafkas_client_are_named_as_from_the_bridge_file(tmp_path: Path) -> None:
    """A service starts in another directory than a person, and librdkafka's own word is "BIO lib"."""
    text = changed('"k1:9092"', '"k1:9092"\nsettings = { "security.protocol" = "ssl", "ssl.ca.location" = "ca.pem" }')
    (mistake,) = told(text, tmp_path)
    assert "[kafka]: ssl.ca.location ca.pem does not exist" in mistake
    assert mistake.endswith("[TL-C15]")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    assert read(text, tmp_path).kafka.client_settings()["ssl.ca.location"] == str(tmp_path / "ca.pem")


ROUTE = 'topic = "telemetry"\n'
TABLE = '\n[[uplink.route]]\nfrom = "telemetry/{device}/#"\n' + ROUTE

#: What was changed in GOOD, by what, and the line it gets.
MISTAKES = [
    ('name = "plant-7"\n', "", 'bridge.toml:1: "name" is missing. Name the bridge; it becomes part of the MQTT client ids.   [TL-C02]'),
    ('"plant-7"', '"plant 7"', 'bridge.toml:1: "name" must match pattern \'^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$\'. Correct the value.   [TL-C03]'),
    ('state_dir = "state"\n', "", 'bridge.toml:1: "state_dir" is missing. Name a directory on a local disk; the journals live there.   [TL-C02]'),
    ('"state"', '"s3://bucket/x"', 'bridge.toml:2: "state_dir" must be a path on a disk of this machine, not a URI. Correct the path.   [TL-C15]'),
    ("state_dir", 'stat_dir = "x"\nstate_dir', 'bridge.toml:2: unknown key "stat_dir". Did you mean "state_dir"?   [TL-C01]'),
    ('brokers = ["mqtt://a:1883"]\n', "", 'bridge.toml:4  [mqtt]: "brokers" is missing. Add it, as brokers = ["mqtt://localhost:1883"].   [TL-C02]'),
    ("[kafka]", "keep_alive_s = 2\n[kafka]", 'bridge.toml:7  [mqtt]: "keep_alive_s" must be greater than or equal to 5. Change the number.   [TL-C03]'),
    ("[kafka]", 'password = "hunter2"\n[kafka]', 'bridge.toml:7  [mqtt]: "password" would put a secret into this file. Write it into a file of mode 0600 and set password_file.   [TL-C16]'),
    ("[kafka]", 'password_file = "nowhere"\n[kafka]', "bridge.toml:7  [mqtt]: password_file nowhere does not exist. Create it, with mode 0600 for a secret, or correct the path.   [TL-C15]"),
    ("[kafka]", "tls = { insecure = true }\n[kafka]", 'bridge.toml:7  uplink "telemetry": tls is set, but no broker is reached by mqtts://, so nothing would be encrypted. Write mqtts://, or remove tls.   [TL-C17]'),
    ('[kafka]\nbootstrap_servers = "k1:9092"\n', "", "bridge.toml:1: [kafka] is missing. Add the table.   [TL-C02]"),
    ("k1:9092", "${KAFKA}", "bridge.toml:8  [kafka]: the environment variable KAFKA is not set. Set it, or write $${KAFKA} for the text itself.   [TL-C04]"),
    ("k1:9092", "k1", 'bridge.toml:8  [kafka]: "k1" in "bootstrap_servers" is not HOST:PORT. Name one or more HOST:PORT, with commas between.   [TL-C42]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { acks = "0" }', 'bridge.toml:9  [kafka]: "acks" is set by Towline. Remove it.   [TL-C68]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "transaction.timeout.ms" = "90000" }', 'bridge.toml:9  [kafka]: "transaction.timeout.ms" is set by Towline. Remove it.   [TL-C68]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "sasl.password" = "hunter2" }', 'bridge.toml:9  [kafka]: "sasl.password" would put a secret into this file. Use password_file or key_password_file, or write ${NAME}.   [TL-C16]'),
    ('"k1:9092"', '"k1:9092"\nsettings = { "lingerr.ms" = 1 }', 'bridge.toml:9  [kafka]: unknown "lingerr.ms". Did you mean "linger.ms"?   [TL-C01]'),
    (ROUTE, ROUTE + 'from_ = "x"\n', 'bridge.toml:16  uplink "telemetry" route 1: unknown key "from_". Did you mean "from"?   [TL-C01]'),
    ('name = "telemetry"', 'name = "telemetry"\nguarantee = "twice"', 'bridge.toml:12  uplink "telemetry": "guarantee" must be "at_most_once", "at_least_once" or "exactly_once". Choose one.   [TL-C03]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\nqos = 1', 'bridge.toml:15  uplink "telemetry" route 1: guarantee exactly_once needs QoS 2, the route subscribes with qos = 1. Raise it. With exactly_once a dedupe key or promise = "at_least_once" allows QoS 1, "at_most_once" QoS 0.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\ndedupe = { key = "payload" }\n\n[[uplink.route]]\nqos = 0', 'bridge.toml:16  uplink "telemetry" route 1: guarantee exactly_once needs QoS 1 or 2, the route subscribes with qos = 0. Raise it. With exactly_once a dedupe key or promise = "at_least_once" allows QoS 1, "at_most_once" QoS 0.   [TL-C12]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.speculation = true\n\n[[uplink]]\nguarantee = "exactly_once"\n', 'bridge.toml:11  uplink "telemetry": guarantee exactly_once needs spark.speculation = false. Remove it from [spark.conf].   [TL-C12]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\nguarantee = "exactly_once"\nmqtt = { session_expiry_s = 0 }\n\n', 'bridge.toml:13  uplink "telemetry": guarantee exactly_once needs a session that outlives the connection. Raise session_expiry_s.   [TL-C12]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndedupe = { key = "payload", within = "a while" }\n\n', 'bridge.toml:12  uplink "telemetry": "within" must match pattern \'^[1-9][0-9]{0,5} (second|minute|hour|day)s?$\'. Correct the value.   [TL-C03]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndedupe = { key = "{nope}" }\n\n', 'bridge.toml:14  uplink "telemetry" route 1: "{nope}" names {nope}, which from does not capture. Known are {device}, {mqtt.topic}, {mqtt.qos}, {mqtt.retain}, {mqtt.content_type}, {mqtt.response_topic}, {mqtt.message_expiry}, {mqtt.gateway}, {mqtt.offset}, {mqtt.received_at}, {payload}, {payload.JSON.PATH} and {mqtt.user.NAME}.   [TL-C66]'),
    ('topic = "telemetry"\n', 'topic = "telemetry"\ndedupe = { key = "payload", within = "1 hour" }\n\n[[uplink.route]]\nfrom = "x"\ntopic = "x"\ndedupe = { key = "payload", within = "2 hours" }\n', 'bridge.toml:21  uplink "telemetry" route 2: within = "2 hours" differs from "1 hour" on the same line. Make it one, or make two lines.   [TL-C72]'),
    ('name = "telemetry"\n\n', 'name = "telemetry"\ndead_letter_topic = "a b"\n\n', 'bridge.toml:12  uplink "telemetry": "a b" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Correct the name, or write false for none.   [TL-C62]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.sql.shuffle.partitions = 4\n\n[[uplink]]\ndedupe = { key = "payload" }\n', 'bridge.toml:11  uplink "telemetry": dedupe needs spark.sql.shuffle.partitions = 1: more would mix up the order of a device\'s messages. Remove the setting.   [TL-C12]'),
    ('name = "telemetry"', 'name = "telemetry"\nack_after = "received"', 'bridge.toml:12  uplink "telemetry": guarantee at_least_once needs ack_after journal or kafka, not received. Change one of the two.   [TL-C12]'),
    ('name = "telemetry"', 'name = "telemetry"\njournal = { max_bytes = "lots" }', 'bridge.toml:12  uplink "telemetry": "max_bytes" must be a size. Write bytes as a number, or as "20 GB", "512 MiB" or 512m.   [TL-C03]'),
    ("telemetry/{device}/#", "telemetry/#/{device}", 'bridge.toml:14  uplink "telemetry" route 1: # stands alone and last in a topic filter. Correct it.   [TL-C67]'),
    ("telemetry/{device}/#", "telemetry/d-{device}", 'bridge.toml:14  uplink "telemetry" route 1: "d-{device}" is no level of a filter. A wildcard {name} fills a whole level, a brace is written {{.   [TL-C67]'),
    ("telemetry/{device}/#", "{a}/{a}", 'bridge.toml:14  uplink "telemetry" route 1: the wildcard {a} stands twice in from. Give each its own name.   [TL-C67]'),
    (ROUTE, ROUTE + "qos = 0\n", 'bridge.toml:16  uplink "telemetry" route 1: guarantee at_least_once needs QoS 1 or 2, the route subscribes with qos = 0. Raise it. With exactly_once a dedupe key or promise = "at_least_once" allows QoS 1, "at_most_once" QoS 0.   [TL-C12]'),
    ('name = "telemetry"\n\n[[uplink.route]]', 'name = "telemetry"\nguarantee = "exactly_once"\n\n[[uplink.route]]\npromise = "at_most_once"\nqos = 1', 'bridge.toml:15  uplink "telemetry" route 1: promise = "at_most_once" subscribes with QoS 0, not 1. Remove qos, or promise.   [TL-C12]'),
    (ROUTE, ROUTE + 'promise = "at_most_once"\n', 'bridge.toml:16  uplink "telemetry" route 1: promise = "at_most_once" is for a route of a line with guarantee exactly_once, not at_least_once. Change one of the two.   [TL-C12]'),
    ("[[uplink]]\n", '[spark.conf]\nspark.stage.maxConsecutiveAttempts = 4\n\n[[uplink]]\nguarantee = "at_most_once"\n', 'bridge.toml:11  uplink "telemetry": guarantee at_most_once needs spark.stage.maxConsecutiveAttempts = 1. Remove it from [spark.conf].   [TL-C12]'),
    (ROUTE, 'topic = "tele metry"\n', 'bridge.toml:15  uplink "telemetry" route 1: "tele metry" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Correct the name.   [TL-C62]'),
    (ROUTE, 'topic = "{device}"\n', 'bridge.toml:15  uplink "telemetry" route 1: topic "{device}" lets a device name any Kafka topic. Begin it with a fixed prefix, or list allowed_topics.   [TL-C63]'),
    (ROUTE, ROUTE + 'allowed_topics = ["other.*"]\n', 'bridge.toml:15  uplink "telemetry" route 1: topic "telemetry" is not among allowed_topics. Add it there.   [TL-C63]'),
    (ROUTE, ROUTE + 'allowed_topics = ["a b"]\n', 'bridge.toml:16  uplink "telemetry" route 1: "a b" is no Kafka topic name: 1 to 249 letters, digits, dots, _ and -. Use names, or globs with * and ?.   [TL-C62]'),
    (ROUTE, ROUTE + 'key = "{devise}"\n', 'bridge.toml:16  uplink "telemetry" route 1: "{devise}" names {devise}, which from does not capture. Known are {device}, {mqtt.topic}, {mqtt.qos}, {mqtt.retain}, {mqtt.content_type}, {mqtt.response_topic}, {mqtt.message_expiry}, {mqtt.gateway}, {mqtt.offset}, {mqtt.received_at}, {payload}, {payload.JSON.PATH} and {mqtt.user.NAME}.   [TL-C66]'),
    (ROUTE, ROUTE + 'key = "{device"\n', 'bridge.toml:16  uplink "telemetry" route 1: "{device" has a lone brace. Write {{ or }} for a brace.   [TL-C66]'),
    (ROUTE, ROUTE + 'headers = { "mqtt.topic" = "x" }\n', 'bridge.toml:16  uplink "telemetry" route 1: a header "mqtt.topic" looks like one that Towline writes. Name it without the prefix mqtt. or towline.   [TL-C65]'),
    (ROUTE, ROUTE + 'where = " "\n', 'bridge.toml:16  uplink "telemetry" route 1: where is empty. Give a condition in Spark SQL, or remove it.   [TL-C69]'),
    *((ROUTE, ROUTE + f'fields = {{ "{name}" = "1" }}\n', f'bridge.toml:16  uplink "telemetry" route 1: the field "{shown}" has a name that {why}. Name it with small letters, digits and _, and as no column of the source and no wildcard.   [TL-C66]') for name, shown, why in [("qos", "qos", "is taken"), ("device", "device", "is taken"), ("A", "A", "is illegal in SQL"), ("a-b", "a-b", "is illegal in SQL"), ("a\\n", "a\\x0a", "is illegal in SQL"), ("towline_a", "towline_a", "is illegal in SQL")]),
    (ROUTE, ROUTE + """where = "'{device}' = topic"\n""", 'bridge.toml:16  uplink "telemetry" route 1: where names {device}, which SQL takes for text. Write the column device, without braces.   [TL-C69]'),
    ('"telemetry/{device}/#"', '"telemetry/{qos}/{Gateway}"\nwhere = "true"', 'bridge.toml:14  uplink "telemetry" route 1: the wildcard {qos} is a column for SQL, which has another of that name. Give the wildcard another name.   [TL-C67]'),
    ("[mqtt]", "[mqtt", "bridge.toml:4: not TOML: expected ']' at the end of a table declaration. Correct the line.   [TL-C11]"),
    ("[kafka]", 'retain_handling = 2\nprotocol = "3.1.1"\n[kafka]', 'bridge.toml:7  [mqtt]: retain_handling 1 and 2 need protocol "5", not 3.x. Change one of the two.   [TL-C05]'),
    (TABLE, "", 'bridge.toml:10  uplink "telemetry": "route" is missing. Add [[uplink.route]] with from and topic.   [TL-C02]'),
    ("[[uplink.route]]", "[uplink.route]", 'bridge.toml:13  uplink "telemetry": "route" must be a list. Write a list, and tables as [[uplink.route]].   [TL-C03]'),
    ('[[uplink]]\nname = "telemetry"\n' + TABLE, "", "bridge.toml:1: [[uplink]] is missing: there is no line to run. Add one.   [TL-C60]"),
    *((ROUTE, f'topic = "{topic}"\n', f'bridge.toml:15  uplink "telemetry" route 1: "{topic}" is reserved. Choose another topic.   [TL-C95]') for topic in ("__consumer_offsets", "towline.other.markers")),
    ("mqtt://a:1883", "mqtt://u:hunter2@a", "bridge.toml:5  [mqtt]: a broker is mqtt://HOST[:PORT], mqtts://, ws://HOST[:PORT][/PATH], wss:// or unix:///PATH. Use username, password_file and websocket_query_file for what it can't carry.   [TL-C05]"),
    ("[kafka]", 'password_file = "~no-such-user/pw"\n[kafka]', 'bridge.toml:7  [mqtt]: "password_file" must be a path; it names the home of a user who is not known here. Correct the path.   [TL-C15]'),
    ('name = "telemetry"\n', 'name = "telemetry"\nreceipts = { prefix = "x" }\n', 'bridge.toml:12  uplink "telemetry": "key_file" is missing. Add it.   [TL-C02]'),
    ('name = "telemetry"\n', 'name = "telemetry"\nguarantee = "at_most_once"\nreceipts = { key_file = "bridge.toml" }\n', 'bridge.toml:13  uplink "telemetry": receipts need guarantee at_least_once or exactly_once: at_most_once may drop messages   [TL-C05]'),
    (ROUTE, ROUTE + '\n[[uplink]]\nname = "telemetry"\n' + TABLE, 'bridge.toml:18  uplink "telemetry": another line, or a member of one, is "telemetry" too. Rename one.   [TL-C18]'),
    (ROUTE, ROUTE + '\n[[uplink]]\nname = "other"\nmqtt = { client_id = "plant-7-telemetry" }\n' + TABLE, 'bridge.toml:17  uplink "other": client id "plant-7-telemetry" is also that of line "telemetry"; they would throw each other out. Give each line its own client_id.   [TL-C19]'),
    ("[[uplink]]\n", '[spark]\nmaster = "spark://m1:7077"\n\n[[uplink]]\n', 'bridge.toml:11  uplink "telemetry": its gateway has no network listener, and executors of spark://m1:7077 can\'t reach it otherwise. Set listen in [gateway], name gateways elsewhere as grpc+tls://HOST:PORT.   [TL-C140]'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    (line,) = told(changed(old, new), tmp_path)
    assert content(line) == content(expected)


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
    assert {path: document.line(path) for path in places} == places


def test_a_list_of_many_lines_has_one_place() -> None:
    rows = "".join(f'  ["topic.{number}", "x"],\n' for number in range(1000))
    document = Document(f"k = [\n{rows}] # a, b,\nz = {{ b = [\n 1 ] }}\nlast = 1\n", Path("f"), {})
    assert [document.line((key,)) for key in ("k", "z", "last")] == [1, 1003, 1005]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or directory\. .*\[TL-C10\]"):
        load(tmp_path / "bridge.toml")
    (tmp_path / "latin").write_bytes(b"name = '\xe4'")
    with pytest.raises(ConfigError, match=r"not UTF-8 text.*\[TL-C11\]"):
        load(tmp_path / "latin")


def line(keys: str, text: str = GOOD) -> str:
    return text.replace('name = "telemetry"\n', f'name = "telemetry"\n{keys}\n', 1)


def test_a_small_file_gets_safe_defaults(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    (uplink,) = bridge.uplinks
    assert uplink.gateway.client_id == "plant-7-telemetry"
    assert uplink.gateway.state_dir == tmp_path / "state" / "telemetry"
    assert uplink.checkpoint == tmp_path / "state" / "telemetry" / "checkpoint"
    assert uplink.fixed_topics == ("telemetry",)
    assert (bridge.spark.master, bridge.spark.ui, bridge.kafka.create_topics) == ("local[*]", False, None)
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge


@pytest.mark.parametrize(
    ("keys", "qos", "acks", "delay_ms", "unknown_session"),
    [
        ("", 1, "journal", 1000, "refuse"),
        ('guarantee = "at_most_once"', 0, "received", 1000, "refuse"),
        ('guarantee = "exactly_once"', 2, "journal", 1000, "refuse"),
        ('guarantee = "exactly_once"\ndedupe = { key = "payload" }\nroute = [{ from = "a", topic = "a", qos = 1 }]', 1, "journal", 1000, "refuse"),
        ('ack_after = "kafka"', 1, "kafka", 0, "adopt"),  # with an empty directory the session is taken over
        ('ack_after = "kafka"\nmqtt = { unknown_session = "refuse" }', 1, "kafka", 0, "refuse"),
        ('ack_after = "kafka"\nmax_trigger_delay_ms = 300', 1, "kafka", 300, "adopt"),
        ('receipts = { key_file = "bridge.toml" }', 1, "journal", 0, "refuse"),
    ],
)  # fmt: skip
def test_what_a_line_says_sets_the_rest(
    tmp_path: Path, keys: str, qos: int, acks: str, delay_ms: int, unknown_session: str
) -> None:
    """It rests between batches where nobody waits for Kafka."""
    text = line(keys, GOOD.partition("\n[[uplink.route]]")[0] if "route" in keys else GOOD)
    (uplink,) = read(text, tmp_path).uplinks
    gateway = uplink.gateway
    assert ([one.qos for one in gateway.subscriptions], gateway.effective_ack_after) == ([qos], acks)
    assert uplink.max_trigger_delay_ms == delay_ms
    assert gateway.connection.session.unknown_session == unknown_session


def test_a_list_of_brokers_under_exactly_once_needs_a_word(tmp_path: Path) -> None:
    several = changed('["mqtt://a:1883"]', '["mqtt://a", "mqtt://b"]')
    exact = line('guarantee = "exactly_once"', several)
    (mistake,) = told(exact, tmp_path)
    assert content(mistake)[:2] == ('bridge.toml:5  uplink "telemetry"', "[TL-C90]")
    redirected = changed("[kafka]", "follow_redirects = true\n[kafka]")
    with pytest.raises(ConfigError, match=r"QoS 2 with follow_redirects .*\[TL-C90\]"):
        read(line('guarantee = "exactly_once"', redirected), tmp_path)
    for allowed in (
        several,
        exact.replace("[kafka]", "brokers_share_sessions = true\n[kafka]"),
        exact.replace("\n\n[[uplink.route]]", '\ndedupe = { key = "payload" }\n[[uplink.route]]'),
        exact.replace("[[uplink.route]]", '[[uplink.route]]\npromise = "at_least_once"'),
    ):
        assert read(allowed, tmp_path).lines


@pytest.mark.parametrize("created", [True, False])
def test_topics_that_a_list_names_are_created(tmp_path: Path, created: bool) -> None:
    """But for those that no message may become; where others make topics, none of them has to be there."""
    lists = {"e{x}": ["e.t1", "e.*", "other", "e"], "_{x}": ["__consumer_offsets"], "fixed": ["fixed"]}
    routes = "".join(
        f'[[uplink.route]]\nfrom = "{number}/{{x}}"\ntopic = "{topic}"\nallowed_topics = {names}\n'
        for number, (topic, names) in enumerate(lists.items())
    )
    bridge = read(changed('"k1:9092"', f'"k1:9092"\ncreate_topics = {str(created).lower()}') + routes, tmp_path)
    assert set(bridge.required_topics()) == {*bridge.lines[0].fixed_topics, *({"e.t1", "e"} if created else set())}


def test_every_mistake_is_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Of keys and values in all tables; then, where these are right, of all rules across them."""
    text = changed('"plant-7"', '"plant 7"').replace(ROUTE, ROUTE + "qos = 3\nxyz = 1\n")
    rules = changed('"k1:9092"', '"k1"\npassword_file = "bridge.toml"').replace(ROUTE, ROUTE + "qos = 0\nwhere = ''\n")
    for wrong, expected in (
        (
            text.replace("[kafka]", 'xyz = 1\npassword_file = "nowhere"\n[kafka]'),
            [(1, "C03"), (7, "C01"), (8, "C15"), (18, "C03"), (19, "C01")],
        ),
        (rules, [(8, "C42"), (17, "C12"), (18, "C69")]),
    ):
        found = [content(text)[:2] for text in told(wrong, tmp_path)]
        assert [(place.partition(" ")[0], code) for place, code in found] == [
            (f"bridge.toml:{number}", f"[TL-{code}]") for number, code in expected
        ]


def test_every_route_knows_the_dead_letter_topics_of_all_lines(tmp_path: Path) -> None:
    second = GOOD[GOOD.index("[[uplink]]") :].replace('"telemetry"\n', '"second"\ndead_letter_topic = "dead.2"\n', 1)
    bridge = read(line('dead_letter_topic = "dead.1"') + second, tmp_path)
    assert [one.routes[0].dead_letter_topics for one in bridge.uplinks] == [("dead.1", "dead.2")] * 2
    (mistake,) = told(line('dead_letter_topic = "telemetry"'), tmp_path)
    assert "TL-C95" in mistake, "a route writes no dead-letter topic"
