"""Identity of a line: a small file in its state directory that survives renames, crashes and new checkpoints.

A changed bridge file leaves lines behind that it no longer has, and former dead-letter topics [I18]. So each line is
recorded as it was last started, and so is every dead-letter topic. Acknowledged messages that still wait are found and
delivered by these records, whatever the file says now.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from towline import files
from towline.bridge.config.model import CHECKPOINT, AnyLine, Bridge, Downlink, Uplink
from towline.errors import ConfigError, JournalError
from towline.gateway.endpoint import not_allowed_error
from towline.gateway.identity import MEMBERS_DIR, JournalPosition, read_client_sessions
from towline.journal.outbox import count_waiting_rows
from towline.journal.recovery import read_state

IDENTITY_FILE: Final = "identity.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of the line in a state directory."""

    #: Name of the line when it last ran.
    line: str
    #: Sink id: prefix of transactional ids and key of the markers.
    sink: str
    #: 1, plus one for each reset.
    generation: int = 1
    #: Id of the streaming query of its checkpoint, and transactions per batch, when it last ran.
    query: str = ""
    parallelism: int = 0
    #: Start of an uplink's query without a checkpoint, at each gateway; empty for the committed offset of each.
    positions: tuple[JournalPosition, ...] = ()
    #: Start of a downlink's query: Kafka offsets by topic and partition, empty for ``starting_offsets``; and the topic
    #: ids by name.
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    #: Settings of the last batches, as JSON; of a downlink the broker's maximum packet size in bytes.
    mapping: str = ""
    packet_limit: int = 0
    #: Guarantee when it last ran; "" before the first start.
    guarantee: str = ""
    #: Brokers that may have its MQTT session.
    brokers: tuple[str, ...] = ()

    @classmethod
    def of_line(cls, bridge: Bridge, line: AnyLine) -> Identity:
        """Return the identity of a line of a bridge; before its first start, or if it is lost, by both names.

        Raises as `read`.
        """
        return cls.read(line.gateway.state_dir) or cls(line.name, f"{bridge.name}.{line.name}")

    @classmethod
    def read(cls, state_dir: Path) -> Identity | None:
        """Read the identity in a state directory; None if there is none.

        Raises:
            ConfigError: TL-B26, the file is not a valid identity.
            NotAllowed: TL-B59.
        """
        file = state_dir / IDENTITY_FILE
        try:
            return TypeAdapter(Identity).validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except PermissionError:
            raise not_allowed_error(file) from None
        except (OSError, ValidationError) as error:
            problem = f"the line's identity can't be read ({type(error).__name__})"
            remedy = "Restore the file, or remove it: the sink id is then made from the names of bridge and line again."
            raise ConfigError("TL-B26", str(file), problem, remedy) from error

    def save(self, state_dir: Path) -> None:
        """Write the identity durably, readable for this user alone."""
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_durably(state_dir / IDENTITY_FILE, json.dumps(asdict(self), indent=1) + "\n")

    def update(self, state_dir: Path, **changes: Any) -> Identity:
        """Return the identity with changed fields; save it if any differs."""
        new_identity = replace(self, **changes)
        if new_identity != self:
            new_identity.save(state_dir)
        return new_identity

    @property
    def first_sink(self) -> str:
        """Sink id of the first generation."""
        return self.sink.removesuffix(f".{self.generation}") if self.generation > 1 else self.sink

    def reset(self, used_sinks: Container[str] = (), **start: Any) -> Identity:
        """Return the identity of the line after a reset: no checkpoint, an unused sink id, and its start positions."""
        new = self.with_new_sink(used_sinks)
        return Identity(self.line, new.sink, new.generation, mapping=self.mapping, brokers=self.brokers, **start)

    def with_new_sink(self, used_sinks: Container[str] = ()) -> Identity:
        """Return the identity with an unused sink id; a line may be named "a.2" beside a line "a" that is reset."""
        generations = count(self.generation + 1)
        generation = next(n for n in generations if f"{self.first_sink}.{n}" not in used_sinks)
        return replace(self, sink=f"{self.first_sink}.{generation}", generation=generation)


