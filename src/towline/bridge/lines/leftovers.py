"""What a changed bridge file leaves behind: lines that it does not have any more, and former dead-letter topics [I18].

Each line is written down as it was started last, and so is every dead-letter topic: what was acknowledged and waits is
named, and carried on, by what stands in the state directory, whatever the file says now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter, ValidationError

from towline import files
from towline.bridge.config.model import CHECKPOINT, DownLine, Line
from towline.bridge.lines.identity import IDENTITY_FILE
from towline.errors import ConfigError, JournalError
from towline.gateway.clients import MEMBERS, read_clients
from towline.journal.outbox import waiting_in
from towline.journal.recovery import state_in

if TYPE_CHECKING:
    from towline.bridge.config.model import AnyLine, Bridge

__all__ = [
    "JOURNALS",
    "LeftLine",
    "former_topics",
    "known_line",
    "left_lines",
    "left_texts",
    "remember",
]

LINE_FILE: Final = "line.json"
#: One topic a line; in the bridge's state directory, because it outlives the lines that wrote to them.
TOPICS_FILE: Final = "dead-letter-topics"
#: Directories of a gateway's journals: what came in, what is to be sent, what the broker refused.
JOURNALS: Final = ("inbox", "outbox", "refused")
_LINE: Final[TypeAdapter[Line | DownLine]] = TypeAdapter(Line | DownLine)


@dataclass(frozen=True, slots=True)
class LeftLine:
    """The state directory of a line that the file does not have, with something in it.

    Attributes:
        bridge: The file.
        directory: With the line's name.
        waiting: Acknowledged messages there that are neither in Kafka nor delivered; None where that can't be read.
        sessions: Client ids whose session at a broker was not ended.
        elsewhere: Gateways of the line that run elsewhere; what waits there is not known here [I19].
    """

    bridge: Bridge
    directory: Path
    waiting: int | None
    sessions: tuple[str, ...]
    elsewhere: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """Whether the bridge does not start beside it."""
        return self.waiting != 0 and self.directory.name not in self.bridge.leave_waiting

    @property
    def error(self) -> ConfigError:
        """What there is of it, and both ways out."""
        name, file, held = self.directory.name, self.bridge.file, []
        if self.waiting != 0:
            some = "an unknown number of" if self.waiting is None else f"{self.waiting:,} acknowledged"
            held = [f"{some} message{'' if self.waiting == 1 else 's'} wait in {self.directory}"]
        held += [f'the session "{one}" goes on queueing at its broker' for one in self.sessions]
        held += [f"what its gateways {', '.join(self.elsewhere)} hold is not known here"] if self.elsewhere else []
        what = f'line "{name}" is not in {file.name} any more, and {" and ".join(held)}'
        leave = f' Or leave it, and start without it: leave_waiting = ["{name}"] at the top of the file.'
        do = f"Carry it on and end it: towline retire {file} {name}.{leave if self.refused else ''}"
        return ConfigError("TL-B37", str(file), what, do)


def left_lines(bridge: Bridge) -> list[LeftLine]:
    """The lines that the file does not have any more, and that hold messages here or a session at a broker."""
    kept, names = [], {line.name for line in bridge.lines}
    with contextlib.suppress(OSError):  # no state yet; who may not look is told so by whoever asks
        kept = [one for one in sorted(bridge.state_dir.iterdir()) if one.name not in names]
    kept = [one for one in kept if any((one / name).exists() for name in (IDENTITY_FILE, *JOURNALS))]
    here = {_journal(line.gateway.state_dir) for line in bridge.lines if kept}
    found = [_look(bridge, one) for one in kept if _journal(one) not in here]
    return [one for one in found if one.waiting != 0 or one.sessions or one.elsewhere]


def _journal(directory: Path) -> str | None:
    """The id of a gateway's journal: a copy, which somebody keeps beside its line, has the same [I17]."""
    with contextlib.suppress(JournalError, OSError):
        state = state_in(directory / "inbox")
        return state.journal_id if state else directory.name
    return directory.name


def _look(bridge: Bridge, directory: Path) -> LeftLine:
    places = [directory, *sorted((directory / MEMBERS).glob("*"))]
    sessions = tuple(one.client_id for place in places for one in read_clients(place) if one.ended is None)
    waiting: int | None = None
    with contextlib.suppress(JournalError, OSError):
        waiting = sum(waiting_in(place / name) for place in places for name in JOURNALS)
    elsewhere: tuple[str, ...] = ()
    with contextlib.suppress(ConfigError):
        line = known_line(bridge, directory.name)
        elsewhere = line.gateways or tuple(one.name for one in line.members) if isinstance(line, Line) else ()
    return LeftLine(bridge, directory, waiting, sessions, elsewhere)


def left_texts(bridge: Bridge) -> Iterator[str]:
    """What is left, one line each.

    Raises:
        ConfigError: TL-B37, messages wait that ``leave_waiting`` does not leave.
    """
    for one in left_lines(bridge):
        if one.refused:
            raise one.error
        yield str(one.error)


def remember(bridge: Bridge) -> None:
    """Write down, durably, what a later file may not say any more: each line, and each dead-letter topic."""
    for line in bridge.lines:
        _keep(line.gateway.state_dir / LINE_FILE, line.model_dump_json(by_alias=True))
    topics = {line.dead_letter_topic for line in bridge.lines if line.dead_letter_topic}
    _keep(bridge.state_dir / TOPICS_FILE, "\n".join(sorted(topics.union(former_topics(bridge)))))


def _keep(file: Path, text: str) -> None:
    if _read(file) != text:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_durably(file, text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def former_topics(bridge: Bridge) -> list[str]:
    """Dead-letter topics of a line of former files that no line has now: letters may wait there."""
    now = {line.dead_letter_topic for line in bridge.lines}
    return [name for name in _read(bridge.state_dir / TOPICS_FILE).split() if name not in now]


def known_line(bridge: Bridge, name: str) -> AnyLine:
    """A line as the file says it, or as it was started last, wherever the state directory is now.

    Raises:
        ConfigError: TL-C73, there is none; TL-B38, it is not written down what it was.
    """
    place = bridge.state_dir / name
    if any(line.name == name for line in bridge.lines) or not place.is_dir():
        return bridge.line(name)
    with contextlib.suppress(ValidationError):
        line = _LINE.validate_json(_read(place / LINE_FILE))
        if line.name == name:
            own = {"state_dir": place, "checkpoint": str(place / CHECKPOINT) if line.gateway.checkpoint else ""}
            return line.model_copy(update={"gateway": line.gateway.model_copy(update=own)})
    what, do = "what this line was is not written down here, so nothing can go on with it", "Put it back into the file."
    raise ConfigError("TL-B38", str(place), what, do)
