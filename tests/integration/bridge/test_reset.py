"""A line whose state directory was emptied: its markers are looked at before anything is taken in."""

from __future__ import annotations

import pytest

from tests.conftest import NewTopic
from tests.integration.bridge.running import Running
from tests.integration.bridge.test_retire import UP, written
from tests.integration.gateway.test_drain import has_session
from tests.unit.cli.test_main import ran
from towline.bridge.runtime.child_supervisors import foreign_marker_error
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.kafka.producers import TransactionalProducer
from towline_prove.devstack import Kafka, Mosquitto


def leave(kafka: str, sink: str, rows: int) -> None:
    """Write the marker that a query has left which carried so many rows as this sink."""
    settings = SinkSettings.parse({"kafka.bootstrap.servers": kafka, "sinkId": sink})
    store = MarkerStore(settings, sink)
    store.ensure_topic()
    producer = TransactionalProducer(settings, settings.transactional_id(sink, 0))
    producer.begin()
    producer.write_marker(store.topic, 0, store.key(0), Marker(3, 1, rows, writer="an-older-query", total_rows=rows))
    producer.commit()
    producer.close()


def test_a_line_whose_sink_has_rows_of_another_query_takes_nothing_in(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(bridge.directory, mosquitto, kafka.bootstrap, UP.format("line", topic()))
    file = file.model_copy(update={"name": bridge.directory.parent.name})
    bridge.file.write_text(bridge.file.read_text().replace('"tests"', f'"{file.name}"'))
    sink = f"{file.name}.line"
    leave(kafka.bootstrap, sink, 40)
    leave(kafka.bootstrap, f"{sink}.2", 0)
    code, out, err = ran(capsys, "run", str(bridge.file))
    assert code == 1
    assert f'its sink "{sink}" has 40 rows of query an-older-query in Kafka' in err
    assert f"towline reset {bridge.file} line (what the last batch held may come twice, this once)" in err
    assert "[TL-K13]" in err
    assert not (bridge.state_dir / "inbox").exists(), "nothing was taken in"
    assert not has_session(mosquitto, f"{file.name}-line")

    assert "is up after" not in out, "nor was Spark waited for"
    _, out, _ = ran(capsys, "reset", str(bridge.file), "line")
    assert out == f'line "line" is reset, its new sink is "{sink}.2"\n'
    assert foreign_marker_error(file, file.lines[0]) is None, "nothing was ever carried under that name"
