"""A real Kafka: started, killed, paused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import NewTopic
from towline.errors import KafkaError, SetupError
from towline_prove.devstack import Kafka
from towline_prove.devstack.kafka import PERFORMANCE_VARIABLE

pytestmark = pytest.mark.kafka


def test_options_that_java_does_not_know_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split at spaces, as Kafka's own start script does; so a lone quotation mark is Java's to refuse."""
    monkeypatch.setenv(PERFORMANCE_VARIABLE, "-XX:+UseSerialGC -XX:+No'Such")
    with pytest.raises(SetupError, match=r"Unrecognized VM option 'No'Such'.*TL-S12"), Kafka(tmp_path):
        pass


def test_a_topic_that_exists_is_an_error(kafka: Kafka, topic: NewTopic) -> None:
    name = topic()
    with pytest.raises(KafkaError, match=rf"can't create topic '{name}': .*already exists.*TL-K70"):
        kafka.create_topics({name: 1})


def test_a_setting_kafka_can_not_take_is_one_line(tmp_path: Path) -> None:
    broker = Kafka(tmp_path, settings={"num.io.threads": "none"})
    with pytest.raises(SetupError, match="TL-S12") as caught:
        broker.start()
    assert "num.io.threads" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not broker.running
