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
    assert faults.error_text(fault(1, "Broker: Two\n lines.")) == "two lines"
    assert faults.error_text(KafkaException(fault(1, "Local: Three"))) == "three"
    assert faults.error_text(ValueError("a b")) == "a b"


def test_a_system_error_has_the_text_of_its_cause() -> None:
    """The binding's way to say "fatal" while a delivery report is pending."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KafkaException(fault(ClientError._FENCED, "Local: Fenced"))
    assert faults.error_text(error) == "fenced"
    assert faults.error_name(error) == "_FENCED"
    assert faults.error_text(SystemError("alone")) == "alone"


@pytest.mark.parametrize(("waited", "told"), [(0.01, ""), (5.2, " for 5 s"), (60.02, " for 60 s")])
def test_the_time_waited_is_in_the_error(waited: float, told: str) -> None:
    """It said "within 60 s", the limit, after a cut of 5 s."""
    for error in (
        faults.unreachable_error("k:1", waited, "refused", rows=True),
        faults.unreachable_error("k:1", waited, "refused"),
    ):
        assert error.problem == f"Kafka did not answer{told}: refused"


@pytest.mark.parametrize(
    ("why", "code", "mend"),
    [
        ("too_large", "TL-K05", "Raise the topic's max.message.bytes"),
        ("partition", "TL-K06", "Correct it"),
        ("", "TL-K06", "Correct it"),
    ],
)
def test_a_record_that_can_not_be_sent(why: str, code: str, mend: str) -> None:
    error = faults.bad_record_error("k", "t", why, "1,002 bytes")
    assert error.code == code
    assert error.problem == 'a record for topic "t" can not be written: 1,002 bytes'
    assert error.remedy.startswith(mend)
    assert "deadLetterTopic" in error.remedy
    assert error.remedy.endswith(faults.NOT_COMMITTED)


@pytest.mark.parametrize(("count", "says"), [(1, '"a0"'), (5, '"a4"'), (8, "and 3 more")])
def test_missing_topics_and_how_to_make_them(count: int, says: str) -> None:
    error = faults.missing_topics_error("k1:9092", {f"a{number}" for number in range(count)})
    assert says in error.problem
    assert "kafka-topics.sh --bootstrap-server k1:9092 --create --topic a0" in error.remedy
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
    last = faults.LastConnectionError()
    for event in events:
        last.on_error(event)
    assert last.reason == explanation
