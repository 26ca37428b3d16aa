from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import content
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.access import ClientAccess
from towline.gateway.settings import GatewaySettings, parse_subscriptions
from towline.guarantee import AckAfter
from towline.net.endpoint import Endpoint
from towline.net.tls import Tls
from towline.options import parse_size
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.options import SOURCE_OPTIONS, parse_options, with_option_names

ROOT = Path(__file__).parents[3]

BASE = {"broker": "mqtt://b", "subscribe": "telemetry/#:1", "stateDir": "/var/lib/towline/plant-7"}


def parse(**options: str) -> ReadPlan:
    """Parse as Spark gives options: names in lower case. An empty value takes an option of `BASE` away."""
    merged = {key: value for key, value in (BASE | options).items() if value or key not in BASE}
    return parse_options({key.lower(): value for key, value in merged.items()})


def gateway(**options: str) -> GatewaySettings:
    return GatewaySettings.model_validate_json(parse(**options).address.settings)


def test_three_options_are_enough() -> None:
    options = parse()
    assert gateway() == GatewaySettings.model_validate(
        {
            "name": "plant-7",
            "state_dir": "/var/lib/towline/plant-7",
            "brokers": "mqtt://b",
            "subscriptions": [{"pattern": "telemetry/#", "qos": 1}],
        }
    )
    assert options.address.location == "/var/lib/towline/plant-7"
    assert (options.consumer, options.replays_batches) == ("default", True)
    assert (options.max_rows, options.max_bytes) == (200_000, 256 << 20)
    assert (options.start_offset, options.end_offset, options.poll_s) == (None, None, 5.0)


def test_every_gateway_option_arrives() -> None:
    settings = gateway(
        broker="mqtts://a:8884, b",
        name="north",
        clientId="plant 7",
        username="u",
        passwordFile="/run/secrets/mqtt",
        ackAfter="kafka",
        keepAlive="30",
        sessionExpiry="3600",
        receiveMaximum="100",
        maxPacketBytes="1m",
        lingerMs="2.5",
        connectTimeout="2.5",
        unknownSession="adopt",
        retainHandling="2",
        tlsCaFile="/ca",
        tlsCertFile="/cert",
        tlsKeyFile="/key",
        tlsServerName="broker.local",
        tlsInsecure="TRUE",
        journalMaxBytes="2g",
        journalMinFreeBytes="0",
        journalRetainBytes="10 MiB",
    )
    assert settings.brokers == (
        Endpoint("mqtts", "a", 8884),
        Endpoint("mqtt", "b", 1883),
    )
    assert (settings.name, settings.client_id, settings.username) == ("north", "plant 7", "u")
    assert settings.password_file == Path("/run/secrets/mqtt")
    assert settings.ack_after is AckAfter.KAFKA
    assert settings.retain_handling == 2
    assert (settings.keep_alive_s, settings.session_expiry_s, settings.receive_maximum) == (30, 3600, 100)
    assert (settings.max_packet_bytes, settings.linger_ms, settings.unknown_session) == (1 << 20, 2.5, "adopt")
    assert settings.connect_timeout_s == 2.5
    assert settings.tls == Tls(Path("/ca"), Path("/cert"), Path("/key"), server_name="broker.local", insecure=True)
    assert (settings.journal.max_bytes, settings.journal.min_free_bytes) == (2 << 30, 0)
    assert settings.journal.retain_bytes == 10 << 20