def sink_ids(state_dir: Path) -> set[str]:
    """Return the sink ids of a line, given its state directory, and of all lines beside it."""
    return {identity.sink for identity in _saved_identities(state_dir.parent).values()}


def assign_identities(bridge: Bridge) -> list[str]:
    """Assign an identity to every line before anything is started; recognise renamed and copied lines.

    Returns:
        Notes for the user, one line each.

    Raises:
        ConfigError: TL-B20 a line may have been renamed; TL-B21 two directories are the same line.
    """
    identities = _saved_identities(bridge.state_dir)
    _refuse_renamed(bridge, identities)
    notes = []
    for line in bridge.lines:
        former = identities.get(line.name)
        identity = former or Identity.of_line(bridge, line)
        used_sinks = {saved_identity.sink for saved_identity in identities.values()}
        if not former and identity.sink in used_sinks:  # of another line that was reset
            identity = identity.reset(used_sinks)
        if identity.line != line.name:
            notes.append(f'line "{line.name}" was "{identity.line}": it continues there, as sink "{identity.sink}"')
            identity = replace(identity, line=line.name)
        remote_gateways = getattr(line, "gateways", ())
        brokers = () if remote_gateways else tuple(map(str, line.gateway.brokers))
        if removed_brokers := sorted(set(identity.brokers) - set(brokers)):
            waiting_text = f'what waits at {", ".join(removed_brokers)} in the session "{line.gateway.mqtt_client_id}"'
            notes.append(f'line "{line.name}": {waiting_text} is fetched only while that is among its brokers')
        identity = replace(identity, brokers=brokers)
        identities[line.name] = identity
        if identity != former:
            identity.save(line.gateway.state_dir)
    _refuse_copied(bridge.state_dir, [line.name for line in bridge.lines], identities)
    return notes


def _saved_identities(state_dir: Path) -> dict[str, Identity]:
    """Return the saved identities under a bridge's state directory, by directory."""
    directories = sorted(file.parent for file in state_dir.glob(f"*/{IDENTITY_FILE}"))
    return {directory.name: identity for directory in directories if (identity := Identity.read(directory)) is not None}


def _refuse_renamed(bridge: Bridge, identities: Mapping[str, Identity]) -> None:
    """Refuse a new line beside the state of a removed one: only a person knows whether they are the same line."""
    names = {line.name for line in bridge.lines}
    new_lines = [line for line in bridge.lines if line.name not in identities and not line.gateway.inbox_dir.exists()]
    gone = sorted(set(identities) - names - {*bridge.leave_waiting})
    if not (new_lines and gone):
        return
    line, gateway, former_directory = new_lines[0], new_lines[0].gateway, bridge.state_dir / gone[0]
    problem = (
        f'line "{line.name}" is new, and line "{gone[0]}" is no longer in {bridge.file.name} but its journal and '
        f"checkpoint are in {former_directory}"
    )
    remedy = (
        f"Was it renamed? Then: mv {former_directory} {gateway.state_dir}, and keep its MQTT session with "
        f'mqtt = {{ client_id = "{gateway.mqtt_client_id.removesuffix(line.name)}{gone[0]}" }}. '
        f"Is it another line? Then: towline retire {bridge.file} {gone[0]}, which delivers the waiting messages."
    )
    raise ConfigError("TL-B20", str(bridge.file), problem, remedy)


def _refuse_copied(state_dir: Path, names: Iterable[str], saved: Mapping[str, Identity]) -> None:
    """Refuse two lines with one sink id: they would fence each other and skip each other's batches."""
    owners: dict[str, str] = {}
    for name in names:
        owner = owners.setdefault(saved[name].sink, name)
        if owner != name:
            problem = f'the lines "{owner}" and "{name}" are both sink "{saved[name].sink}": one directory is a copy'
            file = state_dir / name / IDENTITY_FILE
            remedy = f"Remove the copy, or only its {file} and its checkpoint, to make it a new line."
            raise ConfigError("TL-B21", str(state_dir), problem, remedy)


