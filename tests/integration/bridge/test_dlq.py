"""Dead letters on a real Kafka: shown, fixed, and replayed at most once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from confluent_kafka import Producer

from tests.conftest import NewTopic
from tests.helpers import produce_all
from tests.integration.bridge.running import Running, in_kafka
from tests.integration.conftest import towline_command
from tests.integration.kafka.test_topic_ids import make_anew
from towline.bridge import deadletters
from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.deadletters import (
    DeadLetterTopic,
    LetterMapper,
    StoredLetter,
    _ReplayWriter,
    dead_letter_topics,
)
from towline.errors import KafkaError
from towline.kafka.deadletters import DeadLetter, Reason, to_records
from towline_prove.devstack import Kafka

Make = Callable[..., tuple[Bridge, DeadLetterTopic, str]]


def no_spark() -> NoReturn:
    raise AssertionError("no route has a where")


def replay(letters: DeadLetterTopic, **options: Any) -> tuple[Counter[str], Counter[str]]:
    """Replay letters; return the counts of those that were written by topic, and of the others by reason."""
    results = [*deadletters.replay(letters, no_spark, **options)]
    written = Counter(one[0] for one in results if isinstance(one, tuple))
    return written, Counter(one for one in results if isinstance(one, str))


def write(writer: _ReplayWriter, letters: DeadLetterTopic, bridge: Bridge, waiting: list[StoredLetter]) -> None:
    mappers = {"line": LetterMapper(bridge.uplinks[0], no_spark)}
    writer.write(letters.topic, waiting, deadletters._remap_letters(letters, mappers, waiting))


def put(bootstrap: str, topic: str, letters: list[DeadLetter], limit: int = 1_000_000) -> None:
    produce_all(bootstrap, topic, (record for letter in letters for record in to_records(letter, limit)))


def letter(number: int, mqtt: str = "t/d/x", reason: Reason = Reason.TOPIC_ILLEGAL, size: int = 10) -> DeadLetter:
    value = f"m{number}".encode().ljust(size, b".")
    received = b"%d" % (time.time() * 1e6)  # what is older than a topic's retention would be gone at once
    headers = (("mqtt.topic", mqtt.encode()), ("mqtt.received-at", received))
    return DeadLetter(reason, None, None, value, headers, source="line")


@pytest.fixture
def make(kafka: Kafka, topic: NewTopic, tmp_path: Path) -> Make:
    """A bridge file, its dead-letter topic with letters, and the topic of its line."""

    def made(*waiting: DeadLetter, key: str = "{device}", route: str = "") -> tuple[Bridge, DeadLetterTopic, str]:
        target, dead = topic("target"), topic("dead", 2)
        file = tmp_path / "bridge.toml"
        line = f'[[uplink]]\nname = "line"\ndead_letter_topic = "{dead}"\n[[uplink.route]]\nfrom = "t/{{device}}/x"\n'
        line += f'topic = "{target}"\nkey = "{key}"\n{route}\n'
        Running(tmp_path, file).write("mqtt://127.0.0.1", kafka.bootstrap, line)
        put(kafka.bootstrap, dead, [*waiting])
        (letters,) = dead_letter_topics(bridge := load(file))
        return bridge, letters, target

    return made


def values(kafka: Kafka, topic: str) -> list[bytes]:
    return [value.rstrip(b".") for _, value, _ in in_kafka(kafka.bootstrap, topic)]


def test_a_dead_letter_topic_recreated_during_a_replay_gets_no_mark_of_the_old_one(make: Make, kafka: Kafka) -> None:
    """A mark names offsets: in another topic it would hide other dead letters."""
    _, letters, _ = make(*map(letter, range(3)))
    waiting = list(letters.waiting_letters())
    assert len(letters.still_waiting(waiting)) == 3
    make_anew(kafka, letters.topic)
    with pytest.raises(KafkaError, match=r"was deleted and recreated during the replay.*TL-B30"):
        letters.still_waiting(waiting)


def test_each_letter_is_replayed_once(kafka: Kafka, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadletters, "LETTERS_PER_TRANSACTION", 1)
    _, letters, target = make(letter(0), letter(1, "nobody"), letter(3))
    put(kafka.bootstrap, letters.topic, [letter(2, size=9000)], limit=4096)
    put(kafka.bootstrap, letters.topic, [letter(4, size=2_000_000)])
    command: list[str | bytes] = ["kcat", "-P", "-b", kafka.bootstrap, "-t", letters.topic, "-p", "0", "-H", b"\xff=1"]
    subprocess.run(command, input=b"somebody else's", check=True)
    dry, _ = replay(letters, dry_run=True)
    assert dry == {target: 3}
    assert values(kafka, target) == []

    first, rest, again = replay(letters, limit=1), replay(letters), replay(letters)
    assert sum(map(Counter.total, first)) == 1
    unrouted, too_large = sorted(rest[1])
    assert (unrouted, "2,000" in too_large) == ("no route takes this topic", True)
    assert again == ({}, rest[1])
    assert sorted(values(kafka, target)) == [b"m0", b"m2", b"m3"]
    assert sorted((entry.dead_letter.value or b"")[:2] for entry in letters.waiting_letters()) == [b"m1", b"m4"]
    assert letters.unreadable_records == 1


def test_a_killed_replay_is_repeated(kafka: Kafka, make: Make) -> None:
    """All of it was sent, only the commit is missing: nothing of it counts, and nothing waits for it."""
    bridge, letters, target = make(letter(0), letter(1))
    code = """if True:
        import os, sys
        from pathlib import Path
        from towline.bridge.config import file as config
        from towline.bridge import deadletters
        from towline.kafka.producers import TransactionalProducer
        TransactionalProducer.commit = lambda producer: (producer.flush(20), os._exit(9))
        bridge = config.load(Path(sys.argv[1]))
        (letters,) = deadletters.dead_letter_topics(bridge)
        list(deadletters.replay(letters, None))
    """
    assert subprocess.run([sys.executable, "-c", code, str(bridge.file)], check=False).returncode == 9
    assert replay(letters)[0] == {target: 2}
    assert sorted(values(kafka, target)) == [b"m0", b"m1"]


def test_a_fenced_replay_writes_nothing(kafka: Kafka, make: Make) -> None:
    """By a bridge of another name too, with a line of the same: a letter that names the line alone is of both."""
    bridge, letters, target = make(letter(0))
    (others,) = dead_letter_topics(bridge.model_copy(update={"name": "another"}))
    slow = _ReplayWriter(others)
    waiting = list(letters.waiting_letters())
    assert replay(letters)[0] == {target: 1}
    with pytest.raises(KafkaError, match=r"TL-B30"):
        write(slow, letters, bridge, waiting)
    assert values(kafka, target) == [b"m0"]


def test_marks_above_an_open_transaction_count(kafka: Kafka, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not to be seen yet when the search begins; what they name does not count to the limit."""
    bridge, letters, target = make(*map(letter, range(3)))
    (other,) = dead_letter_topics(bridge)
    (first, *_) = letters.waiting_letters()
    unfinished = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"other-{letters.topic}"})
    unfinished.init_transactions(20)
    unfinished.begin_transaction()
    for partition in (0, 1):
        unfinished.produce(letters.topic, b"unfinished", partition=partition)
    assert unfinished.flush(20) == 0
    write(_ReplayWriter(other), other, bridge, [first])
    monkeypatch.setattr(deadletters, "_OPEN_TRANSACTION_S", 1.0)
    with pytest.raises(KafkaError, match="TL-B31"):
        replay(letters)
    assert values(kafka, target) == [(first.dead_letter.value or b"").rstrip(b".")]
    monkeypatch.undo()

    later = threading.Timer(2.0, unfinished.abort_transaction, (20,))
    later.start()
    assert replay(letters, limit=2)[0] == {target: 2}
    later.join()
    assert sorted(values(kafka, target)) == [b"m0", b"m1", b"m2"]


