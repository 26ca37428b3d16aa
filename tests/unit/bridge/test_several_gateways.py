"""A line over several gateways: its file, its account, where its query begins, and what is told of one that is away."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import wait_until
from tests.unit.bridge.noted import up
from tests.unit.bridge.test_config import GOOD, changed, read, told
from tests.unit.gateway.serving import Served, served
from towline.bridge.config.model import Bridge, Uplink
from towline.bridge.lines import statuses
from towline.bridge.lines.account import LineNotes, uplink_account
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import ServedJournal, check_resume, reset_line
from towline.bridge.lines.statuses import combine_statuses, outage_problem
from towline.bridge.runtime.plan import bridge_plan, render
from towline.bridge.runtime.screen import PlainScreen, line_state, line_summary
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import EXIT_UNKNOWN, collect_status, exit_code
from towline.bridge.runtime.status import render as render_status
from towline.bridge.runtime.supervisor import Supervisor
from towline.bridge.uplink import query
from towline.cli.gateway import gateway as run_gateway
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, TowlineError
from towline.gateway.access import ClientAccess
from towline.spark.offsets import JournalPosition
from towline.spark.sink_note import BatchMessages, BatchResult, BatchTotals, SinkNote, Span

SEVERAL = changed('name = "telemetry"', 'name = "telemetry"\ngateways = ["g1", "g2"]').replace(
    '[mqtt]\nbrokers = ["mqtt://a:1883"]\n', ""
)

# -- the file --------------------------------------------------------------------------------------------------------


def test_a_line_may_read_gateways_elsewhere(tmp_path: Path) -> None:
    """No table [mqtt] is needed where nothing speaks MQTT."""
    bridge = read(SEVERAL, tmp_path)
    (line,) = bridge.uplinks
    assert line.gateways == (str(tmp_path / "g1"), str(tmp_path / "g2"))
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)).uplinks[0].gateways == line.gateways
    plan = bridge_plan(bridge)["lines"][0]
    assert (plan["gateways"], plan["brokers"], plan["client_id"]) == (list(line.gateways), [], None)
    text = render(bridge_plan(bridge))
    assert f"  gateway   {tmp_path / 'g1'}\n  gateway   {tmp_path / 'g2'}\n" in text
    assert "  filters" not in text


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ('["g1", "g2"]', '["g1", "g1"]', "g1 is listed twice."),
        ('["g1", "g2"]', "[]", 'uplink "telemetry": it names no gateway.'),
        ('["g1", "g2"]', '["grpc+tcp://x:1"]', "there is none without TLS."),
        ('["g1", "g2"]', '["grpc+tls://x:1"]', "token_file is required for a gateway on a network."),
        ('["g1", "g2"]', '["g1"]\nack_after = "journal"', "ack_after has no effect with gateways"),
        ('["g1", "g2"]', '["g1"]\njournal = { max_bytes = "1 GB" }', "journal has no effect with gateways"),
        ('gateways = ["g1", "g2"]', 'removed_gateways = ["g1"]', "removed_gateways has no effect without gateways."),
    ],
)
def test_mistakes_have_their_line(tmp_path: Path, old: str, new: str, wanted: str) -> None:
    text = SEVERAL if "removed" not in new else GOOD.replace('name = "telemetry"', 'name = "telemetry"\n' + old)
    lines = told(text.replace(old, new), tmp_path)
    assert any(wanted in line for line in lines), lines
    assert any(code in lines[0] for code in ("TL-C110", "TL-C111", "TL-C112"))


def test_such_a_line_has_no_gateway_to_run(tmp_path: Path) -> None:
    read(SEVERAL, tmp_path)
    with pytest.raises(ConfigError, match=r'line "telemetry": it reads remote gateways.*TL-C113'):
        run_gateway(tmp_path / "bridge.toml", None)


# -- the account -----------------------------------------------------------------------------------------------------


def status(**parts: tuple[int, int, int]) -> dict[str, Any]:
    """Received, end and committed of each gateway, whose journal is named after it."""
    names = ("received", "end", "committed")
    return {
        "received": 0,
        "gateways": {
            name: {
                "journal": f"j{name[1:]}",
                "at": f"/{name}",
                "state": "online",
                **dict(zip(names, numbers, strict=True)),
            }
            for name, numbers in parts.items()
        },
    }


def test_the_account_is_the_sum_over_the_gateways() -> None:
    notes = up({"j1": (0, 15), "j2": (5, 8)})
    account = uplink_account(notes, status(g1=(20, 18, 15), g2=(9, 9, 8)))
    assert account.sentence() == (
        "received 29 = in Kafka 23 (5 of them unconfirmed) + arriving 2 + waiting 4   adds up ✓"
    )


def test_a_journal_that_ends_too_early_is_named() -> None:
    why = uplink_account(up({"j1": (0, 10), "j2": (0, 4)}), status(g1=(10, 10, 10), g2=(3, 3, 3))).disagreement_text
    assert why == "gateway g2: Spark committed up to 4, the journal ends at 3: was it restored from a copy?"


AWAY = GatewayUnreachable("TL-G01", "/g2", "no gateway answers", "Start it.")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "batch", "again", "forgotten", "join", "leave", "come back"]),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),
    ),
    max_size=15,
)


@given(STEPS)
def test_gateways_come_and_go_and_the_sum_holds(steps: list[tuple[str, list[int]]]) -> None:
    """A third of what comes is filtered; a batch may run again, and what was noted of it be lost."""
    note, ends, there, number = SinkNote(), {"j0": 0}, ["j0"], 0
    gone = list[str]()
    places: list[tuple[JournalPosition, ...]] = [()]
    note = note.with_totals(BatchTotals(-1, spans={"j0": Span(0, 0)}))
    for index, (step, sizes) in enumerate(steps):
        if step == "join" and len(there) < len(sizes):
            there.append(f"j{index + 1}")
        elif step == "leave" and len(there) > 1:
            gone.append(there.pop(0))
        elif step == "come back" and gone and len(there) < len(sizes):
            there.append(gone.pop())
        elif step in ("batch", "again", "forgotten"):
            joined = [name for name in there if all(place.journal != name for place in places[-1])] if number else []
            rows = {name: 0 if name in joined else size for name, size in zip(there, sizes, strict=False)}
            ends |= {name: ends.get(name, 0) + rows[name] for name in there}
            places.append(tuple(JournalPosition(name, name, ends[name]) for name in there))
            for _ in range(1 + (step == "again")):
                after = noted(note, number, places[-2], places[-1])
                note = note if step == "forgotten" else after
            number += 1
        told = {f"g{name[1:]}": (ends.get(name, 0),) * 3 for name in {*there, *ends}}
        account = uplink_account(LineNotes(note.totals[-1]), status(**told))
        assert account.adds_up, account.sentence()
        whole = account.delivered + sum(account.parts.values()) + account.counts["waiting"]
        assert whole == account.received == sum(ends.values())


def noted(
    note: SinkNote, number: int, start: tuple[JournalPosition, ...], end: tuple[JournalPosition, ...]
) -> SinkNote:
    """As `LineWriter` counts a batch."""
    messages = BatchMessages.from_positions(note.totals_before(number), start, end)
    assert messages.row_count is not None
    sent = messages.row_count - messages.row_count // 3
    counts = Counter(
        messages=messages.row_count + messages.uncounted_rows,
        unwitnessed=messages.uncounted_rows,
        filtered=messages.row_count // 3,
    )
    counts.update(given=sent, acknowledged=sent)
    return note.with_batch(number, BatchResult(counts, spans=messages.spans))


def test_one_that_is_away_keeps_its_last_word() -> None:
    told_ = {"name": "g1", "journal": "j1", "received": 12, "end": 12, "committed": 12, "state": "online"}
    other = {"name": "g2", "journal": "j2", "received": 9, "end": 9, "committed": 4, "state": "online", "oldest": 3.5}
    before = combine_statuses({"/g1": told_, "/g2": other}, {}, now=1.0)
    assert (before["state"], before["received"], before["oldest"]) == ("online", 21, 3.5)
    now = combine_statuses({"/g1": told_, "/g2": AWAY}, before, now=100.0)
    later = combine_statuses({"/g1": told_, "/g2": AWAY}, now, now=200.0)
    assert later["gateways"]["g2"]["away_since"] == 100.0
    account = uplink_account(up({"j1": (0, 12), "j2": (0, 4)}), later)
    assert account.sum_text() == "received 21 = in Kafka 16 + waiting 5"
    (text,) = account.away
    assert text.startswith("gateway g2 unavailable since ")
    assert text.endswith(", its messages wait there")
    assert "away" not in combine_statuses({"/g1": told_, "/g2": other}, later)["gateways"]["g2"]
    never = combine_statuses({"/g1": told_, "/g9": AWAY}, {})
    assert uplink_account(LineNotes(), never).away[0].startswith("gateway /g9 unavailable since")


def test_one_that_refuses_is_told_with_what_to_do() -> None:
    """In the words of the bridge file: nobody gave an option of Spark's."""
    refused = GatewayError("TL-G40", "g2", "the token is missing", "gatewayTokenFile has to hold a line of it.")
    said = combine_statuses({"/g2": refused}, {}, now=1.0)
    (account,) = uplink_account(LineNotes(), said).away
    assert account.startswith("gateway /g2 refuses access since ")
    trouble = outage_problem("/g2", said["gateways"]["/g2"])
    assert trouble.endswith(
        "its messages wait there: the token is missing. token_file of [gateway] has to hold a line of it.   [TL-G40]"
    )
    assert combine_statuses({"/g2": AWAY}, said)["gateways"]["/g2"]["code"] == "TL-G54"


