"""Who a line is: a small file in its state directory that outlives renamed lines, crashes and new checkpoints.

A changed bridge file leaves things behind: lines that it does not have any more, and former dead-letter topics [I18].
Each line is written down as it was started last, and so is every dead-letter topic: what was acknowledged and waits is
named, and carried on, by what stands in the state directory, whatever the file says now.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from towline import files
from towline.bridge.config.model import CHECKPOINT, AnyLine, Bridge, DownLine, Line
from towline.errors import ConfigError, JournalError
from towline.gateway.endpoint import not_allowed
from towline.gateway.identity import MEMBERS, read_clients
from towline.journal.outbox import waiting_in
from towline.journal.recovery import state_in
from towline.spark.offsets import JournalPlace

IDENTITY_FILE: Final = "identity.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """The line of a state directory."""

    #: Its name when it ran last.
    line: str
    #: Its name in Kafka: first part of transactional ids and key of its markers.
    sink: str
    #: 1, and one more for each time it was told to begin again.
    generation: int = 1
    #: Id of the streaming query whose checkpoint is its own, and transactions of a batch, when it ran last.
    query: str = ""
    parallelism: int = 0
    #: Where the query of an uplink without a checkpoint begins: the ``gateways`` of a source offset
    #: (`towline.spark.offsets`); nothing for where each gateway's account stands.
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: The same of a downlink: offsets in Kafka by topic and partition, nothing for where the file says; and the ids of
    #: their topics, by name.
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    #: By what the last batches were begun: settings, as JSON; of a downlink the broker's largest packet in bytes.
    mapping: str = ""
    packet_limit: int = 0
    #: Its promise when it ran last; "" before the first start.
    guarantee: str = ""
    #: Where its MQTT session may be.
    brokers: tuple[str, ...] = ()

    @classmethod
    def new(cls, bridge: str, line: str) -> Identity:
        """A line that never ran; the same names always give the same sink id, so that a lost file does no harm."""
        return cls(line, f"{bridge}.{line}")

    @classmethod
    def of(cls, bridge: Bridge, line: AnyLine) -> Identity:
        """That of a line of a bridge; a new one before its first start. Raises as `read`."""
        return cls.read(line.gateway.state_dir) or cls.new(bridge.name, line.name)

    @classmethod
    def read(cls, state_dir: Path) -> Identity | None:
        """The identity kept in a state directory; None where none is.

        Raises:
            ConfigError: TL-B26 if the file is not one of ours.
            NotAllowed: TL-B59.
        """
        file = state_dir / IDENTITY_FILE
        try:
            return TypeAdapter(Identity).validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except PermissionError:
            raise not_allowed(file) from None
        except (OSError, ValidationError) as error:
            what = f"the line's identity can't be read ({type(error).__name__})"
            do = "Restore the file, or remove it: the sink id is then made from the names of bridge and line again."
            raise ConfigError("TL-B26", str(file), what, do) from error

    def save(self, state_dir: Path) -> None:
        """Write it, durably and for this user alone."""
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_durably(state_dir / IDENTITY_FILE, json.dumps(asdict(self), indent=1) + "\n")

    def noted(self, state_dir: Path, **facts: Any) -> Identity:
        """The same with other facts, written where they are others."""
        changed = replace(self, **facts)
        if changed != self:
            changed.save(state_dir)
        return changed

    @property
    def begins(self) -> tuple[JournalPlace, ...]:
        """`places`, taken apart."""
        return tuple(JournalPlace.parse(name, fields) for name, fields in self.places.items())

    @property
    def first_sink(self) -> str:
        """The sink id of its first generation."""
        return self.sink.removesuffix(f".{self.generation}") if self.generation > 1 else self.sink

    def again(self, taken: Container[str] = (), **begins: Any) -> Identity:
        """The same line without a checkpoint, with a sink id not `taken`, and where it begins."""
        return Identity(self.line, *self._next(taken), mapping=self.mapping, brokers=self.brokers, **begins)

    def rescaled(self, taken: Container[str] = ()) -> Identity:
        """The same line and checkpoint with a new sink id, for another number of transactions of a batch."""
        sink, number = self._next(taken)
        return replace(self, sink=sink, generation=number)

    def _next(self, taken: Container[str]) -> tuple[str, int]:
        """Names may have dots and digits too: a line "a.2" beside a line "a" that begins again."""
        base = self.first_sink
        return next((sink, n) for n in count(self.generation + 1) if (sink := f"{base}.{n}") not in taken)


def sinks(state_dir: Path) -> set[str]:
    """The sink ids of a line, by its state directory, and of those beside it."""
    return {identity.sink for identity in _kept(state_dir.parent).values()}


def settle(bridge: Bridge) -> list[str]:
    """Give every line its identity before anything is started; recognise renamed and copied ones.

    Returns:
        What the person should know, one line each.

    Raises:
        ConfigError: TL-B20 a line may have been renamed; TL-B21 two directories are the same line.
    """
    kept = _kept(bridge.state_dir)
    _renamed(bridge, kept)
    notes = []
    for line in bridge.lines:
        former = kept.get(line.name)
        mine, taken = former or Identity.new(bridge.name, line.name), {one.sink for one in kept.values()}
        if not former and mine.sink in taken:  # of another line since it began again
            mine = mine.again(taken)
        if mine.line != line.name:
            notes.append(f'line "{line.name}" was "{mine.line}": it goes on where that stood, as sink "{mine.sink}"')
            mine = replace(mine, line=line.name)
        elsewhere = getattr(line, "gateways", ())
        brokers = () if elsewhere else tuple(map(str, line.gateway.brokers))
        if left := sorted(set(mine.brokers) - set(brokers)):
            what = f'what waits at {", ".join(left)} in the session "{line.gateway.mqtt_client_id}"'
            notes.append(f'line "{line.name}": {what} is fetched only while that is among its brokers')
        mine = replace(mine, brokers=brokers)
        kept[line.name] = mine
        if mine != former:
            mine.save(line.gateway.state_dir)
    _copied(bridge.state_dir, [line.name for line in bridge.lines], kept)
    return notes


def _kept(state_dir: Path) -> dict[str, Identity]:
    """The identities under a bridge's state directory, by directory."""
    places = sorted(file.parent for file in state_dir.glob(f"*/{IDENTITY_FILE}"))
    return {place.name: identity for place in places if (identity := Identity.read(place)) is not None}


