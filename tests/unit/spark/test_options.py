"""Options of both directions: what arrives, and one line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import content
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.access import ClientAccess
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee
from towline.net.endpoint import Endpoint
from towline.options import parse_size
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.options import SOURCE_FORMAT, parse_options, parse_sink_options

BASE = {"broker": "mqtt://b", "subscribe": "telemetry/#:1", "stateDir": "/var/lib/towline/plant-7"}
SINK = {"broker": "mqtt://b", "stateDir": "/var/lib/towline/out"}
REMOTE = {"gateway": "grpc+tls://g1:8815", "gatewayTokenFile": "/t"}


def parse(**options: str) -> ReadPlan:
    """Parse as Spark gives options: names in lower case. An empty value takes an option of `BASE` away."""
    merged = {key: value for key, value in (BASE | options).items() if value or key not in BASE}
    return parse_options({key.lower(): value for key, value in merged.items()})


def gateway(**options: str) -> GatewaySettings:
    return GatewaySettings.model_validate_json(parse(**options).address.settings)


def several(**options: str) -> ReadPlan:
    return parse_options({"gateways": "/var/lib/g1, grpc+unix:///var/lib/g2/gateway.sock", **options})


def test_three_options_are_enough() -> None:
    options = parse()
    given = {"name": "plant-7", "state_dir": "/var/lib/towline/plant-7", "brokers": "mqtt://b"}
    subscriptions = [{"pattern": "telemetry/#", "qos": 1}]
    assert gateway() == GatewaySettings.model_validate({**given, "subscriptions": subscriptions})
    assert options.address.location == "/var/lib/towline/plant-7"
    assert (options.consumer, options.replays_batches) == ("default", True)
    assert (options.max_rows, options.max_bytes) == (200_000, 256 << 20)
    assert (options.start_offset, options.end_offset, options.poll_ms) == (None, None, 5000)


def test_gateway_options_of_each_kind_arrive() -> None:
    settings = gateway(
        broker="mqtts://a:8884, b",
        passwordFile="/run/secrets/mqtt",
        ackAfter="KAFKA",
        keepAlive="30",
        lingerMs="2.5",
        tlsInsecure="TRUE",
        journalMaxBytes="2g",
    )
    assert settings.brokers == (Endpoint("mqtts", "a", 8884), Endpoint("mqtt", "b", 1883))
    assert (settings.password_file, settings.ack_after) == (Path("/run/secrets/mqtt"), AckAfter.KAFKA)
    assert (settings.keep_alive_s, settings.linger_ms, settings.tls.insecure) == (30, 2.5, True)
    assert settings.journal.max_bytes == 2 << 30
    paths = gateway(stateDir="~/state", passwordFile="secret")
    assert (paths.state_dir, paths.password_file) == (Path.home() / "state", Path.cwd() / "secret")
    lossy = gateway(guarantee="at_most_once", subscribe="a, b:1")
    assert ([one.qos for one in lossy.subscriptions], lossy.effective_ack_after) == ([0, 1], AckAfter.RECEIVED)
    names = {"line 4/north": "line-4-north", "x" * 99: "x" * 64, "///": "mqtt"}
    assert {client: gateway(clientId=client).name for client in names} == names


def test_source_options_arrive() -> None:
    options = parse(
        startingOffset="17", endingOffset="20", pollMs="250", maxTriggerDelayMs="500", maxBytesPerTrigger="64m"
    )
    assert (options.start_offset, options.end_offset, options.max_bytes) == (17, 20, 64 << 20)
    assert (options.poll_ms, options.max_delay_ms) == (250, 500)
    assert parse(startingOffset="LATEST").start_offset == "latest"
    assert parse(eventTime="true", checkpointLocation="/ck").event_time
    assert several(removedGateways="g3, g4").removed_gateways == ("g3", "g4")
    found = several(startingOffset='{"g1": 5, "g2": "latest"}', endingOffset='{"g1": 9}')
    assert (found.start_offset, found.end_offset) == ({"g1": 5, "g2": "latest"}, {"g1": 9})
    assert several(startingOffset="earliest").start_offset == "earliest"


def test_running_gateways_are_named_by_their_directories_or_locations() -> None:
    files = {"gatewayCaFile": "/ca", "gatewayServerName": "g"}
    access = ClientAccess("/t", "/ca", "g")
    for parsed in (parse_options({**REMOTE, **files}), parse_sink_options({**REMOTE, **files})):
        assert parsed.address == GatewayAddress("grpc+tls://g1:8815", "", access, 3600.0)
    assert parse_options({"gateway": "/var/lib/towline/x"}).address == GatewayAddress("/var/lib/towline/x")
    wanted = ("/var/lib/g1", "grpc+unix:///var/lib/g2/gateway.sock")
    assert (several().gateways, several().address) == (wanted, GatewayAddress(""))
    assert several(gateways='["/var/lib/g1/", "grpc+unix:///var/lib/g2/gateway.sock"]').gateways == wanted
    found = several(gateways="/g1,grpc+tls://g2:8815", gatewayTokenFile="/run/token")
    assert found.address.access == ClientAccess(token_file="/run/token")


#: Facts of the error after ``format("mqtt")``: names, values and code, whatever its prose.
MISTAKES = [
    ({"brokr": "x"}, '"brokr" "broker" TL-C01'),
    ({"zzz": "x"}, f'"zzz" {" ".join(SOURCE_FORMAT.names)} TL-C01'),
    ({"password": "x"}, 'option "password" 0600 passwordFile TL-C22'),
    (
        {"guarantee": "exactly_once", "subscribe": "a/#:2, b:1"},
        'option "subscribe" exactly_once QoS 2, "b" 1 at_least_once TL-C12',
    ),
    ({"guarantee": "exactly_once", "sessionExpiry": "0"}, "exactly_once sessionExpiry TL-C12"),
    ({"guarantee": "exactly_once", "subscribe": "a/+/c:2,a/b/+:2"}, '"a/+/c" "a/b/+" TL-C12'),
    ({"guarantee": "often"}, 'option "guarantee" "often" "at_most_once" "at_least_once" "exactly_once" TL-C21'),
    ({"subscribe": "a:0"}, 'option "subscribe" at_least_once QoS 1 2, "a" 0 at_most_once TL-C12'),
    ({"stateDir": ""}, '"stateDir" TL-C20'),
    ({"broker": ""}, '"broker" mqtt://HOST[:PORT]. TL-C20'),
    ({"broker": "mqtt://u:secret@b"}, 'option "broker" passwordFile TL-C21'),
    ({"subscribe": "a/#/b"}, 'option "subscribe" "a/#/b" TL-C21'),
    ({"subscribe": "[1]"}, 'option "subscribe" "[1]" "a,b/#:1" TL-C21'),
    ({"keepAlive": "1m"}, 'option "keepAlive" "1m" TL-C21'),
    ({"journalMaxBytes": "lots"}, 'option "journalMaxBytes" "lots" 20 512 MiB TL-C21'),
    (
        {"broker": "a, b", "subscribe": "t:2", "guarantee": "exactly_once"},
        'option "broker" QoS 2 2 brokersShareSessions at_least_once QoS 1 TL-C90',
    ),
    ({"passwordFile": "~0"}, 'option "passwordFile" "~0" TL-C21'),
    ({"passwordFile": "s3://bucket/x"}, 'option "passwordFile" "s3://bucket/x" URI TL-C21'),
    ({"stateDir": "state"}, f'option "stateDir" "state" {Path.cwd()}/state TL-C21'),
    ({"consumer": "a b"}, 'option "consumer" 1 64 TL-C21'),
    ({"startingOffset": "-1"}, 'option "startingOffset" "-1" 0 TL-C21'),
    ({"startingOffset": '{"g1": 7}'}, 'option "startingOffset" TL-C23'),
    ({"endingOffset": "latest"}, 'option "endingOffset" "latest" 0 TL-C21'),
    ({"pollMs": "60000"}, 'option "pollMs" "60000" 30000 TL-C21'),
    ({"gateway": "/x"}, 'option "broker" TL-C23'),
    ({"eventTime": "true"}, 'option "eventTime" checkpointLocation TL-C23'),
    ({"removedGateways": "g3"}, 'option "removedGateways" gateways TL-C23'),
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
    ("options", "said"),
    [
        ({"gateways": "/a, /a/"}, r"/a is listed twice.*TL-C21"),
        ({"gateways": " , "}, r"it names no gateway.*TL-C21"),
        ({"gateways": "[1]"}, r"must be gateways with a comma between them.*TL-C21"),
        ({"gateways": "grpc+tcp://x:1"}, r"There is none without TLS.*TL-C21"),
        ({"gateways": "/g1,grpc+tls://g2:8815"}, r"gatewayTokenFile.*TL-C20"),
        ({"stateDir": "/x"}, r'option "stateDir": it is a setting of one gateway.*TL-C23'),
        ({"startingOffset": "7"}, r"an offset belongs to a single journal.*TL-C23"),
        ({"startingOffset": '{"a b": 1}'}, r"for several gateways must be JSON.*TL-C21"),
    ],
)
def test_mistakes_about_several_gateways(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        several(**options)


@pytest.mark.parametrize("parse_any", [parse_options, parse_sink_options])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gateway": "grpc+tls://g1:8815"}, r'"gatewayTokenFile" is missing.*TL-C20'),
        ({**REMOTE, "gatewayTicketValidity": "5"}, r"must be greater than or equal to 60.*TL-C21"),
        ({"gateway": "/state", "gatewayTokenFile": "/t"}, r"this one is on this machine.*TL-C23"),
        ({"gateway": "grpc+tls://x:port"}, "TL-C21"),
    ],
)
def test_mistakes_about_a_running_gateway(parse_any: Any, given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_any(given)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"keepAlive": "1m", "lingerMs": "-1", "tlsMinVersion": "1.0"}, ["keepAlive", "lingerMs", "tlsMinVersion"]),
        ({"brokr": "x", "qos": "1"}, ["brokr", "qos"]),
    ],
)
def test_all_mistakes_are_told_at_once(options: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(**options)
    lines = str(caught.value).splitlines()
    assert sorted(name for name in names if any(f'"{name}"' in line for line in lines)) == names
    assert len(lines) == len(names)


def test_no_error_shows_a_secret() -> None:
    signed = "wss://iot.example/mqtt?X-Amz-Security-Token=hunter2"
    brokers = ("mqtt://u:hunter2@b", "mqtt//u:hunter2%40b", signed)
    said = [{"password": "hunter2"}, {"proxy": "http://u:hunter2"}, {"gateway": signed}, {"gatewayToken": "hunter2"}]
    for options in (*said, *({"broker": broker} for broker in brokers)):
        with pytest.raises(ConfigError) as caught:
            parse(**options)
        assert "hunter2" not in str(caught.value)


@given(st.dictionaries(st.sampled_from(SOURCE_FORMAT.names) | st.text(max_size=12), st.text(max_size=20), max_size=6))
def test_any_options_give_a_value_or_one_line(options: dict[str, str]) -> None:
    try:
        parse_options(BASE | options)
    except ConfigError as error:
        lines = str(error).split("\n")
        assert all(re.search(r"\[TL-C\d\d\]$", line) for line in lines)
        assert len(lines) <= len(options) + 1  # the topic of a will may be missing besides


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1048576", 1 << 20),
        ("512m", 512 << 20),
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


# -- a sink ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "guarantee", "qos"),
    [
        ({}, Guarantee.AT_LEAST_ONCE, 1),
        ({"qos": "0"}, Guarantee.AT_MOST_ONCE, 0),
        ({"qos": "2"}, Guarantee.EXACTLY_ONCE, 2),
        ({"guarantee": "at_most_once"}, Guarantee.AT_MOST_ONCE, 0),
        ({"guarantee": "exactly_once"}, Guarantee.EXACTLY_ONCE, 2),
        ({"guarantee": "at_least_once", "qos": "2"}, Guarantee.AT_LEAST_ONCE, 2),
    ],
)
def test_guarantee_and_qos_decide_about_each_other(given: dict[str, str], guarantee: Guarantee, qos: int) -> None:
    options = parse_sink_options({**SINK, **given})
    assert (options.guarantee, options.qos) == (guarantee, qos)
    assert GatewaySettings.model_validate_json(options.address.settings).outbox is not None


def test_several_brokers_take_qos_2_only_where_they_share_sessions() -> None:
    brokers = {**SINK, "broker": "a, b"}
    assert parse_sink_options(brokers).qos_levels == (1,)
    assert parse_sink_options({**brokers, "brokersShareSessions": "true"}).qos_levels == (1, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guarantee": "exactly_once", "qos": "1"}, r'option "qos".*TL-C12'),
        ({"guarantee": "at_most_once", "qos": "1"}, r'option "qos".*TL-C12'),
        ({"confirm": "kafka"}, r'option "confirm".*TL-C21'),
        ({"topic": "a/#"}, r'option "topic".*TL-C21'),
        ({"outboxMaxAge": "0"}, r'"outboxMaxAge" = "0": must be greater than 0.*TL-C21'),
        ({"subscribe": "a/#"}, r'unknown option "subscribe".*TL-C01'),
        ({"confrim": "broker"}, r'Did you mean "confirm".*TL-C01'),
        ({"password": "secret"}, r'option "password".*TL-C22'),
        ({"gateway": "/x"}, r'option "broker": it is a setting of one gateway.*TL-C23'),
        ({"broker": "a, b", "qos": "2", "guarantee": "at_least_once"}, r"with 2 brokers .* = true.*TL-C90"),
    ],
)
def test_a_mistake_of_a_sink_is_one_line(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_sink_options({**SINK, **given})
    assert "\n" not in str(caught.value)
    assert '"secret"' not in str(caught.value)
