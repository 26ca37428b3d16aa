"""When a PINGREQ is due and a silence is too long, on a clock of numbers."""

from __future__ import annotations

import math

from towline.mqtt.session import Liveness


def opened() -> Liveness:
    return Liveness(10.0, last_answer_at=100.0, last_sent_at=100.0)


def test_an_answer_is_owed_from_the_opening_or_the_last_word_on() -> None:
    liveness = opened()
    assert liveness.answer_deadline == 110.0
    liveness.last_answer_at = 105.0
    assert liveness.answer_deadline == 115.0


def test_a_pingreq_is_due_three_quarters_of_the_keep_alive_after_what_left() -> None:
    liveness = opened()
    assert liveness.ping_deadline(60) == 145.0
    liveness.last_sent_at = 120.0
    assert liveness.ping_deadline(60) == 165.0


def test_without_a_pingreq_no_answer_to_it_is_late() -> None:
    liveness = opened()
    assert liveness.pong_deadline(60) == math.inf
    liveness.mark_alive(130.0)
    assert liveness.pong_deadline(60) == math.inf


def test_a_pingresp_has_as_long_again_and_a_sign_of_life_more() -> None:
    liveness = opened()
    liveness.unanswered_ping_at = 145.0
    assert liveness.pong_deadline(60) == 190.0
    liveness.mark_alive(160.0)
    assert liveness.pong_deadline(60) == 205.0
    liveness.unanswered_ping_at = None
    assert liveness.pong_deadline(60) == math.inf


def test_while_we_do_not_read_nothing_is_late() -> None:
    liveness = opened()
    liveness.unanswered_ping_at = 145.0
    liveness.reading_suspended = True
    assert liveness.pong_deadline(60) == math.inf
    liveness.set_reading(500.0, enabled=True)
    assert (liveness.pong_deadline(60), liveness.answer_deadline) == (545.0, 510.0)