LINE_FILE: Final = "line.json"
#: One topic per text line; in the bridge's state directory, so that it outlives its lines.
TOPICS_FILE: Final = "dead-letter-topics"
#: Directories of a gateway's journals: received, to be sent, refused by the broker.
JOURNAL_DIRECTORIES: Final = ("inbox", "outbox", "refused")
#: Reader of a line that `model_dump` wrote; its errors show no values [I12].
LINE_ADAPTER: Final = TypeAdapter[Uplink | Downlink](Uplink | Downlink, config=ConfigDict(hide_input_in_errors=True))


@dataclass(frozen=True, slots=True)
class RemovedLine:
    """Removed line: not in the file any more, with messages or sessions left.

    Attributes:
        waiting_messages: Acknowledged messages neither in Kafka nor delivered; None if they can't be counted.
        client_ids: Client ids with an open session at a broker.
        remote_gateways: Remote gateways of the line; the messages that wait there are not known [I19].
    """

    bridge: Bridge
    directory: Path
    waiting_messages: int | None
    client_ids: tuple[str, ...]
    remote_gateways: tuple[str, ...]

    @property
    def blocks_start(self) -> bool:
        """Whether the bridge refuses to start while it is left."""
        return self.waiting_messages != 0 and self.directory.name not in self.bridge.leave_waiting

    @property
    def error(self) -> ConfigError:
        """Error TL-B37: messages, sessions and gateways left by the line, with both remedies."""
        line, file, held_texts = self.directory.name, self.bridge.file, []
        if self.waiting_messages != 0:
            waiting = self.waiting_messages
            count_text = "an unknown number of" if waiting is None else f"{waiting:,} acknowledged"
            held_texts = [f"{count_text} message{'' if waiting == 1 else 's'} wait in {self.directory}"]
        held_texts += [f'the session "{name}" still queues messages at its broker' for name in self.client_ids]
        if gateways := ", ".join(self.remote_gateways):
            held_texts.append(f"what its gateways {gateways} hold is unknown here")
        problem = f'line "{line}" was removed from {file.name}, and {" and ".join(held_texts)}'
        remedy = f"Deliver them and remove the line: towline retire {file} {line}."
        if self.blocks_start:
            remedy += f' Or start without them: leave_waiting = ["{line}"] at the top of the file.'
        return ConfigError("TL-B37", str(file), problem, remedy)


def removed_lines(bridge: Bridge) -> list[RemovedLine]:
    """Return the removed lines that still have messages on this machine, or a session at a broker."""
    directories, names = [], {line.name for line in bridge.lines}
    with contextlib.suppress(OSError):  # no state yet; the caller reports missing permissions
        directories = [p for p in sorted(bridge.state_dir.iterdir()) if p.name not in names]
    directories = [p for p in directories if any((p / name).exists() for name in (IDENTITY_FILE, *JOURNAL_DIRECTORIES))]
    line_journals = {_journal_id(line.gateway.state_dir) for line in bridge.lines if directories}
    candidates = [_inspect_removed(bridge, p) for p in directories if _journal_id(p) not in line_journals]
    return [c for c in candidates if c.waiting_messages != 0 or c.client_ids or c.remote_gateways]


def _journal_id(directory: Path) -> str | None:
    """Return the journal id of a gateway's directory; a copy beside the line has the same id [I17]."""
    with contextlib.suppress(JournalError, OSError):
        state = read_state(directory / "inbox")
        return state.journal_id if state else directory.name
    return directory.name


