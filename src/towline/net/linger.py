"""How long a chunk waits for more messages, so that one sync and one round of work serve many. Pure: no clock.

Waiting saves CPU where messages come one by one. It harms where a broker sends nothing more before our
acknowledgements: with a window of 20, a wait of 3 ms each time would hold the line at 6,700 messages a second. Such a
broker shows itself by chunks of one and the same number of packets, its window; a chunk of that many does not wait.

What comes after a moment of silence was not waiting for our acknowledgements: nobody loses by a longer wait, and at 100
messages a second one round of work in place of eight serves four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

#: Packets of a chunk in a stream.
_STREAM: Final = 100
#: How often the time that is set a chunk of a stream waits, and how often any other.
_IN_STREAM: Final = 2
_ELSEWHERE: Final = 3
#: One step towards a window that is not full yet, in seconds: a broker fills it packet by packet.
_STEP_S: Final = 0.00025
#: Chunks of other numbers in a row after which there is no window.
_MISSES: Final = 3
#: Seconds of silence since the last chunk was acknowledged after which a chunk may wait long.
_SILENCE_S: Final = 0.003
#: Packets of a window after which the silence may be the way to the broker and back.
_BURST: Final = 8
#: Every so many chunks one is kept waiting all the same: what looked like a window may have been a low rate.
_TRIAL: Final = 64


class Linger:
    """What was learned from the chunks so far, for the next one.

    Args:
        linger_s: In seconds: a chunk of a stream waits twice as long, any other up to three times; 0 for none.
        after_silence_s: Seconds that a chunk waits after a moment of silence; 0 for as long as any other.
    """

    def __init__(self, linger_s: float, after_silence_s: float = 0.0) -> None:
        self._linger = linger_s
        self._after_silence = after_silence_s
        #: Whether the chunk at hand waits so.
        self._long = False
        #: Chunks until one may wait so again: the last wait was in vain.
        self._vain = 0
        #: Packets of the last chunk.
        self._last = 0
        #: As many as the broker seems to send at a time; 0 for unknown.
        self._window = 0
        #: Chunks since the last one of a whole window; < _MISSES.
        self._misses = 0
        #: Chunks of a whole window since the last one that was kept waiting; <= _TRIAL.
        self._spared = 0

    def at_once(self, silence_s: float = 0.0) -> float:
        """Seconds to wait before the bytes of a chunk are looked at: those of a stream are better decoded in one go.

        Args:
            silence_s: Between the last acknowledgement and this chunk.
        """
        if self._last >= _STREAM:
            return _IN_STREAM * self._linger
        self._long = silence_s >= _SILENCE_S and self._window < _BURST and not self._vain
        return self._after_silence if self._long else 0.0

    def pauses(self, packets: Callable[[], int]) -> Iterator[float]:
        """Seconds to wait for more, one wait after the other.

        Args:
            packets: How many the chunk has by now.
        """
        left, first = _ELSEWHERE * self._linger, packets()
        trial = self._spared == _TRIAL
        self._spared *= not trial
        while self._window and left > 0:
            before = packets()
            if before == self._window and not trial:
                self._spared += 1
                return
            pause = min(left, _STEP_S)
            left -= pause
            yield pause
            if packets() == before:
                break
        if left > 0:
            yield left
        if packets() == first:
            self._window = first
        elif trial:
            self._window = 0  # more came than was taken for all

    def done(self, packets: int, *, in_vain: bool = False) -> None:
        """The chunk is complete, with so many packets.

        Args:
            packets: How many.
            in_vain: Nothing came while it waited `at_once`.
        """
        self._vain = _TRIAL if self._long and in_vain else max(0, self._vain - 1)
        self._long = False
        if packets == self._last < _STREAM:
            self._window = packets
        self._misses = 0 if packets == self._window else self._misses + 1
        if self._misses == _MISSES:
            self._window = self._misses = 0
        self._last = packets
