"""Each semantics of Kafka's delivery page in both directions, with kill -9 at the moment that makes the difference.

docs/guarantees.md says which sentence of that page is which test here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from paho.mqtt import client as paho

from tests.helpers import present, produce_all, producer_in_order, wait_until
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Flow, Running, in_kafka, publish
from tests.integration.conftest import KEEPING, Ear
from tests.integration.devices import device
from tests.integration.gateway.test_outbox import in_order, repeats, save
from towline.bridge.lines.identity import Identity
from towline.bridge.runtime.status import collect_status
from towline.checkpoint import Checkpoint
from towline.gateway.endpoint import GatewayEndpoint
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import Process, wait_for
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.reader import read_topic
from towline_prove.referee import judge_arrivals

pytestmark = pytest.mark.spark


#: In the command line of a bridge's Spark.
JVM = "org.apache.spark.deploy.SparkSubmit"


def write(bridge: Running, broker: Mosquitto, kafka: str, line: str, route: str) -> None:
    bridge.write(broker.uri, kafka, f'[[uplink]]\nname = "line"\n{line}\n[[uplink.route]]\n{route}\n')


def online(bridge: Running, line: str = "line") -> None:
    wait_until(lambda: bridge.online(line), PATIENCE, f"the gateway of {line}")


def nothing_waits(bridge: Running, received: int, line: str = "line") -> None:
    wait_until(
        lambda: (a := bridge.account(line))["received"] >= received and not a["waiting"],
        PATIENCE,
        f"{received} done in {line}",
    )


def checkpoint(bridge: Running, line: str = "line") -> Checkpoint:
    return Checkpoint(f"file:{bridge.state_dir.with_name(line) / 'checkpoint'}")


def committed_behind(bridge: Running, batch: int) -> bool:
    return (checkpoint(bridge).last_committed_batch() or 0) > batch


def begun(bridge: Running, line: str = "line") -> int | None:
    """The batch that was begun and is not done; None where there is none."""
    planned, done = checkpoint(bridge, line).last_planned_batch(), checkpoint(bridge, line).last_committed_batch()
    return planned if planned and planned != done else None


def lines_of(bridge: Running) -> dict[str, Any]:
    lines: dict[str, Any] = collect_status(bridge.directory / "state")["lines"]
    return lines


def accounts(bridge: Running) -> dict[str, Any]:
    return {name: line["account"] for name, line in lines_of(bridge).items()}


DEVICES = 3
#: Beside the line at most once: the same messages at least once, and a line whose routes promise less. Its header says
#: where a message lies in the journal, which is the order it came in.
BESIDE = """
[[uplink]]
name = "least"
guarantee = "at_least_once"
max_trigger_delay_ms = 0
route = [{{ from = "t/#", topic = "{least}" }}]
[[uplink]]
name = "mixed"
guarantee = "exactly_once"
max_trigger_delay_ms = 0
[[uplink.route]]
promise = "at_least_once"
from = "q/{{device}}"
topic = "{mixed}"
key = "{{device}}"
headers = {{ at = "{{mqtt.offset}}" }}
[[uplink.route]]
promise = "at_most_once"
from = "z/{{device}}"
topic = "{mixed}"
key = "{{device}}"
headers = {{ at = "{{mqtt.offset}}" }}
"""
LINES = ("line", "least", "mixed")


# -- devices that publish with QoS 0 and QoS 1 in turn, and what a reader of Kafka finds of routes that promise less


def qos_of(number: int) -> int:
    """How a message comes: each device changes its QoS with every message, and one is on the route at most once."""
    return 0 if number % DEVICES == 2 else number // DEVICES % 2


def publish_mixed(broker: Mosquitto, first: int, count: int) -> None:
    """Publish numbered messages, each device's next with the other QoS, and wait until the broker has them."""
    # Mosquitto takes 20, and ends the connection of who sends more.
    with device(broker.port, paho.MQTTv311, "mixed", in_flight=10) as client:
        sent = []
        for number in range(first, first + count):
            own = number % DEVICES
            sent.append(client.publish(f"{'z' if own == 2 else 'q'}/d{own}", f"{number}", qos=number // DEVICES % 2))
        for each in sent:  # those of QoS 1 are queued here, and one of QoS 0 may overtake them
            each.wait_for_publish(PATIENCE)


def stands_still(pid: int) -> bool:
    """Whether SIGSTOP has come to each thread: one in a call of the system, as a rename, ends that first."""
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return set(states) <= {"T", "t"}


def stop_in_mid_batch(
    bridge: Running,
    kafka: Kafka,
    begun: Mapping[str, Callable[[], int | None]],
    *,
    also: Callable[[], object] = lambda: True,
    driver: bool = False,
) -> None:
    """Kill Spark's JVM, with -9, when Kafka has records of batches that Spark has not committed.

    Args:
        bridge: It runs.
        kafka: Where the topics are.
        begun: The batch that was begun and is not committed, or None, by the topic that its line writes.
        also: What has to be true at that moment too.
        driver: Kill the driver with it.
    """
    process = wait_until(lambda: bridge.child(JVM), PATIENCE, "Spark")
    # The very end: that of open transactions too.
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "isolation.level": "read_uncommitted"}
    reader = Consumer(settings)
    listed = reader.list_topics(timeout=20).topics
    places = {topic: [TopicPartition(topic, part) for part in listed[topic].partitions] for topic in begun}
    #: The batch that was seen last, and where its topic ended when it was first seen.
    seen: dict[str, tuple[int | None, int]] = dict.fromkeys(begun, (None, 0))

    def end(topic: str) -> int:
        return sum(reader.get_watermark_offsets(place, timeout=20)[1] for place in places[topic])

    def written(topic: str) -> bool:
        batch = begun[topic]()
        if batch is None or seen[topic][0] != batch:
            seen[topic] = (batch, end(topic))
            return False
        return end(topic) > seen[topic][1] + DEVICES  # four in a row of `publish_mixed` have both classes

    def struck() -> bool:
        all_written = [written(topic) for topic in begun]
        if not all(all_written) or not also():
            return False
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: stands_still(process.pid), PATIENCE, "the stop of each thread")
        if all(begun[topic]() == seen[topic][0] for topic in begun) and also():
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    try:
        until = time.monotonic() + PATIENCE
        while not struck():  # a batch takes less time than `wait_until` rests between two looks
            assert time.monotonic() < until, "waited for records in Kafka of batches that are not committed"
    finally:
        if driver:
            bridge.kill("towline.bridge.runtime.driver")
        os.kill(process.pid, signal.SIGKILL)
        reader.close()


