"""Pauses between connections grow until one was of use."""

from __future__ import annotations

from towline import ClientSettings
from towline.net.driver import ReconnectSchedule
from towline.net.endpoint import Endpoint


class Line(ReconnectSchedule):
    """One broker, and how long the next try waits after each end of a connection."""

    def __init__(self) -> None:
        super().__init__([Endpoint.parse("mqtt://h")], ClientSettings())

    def ends(self, now: float, times: int = 1, *, served: bool = False) -> float:
        for _ in range(times):
            self.record_failure(now, was_online=served)
        return self.due_at - now


def test_pauses_grow_although_each_connection_comes_online() -> None:
    line, now, taken = Line(), 0.0, []
    for _ in range(12):
        line.record_online(now)
        taken.append(line.ends(now + 0.1, served=True))
        now += 1.0
    assert taken[0] <= 0.25
    assert all(0.25 * 2**n / 4 <= pause + 1e-9 and pause <= 0.25 * 2**n + 1e-9 for n, pause in enumerate(taken[:7]))
    assert all(7.5 <= pause <= 30 for pause in taken[8:])


def test_a_message_that_went_through_begins_anew() -> None:
    line = Line()
    line.ends(0.0, times=8)
    line.record_delivery()
    assert line.ends(0.0) <= 0.25


def test_so_does_a_connection_that_lasted() -> None:
    line = Line()
    line.ends(0.0, times=8)
    line.record_online(0.0)
    assert line.ends(20.0, served=True) <= 0.25
    line.record_online(20.0)
    assert line.ends(21.0, served=True) <= 0.5


def test_a_culprit_found_begins_anew_a_few_times_in_a_row() -> None:
    line = Line()
    for _ in range(8):
        line.ends(0.0, times=3)
        line.record_culprit()
        assert line.ends(0.0) <= 0.25
    line.ends(0.0, times=8)
    line.record_culprit()  # a broker that likes none of them
    assert line.ends(0.0) >= 7.5
    line.record_delivery()
    line.record_culprit()
    assert line.ends(0.0) <= 0.25


def test_a_broker_of_no_use_is_left_until_a_message_went_through() -> None:
    first, second = Endpoint.parse("mqtt://first"), Endpoint.parse("mqtt://second")

    def after(ends: int, *, lasts: float = 0.1, useful: bool = False) -> Endpoint:
        """The next to be tried, after so many ends of connections to the first that came online."""
        attempts = ReconnectSchedule([first, second], ClientSettings())
        for number in range(ends):
            attempts.record_online(now := 100.0 * number)
            if useful:
                attempts.record_delivery()
            attempts.record_failure(now + lasts, was_online=True)
        return attempts.next_endpoint()

    assert [after(4), after(5), after(5, lasts=10.0), after(5, useful=True)] == [first, second, first, first]