def test_the_source_options_arrive() -> None:
    options = parse(
        consumer="archive",
        maxBytesPerTrigger="64m",
        startingOffset="17",
        endingOffset="20",
        pollMs="250",
        maxTriggerDelayMs="500",
    )
    assert (options.consumer, options.max_rows, options.max_bytes) == ("archive", 200_000, 64 << 20)
    assert (options.start_offset, options.end_offset, options.poll_s) == (17, 20, 0.25)
    assert (options.max_delay_s, parse().max_delay_s) == (0.5, 0.0)
    assert parse(startingOffset="LATEST").start_offset == "latest"
    assert parse(eventTime="true", checkpointLocation="/ck").event_time
    assert not parse(checkpointLocation="/ck").event_time
    both = parse(maxMessagesPerTrigger="5", maxBytesPerTrigger="1m")
    assert (both.max_rows, both.max_bytes) == (5, 1 << 20)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "plant-7"),
        ({"clientId": "line 4/north"}, "line-4-north"),
        ({"clientId": "x" * 99}, "x" * 64),
        ({"clientId": "///"}, "mqtt"),
        ({"name": "n", "clientId": "c"}, "n"),
    ],
)
def test_a_gateway_has_a_name(options: dict[str, str], name: str) -> None:
    assert gateway(**options).name == name


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = gateway(stateDir="~/state", passwordFile="secret")
    assert (settings.state_dir, settings.password_file) == (tmp_path / "state", tmp_path / "secret")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("stateDir", "s3://bucket/x", "must be a path on a disk of this machine, not a URI"),
        ("stateDir", "dbfs:/x", "must be a path on a disk of this machine, not a URI"),
        ("stateDir", "state", f"must be an absolute path. Here it would be {Path.cwd()}/state"),
        ("passwordFile", "s3://bucket/secret", "must be a path on a disk of this machine, not a URI"),
    ],
)
def test_a_place_that_is_none_of_this_machine_is_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f'^format\\("mqtt"\\) option "{name}" = "{text}": {said}.*TL-C21'):
        parse(**{name: text})


def test_options_of_a_table_are_those_that_its_catalogue_marks() -> None:
    """As Spark 4.3.0 gives them at CREATE TABLE with COMMENT, LOCATION and TBLPROPERTIES."""
    table = {"owner": "root", "provider": "mqtt", "comment": "c", "quality": "gold", "path": "file:/x", "location": "x"}
    given = {name.lower(): text for name, text in BASE.items()}
    marked = {f"option.{name}": text for name, text in given.items()}
    assert parse_options({**table, **given, **marked}) == parse()
    for wrong, said in (({"option.brokr": "x"}, "Did you mean"), ({"option.password": "x"}, "TL-C22")):
        with pytest.raises(ConfigError, match=said):
            parse_options({**table, **given, **marked, **wrong})
    with pytest.raises(ConfigError, match=r"the option \"stateDir\" is missing"):
        parse_options(table)
    with pytest.raises(ConfigError, match=r"Of a table too: spark\.readStream\.options"):
        parse_options({})


def test_a_running_gateway_is_named_by_its_directory_or_location() -> None:
    assert parse_options({"gateway": "/var/lib/towline/x"}).address == GatewayAddress("/var/lib/towline/x")
    assert parse_options({"gateway": "grpc+unix:///run/x.sock"}).address == GatewayAddress("grpc+unix:///run/x.sock")


def test_at_most_once_subscribes_with_qos_0() -> None:
    settings = gateway(guarantee="at_most_once", subscribe="a, b:1")
    assert [subscription.qos for subscription in settings.subscriptions] == [0, 1]
    assert settings.effective_ack_after is AckAfter.RECEIVED


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("telemetry/#:1, alarms/+:2", [("telemetry/#", 1), ("alarms/+", 2)]),
        ("a", [("a", None)]),
        ("a:b:2", [("a:b", 2)]),
        ("a:x", [("a:x", None)]),
        ("a,,b,", [("a", None), ("b", None)]),
        ('["a,b/#:0", "c"]', [("a,b/#", 0), ("c", None)]),
        ("$share/g/a/#:1", [("$share/g/a/#", 1)]),
    ],
)
def test_subscriptions(text: str, wanted: list[tuple[str, int | None]]) -> None:
    assert [(one["pattern"], one.get("qos")) for one in parse_subscriptions(text)] == wanted


