"""Simulated power failures: the files on disk, computed from a record of a run's system calls.

A write is durable after a sync of its file, a name after a sync of its directory. Unsynced changes are undone, as the
worst kernel would (`NOTHING`), or survive in part and in any order (`random_changes`): ext4, XFS and btrfs lie between
the two. A sync covers the calls that had returned before it started, and counts once it has returned.

    disk = DiskModel.of(root)
    subprocess.run(record_command(command, log))  # tests.engines.strace
    disk.replay(log).lose_power()                 # root now holds what survived a power failure at the command's end
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Self

from tests.engines.strace import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.engines.strace import Call


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


def random_changes(seed: int, share: float = 0.5) -> Survives:
    """Let a random part of the unsynced changes survive, the same for the same seed."""
    random = Random(seed)
    return lambda: random.random() < share


class UnsupportedCall(Exception):
    """System call on a file below the root that the model does not support; the test proves nothing."""


@dataclass(slots=True)
class _ContentChange:
    """Change of a file's content: bytes at a position, or a new size."""

    line: int
    position: int
    data: bytes = b""
    size: int | None = None


@dataclass(slots=True)
class _File:
    """Durable content of a file and its unsynced changes; `size` is the size for programs."""

    durable: bytearray = field(default_factory=bytearray)
    changes: list[_ContentChange] = field(default_factory=list)
    size: int = 0

    def add_change(self, change: _ContentChange) -> None:
        self.changes.append(change)
        self.size = change.size if change.size is not None else max(self.size, change.position + len(change.data))

    def sync(self, before_line: int) -> None:
        for change in self.changes:
            if change.line < before_line:
                _apply(self.durable, change)
        self.changes = [change for change in self.changes if change.line >= before_line]

    def content(self, survives: Survives) -> bytes:
        content = bytearray(self.durable)
        for change in self.changes:
            for sector in _sectors(change):
                if survives():
                    _apply(content, sector)
        return bytes(content)


def _sectors(change: _ContentChange) -> Iterator[_ContentChange]:
    """Yield the sectors of a change, each of which a disk writes whole or not at all."""
    position, end = change.position, change.position + len(change.data)
    if change.size is not None or position == end:
        yield change
        return
    while position < end:
        sector_end = min(end, position - position % _SECTOR + _SECTOR)
        yield _ContentChange(
            change.line, position, change.data[position - change.position : sector_end - change.position]
        )
        position = sector_end


def _apply(content: bytearray, change: _ContentChange) -> None:
    if change.size is not None:
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
        return
    content.extend(bytes(max(0, change.position - len(content))))
    content[change.position : change.position + len(change.data)] = change.data


@dataclass(slots=True)
class _NameChange:
    """Change of a directory's names, applied as a whole (a rename within the directory is one)."""

    line: int
    nodes: dict[str, _Node | None]


@dataclass(slots=True)
class _Directory:
    """Durable names of a directory and its unsynced changes; `names` are the names for programs."""

    durable: dict[str, _Node] = field(default_factory=dict)
    changes: list[_NameChange] = field(default_factory=list)
    names: dict[str, _Node] = field(default_factory=dict)

    def add_change(self, line: int, nodes: dict[str, _Node | None]) -> None:
        self.changes.append(_NameChange(line, nodes))
        _apply_names(self.names, nodes)

    def sync(self, before_line: int) -> None:
        for change in self.changes:
            if change.line < before_line:
                _apply_names(self.durable, change.nodes)
        self.changes = [change for change in self.changes if change.line >= before_line]

    def entries(self, survives: Survives) -> dict[str, _Node]:
        names = dict(self.durable)
        for change in self.changes:
            if survives():
                _apply_names(names, change.nodes)
        return names


_Node = _File | _Directory


def _apply_names(names: dict[str, _Node], nodes: dict[str, _Node | None]) -> None:
    for name, node in nodes.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


@dataclass(slots=True)
class _OpenFile:
    """Open file with the position of the next write."""

    file: _File
    position: int = 0
    append: bool = False


#: What a system call does, as the method of `DiskModel` that follows it.
_METHODS: Final = {
    **dict.fromkeys(("open", "openat", "creat"), "_open_call"),
    **dict.fromkeys(("write", "writev"), "_write_call"),
    **dict.fromkeys(("pwrite64", "pwritev"), "_write_at_call"),
    "lseek": "_seek_call",
    "ftruncate": "_truncate_call",
    "fallocate": "_allocate_call",
    "mmap": "_map_call",
    **dict.fromkeys(("dup", "dup2", "dup3"), "_duplicate_call"),
    **dict.fromkeys(("rename", "renameat", "renameat2"), "_rename_call"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "_remove_call"),
    **dict.fromkeys(("mkdir", "mkdirat"), "_mkdir_call"),
    **dict.fromkeys(("link", "linkat"), "_link_call"),
    **dict.fromkeys(("fsync", "fdatasync"), "_sync_call"),
    **dict.fromkeys(("sync", "syncfs"), "_sync_all_call"),
}