def _inspect_removed(bridge: Bridge, directory: Path) -> RemovedLine:
    directories = [path for _, path in gateway_directories(directory)]
    client_ids = tuple(c.client_id for path in directories for c in read_client_sessions(path) if c.ended is None)
    waiting_messages: int | None = None
    with contextlib.suppress(JournalError, OSError):
        waiting_messages = sum(count_waiting_rows(path / name) for path in directories for name in JOURNAL_DIRECTORIES)
    remote_gateways: tuple[str, ...] = ()
    with contextlib.suppress(ConfigError):
        line = current_or_former_line(bridge, directory.name)
        remote_gateways = line.gateways or tuple(m.name for m in line.members) if isinstance(line, Uplink) else ()
    return RemovedLine(bridge, directory, waiting_messages, client_ids, remote_gateways)


def gateway_directories(line_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the state directories of a line's gateways on this machine, by member; "" for the line's own."""
    yield "", line_dir
    with contextlib.suppress(OSError):
        yield from ((path.name, path) for path in sorted((line_dir / MEMBERS_DIR).iterdir()) if path.is_dir())


def configured_client_ids(line: AnyLine) -> dict[str, str]:
    """Return the configured client ids by member; "" is the member of a line with one gateway."""
    return {gateway.share.member if gateway.share else "": gateway.mqtt_client_id for gateway in line.all_gateways}


def open_sessions(line_dir: Path, client_ids: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Return the open sessions of client ids not in `client_ids`; None for them: return no session."""
    return [
        {"member": name, "client_id": client.client_id, "brokers": [client.broker], "since": client.since}
        for name, directory in gateway_directories(line_dir)
        for client in read_client_sessions(directory)
        if client_ids is not None and client.ended is None and client_ids.get(name) != client.client_id
    ]


def is_drained(line_dir: Path, client_ids: Mapping[str, str] | None) -> bool:
    """Return whether the line's single gateway was drained for good; without a file, of its last client id."""
    clients = read_client_sessions(line_dir)
    client_id = clients[-1].client_id if client_ids is None and clients else (client_ids or {}).get("")
    return any(client.client_id == client_id and client.how == "drained" for client in clients)


def removed_line_notes(bridge: Bridge) -> Iterator[str]:
    """Yield a note on each removed line.

    Raises:
        ConfigError: TL-B37, messages wait that ``leave_waiting`` does not name.
    """
    for removed_line in removed_lines(bridge):
        if removed_line.blocks_start:
            raise removed_line.error
        yield str(removed_line.error)


def record_lines(bridge: Bridge) -> None:
    """Record each line and each dead-letter topic durably, for the time after they are removed from the file."""
    for line in bridge.lines:
        _update_file(line.gateway.state_dir / LINE_FILE, line.model_dump_json(by_alias=True))
    topics = {line.dead_letter_topic for line in bridge.lines if line.dead_letter_topic}
    _update_file(bridge.state_dir / TOPICS_FILE, "\n".join(sorted(topics.union(former_dead_letter_topics(bridge)))))


def _update_file(file: Path, text: str) -> None:
    if _read_text(file) != text:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_durably(file, text)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def former_dead_letter_topics(bridge: Bridge) -> list[str]:
    """Return the dead-letter topics of former files that no line has now: dead letters may wait there."""
    current_topics = {line.dead_letter_topic for line in bridge.lines}
    return [name for name in _read_text(bridge.state_dir / TOPICS_FILE).split() if name not in current_topics]


def current_or_former_line(bridge: Bridge, name: str) -> AnyLine:
    """Return a line of the file, or a removed line as it was last started; the state directory may have moved.

    Raises:
        ConfigError: TL-C73, there is none; TL-B38, no record of the line exists.
    """
    path = bridge.state_dir / name
    if any(line.name == name for line in bridge.lines) or not path.is_dir():
        return bridge.line(name)
    with contextlib.suppress(ValidationError):
        line = LINE_ADAPTER.validate_json(_read_text(path / LINE_FILE))
        if line.name == name:
            update = {"state_dir": path, "checkpoint": str(path / CHECKPOINT) if line.gateway.checkpoint else ""}
            return line.model_copy(update={"gateway": line.gateway.model_copy(update=update)})
    problem = "what this line was is not recorded here, so nothing can continue it"
    raise ConfigError("TL-B38", str(path), problem, "Put it back into the file.")