#: Facts of the error after ``format("mqtt")``: names, values and code, whatever its prose.
MISTAKES = [
    ({"brokr": "x"}, '"brokr" "broker" TL-C01'),
    ({"client_id": "x"}, '"client_id" "clientId" TL-C01'),
    ({"zzz": "x"}, f'"zzz" {" ".join(SOURCE_OPTIONS)} TL-C01'),
    ({"password": "x"}, 'option "password" 0600 passwordFile TL-C22'),
    ({"path": "/x"}, 'option "path" "broker" "mqtt://HOST" TL-C22'),
    ({"asyncProgressTrackingEnabled": "true"}, 'option "asyncProgressTrackingEnabled" TL-C22'),
    (
        {"guarantee": "exactly_once", "subscribe": "a/#:2, b:1"},
        'option "subscribe" exactly_once QoS 2, "b" 1 at_least_once TL-C12',
    ),
    ({"guarantee": "exactly_once", "ackAfter": "kafka"}, "exactly_once ackAfter TL-C12"),
    ({"guarantee": "at_most_once", "ackAfter": "journal"}, "at_most_once ackAfter TL-C12"),
    ({"guarantee": "exactly_once", "sessionExpiry": "0"}, "exactly_once sessionExpiry TL-C12"),
    ({"guarantee": "often"}, 'option "guarantee" "often" "at_most_once" "at_least_once" "exactly_once" TL-C21'),
    ({"subscribe": "a:0"}, 'option "subscribe" at_least_once QoS 1 2, "a" 0 at_most_once TL-C12'),
    ({"ackAfter": "received"}, "at_least_once ackAfter TL-C12"),
    ({"sessionExpiry": "0"}, "at_least_once sessionExpiry TL-C12"),
    ({"subscribe": "a,a"}, "QoS TL-C12"),
    ({"stateDir": ""}, '"stateDir" TL-C20'),
    ({"broker": ""}, '"broker" mqtt://HOST[:PORT]. TL-C20'),
    ({"subscribe": ""}, '"subscribe" 1 TL-C20'),
    ({"broker": ","}, 'option "broker" mqtt://HOST[:PORT], TL-C21'),
    ({"broker": "http://b"}, 'option "broker" "http://" mqtt://, mqtts://, ws://, wss:// unix://. TL-C21'),
    ({"broker": "mqtt://u:secret@b"}, 'option "broker" passwordFile TL-C21'),
    ({"broker": "mqtt://b:99999"}, 'option "broker" 1 65535 TL-C21'),
    ({"subscribe": "a/#/b"}, 'option "subscribe" "a/#/b" TL-C21'),
    ({"subscribe": "a:7"}, 'option "subscribe" "a:7" 2 TL-C21'),
    ({"subscribe": ","}, 'option "subscribe" "," TL-C21'),
    ({"subscribe": "[1]"}, 'option "subscribe" "[1]" "a,b/#:1" TL-C21'),
    ({"keepAlive": "1m"}, 'option "keepAlive" "1m" TL-C21'),
    ({"keepAlive": "1"}, 'option "keepAlive" "1" 5 TL-C21'),
    ({"lingerMs": "soon"}, 'option "lingerMs" "soon" TL-C21'),
    ({"lingerMs": "nan"}, 'option "lingerMs" "nan" 1,000 TL-C21'),
    ({"tlsInsecure": "maybe"}, 'option "tlsInsecure" "maybe" TL-C21'),
    ({"journalMaxBytes": "lots"}, 'option "journalMaxBytes" "lots" 20 512 MiB TL-C21'),
    ({"journalMaxBytes": "5"}, 'option "journalMaxBytes" "5" 1,048,576 TL-C21'),
    (
        {"broker": "a, b", "subscribe": "t:2", "guarantee": "exactly_once"},
        'option "broker" exactly_once 2 brokersShareSessions at_least_once TL-C90',
    ),
    ({"passwordFile": "~0"}, 'option "passwordFile" "~0" TL-C21'),
    ({"unknownSession": "x"}, 'option "unknownSession" "x" "refuse" "adopt" "discard" TL-C21'),
    ({"name": "-"}, 'option "name" "-" 1 64 TL-C21'),
    ({"consumer": "a b"}, 'option "consumer" 1 64 TL-C21'),
    ({"maxMessagesPerTrigger": "0"}, 'option "maxMessagesPerTrigger" "0" 1 TL-C21'),
    ({"maxBytesPerTrigger": "0"}, 'option "maxBytesPerTrigger" "0" 1 TL-C21'),
    ({"startingOffset": "-1"}, 'option "startingOffset" "-1" 0 TL-C21'),
    ({"endingOffset": "latest"}, 'option "endingOffset" "latest" 0 TL-C21'),
    ({"pollMs": "60000"}, 'option "pollMs" "60000" 30000, TL-C21'),
    ({"gateway": "/x"}, 'option "broker" TL-C23'),
    ({"eventTime": "true"}, 'option "eventTime" checkpointLocation TL-C23'),
]


