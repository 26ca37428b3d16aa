"""Which version of MQTT to speak, found out where the setting leaves it open.

A broker that does not know a version says so in CONNACK (0x84, or 1), or it ends the connection, as RabbitMQ 3.10 does,
or says nothing. The last two are what an outage looks like as well, so they are only a guess, and it is tried: one
version less; where CONNACK comes, the connection is ended at once and the newest is tried once more. A version without
an answer then too, right after an older one had got one, is left for good. Where none gets an answer it was an outage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from towline.errors import Refused, Unreachable
from towline.mqtt.events import Close, SessionConfig
from towline.mqtt.rules import version_problem

#: Protocol as a setting → levels to try, in this order.
LEVELS: Final = {"5": (5,), "3.1.1": (4,), "3.1": (3,), "auto": (5, 4, 3)}
NAMES: Final = {5: "MQTT 5", 4: "MQTT 3.1.1", 3: "MQTT 3.1"}


class Versions:
    """The version in use, and what is known of the others.

    Args:
        levels: One of `LEVELS`.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        self._levels = levels
        #: The one in use.
        self.level = levels[0]
        #: A session was online with it: silence says nothing about the version any more.
        self._known = False
        #: Levels without an answer since the newest was tried.
        self._unanswered: list[int] = []
        #: An older level that got an answer; the newest is tried once more.
        self._answered: int | None = None

    @property
    def guessed(self) -> bool:
        """Whether the level is a guess, and a connection only to see whether CONNACK comes (`Session.probing`)."""
        return bool(self._unanswered) and self.level != self._answered

    def online(self) -> None:
        """A session is online with `level`."""
        self._known, self._answered = True, None
        self._unanswered.clear()

    def away(self) -> None:
        """No connection could be made: what ended one before was an outage."""
        if not self._known:
            self._begin_again()

    def judge(self, action: Close, config: SessionConfig) -> Close:
        """Decide what the end of a connection means: another try at once, with another `level`, or the error.

        Args:
            action: How it has ended.
            config: Of its session.
        """
        if action.answered:
            self._answered, self.level = self.level, self._levels[0]
            self._unanswered.clear()
            return action
        silent = action.unanswered and not self._known
        if not (silent or action.version_refused):
            return action
        if silent:
            self._unanswered.append(self.level)
        older, problem = self._older(config)
        if older is not None:
            self.level, self._known = older, False
            return Close(None, again_at_once=True)
        verdict = self._explained(action, problem)
        self._begin_again()
        return verdict

    def _older(self, config: SessionConfig) -> tuple[int | None, str]:
        """The next older version that can say what the configuration wants, or what is in the way of it."""
        problem = ""
        for level in self._levels:
            if level < self.level:
                found = version_problem(replace(config, protocol=level))
                if found is None:
                    return level, ""
                problem = problem or f"; {NAMES[level]} can't be used: {found}"
        return None, problem

    def _begin_again(self) -> None:
        self.level, self._known, self._answered = self._levels[0], False, None
        self._unanswered.clear()

    def _explained(self, action: Close, problem: str) -> Close:
        """The error, with what was tried and what could not be."""
        error = action.error
        assert error is not None
        names = [NAMES[level] for level in self._levels if level >= self.level]
        if not self._unanswered:  # the broker says that it knows none of them
            advice = (
                'Set protocol = "5", or "auto" to let the gateway find out.' if self.level < max(NAMES) else error.do
            )
            advice = f"It takes none of {', '.join(names)}: ask which it speaks." if len(names) > 1 else advice
            advice = "Change that setting, or use a broker that speaks MQTT 5." if problem else advice
            return replace(action, error=Refused(error.code, error.where, error.what + problem, advice))
        tried = f"{', '.join(names)}{' were tried' if len(names) > 1 else ''}"
        advice = "Is this port an MQTT listener?"
        if len(self._levels) == 1:
            advice = f'Is this port an MQTT listener, and does it speak {names[0]}? protocol = "auto" finds out.'
        unanswered = Unreachable(error.code, error.where, f"{error.what} ({tried}){problem}", advice)
        return replace(action, error=unanswered, fatal=False)