def run_dlq(*arguments: str) -> tuple[int, str, str]:
    result = towline_command("dlq", *arguments)
    return result.returncode, result.stdout, result.stderr


def test_the_commands(kafka: Kafka, make: Make) -> None:
    other = replace(letter(2), source="another.line")
    bridge, letters, target = make(letter(0), letter(1, "nobody", Reason.UNROUTED), other)
    dead, text = letters.topic, bridge.file.read_text()
    bridge.file.write_text(text.replace(dead, f"{dead}.not-yet"))
    assert run_dlq("show", str(bridge.file)) == (0, f"none yet: topic {dead}.not-yet is not there\n", "")
    assert run_dlq("replay", str(bridge.file))[0] == 0
    bridge.file.write_text(text)
    code, out, _ = run_dlq("show", str(bridge.file))
    assert code == 0
    assert "1  topic_illegal      line line   in " + dead in out
    assert "nobody → no topic  10 B" in out
    assert f'1  of no line of this bridge, signed "another.line"   in {dead}' in out
    code, out, _ = run_dlq("replay", str(bridge.file), "--json", "--line", "line", "--reason", "unrouted")
    assert (code, json.loads(out)["replayed"], values(kafka, target)) == (1, {}, [])
    code, out, _ = run_dlq("replay", str(bridge.file), "--json")
    report = json.loads(out)
    assert (code, report["replayed"], report["dead"]) == (1, {target: 1}, {"no route takes this topic": 1})
    assert report["unowned"] == [{"topic": dead, "signed": "another.line", "letters": 1}]
    code, _, err = run_dlq("replay", str(bridge.file), "--reason", "topic_ilegal")
    assert code == 2
    assert "'topic_ilegal' is not one of 'too_large', 'topic_missing', 'topic_illegal'" in err