@pytest.mark.parametrize(("options", "facts"), MISTAKES, ids=lambda value: str(value)[:40])
def test_an_option_error_is_one_line(options: dict[str, str], facts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**options)
    said = str(caught.value)
    assert said.startswith('format("mqtt") option "' if facts.startswith("option") else 'format("mqtt"): ')
    assert content(facts) <= content(said)
    assert "\n" not in said
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"keepAlive": "1m", "lingerMs": "-1", "tlsMinVersion": "1.0"}, ["keepAlive", "lingerMs", "tlsMinVersion"]),
        ({"brokr": "x", "qos": "1"}, ["brokr", "qos"]),
        ({"pollMs": "x", "consumer": "a b"}, ["consumer", "pollMs"]),
    ],
)
def test_all_mistakes_are_told_at_once(options: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(**options)
    lines = str(caught.value).splitlines()
    assert sorted(name for name in names if any(f'"{name}"' in line for line in lines)) == names
    assert len(lines) == len(names)


@pytest.mark.parametrize("guarantee", ["at_most_once", "exactly_once"])
def test_filters_that_overlap_are_refused_where_nothing_may_double(guarantee: str) -> None:
    qos = 0 if guarantee == "at_most_once" else 2
    with pytest.raises(ConfigError, match=r'"a/\+/c" and "a/b/\+" have topics in common.*TL-C12') as caught:
        parse(subscribe=f"a/+/c:{qos},a/b/+:{qos}", guarantee=guarantee)
    assert "\n" not in str(caught.value)
    parse(subscribe="a/+/c:1,a/b/+:1")


@pytest.mark.parametrize(
    "gateway", ["", "grpc+tls://x", "grpc+tls://x:port", "grpc+tcp://127.0.0.1:8815", "grpc+unix://relative"]
)
def test_a_gateway_that_cannot_be(gateway: str) -> None:
    with pytest.raises(ConfigError, match="TL-C21"):
        parse_options({"gateway": gateway})


def test_no_error_shows_a_secret() -> None:
    signed = "wss://iot.example/mqtt?X-Amz-Security-Token=hunter2"
    brokers = ("mqtt://u:hunter2@b", "mqtt://u:hunter2", "mqtt//u:hunter2%40b", signed)
    said = [{"password": "hunter2"}, {"passwort": "hunter2"}, {"proxy": "http://u:hunter2"}, {"gateway": signed}]
    for options in (*said, *({"broker": broker} for broker in brokers)):
        with pytest.raises(ConfigError) as caught:
            parse(**options)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "here"),
    [
        ("Set tls.ca_file to the authority's certificate.", "Set tlsCaFile to the authority's certificate."),
        ("Set tls.server_name, or session_expiry_s.", "Set tlsServerName, or sessionExpiry."),
        ('name its file: password_file = "kafka.pw".', "name its file: passwordFile=kafka.pw."),
        ('guarantee or unknown_session = "adopt"', "guarantee or unknownSession=adopt"),
        ("/srv/client_id/ca_file is not there", "/srv/client_id/ca_file is not there"),
        ("the brokers share no sessions; brokers_share_sessions = true", None),
    ],
)
def test_settings_are_named_as_options_are(message: str, here: str | None) -> None:
    assert with_option_names(message) == (here or "the brokers share no sessions; brokersShareSessions=true")


@given(st.dictionaries(st.sampled_from(SOURCE_OPTIONS) | st.text(max_size=12), st.text(max_size=20), max_size=6))
def test_any_options_give_a_value_or_one_line(options: dict[str, str]) -> None:
    lines = _parsed(BASE | options).split("\n")
    assert all(re.search(r"\[TL-C\d\d\]$|^$", line) for line in lines)
    assert len(lines) <= len(options) + 1  # the topic of a will may be missing besides


