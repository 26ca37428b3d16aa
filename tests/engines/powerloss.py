"""Power failures without pulling a plug: the disk as it would be, from a record of a run's system calls.

A write is on the disk once its file was synced, a name once its directory was. What was not is undone, as the worst
kernel would (`NOTHING`), or survives in part and in any order (`some`): ext4, XFS and btrfs lie between the two. A sync
covers what had returned when it was entered, and counts once it has returned.

    disk = Disk.of(root)
    subprocess.run(recording(command, log))       # tests.engines.strace
    disk.follow(log).cut()                        # what is in root now survived a power failure at the command's end
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Self

from tests.engines.strace import recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.engines.strace import Call

__all__ = ["EVERYTHING", "NOTHING", "DiskModel", "Gap", "Survives", "some"]

#: Bytes that a disk writes in one piece.
_SECTOR: Final = 512

#: Asked for each unsynced change, oldest first within a file or directory, of a write for each of its sectors: is it on
#: the disk?
Survives = Callable[[], bool]


def NOTHING() -> bool:  # noqa: N802 - a constant that is called
    """No change survives that was not synced."""
    return False


def EVERYTHING() -> bool:  # noqa: N802 - a constant that is called
    """Every change survives: the process was killed and the machine went on."""
    return True


def some(seed: int, share: float = 0.5) -> Survives:
    """A part of the unsynced changes survives, chosen at random, the same for the same seed."""
    dice = Random(seed)
    return lambda: dice.random() < share


class Gap(Exception):
    """A record holds a call on a file below the root that this model does not know; nothing is proved."""


@dataclass(slots=True)
class _Write:
    """One change of a file's content: bytes at a place, or a new size."""

    ended: int
    at: int
    data: bytes = b""
    size: int | None = None


@dataclass(slots=True)
class _File:
    """A file's durable content and what was written since; `size` is what the program sees."""

    durable: bytearray = field(default_factory=bytearray)
    changes: list[_Write] = field(default_factory=list)
    size: int = 0

    def change(self, change: _Write) -> None:
        self.changes.append(change)
        self.size = change.size if change.size is not None else max(self.size, change.at + len(change.data))

    def sync(self, began: int) -> None:
        for change in self.changes:
            if change.ended < began:
                _put(self.durable, change)
        self.changes = [change for change in self.changes if change.ended >= began]

    def content(self, survives: Survives) -> bytes:
        content = bytearray(self.durable)
        for change in self.changes:
            for sector in _sectors(change):
                if survives():
                    _put(content, sector)
        return bytes(content)


def _sectors(change: _Write) -> Iterator[_Write]:
    """What a disk writes whole or not at all: a write may be torn between two of its sectors."""
    at, end = change.at, change.at + len(change.data)
    if change.size is not None or at == end:
        yield change
        return
    while at < end:
        upto = min(end, at - at % _SECTOR + _SECTOR)
        yield _Write(change.ended, at, change.data[at - change.at : upto - change.at])
        at = upto


def _put(content: bytearray, change: _Write) -> None:
    if change.size is not None:
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
        return
    content.extend(bytes(max(0, change.at - len(content))))
    content[change.at : change.at + len(change.data)] = change.data


@dataclass(slots=True)
class _Names:
    """One change of a directory: names given and taken, all or none (a rename within it is one)."""

    ended: int
    now: dict[str, _Node | None]


@dataclass(slots=True)
class _Directory:
    """A directory's durable names and what was changed since; `names` is what the program sees."""

    durable: dict[str, _Node] = field(default_factory=dict)
    changes: list[_Names] = field(default_factory=list)
    names: dict[str, _Node] = field(default_factory=dict)

    def change(self, ended: int, now: dict[str, _Node | None]) -> None:
        self.changes.append(_Names(ended, now))
        _rename(self.names, now)

    def sync(self, began: int) -> None:
        for change in self.changes:
            if change.ended < began:
                _rename(self.durable, change.now)
        self.changes = [change for change in self.changes if change.ended >= began]

    def entries(self, survives: Survives) -> dict[str, _Node]:
        names = dict(self.durable)
        for change in self.changes:
            if survives():
                _rename(names, change.now)
        return names