# -- where the query begins ------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path / "g1", name="g1") as one, served(tmp_path / "g2", name="g2") as other:
        yield one, other


def line_of(directory: Path, more: str = "") -> Uplink:
    text = SEVERAL.replace('name = "telemetry"', f'name = "telemetry"\nguarantee = "exactly_once"\n{more}')
    return read(text, directory).uplinks[0]


def write(
    line: Uplink,
    number: int,
    done: bool = True,  # noqa: FBT002 - of a test
    **places: tuple[Served, int],
) -> None:
    """A batch as Spark writes it down."""
    ends = {
        name: {
            "journal": one.journal.journal_id,
            "offset": end,
            "incarnation": one.journal.incarnation_of(end),
            "at": str(one.state_dir),
        }
        for name, (one, end) in places.items()
    }
    for name in ("offsets", "commits")[: 2 if done else 1]:
        (line.checkpoint / name).mkdir(parents=True, exist_ok=True)
    (line.checkpoint / "metadata").write_text('{"id": "q1"}')
    entry = json.dumps({"gateways": ends, "tick": 0})
    (line.checkpoint / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{entry}')
    if done:
        (line.checkpoint / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')


KNOWN = Identity("telemetry", "plant-7.telemetry", query="q1", parallelism=1)


def gathered(line: Uplink, identity: Identity) -> dict[str, ServedJournal]:
    return query.read_evidence(line, ClientAccess(), identity)[1]


def examined(line: Uplink, file: Path) -> Identity:
    seen, journals = query.read_evidence(line, ClientAccess(), KNOWN)
    return check_resume(line, file, KNOWN, seen, journals=journals)


def test_a_checkpoint_that_fits_is_gone_on_with(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line, (one, other) = line_of(tmp_path), two
    for each in two:
        each.add(10)
        each.journal.commit("bridge", 5)
    write(line, 3, g1=(one, 7), g2=(other, 5))
    seen = gathered(line, KNOWN)
    assert examined(line, tmp_path / "bridge.toml").query == "q1"
    assert {
        name: (one.position and one.position.offset, one.committed_offset, one.extent.end_offset)
        for name, one in seen.items()
    } == {"g1": (7, 5, 10), "g2": (5, 5, 10)}


def test_a_checkpoint_older_than_one_gateway_is_told(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line, (one, other) = line_of(tmp_path), two
    for each in two:
        each.add(10)
    write(line, 3, g1=(one, 7), g2=(other, 5))
    other.journal.commit("bridge", 9)
    with pytest.raises(TowlineError, match=r"gateway g2: the checkpoint is an older copy.*TL-B23"):
        examined(line, tmp_path / "bridge.toml")


def test_another_journal_of_one_gateway_is_told(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line, (one, other) = line_of(tmp_path), two
    other.add(10)
    write(line, 3, g1=(one, 0), g2=(other, 5))
    text = (line.checkpoint / "offsets" / "3").read_text()
    (line.checkpoint / "offsets" / "3").write_text(text.replace(other.journal.journal_id, "0ther"))
    with pytest.raises(TowlineError, match=r"gateway g2: the query's checkpoint belongs to journal 0ther.*TL-B24"):
        examined(line, tmp_path / "bridge.toml")


def test_a_line_with_a_gateway_of_its_own_is_one_of_a_list_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statuses, "_ANSWER_TIMEOUT_S", 0.2)
    line = read(GOOD, tmp_path).uplinks[0]
    with served(line.gateway.state_dir, name="telemetry") as one:
        one.add(10)
        one.journal.commit("bridge", 4)
        new = gathered(line, Identity.of_new_line("plant-7", "telemetry"))
        begin = query.initial_offsets(line, Identity.of_new_line("plant-7", "telemetry"), new)
        assert begin == {"telemetry": 4}
        KNOWN.save(line.gateway.state_dir)
        write(line, 3, telemetry=(one, 7))
        examined(line, tmp_path / "bridge.toml")
        one.journal.commit("bridge", 9)
        with pytest.raises(TowlineError, match=r'line "telemetry": the checkpoint is an older copy.*TL-B23'):
            examined(line, tmp_path / "bridge.toml")
        reset_line(line)
        identity = Identity.read(line.gateway.state_dir)
        assert identity is not None
        assert query.initial_offsets(line, identity, gathered(line, identity)) == {"telemetry": 9}
    with pytest.raises(GatewayUnreachable, match=r"no gateway answers. It is restarted automatically.*TL-G01"):
        gathered(line, identity)


def test_one_that_is_away_does_not_keep_a_line_from_going_on(tmp_path: Path) -> None:
    line = line_of(tmp_path)
    with served(tmp_path / "g1", name="g1") as one:
        with served(tmp_path / "g2", name="g2") as other:
            write(line, 3, g1=(one, 0), g2=(other, 0))
        assert list(gathered(line, KNOWN)) == ["g1"]


def test_a_line_begins_again_behind_what_is_done_at_each(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line, (one, other) = line_of(tmp_path), two
    for each in two:
        each.add(10)
    KNOWN.save(line.gateway.state_dir)
    write(line, 3, g1=(one, 7), g2=(other, 5))
    write(line, 4, done=False, g1=(one, 9), g2=(other, 5))
    reset_line(line)
    identity = Identity.read(line.gateway.state_dir)
    assert identity is not None
    assert identity.sink == "plant-7.telemetry.2"
    assert query.initial_offsets(line, identity, gathered(line, identity)) == {"g1": 7, "g2": 5}


def test_it_waits_for_each_gateway_that_it_begins_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At committed it would begin too early there: only the checkpoint knew how far it had come."""
    monkeypatch.setattr(statuses, "_ANSWER_TIMEOUT_S", 0.2)
    line = line_of(tmp_path)
    with served(tmp_path / "g1", name="g1") as one:
        with served(tmp_path / "g2", name="g2") as other:
            other.add(9)
            write(line, 3, g1=(one, 0), g2=(other, 5))
            KNOWN.save(line.gateway.state_dir)
        reset_line(line)
        identity = Identity.read(line.gateway.state_dir)
        assert identity is not None
        with pytest.raises(GatewayUnreachable, match="TL-G01"):
            gathered(line, identity)


def test_a_new_line_begins_where_each_account_stands(tmp_path: Path, two: tuple[Served, Served]) -> None:
    line = line_of(tmp_path)
    two[0].add(10)
    two[0].journal.commit("bridge", 4)
    fresh = Identity.of_new_line("plant-7", "telemetry")
    assert query.initial_offsets(line, fresh, gathered(line, fresh)) == {"g1": 4, "g2": 0}


# -- supervision and status ------------------------------------------------------------------------------------------


def test_status_asks_each_gateway_and_names_one_that_is_away(tmp_path: Path) -> None:
    bridge = read(SEVERAL, tmp_path)
    bridge.state_dir.mkdir()
    supervisor = Supervisor(bridge, PlainScreen(io.StringIO()))
    supervisor._state = BridgeState("plant-7", bridge.state_dir, {"telemetry": "up"})
    child = supervisor._create_gateway(bridge.uplinks[0])
    reported = {
        "received": 3,
        "state": "online",
        "deduplicated": 0,
        "guarantee": "at_least_once",
        "ack_after": "journal",
    }
    with served(tmp_path / "g1", name="g1") as one:
        one.reported = dict(reported)
        one.add(3)
        with served(tmp_path / "g2", name="g2") as other:
            other.reported = dict(reported)
            other.add(3)
            child.start()
            view = supervisor._state.lines["telemetry"]
            wait_until(lambda: view.account)
            view.query = "running"
            assert line_summary(view, "running").startswith(
                'line "telemetry"   running   received 6 = in Kafka 0 + waiting 6'
            )
            assert line_state(view, "running") == "running"
            supervisor._state.save()
            known = collect_status(bridge.state_dir)
            assert exit_code(known) == 0
            assert f"  gateway   g2   {tmp_path / 'g2'}\n" in render_status(known)
        wait_until(lambda: view.account and view.account.away)
        assert line_state(view, "running").startswith("gateway g2 unavailable since ")
        supervisor._state.save()
        away = collect_status(bridge.state_dir)
        assert exit_code(away) == EXIT_UNKNOWN
        text = render_status(away)
        assert "received 6 = in Kafka 0 + waiting 6   adds up ✓   gateway g2 unavailable since" in text
        assert "its messages wait there: no gateway" in text
    wait_until(lambda: view.is_silent)
    assert line_state(view, "running") == "no gateway"
    supervisor._state.save()
    none = collect_status(bridge.state_dir)
    assert exit_code(none) == EXIT_UNKNOWN
    assert f"none of its gateways answers: {tmp_path / 'g1'}, {tmp_path / 'g2'}" in render_status(none)
    supervisor._stopping.set()
    child.join(20)
    assert not child.is_alive()
    said = [text for text in supervisor._state.take_events() if "unavailable" in text]
    assert said[0].startswith('line "telemetry": gateway g2 unavailable since ')
