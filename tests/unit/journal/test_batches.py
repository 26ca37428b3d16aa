"""A batch in pieces: what leaves is one attempt of it, whole and in order, whatever is killed and comes again."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.journal.support import FAST, SMALL, Sending, crash, opened_outbox, rows
from towline.journal import Batch


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=9), st.integers(0, 1 << 32))
def test_everything_is_reached_once_all_is_done_but_what_is_held_back(pieces: list[tuple[int, int]], seed: int) -> None:
    """Rows of batches that are not whole don't leave, those around them do, in any order."""
    directory = Path(tempfile.mkdtemp(dir=FAST)) / "o"
    outbox, held, brought = opened_outbox(directory), set[int](), dict.fromkeys(range(3), 0)
    for writer, count in pieces:
        start = outbox.end
        if writer:
            batch = Batch(f"q/{writer}", 1, attempt="a")
            outbox.append_batch(rows(start, count), batch, start=brought[writer], whole=False)
            held |= set(range(start, start + count))
            brought[writer] += count
        else:
            outbox.append_batch(rows(start, count))
    free = [number for number in range(outbox.end) if number not in held]
    following = outbox.next_rows(0)
    assert (following is None) == (not free)
    assert following is None or (following[0] == min(free) and set(free).issuperset(range(*following)))
    random.Random(seed).shuffle(free)
    for number in free:
        assert not outbox.is_done_below(outbox.end)
        outbox.mark_done([number])
    assert outbox.is_done_below(outbox.end)
    assert (outbox.waiting_rows, outbox.incomplete_rows) == (0, len(held))
    outbox.close()
    shutil.rmtree(directory.parent)


@given(st.integers(0, 1 << 32))
def test_any_life_sends_one_attempt_of_each_batch(seed: int) -> None:
    """Writers that bring batches in pieces, fail, and begin again in another order; the process killed at any time."""
    dice = random.Random(seed)
    directory = Path(tempfile.mkdtemp(dir=FAST)) / "o"
    outbox = opened_outbox(directory, SMALL)
    sending = Sending(outbox)
    left: list[int] = []
    at = dict.fromkeys(range(3), (0, 0))  # batch and rows brought of it
    attempts = dict.fromkeys(at, 0)
    whole: list[tuple[int, int, int]] = []  # writer, batch, attempt

    def base(writer: int, batch: int, attempt: int) -> int:
        return ((writer * 100 + batch) * 100 + attempt) * 1000

    for _ in range(40):
        writer, what = dice.randrange(3), dice.random()
        number, brought = at[writer]
        if what < 0.6:
            more, last = dice.randrange(1, 12), dice.random() < 0.4
            batch = Batch(f"q/{writer}", number, attempt=str(attempts[writer]))
            start = max(0, brought - dice.randrange(3))
            first = base(writer, number, attempts[writer])
            end = max(brought, start + more)
            outbox.append_batch(rows(first + start, end - start), batch, start=start, whole=last)
            at[writer] = (number + 1, 0) if last else (number, end)
            if last:
                whole.append((writer, number, attempts[writer]))
                attempts[writer] = 0
        elif what < 0.75:
            at[writer], attempts[writer] = (number, 0), attempts[writer] + 1
        elif what < 0.95:
            sending.turn()
        else:
            crash(outbox)
            left += sending.left
            outbox = opened_outbox(directory, SMALL)
            sending = Sending(outbox)
    sending.turn()
    left += sending.left
    first_time = list(dict.fromkeys(left))
    assert {n // 1000 for n in first_time} == {base(*named) // 1000 for named in whole}
    assert all(n in first_time for named in whole for n in [base(*named)])
    for writer in at:
        own = [n for n in first_time if n // 10_000_000 == writer]
        assert own == sorted(own)
        counts = [n for n in own if n + 1 not in own]
        assert len(counts) == sum(1 for one in whole if one[0] == writer), "no gap within a batch"
    outbox.close()
    shutil.rmtree(directory.parent)
