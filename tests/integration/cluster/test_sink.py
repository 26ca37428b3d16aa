"""Long: the way back on a cluster: executors bring records to a gateway that they reach over the network alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import produce_all, wait_until
from tests.integration.cluster.hurting import executors_of, kill
from tests.integration.cluster.page import PATIENCE, Page
from tests.integration.gateway.test_outbox import Ear
from towline_prove.devstack.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.kafka, pytest.mark.broker]

BRIDGE = """
name = "plant"
state_dir = "state"
mqtt = { brokers = ["${STACK_MQTT}"] }
kafka = { bootstrap_servers = "${STACK_KAFKA}" }
[spark]
master = "${STACK_SPARK}"
secret_file = "${STACK_DIR}/spark/secret"
conf = { "spark.executor.memory" = "512m" }
[gateway]
listen = "${STACK_GATEWAY_1}"
cert_file = "${STACK_DIR}/gateway/server.pem"
key_file = "${STACK_DIR}/gateway/server.key"
ca_file = "${STACK_DIR}/gateway/authority.pem"
token_file = "${STACK_DIR}/gateway/token"
[[downlink]]
name = "commands"
guarantee = "exactly_once"
from = "commands"
topic = "cmd/{key}"
max_messages_per_trigger = 100
"""
#: Records of each round, to so many devices.
ROUND, DEVICES = 600, 20


def test_each_record_is_published_once_whoever_dies(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "plant.toml").write_text(BRIDGE)
    sent = 0
    with Page(tmp_path) as page:
        try:
            page.run("towline devstack up --spark --dir stack")
            page.run('eval "$(towline devstack env --dir stack)"')
            stack = Stack(tmp_path / "stack")
            cluster = stack.spark
            assert cluster is not None
            stack.kafka.create_topics({"commands": 2})
            ear = Ear(stack.mosquitto, "cmd/#")
            page.run("towline run plant.toml > run.log 2>&1 &")

            def more() -> None:
                nonlocal sent
                numbers = range(sent, sent + ROUND)
                produce_all(
                    stack.kafka.bootstrap, "commands", [(b"d%d" % (n % DEVICES), b"%d" % n, []) for n in numbers]
                )
                sent += ROUND

            more()
            ear.until(sent // 3, PATIENCE)
            first = wait_until(lambda: next(iter(executors_of(cluster.workers[0])), None), PATIENCE, "executor")
            kill(first)
            more()
            ear.until(sent, PATIENCE)
            page.run("towline devstack kill spark-worker-2 --dir stack")
            more()
            ear.until(sent, PATIENCE)
            assert "adds up ✓" in page.run("towline status plant.toml")
            counted = Counter(ear.numbers())
            record_property("messages", sent)
            record_property("doubled", sum(counted.values()) - len(counted))
            assert counted == Counter(range(sent))
            for device in range(DEVICES):
                own = [n for n in ear.numbers() if n % DEVICES == device]
                assert own == sorted(own)
            page.run("kill $!; wait $!")
            ear.close()
        finally:
            page.run("kill $(jobs -p) 2>/dev/null; wait; towline devstack down --dir stack")
