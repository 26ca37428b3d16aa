"""A line that is taken out of the file with something in it: refused, carried on, ended, gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.conftest import Ear, Gateway
from tests.integration.gateway.test_drain import has_session
from tests.unit.cli.test_main import ran
from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.lines.identity import assign_identities, record_lines, removed_lines
from towline.bridge.runtime.retiring import retire
from towline.bridge.runtime.screen import PlainScreen
from towline.bridge.runtime.state import pause
from towline.errors import ConfigError
from towline.journal import Batch, Limits, Outbox
from towline.schema import OUTBOX_SCHEMA
from towline_prove.devstack import Kafka, Mosquitto

UP = '[[uplink]]\nname = "{0}"\nguarantee = "exactly_once"\nroute = [{{ from = "{0}/#", topic = "{1}" }}]\n'
DOWN = '[[downlink]]\nname = "{0}"\nguarantee = "exactly_once"\nfrom = "{1}"\ntopic = "c/{{key}}"\n'


def written(place: Path, mosquitto: Mosquitto, kafka: str, *lines: str) -> Bridge:
    """A bridge file, read; the bridge is called as its test: all tests share one Kafka."""
    file = place / "bridge.toml"
    Running(place, file).write(mosquitto.uri, kafka, "".join(lines), name=place.parent.name)
    return load(file)


def received(bridge: Bridge, name: str, mosquitto: Mosquitto, count: int, queued: int, first: int = 0) -> None:
    """Have a line's gateway take messages in while no Spark runs, and the broker queue more for it when it has gone."""
    gateway = Gateway(bridge.line(name).gateway)
    gateway.log = bridge.state_dir.parent / "gateway.log"
    gateway.connect()
    publish(mosquitto, first, count, topic=f"{name}/x", qos=2)
    gateway.until(journaled=first + count)
    assert gateway.stop() == 0
    publish(mosquitto, first + count, queued, topic=f"{name}/x", qos=2)


def test_an_uplink_that_is_gone_from_the_file_is_carried_to_kafka_and_ended(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own settings of then, paused as it is, in ten batches; killed amid them, it goes on and doubles none."""
    name = topic()
    small = UP.replace("route =", "max_messages_per_trigger = 10\nroute =").format("line", name)
    before = written(bridge.directory, mosquitto, kafka.bootstrap, small, UP.format("other", name))
    assign_identities(before)
    record_lines(before)
    received(before, "line", mosquitto, 77, 23)
    written(bridge.directory, mosquitto, kafka.bootstrap, UP.format("other", name))

    code, _, err = ran(capsys, "run", str(bridge.file))
    assert (code, err.count("\n")) == (2, 1)
    assert 'line "line" was removed from bridge.toml, and 77 acknowledged messages wait in' in err
    assert not (before.state_dir / "other" / "inbox").exists(), "nothing was started"

    pause(before.state_dir / "line")
    command = [sys.executable, "-m", "towline", "retire", str(bridge.file), "line", "--idle", "1"]
    own = {**os.environ, "SPARK_HOME": str(Path(pyspark.__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=own) as process:
        wait_until(lambda: in_kafka(kafka.bootstrap, name), PATIENCE, "some of them")
        process.kill()
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith('line "line" is retired: nothing waits, no session is left')
    assert [value for _, value, _ in in_kafka(kafka.bootstrap, name)] == [f"m{n}".encode() for n in range(100)]
    assert not bridge.state_dir.exists()
    assert not has_session(mosquitto, f"{before.name}-line")
    assert removed_lines(load(bridge.file)) == []


def test_a_downlink_sends_what_it_holds_and_is_ended(tmp_path: Path, mosquitto: Mosquitto) -> None:
    """Kafka is not asked, and Spark not started."""
    before = written(tmp_path, mosquitto, "127.0.0.1:1", UP.format("up", "t"), DOWN.format("down", "commands"))
    assign_identities(before)
    record_lines(before)
    gateway = Gateway(settings := before.line("down").gateway)
    gateway.log = tmp_path / "gateway.log"
    gateway.connect()
    assert gateway.stop() == 0
    now = datetime.now(UTC)
    rows = [{"topic": "c/d", "payload": b"%d" % n, "qos": 2, "arrived_at": now} for n in range(30)]
    outbox = Outbox.open(settings.outbox_dir, schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0))
    outbox.append_batch(pa.RecordBatch.from_pylist(rows, schema=OUTBOX_SCHEMA), Batch("q/0", 0))
    outbox.close()
    after = written(tmp_path, mosquitto, "127.0.0.1:1", UP.format("up", "t"))
    ear, thresholds = Ear(mosquitto, "c/#"), gc.get_threshold()
    try:
        retire(after, "down", PlainScreen(sys.stderr))
        wait_until(lambda: len(ear.messages) == 30, what="the messages")
    finally:
        ear.close()
        gc.unfreeze()  # a gateway ran in this process
        gc.set_threshold(*thresholds)
    assert [one.payload for one in ear.messages] == [f"{n}".encode() for n in range(30)]
    assert not (tmp_path / "state" / "down").exists()
    assert not has_session(mosquitto, f"{before.name}-down")


def test_what_cant_be_carried_on_is_refused_and_can_be_given_up(tmp_path: Path, mosquitto: Mosquitto) -> None:
    several = UP.format("line", "t") + f'mqtt = {{ brokers = ["{mosquitto.uri}", "{mosquitto.uri}/"] }}\n'
    before = written(tmp_path, mosquitto, "127.0.0.1:1", UP.format("up", "t"), several.replace("exactly", "at_least"))
    assign_identities(before)
    received(before, "line", mosquitto, 5, 3)
    screen = PlainScreen(sys.stderr)
    with pytest.raises(ConfigError, match="TL-G57"):
        retire(before, "line", screen)
    told = retire(before, "line", screen, discard=True)
    assert told.startswith('line "line" is retired: 5 messages dropped, no session is left at its broker')
    assert not has_session(mosquitto, f"{before.name}-line")
    with pytest.raises(ConfigError, match="TL-C73"):
        retire(before, "logs", screen)