def test_chosen_letters_are_shown_and_replayed(kafka: Kafka, make: Make) -> None:
    """One that is in pieces too; one that another replay took meanwhile is told, and no error."""
    bridge, letters, target = make(letter(0), letter(1), letter(2))
    put(kafka.bootstrap, letters.topic, [letter(3, size=9000)], limit=4096)
    file, waiting = str(bridge.file), list(letters.waiting_letters())
    places = {(one.dead_letter.value or b"")[:2]: f"{one.partition}/{one.offset}" for one in waiting}
    code, out, _ = run_dlq("show", file, "--at", places[b"m3"], "--json")
    shown = json.loads(out)
    assert (code, shown["payload"]["text"], shown["payload"]["bytes"]) == (0, "m3".ljust(9000, "."), 9000)
    assert shown["headers"][0] == ["mqtt.topic", "t/d/x", "dC9kL3g="]
    chosen = [part for name in (b"m1", b"m3") for part in ("--at", places[name])]
    code, out, _ = run_dlq("replay", file, *chosen, "--dry-run", "--json")
    assert (code, json.loads(out)["replayed"], values(kafka, target)) == (0, {target: 2}, [])
    for count in (2, 0):
        code, out, _ = run_dlq("replay", file, *chosen, "--json")
        report = json.loads(out)
        assert (code, report["replayed"].get(target, 0), report["left_out"]) == (0, count, 2 - count)
        assert sorted(values(kafka, target)) == [b"m1", b"m3"]
    code, out, err = run_dlq("show", file, "--at", places[b"m3"])
    assert (code, out) == (2, "")
    assert "no such letter waits: it was replayed, or there is none" in err
    assert sorted((one.dead_letter.value or b"")[:2] for one in letters.waiting_letters()) == [b"m0", b"m2"]


@pytest.mark.spark
def test_the_sql_of_a_route_is_evaluated_again(kafka: Kafka, make: Make) -> None:
    """Its fields too, which make the key here."""
    route = """
fields = { n = "substr(CAST(payload AS STRING), 1, 2)" }
reject = "IF(n = 'm3', 'too old', NULL)"
where = "CASE WHEN n = 'm2' THEN raise_error('no') ELSE n = 'm1' END"
"""
    bridge, _, target = make(*map(letter, range(4)), key="{n}", route=route)
    code, out, _ = run_dlq("replay", str(bridge.file), "--json")
    report = json.loads(out)
    assert (code, report["replayed"], report["filtered"]) == (1, {target: 1}, 1)
    assert report["dead"] == {"the SQL of where raised an error on it": 1, "it is refused: too old": 1}
    assert [(key, value.rstrip(b".")) for key, value, _ in in_kafka(kafka.bootstrap, target)] == [(b"m1", b"m1")]
