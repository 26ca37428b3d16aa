"""Options of the sink: what is taken, and the one line a mistake gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.kafka.options import NAMES, SinkSettings

BASE = {"kafka.bootstrap.servers": "k1:9092,k2:9093", "guarantee": "at_least_once", "topic": "t"}


def mistake(**options: str) -> ConfigError:
    """The error for BASE with these options; `__` stands for a dot, None takes an option away."""
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, **{name.replace("__", "."): value for name, value in options.items()}})
    assert "\n" not in str(caught.value)
    return caught.value


def test_at_least_once_is_idempotent_and_waits_for_all_replicas() -> None:
    client = SinkSettings.parse(BASE).client
    assert client["acks"] == "all"
    assert client["enable.idempotence"] == "true"
    assert client["partitioner"] == "murmur2_random"
    assert client["linger.ms"] == "20"
    assert client["batch.size"] == "1000000"
    assert client["message.timeout.ms"] == "60000"


def test_at_most_once_has_no_acks_and_no_retries() -> None:
    settings = SinkSettings.parse({**BASE, "guarantee": "at_most_once"})
    assert (settings.client["acks"], settings.client["retries"]) == ("0", "0")
    assert settings.client["enable.idempotence"] == "false"
    assert settings.timeout_s == 5


def test_names_in_any_case_as_spark_hands_them_over() -> None:
    settings = SinkSettings.parse(
        {
            "KAFKA.bootstrap.servers": "k1:9092",
            "Guarantee": "at_least_once",
            "includeheaders": "FALSE",
            "DELIVERYTIMEOUT": "2.5",
            "sinkid": "s",
            "checkpointlocation": "/x",
            "queryname": "q",
        }
    )
    assert not settings.include_headers
    assert settings.client["message.timeout.ms"] == "2500"
    assert settings.sink_id == "s"


def test_client_settings_pass_through_and_win_over_ours() -> None:
    settings = SinkSettings.parse({**BASE, "kafka.linger.ms": "5", "kafka.compression.type": "lz4"})
    assert settings.client["linger.ms"] == "5"
    assert settings.client["compression.type"] == "lz4"


def test_exactly_once_is_the_default() -> None:
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "k1:9092", "topic": "t"})
    assert settings.guarantee == "exactly_once"
    assert settings.client["acks"] == "all"
    assert settings.client["transaction.timeout.ms"] == settings.client["message.timeout.ms"] == "60000"
    assert (settings.parallelism, settings.verify) == (1, None)
    assert settings.marker_topic_of("s") == "towline.s.markers"
    assert settings.transactional_id("s", 3) == "towline.s.3"


def test_the_queue_holds_at_least_two_of_the_largest_records() -> None:
    assert SinkSettings.parse(BASE).client["queue.buffering.max.kbytes"] == "262144"
    large = SinkSettings.parse({**BASE, "kafka.message.max.bytes": "300000000"})
    assert large.client["queue.buffering.max.kbytes"] == str(2 * 300_000_000 // 1024)
    own = SinkSettings.parse({**BASE, "kafka.message.max.bytes": "300000000", "kafka.queue.buffering.max.kbytes": "9"})
    assert own.client["queue.buffering.max.kbytes"] == "9"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"guarantee": "at_least_once", "parallelism": "2"}, "TL-C41"),
        ({"guarantee": "at_most_once", "deadLetterTopic": "d"}, "TL-C41"),
        ({"parallelism": "0"}, "TL-C21"),
        ({"parallelism": "1001"}, "TL-C21"),
        ({"parallelism": "two"}, "TL-C21"),
        ({"sinkId": "a/b"}, "TL-C21"),
        ({"sinkId": ""}, "TL-C21"),
        ({"deadLetterTopic": ".."}, "TL-C21"),
        ({"verifyOnSkip": "maybe"}, "TL-C21"),
        ({"spoolDiskBytes": "-1"}, "TL-C21"),
        ({"includeHeaders": "maybe"}, "TL-C21"),
        ({"topic": " "}, "TL-C21"),
        *(({"guarantee": word}, "TL-C21") for word in ("", "at-least-once", "none")),
        ({"kafka.acks": "1"}, "TL-C41"),
        ({"kafka.retries": "0"}, "TL-C41"),
        ({"kafka.transactional.id": "x"}, "TL-C41"),
        ({"kafka.transaction.timeout.ms": "5000"}, "TL-C41"),
    ],
)
def test_options_of_exactly_once_that_can_not_be(options: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({"kafka.bootstrap.servers": "k1:9092", "topic": "t", **options})
    assert caught.value.code == code
    assert next(iter(options)) in str(caught.value) or list(options)[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("topik", "topic"),
        ("includeheader", "includeHeaders"),
        ("garantee", "guarantee"),
        ("deliverytimeot", "deliveryTimeout"),
        ("kafka_bootstrap_servers", "kafka.bootstrap.servers"),
        ("kafka.linger.mss", "kafka.linger.ms"),
        ("kafka.compresion.type", "kafka.compression.type"),
    ],
)
def test_unknown_options_get_a_guess(written: str, meant: str) -> None:
    error = mistake(**{written: "1"})
    assert error.code == "TL-C01"
    assert written in error.problem
    assert error.remedy == f'Did you mean "{meant}"?'


def test_an_option_like_no_other_gets_the_list() -> None:
    assert all(name in mistake(zzz="1").remedy for name in NAMES)


@pytest.mark.parametrize(
    ("guarantee", "name", "value"),
    [
        *(
            ("at_least_once", name, value)
            for name, value in (
                *(("acks", "1"), ("acks", "0"), ("request.required.acks", "1"), ("enable.idempotence", "false")),
                *(("retries", "0"), ("message.send.max.retries", "0"), ("transactional.id", "mine")),
                *(("max.in.flight.requests.per.connection", "6"), ("message.timeout.ms", "1000")),
            )
        ),
        *(("at_most_once", *pair) for pair in (("acks", "all"), ("enable.idempotence", "true"), ("retries", "3"))),
    ],
)
def test_client_settings_that_contradict_the_guarantee(guarantee: str, name: str, value: str) -> None:
    error = mistake(**{"guarantee": guarantee, f"kafka.{name}": value})
    assert error.code == "TL-C41"
    assert f"kafka.{name}" in error.problem


@pytest.mark.parametrize(
    ("name", "value"),
    [("acks", "-1"), ("acks", "ALL"), ("enable.idempotence", "True"), ("retries", "9"), ("max.in.flight", "1")],
)
def test_settings_that_agree_with_the_guarantee(name: str, value: str) -> None:
    assert SinkSettings.parse({**BASE, f"kafka.{name}": value}).client[name] == value


@pytest.mark.parametrize("seconds", ["0", "0.5", "-1", "901", "soon", "nan", "inf", ""])
def test_delivery_timeout_has_bounds(seconds: str) -> None:
    error = mistake(deliveryTimeout=seconds)
    assert error.code == "TL-C21"
    assert "must be" in error.problem


@pytest.mark.parametrize("servers", ["", " ", "k1", "k1:", ":9092", "k1:x", "k1:0", "k1:65536", "k1:9092,,k2:9092"])
def test_servers_are_host_and_port(servers: str) -> None:
    error = mistake(**{"kafka.bootstrap.servers": servers})
    assert error.code == "TL-C42"
    assert "kafka.bootstrap.servers" in error.problem


@pytest.mark.parametrize("servers", ["k1:1", "127.0.0.1:9092", "[::1]:9092", "SSL://k1:9093, k2:9093"])
def test_servers_that_are_fine(servers: str) -> None:
    assert SinkSettings.parse({**BASE, "kafka.bootstrap.servers": servers}).servers == servers


def outcome(options: dict[str, str]) -> str:
    try:
        SinkSettings.parse(options)
    except ConfigError as error:
        return error.code
    return "fine"


#: With "provider" it is a table of Spark SQL's, whose other names are no options.
NAME = st.text(max_size=12).filter(lambda name: name.lower() != "provider")


@given(st.dictionaries(NAME, st.text(max_size=12), max_size=4))
def test_any_option_map_is_taken_or_gets_one_line(options: dict[str, str]) -> None:
    assert outcome({**BASE, **options}) in {"fine", "TL-C01", "TL-C21", "TL-C41"}


@given(st.dictionaries(st.text(max_size=12).map("kafka.".__add__), st.text(max_size=12), max_size=3))
def test_any_client_setting_is_taken_or_gets_one_line(options: dict[str, str]) -> None:
    assert outcome({**BASE, **options}) in {"fine", "TL-C01", "TL-C41", "TL-C42", "TL-C43", "TL-C44", "TL-C45"}