def check_mixed(kafka: Kafka, topic: str, sent: int, account: Mapping[str, Any]) -> None:
    """QoS 0 at most once, QoS 1 doubled only by the broker, each device in its order, an account that adds up."""
    records = [(int(value), headers) for _, value, headers in in_kafka(kafka.bootstrap, topic)]
    times = Counter(n for n, _ in records)
    none, once = ({n for n in range(sent) if qos_of(n) == qos} for qos in (0, 1))
    assert all(headers["mqtt.qos"] == str(qos_of(n)).encode() for n, headers in records)
    assert [n for n in none if times[n] > 1] == [], "QoS 0, doubled"
    assert none - times.keys(), "QoS 0 that came while no gateway was there"
    assert [n for n in once if not times[n]] == [], "QoS 1, lost"
    assert len({headers["at"] for _, headers in records}) == len(records), "doubled, and not by the broker"

    firsts = {n: int(headers["at"]) for n, headers in reversed(records)}
    for own in range(DEVICES):
        places = [firsts[n] for n in dict.fromkeys(n for n, _ in records) if n % DEVICES == own]
        assert places == sorted(places), f"the order of device {own}"

    assert account["adds_up"], account
    assert account["received"] == account["in_kafka"] == len(records)


# -- MQTT to Kafka


@dataclass(frozen=True)
class Up:
    """What a run of uplinks left behind, killed between Kafka's records and the word that they are there."""

    kafka: Kafka
    topics: dict[str, str]
    accounts: dict[str, Any]
    #: Messages of a steady flow, numbered from 0, after 50 others; and those of QoS 0 and QoS 1 in turn.
    flow: int
    mixed: int

    def values(self, line: str) -> list[bytes]:
        return [value for _, value, _ in in_kafka(self.kafka.bootstrap, self.topics[line])]