_Node = _File | _Directory


def _rename(names: dict[str, _Node], now: dict[str, _Node | None]) -> None:
    for name, node in now.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


@dataclass(slots=True)
class _Open:
    """An open file: where the next write goes."""

    file: _File
    position: int = 0
    append: bool = False


#: What a system call does, as the method of `DiskModel` that follows it.
_KINDS: Final = {
    **dict.fromkeys(("open", "openat", "creat"), "_opened"),
    **dict.fromkeys(("write", "writev"), "_wrote"),
    **dict.fromkeys(("pwrite64", "pwritev"), "_wrote_at"),
    "lseek": "_sought",
    "ftruncate": "_resized",
    "fallocate": "_allocated",
    "mmap": "_mapped",
    **dict.fromkeys(("dup", "dup2", "dup3"), "_copied"),
    **dict.fromkeys(("rename", "renameat", "renameat2"), "_renamed"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "_removed"),
    **dict.fromkeys(("mkdir", "mkdirat"), "_created"),
    **dict.fromkeys(("link", "linkat"), "_linked"),
    **dict.fromkeys(("fsync", "fdatasync"), "_synced"),
    **dict.fromkeys(("sync", "syncfs"), "_synced_all"),
}

#: Calls that change a file's content in ways this model does not follow.
_UNKNOWN: Final = frozenset({"truncate", "sendfile", "copy_file_range", "splice", "symlink", "symlinkat"})


