"""Negotiation of the MQTT version, where the setting leaves it open.

A broker may report an unsupported version in CONNACK (0x84, or 1), end the connection, as RabbitMQ 3.10 does, or stay
silent. The last two look like an outage too, so they are only a hint, and it is tested: the next older version is
tried. If CONNACK comes, the connection is closed at once and the newest version is tried once more. A version without
an answer then too, right after an older one had got one, is not tried again. If none gets an answer, it was an outage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from towline.errors import BrokerRefused, Unreachable
from towline.mqtt.events import Close, SessionConfig
from towline.mqtt.rules import version_problem

#: Setting `protocol` → levels to try, in this order.
LEVELS_OF_SETTING: Final = {"5": (5,), "3.1.1": (4,), "3.1": (3,), "auto": (5, 4, 3)}
VERSION_NAMES: Final = {5: "MQTT 5", 4: "MQTT 3.1.1", 3: "MQTT 3.1"}


class VersionNegotiation:
    """Protocol version in use, and the results of former attempts.

    Args:
        levels: One of `LEVELS_OF_SETTING`.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        self._levels = levels
        #: Protocol level in use.
        self.level = levels[0]
        #: A session was online with it: a later silence is no sign of the version.
        self._level_confirmed = False
        #: Levels without an answer since the newest was tried.
        self._unanswered_levels: list[int] = []
        #: Older level that got an answer; the newest is tried once more.
        self._answered_level: int | None = None

    @property
    def level_is_guess(self) -> bool:
        """True if the connection only tests whether the broker answers this version (`Session.probing_version`)."""
        return bool(self._unanswered_levels) and self.level != self._answered_level

    def confirm_level(self) -> None:
        """Confirm the version: a session is online with `level`."""
        self._level_confirmed, self._answered_level = True, None
        self._unanswered_levels.clear()

    def connection_failed(self) -> None:
        """Reset unconfirmed results: no connection could be made, so an earlier end was an outage."""
        if not self._level_confirmed:
            self._reset_levels()

    def decide_close(self, close: Close, config: SessionConfig) -> Close:
        """Return what follows the end of a connection: an immediate retry with another `level`, or the error.

        Args:
            close: Action that ended the connection.
            config: Settings of its session.
        """
        if close.version_confirmed:
            self._answered_level, self.level = self.level, self._levels[0]
            self._unanswered_levels.clear()
            return close
        no_answer = close.no_connack and not self._level_confirmed
        if not (no_answer or close.version_refused):
            return close
        if no_answer:
            self._unanswered_levels.append(self.level)
        older_level, problem = self._older_level(config)
        if older_level is not None:
            self.level, self._level_confirmed = older_level, False
            return Close(None, reconnect_at_once=True)
        explained_close = self._explained_close(close, problem)
        self._reset_levels()
        return explained_close

    def _older_level(self, config: SessionConfig) -> tuple[int | None, str]:
        """Return the next older version that supports the configuration, or None and the conflicts."""
        problem = ""
        for level in self._levels:
            if level < self.level:
                conflict = version_problem(replace(config, protocol=level))
                if conflict is None:
                    return level, ""
                problem = problem or f"; {VERSION_NAMES[level]} can't be used: {conflict}"
        return None, problem

    def _reset_levels(self) -> None:
        self.level, self._level_confirmed, self._answered_level = self._levels[0], False, None
        self._unanswered_levels.clear()

    def _explained_close(self, close: Close, problem: str) -> Close:
        """Return the error with the versions tried and the conflicts."""
        error = close.error
        assert error is not None
        names = [VERSION_NAMES[level] for level in self._levels if level >= self.level]
        if not self._unanswered_levels:  # the broker says that it knows none of them
            advice = error.remedy
            if self.level < max(VERSION_NAMES):
                advice = 'Set protocol = "5", or "auto" to let the gateway find out.'
            advice = f"It supports none of {', '.join(names)}: ask its operator." if len(names) > 1 else advice
            advice = "Change that setting, or use a broker that speaks MQTT 5." if problem else advice
            return replace(close, error=BrokerRefused(error.code, error.location, error.problem + problem, advice))
        tried_text = f"{', '.join(names)}{' were tried' if len(names) > 1 else ''}"
        advice = "Is this port an MQTT listener?"
        if len(self._levels) == 1:
            advice = f'Is this port an MQTT listener, and does it speak {names[0]}? protocol = "auto" finds out.'
        unanswered_error = Unreachable(error.code, error.location, f"{error.problem} ({tried_text}){problem}", advice)
        return replace(close, error=unanswered_error, fatal=False)