def _parsed(options: dict[str, str]) -> str:
    """What is wrong with options, "" for nothing."""
    try:
        parse_options(options)
    except ConfigError as error:
        return str(error)
    return ""


# -- several gateways ------------------------------------------------------------------------------------------------


def several(**options: str) -> ReadPlan:
    given = {"gateways": "/var/lib/g1, grpc+unix:///var/lib/g2/gateway.sock", **options}
    return parse_options({key.lower(): value for key, value in given.items()})


def test_gateways_are_a_list_of_either_kind() -> None:
    wanted = ("/var/lib/g1", "grpc+unix:///var/lib/g2/gateway.sock")
    assert several().gateways == wanted
    assert several(gateways='["/var/lib/g1/", "grpc+unix:///var/lib/g2/gateway.sock"]').gateways == wanted
    assert several().address == GatewayAddress("")


def test_several_on_a_network_need_a_token() -> None:
    with pytest.raises(ConfigError, match=r"gatewayTokenFile.*TL-C20"):
        several(gateways="/var/lib/g1,grpc+tls://g2:8815")
    found = several(gateways="/var/lib/g1,grpc+tls://g2:8815", gatewayTokenFile="/run/token")
    assert found.address.access == ClientAccess(token_file="/run/token")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/a,/a", "/a is listed twice"),
        ("/a, /a/", "/a is listed twice"),
        (" , ", "it names no gateway"),
        ("[1]", "must be gateways with a comma between them"),
        ('["/a"', "must be gateways with a comma between them"),
        ("grpc+tcp://x:1", "There is none without TLS"),
    ],
)
def test_lists_that_can_not_be(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(why)}.*TL-C21"):
        several(gateways=text)


@pytest.mark.parametrize("name", ["gateway", "stateDir", "broker", "subscribe", "journalMaxBytes"])
def test_gateways_stand_alone(name: str) -> None:
    with pytest.raises(ConfigError, match=rf'option "{name}": it is a setting of one gateway.*TL-C23'):
        several(**{name: "/x" if name != "journalMaxBytes" else "1g"})


def test_offsets_of_several_are_by_name() -> None:
    found = several(startingOffset='{"g1": 5, "g2": "latest"}', endingOffset='{"g1": 9}')
    assert (found.start_offset, found.end_offset) == ({"g1": 5, "g2": "latest"}, {"g1": 9})
    assert several(startingOffset="earliest").start_offset == "earliest"
    for name in ("startingOffset", "endingOffset"):
        with pytest.raises(ConfigError, match=r"an offset belongs to a single journal.*TL-C23"):
            several(**{name: "7"})
        with pytest.raises(ConfigError, match=r"it names gateways, and the source has only one.*TL-C23"):
            parse(**{name: '{"g1": 7}'})
    for text in ('{"g1": "x"}', '{"g1"', '{"a b": 1}', "[1]"):
        with pytest.raises(ConfigError, match="TL-C21"):
            several(startingOffset=text)


def test_partitions_are_as_sparks_kafka_source_names_them() -> None:
    found = several(minPartitions="8", maxRecordsPerPartition="5000", removedGateways="g3, g4")
    assert (found.min_partitions, found.max_partition_rows, found.removed_gateways) == (8, 5000, ("g3", "g4"))
    assert parse(minPartitions="2").min_partitions == 2
    for name in ("minPartitions", "maxRecordsPerPartition"):
        with pytest.raises(ConfigError, match="TL-C21"):
            several(**{name: "0"})
    with pytest.raises(ConfigError, match=r"no effect without the option gateways.*TL-C23"):
        parse(removedGateways="g3")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1048576", 1 << 20),
        ("512m", 512 << 20),
        ("2g", 2 << 30),
        ("512 MiB", 512 << 20),
        ("20 GB", 20 * 1000**3),
        ("1.5kB", 1500),
        (" 1 T ", 1 << 40),
    ],
)
def test_a_size_is_the_same_on_every_face(text: str, read: int) -> None:
    """Bytes, or a unit: with a B of 1000 or, with an i, of 1024; without one of 1024, as Spark's own sizes."""
    assert parse_size(text) == read


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 2", "5 XB", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match='"20 GB", "512 MiB" or 512m'):
        parse_size(text)