class DiskModel:
    """The files below a directory, what the programs see and what the disk holds.

    Args:
        root: The directory, without symbolic links on the way.
        top: Its content, all of it durable.

    Attributes:
        root: The directory.
    """

    def __init__(self, root: Path, top: _Directory) -> None:
        self.root = root
        self._top = top
        #: By descriptor and path: one program does not open a file twice under one number.
        self._open: dict[tuple[int, str], _Open] = {}

    @classmethod
    def empty(cls, root: Path) -> Self:
        """A directory that is there and holds nothing."""
        return cls(root, _Directory())

    @classmethod
    def of(cls, root: Path) -> Self:
        """A directory as it is now, all of it durable; sockets and links are left out."""
        return cls(root, _loaded(root))

    def apply(self, call: Call) -> None:
        """Take in the next call of a record.

        Raises:
            Gap: It changes a file in a way that is not followed.
        """
        if call.result is None or call.result < 0 or call.faked:
            return
        kind = _KINDS.get(call.name)
        if kind is not None:
            getattr(self, kind)(call)
        elif call.name in _UNKNOWN and any(self._parts(path) is not None for path in [*call.paths, *self._named(call)]):
            raise Gap(f"{call.name}({call.arguments})")

    def follow(self, log: Path, *, synced: bool = True) -> Self:
        """Take in a whole record.

        Args:
            log: The record.
            synced: Whether its syncs count; without them it tells what a program that makes none would leave.

        Raises:
            Gap: The record holds a change that is not followed.
        """
        for call in recorded(log, self.root):
            if synced or "sync" not in call.name:
                self.apply(call)
        return self

    def cut(self, survives: Survives = NOTHING) -> Path:
        """Lose power now: make of the directory itself what the disk holds. Whoever wrote there has to be dead.

        Args:
            survives: Asked for each change that was not synced.

        Returns:
            Where what the kernel had is kept, for a look.
        """
        names = (self.root.with_name(f"{self.root.name}-before-{number}") for number in count(1))
        before = next(name for name in names if not name.exists())
        self.root.rename(before)
        self.restore(self.root, survives)
        return before

    def restore(self, target: Path, survives: Survives = NOTHING) -> None:
        """Write the disk as it is after a power failure now into a new directory.

        Args:
            target: Made here; must not exist.
            survives: Asked for each change that was not synced.
        """
        _write(self._top, target, survives)

    def unsynced(self) -> dict[str, int]:
        """How many changes a power failure would undo now, by path; directories end with a slash."""
        return {path: len(node.changes) for path, node in _walk(self._top, "") if node.changes}

    def differs(self) -> list[str]:
        """Paths where what the programs see, by this model, is not what is there: empty when the record was whole."""
        return sorted(_differing(self._top, self.root, ""))

    # -- names -----------------------------------------------------------------------------------------------------

    def _parts(self, path: str) -> tuple[str, ...] | None:
        """The names on the way from the root; None for a path elsewhere."""
        try:
            return Path(path).relative_to(self.root).parts
        except ValueError:
            return None

    def _node(self, path: str) -> _Node | None:
        parts = self._parts(path)
        node: _Node | None = self._top
        for part in parts or ():
            node = node.names.get(part) if isinstance(node, _Directory) else None
        return node if parts is not None else None

    def _place(self, path: str) -> tuple[_Directory, str] | None:
        """The directory of a name, when it is below the root."""
        directory = self._node(str(Path(path).parent))
        return (directory, Path(path).name) if isinstance(directory, _Directory) else None

    def _named(self, call: Call) -> list[str]:
        """The absolute paths that a call names, each from its directory's descriptor where it has one."""
        bases, names = list(call.paths), [os.fsdecode(name) for name in call.strings]
        if len(bases) < len(names):  # a call without directory descriptors: rename, unlink, mkdir
            bases = [str(self.root)] * len(names)
        return [os.path.normpath(Path(base) / name) for base, name in zip(bases, names, strict=False)]

    # -- calls -----------------------------------------------------------------------------------------------------

    def _opened(self, call: Call) -> None:
        path = call.paths[-1] if call.paths else ""
        place = self._place(path)
        if place is None or "O_DIRECTORY" in call.arguments or "O_TMPFILE" in call.arguments:
            return
        directory, name = place
        file = directory.names.get(name)
        if file is None and "O_CREAT" in call.arguments:
            file = _File()
            directory.change(call.ended, {name: file})
        if isinstance(file, _File):
            if "O_TRUNC" in call.arguments and file.size:
                file.change(_Write(call.ended, 0, size=0))
            self._open[call.result or 0, path] = _Open(file, append="O_APPEND" in call.arguments)

    def _file(self, call: Call) -> _Open | None:
        return self._open.get((call.numbers[0], call.paths[0])) if call.paths and call.numbers else None

    def _wrote(self, call: Call) -> None:
        target = self._file(call)
        if target is None:
            return
        data = b"".join(call.strings)[: call.result]
        at = target.file.size if target.append else target.position
        target.file.change(_Write(call.ended, at, data))
        target.position = at + len(data)

    def _wrote_at(self, call: Call) -> None:
        target = self._file(call)
        if target is not None:
            # Linux: with O_APPEND the data goes to the end, whatever the offset (pwrite(2), BUGS)
            at = target.file.size if target.append else call.numbers[-1]
            target.file.change(_Write(call.ended, at, b"".join(call.strings)[: call.result]))

    def _sought(self, call: Call) -> None:
        target = self._file(call)
        if target is not None:
            target.position = call.result or 0

    def _resized(self, call: Call) -> None:
        target = self._file(call)
        if target is not None:
            target.file.change(_Write(call.ended, 0, size=call.numbers[-1]))

    def _allocated(self, call: Call) -> None:
        target = self._file(call)
        if target is None:
            return
        _, mode, start, length = call.numbers
        if mode:
            raise Gap(f"fallocate({call.arguments})")
        target.file.change(_Write(call.ended, 0, size=max(target.file.size, start + length)))

    def _mapped(self, call: Call) -> None:
        ours = any(path in call.paths for _, path in self._open)
        if ours and "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments:
            raise Gap(f"mmap({call.arguments})")

    def _copied(self, call: Call) -> None:
        target = self._file(call)
        if target is not None:  # the same open file under another number
            self._open[call.result or 0, call.paths[0]] = target

    def _renamed(self, call: Call) -> None:
        old, new = self._named(call)[:2]
        source, target = self._place(old), self._place(new)
        node = source[0].names.get(source[1]) if source else None
        if "RENAME_EXCHANGE" in call.arguments or (node is None and target is not None):
            raise Gap(f"{call.name} {old} -> {new}")
        if source is None or node is None:
            return
        if target is not None and source[0] is target[0]:
            source[0].change(call.ended, {source[1]: None, target[1]: node})
        else:
            source[0].change(call.ended, {source[1]: None})
            if target is not None:
                target[0].change(call.ended, {target[1]: node})
        self._moved(old, new)

    def _moved(self, old: str, new: str) -> None:
        """An open file is known by its new path from now on; so are those below a directory."""
        for (descriptor, path), target in list(self._open.items()):
            if path == old or path.startswith(old + "/"):
                self._open[descriptor, new + path[len(old) :]] = self._open.pop((descriptor, path), target)

    def _removed(self, call: Call) -> None:
        place = self._place(self._named(call)[0])
        if place is not None and place[1] in place[0].names:  # who has it open goes on writing to it
            place[0].change(call.ended, {place[1]: None})

    def _created(self, call: Call) -> None:
        place = self._place(self._named(call)[0])
        if place is not None:
            place[0].change(call.ended, {place[1]: _Directory()})

    def _linked(self, call: Call) -> None:
        old, new = self._named(call)[:2]
        node, place = self._node(old), self._place(new)
        if place is not None and node is not None:
            place[0].change(call.ended, {place[1]: node})

    def _synced(self, call: Call) -> None:
        path = call.paths[0] if call.paths else ""
        target = self._file(call)
        node = target.file if target else self._node(path)
        if node is not None:
            node.sync(call.began)

    def _synced_all(self, call: Call) -> None:
        for _, node in _walk(self._top, ""):
            node.sync(call.began)