def _renamed(bridge: Bridge, kept: Mapping[str, Identity]) -> None:
    """A new line beside the state of one that is gone: only a person knows whether they are the same."""
    names = {line.name for line in bridge.lines}
    fresh = [line for line in bridge.lines if line.name not in kept and not line.gateway.inbox.exists()]
    gone = sorted(set(kept) - names - {*bridge.leave_waiting})
    if not (fresh and gone):
        return
    line, own, former = fresh[0], fresh[0].gateway, bridge.state_dir / gone[0]
    what = (
        f'line "{line.name}" is new, and line "{gone[0]}" is no longer in {bridge.file.name} but has left journal and '
        f"checkpoint in {former}"
    )
    do = (
        f"Was it renamed? Then: mv {former} {own.state_dir}, and keep its MQTT session with "
        f'mqtt = {{ client_id = "{own.mqtt_client_id.removesuffix(line.name)}{gone[0]}" }}. '
        f"Is it another line? Then: towline retire {bridge.file} {gone[0]}, which carries on what waits there."
    )
    raise ConfigError("TL-B20", str(bridge.file), what, do)


def _copied(place: Path, names: Iterable[str], kept: Mapping[str, Identity]) -> None:
    """Two lines with one sink id would fence each other and skip each other's batches."""
    owners: dict[str, str] = {}
    for name in names:
        other = owners.setdefault(kept[name].sink, name)
        if other != name:
            what = f'the lines "{other}" and "{name}" are both sink "{kept[name].sink}": one directory is a copy'
            file = place / name / IDENTITY_FILE
            do = f"Remove the copy, or only its {file} and its checkpoint, to make it a new line."
            raise ConfigError("TL-B21", str(place), what, do)


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
    places = [place for _, place in places_in(directory)]
    sessions = tuple(one.client_id for place in places for one in read_clients(place) if one.ended is None)
    waiting: int | None = None
    with contextlib.suppress(JournalError, OSError):
        waiting = sum(waiting_in(place / name) for place in places for name in JOURNALS)
    elsewhere: tuple[str, ...] = ()
    with contextlib.suppress(ConfigError):
        line = known_line(bridge, directory.name)
        elsewhere = line.gateways or tuple(one.name for one in line.members) if isinstance(line, Line) else ()
    return LeftLine(bridge, directory, waiting, sessions, elsewhere)


def places_in(line_dir: Path) -> Iterator[tuple[str, Path]]:
    """The state directories of a line's gateways on this machine, by member; "" for the line's own."""
    yield "", line_dir
    with contextlib.suppress(OSError):
        yield from ((one.name, one) for one in sorted((line_dir / MEMBERS).iterdir()) if one.is_dir())


def wanted_clients(line: AnyLine) -> dict[str, str]:
    """Member → client id, as the file says; "" is the member of a line with one gateway."""
    return {one.share.member if one.share else "": one.mqtt_client_id for one in line.each_gateway}


def left_sessions(line_dir: Path, wanted: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Sessions that were not ended, of client ids that the file does not have (`wanted_clients`); None for no file."""
    return [
        {"member": name, "client_id": one.client_id, "brokers": [one.broker], "since": one.since}
        for name, directory in places_in(line_dir)
        for one in read_clients(directory)
        if wanted is not None and one.ended is None and wanted.get(name) != one.client_id
    ]


def is_drained(line_dir: Path, wanted: Mapping[str, str] | None) -> bool:
    """Whether the line's one gateway left it by a drain for good; without a file that of the last client id."""
    known = read_clients(line_dir)
    own = known[-1].client_id if wanted is None and known else (wanted or {}).get("")
    return any(one.client_id == own and one.how == "drained" for one in known)


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