@pytest.fixture(scope="module")
def up(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Up:
    """Four lines of one bridge, so that they share its starts and its kills."""
    place = tmp_path_factory.mktemp("up")
    with a_bridge(place) as bridge, Mosquitto(place / "mosquitto", settings={"max_queued_messages": "0"}) as broker:
        return carried_up(bridge, broker, kafka)


def carried_up(bridge: Running, broker: Mosquitto, kafka: Kafka) -> Up:
    topics = {line: f"semantics.{line}" for line in LINES}
    kafka.create_topics(dict.fromkeys(topics.values(), 1))
    route = f'from = "t/#"\ntopic = "{topics["line"]}"' + BESIDE.format(**topics)
    write(bridge, broker, kafka.bootstrap, 'guarantee = "at_most_once"\nmax_trigger_delay_ms = 0', route)
    bridge.start()
    for line in LINES:
        online(bridge, line)
    publish(broker, 900_000, 50)
    for line in ("line", "least"):
        nothing_waits(bridge, 50, line)
    with Flow(broker) as flow:
        with Flow(broker, publish_mixed) as mixed:
            wait_until(lambda: mixed.sent > 500, PATIENCE, "batches of both classes")
            undecided = {topics[line]: partial(begun, bridge, line) for line in ("mixed", "least")}
            stop_in_mid_batch(bridge, kafka, undecided, also=partial(begun, bridge, "line"), driver=True)
            kill_gateway(bridge, "mixed")  # what came with QoS 1 and was not acknowledged comes again
            online(bridge, "mixed")
        kill_gateway(bridge, "line")  # what comes with QoS 0 meanwhile is nobody's
        online(bridge)
    publish(broker, LAST, 1)
    for line, count in {"line": 0, "least": 51 + flow.sent, "mixed": mixed.sent // 3}.items():
        nothing_waits(bridge, count, line)
    wait_until(lambda: bridge.account("line")["skipped"], PATIENCE, "what was given up")
    accounts = {line: bridge.account(line) for line in LINES}
    assert bridge.interrupt() == 0
    return Up(kafka, topics, accounts, flow.sent, mixed.sent)


#: The number of the last message, behind everything.
LAST = 999_999


def kill_gateway(bridge: Running, line: str) -> None:
    """Kill it, wait until it is gone, and leave it to the bridge to start another."""
    endpoint = wait_until(lambda: GatewayEndpoint.read(bridge.state_dir.with_name(line)), PATIENCE, "the endpoint")
    psutil.Process(endpoint.pid).kill()
    wait_until(lambda: not Process.of(endpoint.pid).alive, PATIENCE, f"the end of the gateway of {line}")


def test_mqtt_to_kafka_at_most_once_loses_and_never_doubles(up: Up) -> None:
    """The position is saved before the record is written, and nobody asks whether it was."""
    values, account = up.values("line"), up.accounts["line"]
    assert len(values) == len(set(values)), "doubled"
    flow = values[50:-1]
    assert flow == sorted(flow, key=lambda value: int(value[1:])), "order"
    assert values[-1] == b"m%d" % LAST
    assert 0 < len(flow) < up.flow, "what came while nobody listened"
    # The batch that was begun is given up: some of it is in Kafka.
    assert account["skipped"] > 0
    assert account["adds_up"], account
    assert account["in_kafka"] <= len(values) <= account["in_kafka"] + account["skipped"]


def test_mqtt_to_kafka_at_least_once_doubles_and_never_loses(up: Up) -> None:
    """The records are written before the position is saved: a kill between the two brings them again."""
    values, account = up.values("least"), up.accounts["least"]
    sent = [b"m%d" % n for n in (*range(900_000, 900_050), *range(up.flow), LAST)]
    assert list(dict.fromkeys(values)) == sent, "all, in order"
    assert len(values) > len(sent), "the kill fell between two batches"
    assert (account["received"], account["in_kafka"], account["adds_up"]) == (len(sent), len(sent), True)


def test_mqtt_to_kafka_each_route_as_it_promises(up: Up) -> None:
    check_mixed(up.kafka, up.topics["mixed"], up.mixed, up.accounts["mixed"])


def test_mqtt_to_kafka_exactly_once_whatever_is_killed(
    bridge: Running, broker: Mosquitto, own_kafka: Kafka, tmp_path: Path
) -> None:
    own_kafka.create_topics({"t": 2})
    route = 'from = "telemetry/{device}/data"\ntopic = "t"\nkey = "{device}"'
    line = 'guarantee = "exactly_once"\nmax_messages_per_trigger = 150'
    write(bridge, broker, own_kafka.bootstrap, line, route)
    bridge.start()
    online(bridge)
    wait_until(lambda: checkpoint(bridge).last_committed_batch() is not None, PATIENCE, "the first, empty batch")
    plan = LoadPlan(port=broker.port, messages=100_000, rate=100, qos=2, devices=16, publishers=4)
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(run_load, plan, tmp_path / "claims", stop=enough)
        try:
            for strike in _strikes(bridge, own_kafka):
                wait_until(lambda: begun(bridge), PATIENCE, "a batch in work")
                before = checkpoint(bridge).last_committed_batch() or 0
                strike()
                wait_until(partial(committed_behind, bridge, before), PATIENCE, "the next batch")
        finally:
            enough.set()
    sent = load.result()
    assert sent.acked > 500
    nothing_waits(bridge, sent.acked)
    assert bridge.account()["adds_up"]
    identity = present(Identity.read(bridge.state_dir))
    settings = SinkSettings.parse({"kafka.bootstrap.servers": own_kafka.bootstrap, "sinkId": identity.sink})
    (marker,) = MarkerStore(settings, identity.sink).read_markers().values()
    assert marker is not None
    assert marker.total_rows == bridge.account()["in_kafka"], "Kafka says the same"
    assert bridge.interrupt() == 0
    verdict = judge_arrivals(read_history(tmp_path / "claims"), read_topic(own_kafka.bootstrap, "t"))
    # What was on its way when the load ended may have come through.
    assert verdict.acked == sent.acked <= verdict.delivered <= sent.attempted, verdict.summary_line()
    assert verdict.ok("exactly_once"), verdict.summary_line()


def _strikes(bridge: Running, kafka: Kafka) -> Iterator[Callable[[], object]]:
    yield lambda: bridge.kill("towline.gateway")
    yield lambda: stop_in_mid_batch(bridge, kafka, {"t": partial(begun, bridge)})

    def restart() -> None:
        kafka.kill()
        kafka.start()

    yield restart


#: One for each guarantee, and one that reads a topic with transactions that were aborted, and with one that is open.
DOWN_LINES = """
[[downlink]]
name = "q0"
guarantee = "at_most_once"
from = "{topic}"
topic = "q0/{{key}}"
dead_letter_topic = false
[[downlink]]
name = "q1"
from = "{topic}"
topic = "q1/{{key}}"
dead_letter_topic = false
max_messages_per_trigger = 250
[[downlink]]
name = "q2"
guarantee = "exactly_once"
from = "{topic}"
topic = "q2/{{key}}"
dead_letter_topic = "{dead}"
max_messages_per_trigger = 250
[[downlink]]
name = "committed"
from = "{isolated}"
topic = "committed/all"
"""
STEP = 250


@dataclass(frozen=True)
class Down:
    """What a run of downlinks left behind: gateways killed with messages on their way, then everything else."""

    ear: Ear
    total: int
    accounts: dict[str, Any]
    #: What had come of the line "committed", and its account, while a transaction was open.
    amid: tuple[list[int], Any]


@pytest.fixture(scope="module")
def down(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Down:
    """Three lines of one bridge, q0, q1 and q2, called as the QoS they publish with."""
    place = tmp_path_factory.mktemp("down")
    with a_bridge(place) as bridge, Mosquitto(place / "mosquitto", settings=KEEPING) as broker:
        ear = Ear(broker)
        try:
            return carried_down(bridge, broker, kafka, ear)
        finally:
            ear.close()


def carried_down(bridge: Running, broker: Mosquitto, kafka: Kafka, ear: Ear) -> Down:
    source, dead, isolated = (f"semantics.{name}" for name in ("down", "dead", "isolated"))
    kafka.create_topics(dict.fromkeys((source, dead, isolated), 1))
    still_open = put_in_transactions(kafka, isolated)
    lines = DOWN_LINES.format(topic=source, dead=dead, isolated=isolated)
    # A name of the test's own: the Kafka that it shares with others has their markers.
    name = bridge.directory.parent.name
    bridge.write(broker.uri, kafka.bootstrap, lines, name=name, create_topics=True)
    bridge.start()
    put(kafka, source, range(STEP))
    for line in ("q0", "q1", "q2"):
        wait_until(lambda line=line: any(m.topic.startswith(line) for m in ear.messages), PATIENCE, line)  # type: ignore[misc]
    broker.pause()  # what the gateways send now stays where it is
    put(kafka, source, range(STEP, 2 * STEP))
    wait_until(partial(on_their_way, bridge), PATIENCE, "messages on their way")
    for line in ("q1", "q2", "q0"):
        kill_gateway(bridge, line)
    broker.resume()
    total = run_through(bridge, broker, kafka, ear, source)
    wait_until(lambda: len(heard_of(ear, "committed")) >= len(COMMITTED), PATIENCE, "what it reads")
    wait_until(lambda: accounts(bridge)["committed"]["hidden"] == BEHIND, PATIENCE, "the open transaction")
    amid = heard_of(ear, "committed"), accounts(bridge)["committed"]
    still_open.commit_transaction(30)
    wait_until(lambda: accounts(bridge)["committed"]["taken"] == len(COMMITTED + LATE), PATIENCE, "what was open")
    wait_until(lambda: not any(account["waiting"] for account in accounts(bridge).values()), PATIENCE, "the outbox")
    wait_until(lambda: len(heard_of(ear, "committed")) >= len(COMMITTED + LATE), PATIENCE, "what was open")
    said = accounts(bridge)
    assert bridge.interrupt() == 0
    assert bridge.out.count("adds up ✓") == 4
    return Down(ear, total, said, amid)


#: Committed and plain records in front of the open transaction; the records of that, and plain ones behind it.
COMMITTED, LATE = [*range(10), *range(20, 30), *range(40, 50)], [*range(50, 70)]
#: Offsets that a reader of committed records doesn't get: those two tens.
BEHIND = 20


def put(kafka: Kafka, topic: str, numbers: range) -> None:
    produce_all(kafka.bootstrap, topic, ((b"k%d" % (number % 5), b"%d" % number, []) for number in numbers))


def judge(ear: Ear, line: str, numbers: range) -> tuple[int, int]:
    """Lost none, each topic in order; how many repeats are ours, and how many the killed Mosquitto's."""
    mine = [message for message in ear.messages if message.topic.startswith(f"{line}/")]
    assert in_order(mine), f"{line}: order"
    came = {int(message.payload) for message in mine}
    lost = sorted(set(numbers) - came)
    assert not lost, f"{line}: lost {len(lost)}: {lost[:20]}"
    assert came <= set(numbers), f"{line}: invented {came - set(numbers)}"
    return repeats(mine)


def kill_broker(bridge: Running, broker: Mosquitto) -> None:
    """Kill Mosquitto while nothing of ours runs but Spark, and start it again.

    It acknowledges QoS 2 messages that it has not saved: killed then it loses by itself up to a window of them, which
    no publisher can know.
    """
    supervisor = psutil.Process(bridge.process.pid)
    supervisor.suspend()  # first, so that it starts no more
    still = [supervisor, *(child for child in supervisor.children() if "towline.gateway" in child.cmdline())]
    for process in still:
        process.suspend()
    try:
        save(broker)
        broker.kill()
        broker.start()
    finally:
        for process in still:
            process.resume()


def run_through(bridge: Running, broker: Mosquitto, kafka: Kafka, ear: Ear, source: str) -> int:
    """Feed, kill Mosquitto and then Spark in the midst of it, and wait until all is delivered; how many there were."""

    def feed(step: int) -> None:
        before = len(ear.messages)
        put(kafka, source, range(step * STEP, (step + 1) * STEP))
        wait_until(lambda: len(ear.messages) > before, PATIENCE, f"messages of step {step}")

    feed(2)
    kill_broker(bridge, broker)
    feed(3)
    bridge.kill(JVM)
    feed(4)
    total = 5 * STEP

    def done() -> bool:
        now = [account for name, account in accounts(bridge).items() if name in ("q0", "q1", "q2")]
        return all(a and a["taken"] >= total and not a["waiting"] and a["adds_up"] for a in now)

    wait_until(done, PATIENCE, "the accounts")
    # Delivered is the broker's word; the ear may still be listening. Repeats of the QoS 1 line don't count here.
    wait_for(lambda: len({(m.topic, m.payload) for m in ear.messages if m.topic[:2] in ("q1", "q2")}) >= 2 * total, 60)
    return total


def put_in_transactions(kafka: Kafka, topic: str) -> Producer:
    """Tens of records: committed, aborted, plain, aborted, committed, open, plain; the producer of what is open."""
    plain = producer_in_order(kafka.bootstrap)
    client = {"bootstrap.servers": kafka.bootstrap, "transaction.timeout.ms": 900_000}
    for ten, how in enumerate(("commit", "abort", "plain", "abort", "commit", "open", "plain")):
        producer = plain
        if how != "plain":
            producer = Producer({**client, "transactional.id": f"{topic}.{ten}"})
            producer.init_transactions(30)
            producer.begin_transaction()
        for number in range(10 * ten, 10 * ten + 10):
            producer.produce(topic, b"%d" % number)
        assert producer.flush(30) == 0  # aborted records are in the log too
        if how == "commit":
            producer.commit_transaction(30)
        elif how == "abort":
            producer.abort_transaction(30)
        elif how == "open":
            still_open = producer
    return still_open


def heard_of(ear: Ear, line: str) -> list[int]:
    """What came of a line, without what QoS 1 repeats."""
    return list(dict.fromkeys(int(m.payload) for m in list(ear.messages) if m.topic == f"{line}/all"))


def on_their_way(bridge: Running) -> bool:
    """Lines q1 and q2 wait for the broker's answer, and q0 has handed everything over."""
    boxes = {name: (line["gateway"] or {}).get("outbox") or {} for name, line in lines_of(bridge).items()}
    handed_over = boxes["q0"].get("delivered") == 2 * STEP
    return bool(handed_over and boxes["q1"].get("in_flight") and boxes["q2"].get("in_flight"))


def test_kafka_to_mqtt_at_most_once_loses_and_never_doubles(down: Down) -> None:
    """A message is done, on disk, before it leaves: what was on its way at the kill is not sent again."""
    came = [message for message in down.ear.messages if message.topic.startswith("q0/")]
    assert len(came) == len({(message.topic, message.payload) for message in came}), "doubled"
    assert in_order(came)
    account = down.accounts["q0"]
    assert (account["taken"], account["adds_up"]) == (down.total, True)


def test_kafka_to_mqtt_at_least_once_doubles_and_never_loses(down: Down) -> None:
    """A message is done when the broker has answered: what was on its way at the kill is sent again."""
    ours, _ = judge(down.ear, "q1", range(down.total))
    assert ours > 0, "nothing was on its way"
    assert (down.accounts["q1"]["delivered"], down.accounts["q1"]["adds_up"]) == (down.total, True)


def test_kafka_to_mqtt_exactly_once_whatever_is_killed(down: Down) -> None:
    """The batch is in the outbox with its number, and QoS 2 with its packet ids: what is sent again is recognised."""
    ours, the_brokers = judge(down.ear, "q2", range(down.total))
    assert (ours, the_brokers <= 20) == (0, True), "a killed Mosquitto repeats its max_inflight_messages at most"
    assert (down.accounts["q2"]["delivered"], down.accounts["q2"]["adds_up"]) == (down.total, True)


def test_kafka_to_mqtt_read_committed_delivers_nothing_that_was_aborted(down: Down) -> None:
    """It waits at the last stable offset, also with plain records behind it, and skips nothing."""
    came, account = down.amid
    assert came == COMMITTED
    assert (account["taken"], account["delivered"], account["adds_up"]) == (len(came), len(came), True)
    assert (account["behind"], account["hidden"]) == (BEHIND, BEHIND), "it has taken all that it can have"
    assert heard_of(down.ear, "committed") == COMMITTED + LATE
    account = down.accounts["committed"]
    assert (account["taken"], account["delivered"], account["adds_up"]) == (50, 50, True), "offsets have holes"