def _loaded(path: Path) -> _Directory:
    names: dict[str, _Node] = {}
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            names[child.name] = _loaded(child)
        elif child.is_file():
            content = child.read_bytes()
            names[child.name] = _File(bytearray(content), size=len(content))
    return _Directory(dict(names), names=names)


def _write(directory: _Directory, target: Path, survives: Survives) -> None:
    target.mkdir(mode=0o700)
    for name, node in directory.entries(survives).items():
        if isinstance(node, _Directory):
            _write(node, target / name, survives)
        else:
            (target / name).write_bytes(node.content(survives))
            (target / name).chmod(0o600)


def _differing(directory: _Directory, real: Path, path: str) -> Iterator[str]:
    there = _loaded(real)
    for name in there.names.keys() | directory.names.keys():
        mine, other = directory.names.get(name), there.names.get(name)
        if isinstance(mine, _Directory) and isinstance(other, _Directory):
            yield from _differing(mine, real / name, f"{path}/{name}")
        elif isinstance(mine, _File) and isinstance(other, _File):
            if mine.content(EVERYTHING) != other.durable:
                yield f"{path}/{name}"
        elif mine is not other and not (isinstance(mine, _File) and (real / name).exists()):
            yield f"{path}/{name}"


def _walk(directory: _Directory, path: str) -> Iterator[tuple[str, _Node]]:
    """Everything the programs see, and what only the disk still has."""
    yield f"{path}/", directory
    nodes: Iterable[tuple[str, _Node]] = {**directory.durable, **directory.names}.items()
    for name, node in nodes:
        if isinstance(node, _Directory):
            yield from _walk(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node
