"""The brokers that the tests of every room stand on."""

from __future__ import annotations

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from towline_prove.devstack import Kafka, Mosquitto


def test_every_test_gets_a_running_mosquitto_of_its_own(mosquitto: Mosquitto, new_mosquitto: NewMosquitto) -> None:
    other = new_mosquitto(max_queued_messages="7")
    assert mosquitto.running
    assert other.running
    assert mosquitto.port != other.port
    assert "max_queued_messages 7" in (other.directory / "mosquitto.conf").read_text()
    assert "max_queued_messages" not in (mosquitto.directory / "mosquitto.conf").read_text()


def test_topics_have_names_of_their_own(kafka: Kafka, topic: NewTopic) -> None:
    first, second = topic(), topic("other", partitions=2)
    assert first != second
    assert kafka.running


def test_a_helper_topic_is_compacted_when_asked(topic: NewTopic) -> None:
    assert "test_a_helper_topic" in topic("marker", 1, {"cleanup.policy": "compact"})


def test_wait_until_gives_the_first_true_answer() -> None:
    answers = iter([0, "", None, 7])
    assert wait_until(lambda: next(answers)) == 7
