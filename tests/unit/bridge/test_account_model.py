"""[I11] Whatever is killed wherever, the account adds up; and it does not where a witness says something else."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.uplink_model import STEPS, Message, ModelLine
from towline.bridge.uplink.query import UplinkQuery
from towline.checkpoint import SINK_TOTALS
from towline.guarantee import Guarantee
from towline.kafka.delivery import BatchOrigin
from towline.kafka.markers import Marker
from towline.spark import kafka_sink

MESSAGES = st.builds(Message, st.sampled_from(("sent", "sent", "filtered", "dead", "lost")))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), st.lists(MESSAGES, min_size=1, max_size=6)),
        st.tuples(st.just("run"), st.just("")),
        st.tuples(st.just("run"), st.sampled_from(STEPS)),
        st.tuples(st.just("power failure"), st.none()),
        st.tuples(st.just("begin again"), st.none()),
    ),
    max_size=14,
)


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "require_configured_topics", lambda _: None)
    monkeypatch.setattr(kafka_sink, "batch_origin", lambda *_: BatchOrigin())
    for name in ("fsync", "fdatasync"):  # no power fails here
        monkeypatch.setattr(os, name, lambda _: None)


def a_line(place: Path, guarantee: str, *, letters: bool) -> ModelLine:
    own = f'name = "telemetry"\nguarantee = "{guarantee}"\n' + ('dead_letter_topic = "dead"\n' if letters else "")
    route = "where = \"topic <> 'none'\"\n"
    bridge = read(GOOD.replace('name = "telemetry"\n', own) + route, place)
    return ModelLine(UplinkQuery(bridge, bridge.uplinks[0]), guarantee)


def operate(line: ModelLine, operation: str, what: Any) -> None:
    if operation == "receive":
        line.receive(what)
    elif operation == "run":
        line.run(what)
    elif operation == "power failure":
        line.kill()
        line.forget_the_note()
    else:
        line.kill()
        line.reset()


def check(line: ModelLine) -> None:
    """The sum is whole and holds."""
    account = line.account
    assert account.adds_up, account.sentence()
    assert sum(account.counts.values()) - account.received == account.received == len(line.journal)
    assert min(account.counts.values()) >= 0, account.sentence()


@pytest.mark.parametrize("guarantee", [one.value for one in Guarantee])
@given(operations=OPERATIONS, letters=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_killed_wherever_the_sum_holds(
    guarantee: str, letters: bool, operations: list[tuple[str, Any]]
) -> None:
    """What Kafka has is what it says, each message once, however often at_least_once writes it."""
    with tempfile.TemporaryDirectory() as place:
        line = a_line(Path(place), guarantee, letters=letters)
        for operation, what in operations:
            operate(line, operation, what)
            check(line)
        while line.run():
            check(line)
        line.start()
        check(line)
        account = line.account
        assert account.counts["waiting"] == 0
        if guarantee != "at_most_once" and letters and all(name != "power failure" for name, _ in operations):
            sent, dead = ({n for n, fate in line.records if fate == one} for one in ("sent", "dead"))
            filtered = sum(one.fate == "filtered" for one in line.journal)
            assert (account.counts["in_kafka"], account.counts["dead_lettered"]) == (len(sent), len(dead))
            assert (account.counts["filtered"], account.counts["left_out"]) == (filtered, 0)
            assert account.more["not_witnessed"] == 0


#: What may be gone, or be done, after a kill.
AFTER = ("", "power failure", "begin again")


@pytest.mark.parametrize("guarantee", [one.value for one in Guarantee])
def test_each_crash_point_and_what_may_be_gone_after_it(guarantee: str, tmp_path: Path) -> None:
    """Enumerated: two batches, a kill at each step of the second, what is lost with it, and another kill."""
    mixed = [Message(), Message(), Message("filtered"), Message("dead"), Message("lost")]
    for number, (first, after, second) in enumerate(product(STEPS, AFTER, ("", "in Kafka"))):
        place = tmp_path / str(number)
        place.mkdir()
        line = a_line(place, guarantee, letters=True)
        for operation, what in (
            ("receive", mixed),
            ("run", ""),
            ("receive", mixed),
            ("run", first),
            *([(after, None)] if after else []),
            ("receive", mixed),
            ("run", second),
            ("run", ""),
            ("run", ""),
        ):
            operate(line, operation, what)
            check(line)
        assert line.account.counts["waiting"] == 0


def runs(place: Path, guarantee: str, *, letters: bool = True) -> ModelLine:
    """A line that has carried ten messages in two batches."""
    line = a_line(place, guarantee, letters=letters)
    for fates in (["sent"] * 5, ["sent", "sent", "sent", "dead", "filtered"]):
        line.receive([Message(fate) for fate in fates])
        assert line.run()
    return line


def another_batch(line: ModelLine) -> str:
    line.receive([Message()] * 3)
    assert line.run()
    return line.account.sentence()


def note(line: ModelLine, **changes: int) -> None:
    """Change counts of the newest totals."""
    file = line.path / SINK_TOTALS
    values = json.loads(file.read_text())
    counts = values["totals"][-1]["counts"]
    for name, more in changes.items():
        counts[name] = counts.get(name, 0) + more
    file.write_text(json.dumps(values))


SINK = "the sink was given 9 rows · it says"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"acknowledged": -1}, f"{SINK} 7 acknowledged by Kafka + 1 dead letters"),
        ({"dead_lettered": 2}, f"{SINK} 8 acknowledged by Kafka + 3 dead letters"),
        ({"given": 1}, "the sink was given 10 rows · it says 8 acknowledged by Kafka + 1 dead letters"),
        ({"filtered": 1}, "10 were received · the parts are 11"),
        ({"astray": 1}, "1 rows did not reach the sink, for no reason that the line has"),
        ({"astray": -1, "given": 1}, "the sink was given 1 rows more than the journal has committed"),
    ],
)
def test_a_note_that_does_not_fit_its_batches_is_told(change: dict[str, int], told: str, tmp_path: Path) -> None:
    line = runs(tmp_path, "at_least_once")
    note(line, **change)
    assert told in line.account.disagreements
    assert "does not add up ✗" in another_batch(line), "it stays"


def test_a_marker_with_other_totals_is_told_unless_a_person_has_set_it(tmp_path: Path) -> None:
    line = runs(tmp_path, "exactly_once")
    assert line.marker is not None
    ours, line.marker = line.marker, replace(line.marker, total_rows=line.marker.total_rows + 7)
    assert (
        "does not add up ✗ (Kafka's markers say 19 rows, 1 of them dead letters · the sink says 11 acknowledged by "
        "Kafka + 1 dead letters)"
    ) in another_batch(line)
    place = tmp_path / "other"
    place.mkdir()
    line = runs(place, "exactly_once")
    line.marker = Marker(ours.batch, 1)
    assert "adds up ✓" in another_batch(line)


def test_a_note_that_a_power_failure_took_leaves_nothing_but_offsets(tmp_path: Path) -> None:
    """What was carried before it is named so; what Spark had done by then waits until the next batch tells of it."""
    line = runs(tmp_path, "at_least_once")
    operate(line, "power failure", None)
    assert line.account.sentence() == "received 10 = in Kafka 10 (10 of them unconfirmed) + waiting 0   adds up ✓"
    assert another_batch(line) == "received 13 = in Kafka 13 (10 of them unconfirmed) + waiting 0   adds up ✓"


def test_a_batch_is_counted_when_it_is_committed(tmp_path: Path) -> None:
    line = a_line(tmp_path, "at_most_once", letters=False)
    line.receive([Message(), Message("lost"), Message("lost")])
    line.run()
    assert line.account.sentence() == "received 3 = in Kafka 1 + lost 2 + waiting 0   adds up ✓"
    line.receive([Message()] * 4)
    line.run("noted")
    assert line.account.sentence() == "received 7 = in Kafka 1 + lost 2 + waiting 4   adds up ✓"
    line.run("committed")
    assert line.account.sentence() == "received 7 = in Kafka 1 + dropped 4 + lost 2 + waiting 0   adds up ✓"
