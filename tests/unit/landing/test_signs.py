"""When a standby tries: decided from what was seen, by its own clock."""

from __future__ import annotations

from typing import Any

import pytest

from towline.landing import signs
from towline.landing.place import LandingPlace
from towline.landing.signs import Lookout, Sign, SignWatch, StandbyVerdict

ONLINE = Sign(1, "aaaa", "h", 1, online=True)
OFFLINE = ONLINE._replace(online=False)


def verdict(lookout: Lookout, now: float, *, contact: float | None = None, reachable: bool = True) -> StandbyVerdict:
    return lookout.verdict(now, contact=now if contact is None else contact, reachable=lambda: reachable)


def test_nobody_is_waited_for_where_nobody_is() -> None:
    lookout = Lookout(100.0)
    assert verdict(lookout, 101.0, contact=0.0) is StandbyVerdict.WAIT  # Kafka has not answered: nothing is known
    assert verdict(lookout, 101.0) is StandbyVerdict.NONE


def test_a_silence_counts_only_while_kafka_answers() -> None:
    lookout = Lookout(100.0, silence_s=1.5)
    lookout.seen(ONLINE, 100.0)
    assert verdict(lookout, 101.4) is StandbyVerdict.WAIT
    assert verdict(lookout, 110.0, contact=101.0) is StandbyVerdict.WAIT
    assert verdict(lookout, 110.0) is StandbyVerdict.SILENT


def test_an_end_that_was_said_is_not_waited_for() -> None:
    lookout = Lookout(100.0)
    lookout.seen(ONLINE._replace(ended=True), 100.0)
    assert verdict(lookout, 100.0) is StandbyVerdict.ENDED


@pytest.mark.parametrize("reachable", [True, False])
def test_who_cannot_reach_the_broker_gives_way_to_one_that_can(reachable: bool) -> None:
    lookout = Lookout(100.0, offline_s=5.0)
    for tenth in range(60):
        lookout.seen(OFFLINE, 100.0 + tenth / 10)
    wanted = StandbyVerdict.OFFLINE if reachable else StandbyVerdict.WAIT
    assert verdict(lookout, 106.0, reachable=reachable) is wanted
    lookout.seen(ONLINE, 106.0)
    assert verdict(lookout, 106.0) is StandbyVerdict.WAIT
    lookout.seen(OFFLINE, 106.1)
    assert verdict(lookout, 107.0) is StandbyVerdict.WAIT


def test_a_sign_reads_back_and_nothing_else_is_one() -> None:
    assert Sign.decode(ONLINE.encode()) == ONLINE
    for value in (None, b"", b"{}", b"[]", b'{"epoch": 1}', b"\xff"):
        assert Sign.decode(value) is None


def test_a_sign_that_is_there_and_does_not_come_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow answer is not "there is no owner": whoever begins then would fence one that lives."""

    class Slow:
        def get_watermark_offsets(self, *_: Any, **_more: Any) -> tuple[int, int]:
            return 0, 7

        def assign(self, _places: Any) -> None:
            pass

        def poll(self, _seconds: float) -> None:
            return None

    monkeypatch.setattr(signs, "consumer_of", lambda *_: Slow())
    monkeypatch.setattr(signs, "_LOOK_S", 0.01)
    watch = SignWatch(LandingPlace({"bootstrap.servers": "k:9092"}, "line"), {})
    assert watch.look() is StandbyVerdict.WAIT
    assert not watch.fresh
