"""A bridge whose state was changed behind its back, and its dead letters: told, mended, carried on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from tests.integration.bridge.test_delivery_semantics import nothing_waits, online, write
from towline.bridge.config.file import load
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import check_resume
from towline.bridge.lines.statuses import read_checkpoint as read
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.spark.offsets import positions_at
from towline_prove.devstack import Kafka

pytestmark = [pytest.mark.spark, pytest.mark.long]


def test_an_older_checkpoint_and_the_letters(
    bridge: Running, new_mosquitto: NewMosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    name, dead = topic(), topic("dead")
    line = f'guarantee = "exactly_once"\ndead_letter_topic = "{dead}"'
    route = f'from = "t/#"\ntopic = "{name}"\nkey = "{{mqtt.user.id}}"\nkey_required = true'
    write(bridge, broker.port, kafka.bootstrap, line, route)
    bridge.start()
    online(bridge)
    publish(broker, 0, 100, qos=2, user="id")
    publish(broker, 1000, 3, qos=2)
    nothing_waits(bridge, 103)
    place = bridge.state_dir / "checkpoint"
    shutil.copytree(place, bridge.directory / "older")
    publish(broker, 100, 100, qos=2, user="id")
    nothing_waits(bridge, 203)
    account = wait_until(lambda: (a := bridge.account())["dead_lettered"] == 3 and a, PATIENCE, "the counts")
    assert (account["received"], account["in_kafka"], account["adds_up"]) == (203, 200, True)
    assert bridge.interrupt() == 0
    assert "dead-lettered 3" in bridge.out

    one = load(bridge.file).line("line")
    identity = Identity.read(bridge.state_dir)
    assert identity is not None
    assert (identity.sink, identity.parallelism) == ("tests.line", 1)
    seen = read(one.checkpoint)
    assert identity.query == seen.query_id, "what Spark wrote is understood"
    assert seen.all_committed
    assert [spot.offset for spot in positions_at(Checkpoint(str(one.checkpoint)), seen.committed_batch)] == [203]
    with pytest.raises(TowlineError, match="TL-B22"):
        check_resume(one, bridge.file, identity, read(bridge.directory / "nowhere"))

    place.rename(bridge.directory / "newest")
    shutil.copytree(bridge.directory / "older", place)
    bridge.start()
    assert bridge.ended() == 2
    assert "and 203 was committed already" in bridge.out
    assert f"towline reset {bridge.file} line" in bridge.out
    assert "[TL-B23]" in bridge.out

    assert 'line "line" is reset, its new sink is "tests.line.2"' in bridge.command("reset", "line")
    bridge.start()
    online(bridge)
    publish(broker, 200, 100, qos=2, user="id")
    nothing_waits(bridge, 303)
    assert bridge.interrupt() == 0
    values = [value for _, value, _ in in_kafka(kafka.bootstrap, name)]
    assert values == [f"m{n}".encode() for n in range(300)]
    assert (bridge.state_dir / "checkpoint.1").is_dir()

    bridge.file.write_text(bridge.file.read_text().replace("key_required = true", ""))
    run = subprocess.run(
        [sys.executable, "-m", "towline", "dlq", "replay", str(bridge.file), "--json"],
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    )
    assert json.loads(run.stdout)["replayed"] == {name: 3}
    records = in_kafka(kafka.bootstrap, name)
    assert [value for _, value, _ in records[300:]] == [b"m1000", b"m1001", b"m1002"]
    assert records[300][2]["mqtt.topic"] == b"t/d/x"
