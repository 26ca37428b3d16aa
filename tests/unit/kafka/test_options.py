"""Options of the sink: what is taken, and the one line a mistake gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.kafka.options import NAMES, SinkSettings

BASE = {"kafka.bootstrap.servers": "k1:9092,k2:65535", "topic": "t"}


def parse(**options: str) -> SinkSettings:
    """With BASE; `__` stands for a dot."""
    return SinkSettings.parse({**BASE, **{name.replace("__", "."): value for name, value in options.items()}})


def mistake(options: dict[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, **options})
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_each_guarantee_sets() -> None:
    once, least, most = parse(), parse(guarantee="at_least_once"), parse(guarantee="at_most_once")
    assert once.guarantee == "exactly_once", "the default"
    for settings in (once, least):
        client = settings.client
        assert (client["acks"], client["enable.idempotence"], client["message.timeout.ms"]) == ("all", "true", "60000")
        assert (client["partitioner"], client["linger.ms"]) == ("murmur2_random", "20")
        assert (client["batch.size"], client["queue.buffering.max.kbytes"]) == ("1000000", "262144")
    assert once.client["transaction.timeout.ms"] == "60000"
    assert (once.parallelism, once.verify) == (1, None)
    assert once.marker_topic_of("s") == "towline.s.markers"
    assert once.transactional_id("s", 3) == "towline.s.3"
    assert (most.client["acks"], most.client["retries"], most.client["enable.idempotence"]) == ("0", "0", "false")
    assert most.timeout_s == 5


def test_names_in_any_case_as_spark_hands_them_over() -> None:
    settings = SinkSettings.parse(
        {
            "KAFKA.bootstrap.servers": "[::1]:9092, SSL://k2:9093",
            "Guarantee": "at_least_once",
            "includeheaders": "FALSE",
            "DELIVERYTIMEOUT": "2.5",
            "checkpointlocation": "/x",
            "kafka.linger.ms": "5",
        }
    )
    assert settings.servers == "[::1]:9092, SSL://k2:9093"
    assert not settings.include_headers
    assert (settings.client["message.timeout.ms"], settings.client["linger.ms"]) == ("2500", "5")


def test_the_queue_holds_at_least_two_of_the_largest_records() -> None:
    large = {"kafka__message__max__bytes": "300000000"}
    assert parse(**large).client["queue.buffering.max.kbytes"] == str(2 * 300_000_000 // 1024)
    assert parse(**large, kafka__queue__buffering__max__kbytes="9").client["queue.buffering.max.kbytes"] == "9"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"guarantee": "at_least_once", "parallelism": "2"}, "TL-C41"),
        ({"guarantee": "at_most_once", "deadLetterTopic": "d"}, "TL-C41"),
        ({"kafka.acks": "1"}, "TL-C41"),
        ({"kafka.request.required.acks": "0"}, "TL-C41"),
        ({"kafka.enable.idempotence": "false"}, "TL-C41"),
        ({"kafka.message.timeout.ms": "1000"}, "TL-C41"),
        ({"kafka.delivery.timeout.ms": "1000"}, "TL-C41"),
        ({"kafka.transactional.id": "x"}, "TL-C41"),
        ({"kafka.transaction.timeout.ms": "90000"}, "TL-C41"),
        ({"guarantee": "at_most_once", "kafka.acks": "all"}, "TL-C41"),
        ({"guarantee": "at_most_once", "kafka.message.send.max.retries": "3"}, "TL-C41"),
        ({"parallelism": "0"}, "TL-C21"),
        ({"parallelism": "1001"}, "TL-C21"),
        ({"sinkId": "a/b"}, "TL-C21"),
        ({"sinkId": ""}, "TL-C21"),
        ({"deadLetterTopic": ".."}, "TL-C21"),
        ({"verifyOnSkip": "maybe"}, "TL-C21"),
        ({"topic": " "}, "TL-C21"),
        ({"guarantee": "none"}, "TL-C21"),
        *(({"deliveryTimeout": text}, "TL-C21") for text in ("0.5", "901", "soon", "nan", "")),
        *(({"kafka.bootstrap.servers": text}, "TL-C42") for text in (" ", "k1", ":9092", "k1:0", "k1:65536", "k:1,,")),
        ({"batchId": "1"}, "TL-C200"),
        *(({"topic": name}, "TL-C95") for name in ("__consumer_offsets", "towline.s.markers")),
        ({"deadLetterTopic": "towline.s.markers"}, "TL-C95"),
        ({"transactionalIdPrefix": "mine", "topic": "mine.s.markers"}, "TL-C95"),
    ],
)
def test_options_that_can_not_be(options: dict[str, str], code: str) -> None:
    error = mistake(options)
    assert error.code == code
    assert f'"{[*options][-1]}"' in str(error)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("topik", "topic"),
        ("includeheader", "includeHeaders"),
        ("kafka_bootstrap_servers", "kafka.bootstrap.servers"),
        ("kafka.compresion.type", "kafka.compression.type"),
    ],
)
def test_unknown_options_get_a_guess(written: str, meant: str) -> None:
    error = mistake({written: "1"})
    assert (error.code, error.remedy) == ("TL-C01", f'Did you mean "{meant}"?')
    assert written in error.problem
    assert all(name in mistake({"zzz": "1"}).remedy for name in NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [("acks", "ALL"), ("enable.idempotence", "True"), ("retries", "9"), ("max.in.flight", "1")],
)
def test_settings_that_agree_with_the_guarantee(name: str, value: str) -> None:
    assert parse(**{f"kafka.{name}": value}).client[name] == value


#: With "provider" it is a table of Spark SQL's, whose other names are no options.
NAME = st.text(max_size=12).filter(lambda name: name.lower() != "provider")
CODES = {"", "TL-C01", "TL-C21", "TL-C41", "TL-C42", "TL-C43", "TL-C44", "TL-C45"}


@given(st.dictionaries(st.one_of(NAME, NAME.map("kafka.".__add__)), st.text(max_size=12), max_size=4))
def test_any_option_is_taken_or_gets_one_line(options: dict[str, str]) -> None:
    code = ""
    try:
        SinkSettings.parse({**BASE, **options})
    except ConfigError as error:
        code = error.code
    assert code in CODES
