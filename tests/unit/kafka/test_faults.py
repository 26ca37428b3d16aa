"""Kafka's errors in our words."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException

from towline.kafka import faults


def fault(code: int, text: str = "") -> Any:
    return ClientError(code, text or None)


CONNECT = fault(ClientError._TRANSPORT, "k1:9092/bootstrap: Connect to k1 failed: Connection refused (after 0ms in x)")
LOGIN = fault(ClientError._AUTHENTICATION, "k1:9092/bootstrap: SASL PLAIN failed (after 3ms in x)")
DOWN = fault(ClientError._ALL_BROKERS_DOWN, "1/1 brokers are down")


def test_a_reason_is_one_line_from_whatever_was_raised() -> None:
    assert faults.reason(fault(1, "Broker: Two\n lines.")) == "two lines"
    assert faults.reason(KafkaException(fault(1, "Local: Three"))) == "three"
    assert faults.reason(ValueError("a b")) == "a b"


def test_a_system_error_is_told_by_its_cause() -> None:
    """The binding's way to say "fatal" while a delivery report is pending."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KafkaException(fault(ClientError._FENCED, "Local: Fenced"))
    assert faults.reason(error) == "fenced"
    assert faults.name_of(error) == "_FENCED"
    assert faults.reason(SystemError("alone")) == "alone"


@pytest.mark.parametrize(("waited", "told"), [(0.01, ""), (5.2, " for 5 s"), (60.02, " for 60 s")])
def test_a_silence_is_told_as_long_as_it_was(waited: float, told: str) -> None:
    """It said "within 60 s", the limit, after a cut of 5 s."""
    for error in (
        faults.unreachable("k:1", waited, "refused", rows=True),
        faults.unreachable("k:1", waited, "refused"),
    ):
        assert error.what == f"Kafka did not answer{told}: refused"


@pytest.mark.parametrize(
    ("why", "code", "mend"),
    [
        ("too_large", "TL-K05", "Raise the topic's max.message.bytes"),
        ("partition", "TL-K06", "Correct it"),
        ("", "TL-K06", "Correct it"),
    ],
)
def test_a_record_that_can_not_be_sent(why: str, code: str, mend: str) -> None:
    error = faults.unfit("k", "t", why, "1,002 bytes")
    assert error.code == code
    assert error.what == 'a record for topic "t" can not be written: 1,002 bytes'
    assert error.do.startswith(mend)
    assert "deadLetterTopic" in error.do
    assert error.do.endswith(faults.KEPT)


@pytest.mark.parametrize(("count", "says"), [(1, '"a0"'), (5, '"a4"'), (8, "and 3 more")])
def test_missing_topics_and_how_to_make_them(count: int, says: str) -> None:
    error = faults.missing("k1:9092", {f"a{number}" for number in range(count)})
    assert says in error.what
    assert "kafka-topics.sh --bootstrap-server k1:9092 --create --topic a0" in error.do
    assert error.code == "TL-K04"


@pytest.mark.parametrize(
    ("events", "explanation"),
    [
        ([CONNECT], "k1:9092: Connect to k1 failed: Connection refused"),
        ([CONNECT, DOWN], "k1:9092: Connect to k1 failed: Connection refused"),
        ([DOWN], "no broker is up"),
        ([LOGIN, CONNECT, DOWN], "authentication failed: k1:9092: SASL PLAIN failed"),
        ([DOWN, LOGIN], "authentication failed: k1:9092: SASL PLAIN failed"),
    ],
)
def test_the_clearest_explanation_of_a_silence_wins(events: list[Any], explanation: str) -> None:
    last = faults.LastWord()
    for event in events:
        last.note(event)
    assert last.why == explanation