#: Calls that change a file's content in ways this model does not follow.
_UNSUPPORTED_CALLS: Final = frozenset({"truncate", "sendfile", "copy_file_range", "splice", "symlink", "symlinkat"})


class DiskModel:
    """Files below a directory, as programs see them and as they are on disk.

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
        self._open_files: dict[tuple[int, str], _OpenFile] = {}

    @classmethod
    def empty(cls, root: Path) -> Self:
        """Return the model of an empty directory."""
        return cls(root, _Directory())

    @classmethod
    def of(cls, root: Path) -> Self:
        """Return the model of an existing directory, all of it durable, without sockets and links."""
        return cls(root, _load_directory(root))

    def apply(self, call: Call) -> None:
        """Apply the next call of a record.

        Raises:
            UnsupportedCall: It changes a file in a way that the model does not support.
        """
        if call.result is None or call.result < 0 or call.is_injected:
            return
        method = _METHODS.get(call.name)
        if method is not None:
            getattr(self, method)(call)
        elif call.name in _UNSUPPORTED_CALLS and any(
            self._parts(path) is not None for path in [*call.paths, *self._named_paths(call)]
        ):
            raise UnsupportedCall(f"{call.name}({call.arguments})")

    def replay(self, log: Path, *, include_syncs: bool = True) -> Self:
        """Apply all calls of a record.

        Args:
            log: The record.
            include_syncs: Without its syncs, a record shows the effect of a program that makes none.

        Raises:
            UnsupportedCall: The record holds a change that the model does not support.
        """
        for call in read_record(log, self.root):
            if include_syncs or "sync" not in call.name:
                self.apply(call)
        return self

    def lose_power(self, survives: Survives = NOTHING) -> Path:
        """Lose power: replace the directory by its durable content. Its writers must be dead.

        Args:
            survives: Called for each unsynced change.

        Returns:
            The path of the previous directory.
        """
        names = (self.root.with_name(f"{self.root.name}-before-{number}") for number in count(1))
        previous = next(name for name in names if not name.exists())
        self.root.rename(previous)
        self.restore(self.root, survives)
        return previous

    def restore(self, target: Path, survives: Survives = NOTHING) -> None:
        """Write the durable content into a new directory.

        Args:
            target: Created here; must not exist.
            survives: Called for each unsynced change.
        """
        _write_directory(self._top, target, survives)

    def unsynced_changes(self) -> dict[str, int]:
        """Return the number of unsynced changes by path; directories end with a slash."""
        return {path: len(node.changes) for path, node in _walk(self._top, "") if node.changes}

    def differences(self) -> list[str]:
        """Return the paths whose content differs from the model: none after a complete record."""
        return sorted(_find_differences(self._top, self.root, ""))

    # -- names -----------------------------------------------------------------------------------------------------

    def _parts(self, path: str) -> tuple[str, ...] | None:
        """Return the path below the root as parts; None for a path elsewhere."""
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

    def _directory_of(self, path: str) -> tuple[_Directory, str] | None:
        """Return directory and name of a path below the root, else None."""
        directory = self._node(str(Path(path).parent))
        return (directory, Path(path).name) if isinstance(directory, _Directory) else None

    def _named_paths(self, call: Call) -> list[str]:
        """Return the absolute paths of a call, each relative to its directory descriptor if there is one."""
        bases, names = list(call.paths), [os.fsdecode(name) for name in call.strings]
        if len(bases) < len(names):  # a call without directory descriptors: rename, unlink, mkdir
            bases = [str(self.root)] * len(names)
        return [os.path.normpath(Path(base) / name) for base, name in zip(bases, names, strict=False)]

    # -- calls -----------------------------------------------------------------------------------------------------

    def _open_call(self, call: Call) -> None:
        path = call.paths[-1] if call.paths else ""
        location = self._directory_of(path)
        if location is None or "O_DIRECTORY" in call.arguments or "O_TMPFILE" in call.arguments:
            return
        directory, name = location
        file = directory.names.get(name)
        if file is None and "O_CREAT" in call.arguments:
            file = _File()
            directory.add_change(call.end_line, {name: file})
        if isinstance(file, _File):
            if "O_TRUNC" in call.arguments and file.size:
                file.add_change(_ContentChange(call.end_line, 0, size=0))
            self._open_files[call.result or 0, path] = _OpenFile(file, append="O_APPEND" in call.arguments)

    def _open_file(self, call: Call) -> _OpenFile | None:
        return self._open_files.get((call.numbers[0], call.paths[0])) if call.paths and call.numbers else None

    def _write_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is None:
            return
        data = b"".join(call.strings)[: call.result]
        position = target.file.size if target.append else target.position
        target.file.add_change(_ContentChange(call.end_line, position, data))
        target.position = position + len(data)

    def _write_at_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is not None:
            # Linux: with O_APPEND the data goes to the end, whatever the offset (pwrite(2), BUGS)
            position = target.file.size if target.append else call.numbers[-1]
            target.file.add_change(_ContentChange(call.end_line, position, b"".join(call.strings)[: call.result]))

    def _seek_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is not None:
            target.position = call.result or 0

    def _truncate_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is not None:
            target.file.add_change(_ContentChange(call.end_line, 0, size=call.numbers[-1]))

    def _allocate_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is None:
            return
        _, mode, start, length = call.numbers
        if mode:
            raise UnsupportedCall(f"fallocate({call.arguments})")
        target.file.add_change(_ContentChange(call.end_line, 0, size=max(target.file.size, start + length)))

    def _map_call(self, call: Call) -> None:
        is_open_here = any(path in call.paths for _, path in self._open_files)
        if is_open_here and "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments:
            raise UnsupportedCall(f"mmap({call.arguments})")

    def _duplicate_call(self, call: Call) -> None:
        target = self._open_file(call)
        if target is not None:  # the same open file under another number
            self._open_files[call.result or 0, call.paths[0]] = target

    def _rename_call(self, call: Call) -> None:
        old_path, new_path = self._named_paths(call)[:2]
        source, target = self._directory_of(old_path), self._directory_of(new_path)
        node = source[0].names.get(source[1]) if source else None
        if "RENAME_EXCHANGE" in call.arguments or (node is None and target is not None):
            raise UnsupportedCall(f"{call.name} {old_path} -> {new_path}")
        if source is None or node is None:
            return
        if target is not None and source[0] is target[0]:
            source[0].add_change(call.end_line, {source[1]: None, target[1]: node})
        else:
            source[0].add_change(call.end_line, {source[1]: None})
            if target is not None:
                target[0].add_change(call.end_line, {target[1]: node})
        self._move_open_files(old_path, new_path)

    def _move_open_files(self, old_path: str, new_path: str) -> None:
        """Change the paths of open files after a rename, also of those below a renamed directory."""
        for (descriptor, path), target in list(self._open_files.items()):
            if path == old_path or path.startswith(old_path + "/"):
                self._open_files[descriptor, new_path + path[len(old_path) :]] = self._open_files.pop(
                    (descriptor, path), target
                )

    def _remove_call(self, call: Call) -> None:
        location = self._directory_of(self._named_paths(call)[0])
        if location is not None and location[1] in location[0].names:  # who has it open goes on writing to it
            location[0].add_change(call.end_line, {location[1]: None})

    def _mkdir_call(self, call: Call) -> None:
        location = self._directory_of(self._named_paths(call)[0])
        if location is not None:
            location[0].add_change(call.end_line, {location[1]: _Directory()})

    def _link_call(self, call: Call) -> None:
        old_path, new_path = self._named_paths(call)[:2]
        node, location = self._node(old_path), self._directory_of(new_path)
        if location is not None and node is not None:
            location[0].add_change(call.end_line, {location[1]: node})

    def _sync_call(self, call: Call) -> None:
        path = call.paths[0] if call.paths else ""
        target = self._open_file(call)
        node = target.file if target else self._node(path)
        if node is not None:
            node.sync(call.start_line)

    def _sync_all_call(self, call: Call) -> None:
        for _, node in _walk(self._top, ""):
            node.sync(call.start_line)


def _load_directory(path: Path) -> _Directory:
    names: dict[str, _Node] = {}
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            names[child.name] = _load_directory(child)
        elif child.is_file():
            content = child.read_bytes()
            names[child.name] = _File(bytearray(content), size=len(content))
    return _Directory(dict(names), names=names)


def _write_directory(directory: _Directory, target: Path, survives: Survives) -> None:
    target.mkdir(mode=0o700)
    for name, node in directory.entries(survives).items():
        if isinstance(node, _Directory):
            _write_directory(node, target / name, survives)
        else:
            (target / name).write_bytes(node.content(survives))
            (target / name).chmod(0o600)


def _find_differences(directory: _Directory, real_path: Path, path: str) -> Iterator[str]:
    real_directory = _load_directory(real_path)
    for name in real_directory.names.keys() | directory.names.keys():
        node, real_node = directory.names.get(name), real_directory.names.get(name)
        if isinstance(node, _Directory) and isinstance(real_node, _Directory):
            yield from _find_differences(node, real_path / name, f"{path}/{name}")
        elif isinstance(node, _File) and isinstance(real_node, _File):
            if node.content(EVERYTHING) != real_node.durable:
                yield f"{path}/{name}"
        elif node is not real_node and not (isinstance(node, _File) and (real_path / name).exists()):
            yield f"{path}/{name}"


def _walk(directory: _Directory, path: str) -> Iterator[tuple[str, _Node]]:
    """Yield all files that programs see, and those that are still on disk."""
    yield f"{path}/", directory
    nodes: Iterable[tuple[str, _Node]] = {**directory.durable, **directory.names}.items()
    for name, node in nodes:
        if isinstance(node, _Directory):
            yield from _walk(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node
