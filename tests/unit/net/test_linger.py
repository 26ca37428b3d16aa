from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.net.driver import Linger

LINGER_S = 0.001


def chunk(linger: Linger, *arrivals: int) -> float:
    """Let a chunk wait while packets arrive, at first and during each pause; the seconds that it waited."""
    coming, came, waits = iter(arrivals[1:]), [arrivals[0]], list[float]()
    early = linger.initial_pause()
    for pause in [early] if early else linger.further_pauses(lambda: sum(came)):
        waits.append(pause)
        came.append(next(coming, 0))
    linger.record_chunk(sum(came))
    return sum(waits)


def test_a_window_that_fills_packet_by_packet_ends_the_wait() -> None:
    linger = Linger(LINGER_S)
    for _ in range(2):
        chunk(linger, 1, 19)
    assert chunk(linger, 1, 19) == pytest.approx(LINGER_S / 4)
    assert chunk(linger, 1, 5, 14) == pytest.approx(LINGER_S / 2)
    assert chunk(linger, 20) == 0.0


def test_a_window_is_put_to_the_test_and_forgotten_when_more_comes() -> None:
    linger = Linger(LINGER_S)
    waits = [chunk(linger, 1) for _ in range(200)]
    assert [number for number, waited in enumerate(waits) if waited] == [0, 65, 130, 195]
    waits = [chunk(linger, 1, *[1] * (3 + number % 5)) for number in range(100)]
    assert all(waits[70:]), "it is a low rate, and no window"


def test_a_stream_waits_once_and_before_it_is_looked_at() -> None:
    linger = Linger(LINGER_S)
    assert linger.initial_pause() == 0.0
    chunk(linger, 150)
    assert chunk(linger, 150, 30) == 2 * LINGER_S
    assert chunk(linger, 150, 30) == 2 * LINGER_S, "equal numbers of a stream are no window"
    chunk(linger, 10)
    assert linger.initial_pause() == 0.0


def after(linger: Linger, silence_s: float, *arrivals: int) -> float:
    """As `chunk`, so long after the last acknowledgement; the seconds that it waited before it was looked at."""
    waited = linger.initial_pause(silence_s)
    linger.record_chunk(sum(arrivals), wait_was_idle=len(arrivals) == 1)
    return waited


def test_a_chunk_after_a_silence_waits_long() -> None:
    linger = Linger(LINGER_S, 0.02)
    assert [after(linger, 0.01, 1, 1) for _ in range(5)] == [0.02] * 5
    assert after(linger, 0.001, 1, 1) == 0.0, "the broker waited for us"
    assert after(Linger(LINGER_S), 0.01, 1, 1) == 0.0, "who is in a hurry waits no longer than before"


def test_a_long_wait_in_vain_is_not_repeated_for_a_while() -> None:
    """Messages that come one by one win nothing by it; and so it is with a window of one, on a long way."""
    linger = Linger(LINGER_S, 0.02)
    waits = [after(linger, 0.05, 1) for _ in range(200)]
    assert [number for number, waited in enumerate(waits) if waited] == [0, 65, 130, 195]
    assert after(linger, 0.05, 1) == 0.0


@given(st.lists(st.lists(st.integers(0, 150), max_size=20).map(lambda more: [1, *more]), max_size=150))
def test_no_chunk_waits_longer_than_it_may(chunks: Sequence[Sequence[int]]) -> None:
    linger = Linger(LINGER_S)
    for arrivals in chunks:
        assert chunk(linger, *arrivals) <= 3 * LINGER_S + 1e-9
