"""How long to wait before the next try: doubling, with jitter, so that those who failed together return apart."""

from __future__ import annotations

import random
from typing import Final

_MOST_DOUBLINGS: Final = 30


class Backoff:
    """Waiting times in seconds.

    Args:
        first: The first pause.
        most: The longest.
        jitter: Part by which a pause is shortened at random, 0 to 1.
        rng: For tests.
    """

    def __init__(
        self, first: float = 1.0, most: float = 60.0, jitter: float = 0.3, rng: random.Random | None = None
    ) -> None:
        self._first = first
        self._most = most
        self._jitter = jitter
        self._rng = rng or random.Random()  # noqa: S311 - not a secret
        #: Tries since the last success.
        self.failures = 0

    def next(self) -> float:
        """The pause after one more failure."""
        pause = min(self._most, self._first * 2.0 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return pause * (1 - self._jitter * self._rng.random())

    def reset(self) -> None:
        """Begin again after a success."""
        self.failures = 0
