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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from tests.engines.strace import Call, read_record

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


@dataclass(slots=True, eq=False)
class _Node:
    """File (bytes) or directory (names): as programs see it, as it is on disk, and the changes between the two."""

    durable: Any
    seen: Any
    #: line of the record where the change had returned, and the change
    changes: list[tuple[int, Callable[[Any], None]]] = field(default_factory=list)

    @classmethod
    def new(cls, content: bytes | dict[str, _Node]) -> _Node:
        """A node, all of it durable."""
        if isinstance(content, dict):
            return cls(dict(content), dict(content))
        return cls(bytearray(content), bytearray(content))

    @property
    def is_directory(self) -> bool:
        return isinstance(self.seen, dict)

    def change(self, line: int, *changes: Callable[[Any], None]) -> None:
        for change in changes:
            change(self.seen)
            self.changes.append((line, change))

    def sync(self, before_line: int) -> None:
        for line, change in self.changes:
            if line < before_line:
                change(self.durable)
        self.changes = [entry for entry in self.changes if entry[0] >= before_line]

    def after_failure(self, survives: Survives) -> Any:
        content = self.durable.copy()
        for _, change in self.changes:
            if survives():
                change(content)
        return content


def _write(content: bytearray, *, position: int, data: bytes) -> None:
    content.extend(bytes(max(0, position - len(content))))
    content[position : position + len(data)] = data


def _resize(content: bytearray, *, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _rename(names: dict[str, _Node], *, nodes: dict[str, _Node | None]) -> None:
    for name, node in nodes.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


def _sectors(position: int, data: bytes) -> Iterator[Callable[[bytearray], None]]:
    """Yield the writes of a write's sectors, each of which a disk makes whole or not at all."""
    start, end = position, position + len(data)
    while start < end:
        sector_end = min(end, start - start % _SECTOR + _SECTOR)
        yield partial(_write, position=start, data=data[start - position : sector_end - position])
        start = sector_end


@dataclass(slots=True)
class _OpenFile:
    """Open file with the position of the next write."""

    file: _Node
    position: int = 0
    append: bool = False


#: What a system call does, as the method of `DiskModel` that follows it.
_METHODS: Final = {
    **dict.fromkeys(("open", "openat", "creat"), "_open_call"),
    **dict.fromkeys(("write", "writev", "pwrite64", "pwritev"), "_write_call"),
    "lseek": "_seek_call",
    "ftruncate": "_truncate_call",
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
_UNSUPPORTED_CALLS: Final = frozenset(
    ("truncate", "fallocate", "sendfile", "copy_file_range", "splice", "symlink", "symlinkat")
)


class DiskModel:
    """Files below `root`, as programs see them and as they are on disk; no symbolic links on the way there."""

    def __init__(self, root: Path, top: _Node) -> None:
        self.root = root
        self._top = top
        #: By descriptor and path: one program does not open a file twice under one number.
        self._open_files: dict[tuple[int, str], _OpenFile] = {}

    @classmethod
    def empty(cls, root: Path) -> Self:
        """Return the model of an empty directory."""
        return cls(root, _Node.new({}))

    @classmethod
    def of(cls, root: Path) -> Self:
        """Return the model of an existing directory, all of it durable, without sockets and links."""
        return cls(root, _load(root))

    def apply(self, call: Call) -> None:
        """Apply the next call of a record; UnsupportedCall if the model does not follow it."""
        if call.result is None or call.result < 0 or call.is_injected:
            return
        method = _METHODS.get(call.name)
        if method is not None:
            getattr(self, method)(call)
        elif call.name in _UNSUPPORTED_CALLS:
            paths = [*call.paths, *self._named_paths(call)]
            if any(Path(path).is_relative_to(self.root) for path in paths):
                raise UnsupportedCall(f"{call.name}({call.arguments})")

    def replay(self, log: Path) -> Self:
        """Apply all calls of a record."""
        for call in read_record(log, self.root):
            self.apply(call)
        return self

    def lose_power(self, survives: Survives = NOTHING) -> Path:
        """Replace the directory by its durable content, its writers being dead; return where the previous one is."""
        names = (self.root.with_name(f"{self.root.name}-before-{number}") for number in count(1))
        previous = next(name for name in names if not name.exists())
        self.root.rename(previous)
        self.restore(self.root, survives)
        return previous

    def restore(self, target: Path, survives: Survives = NOTHING) -> None:
        """Write the durable content into a new directory."""
        _store(self._top, target, survives)

    def differences(self) -> list[str]:
        """Return the paths whose content differs from the model: none after a complete record."""
        return sorted(_differences(self._top, _load(self.root), ""))

    # -- names -----------------------------------------------------------------------------------------------------

    def _node(self, path: str) -> _Node | None:
        if not Path(path).is_relative_to(self.root):
            return None
        node: _Node | None = self._top
        for part in Path(path).relative_to(self.root).parts:
            node = node.seen.get(part) if node is not None and node.is_directory else None
        return node

    def _directory_of(self, path: str) -> tuple[_Node, str] | None:
        """Return directory and name of a path below the root, else None."""
        directory = self._node(str(Path(path).parent))
        return (directory, Path(path).name) if directory is not None and directory.is_directory else None

    def _named_paths(self, call: Call) -> list[str]:
        """Return the absolute paths of a call, each relative to its directory descriptor if there is one."""
        bases, names = list(call.paths), [os.fsdecode(name) for name in call.strings]
        if len(bases) < len(names):  # a call without directory descriptors: rename, unlink, mkdir
            bases = [str(self.root)] * len(names)
        return [os.path.normpath(Path(base) / name) for base, name in zip(bases, names, strict=False)]

    def _set_name(self, call: Call, path: str, node: _Node | None) -> None:
        if (location := self._directory_of(path)) is not None:
            location[0].change(call.end_line, partial(_rename, nodes={location[1]: node}))

    # -- calls -----------------------------------------------------------------------------------------------------

    def _open_call(self, call: Call) -> None:
        path = call.paths[-1] if call.paths else ""
        location = self._directory_of(path)
        if location is None or "O_DIRECTORY" in call.arguments or "O_TMPFILE" in call.arguments:
            return
        file = location[0].seen.get(location[1])
        if file is None and "O_CREAT" in call.arguments:
            file = _Node.new(b"")
            self._set_name(call, path, file)
        if file is not None and not file.is_directory:
            if "O_TRUNC" in call.arguments and file.seen:
                file.change(call.end_line, partial(_resize, size=0))
            self._open_files[call.result or 0, path] = _OpenFile(file, append="O_APPEND" in call.arguments)

    def _open_file(self, call: Call) -> _OpenFile | None:
        return self._open_files.get((call.numbers[0], call.paths[0])) if call.paths and call.numbers else None

    def _write_call(self, call: Call) -> None:
        if (target := self._open_file(call)) is None:
            return
        data = b"".join(call.strings)[: call.result]
        is_positioned = call.name.startswith("p")
        # Linux: with O_APPEND the data goes to the end, whatever the offset (pwrite(2), BUGS)
        position = call.numbers[-1] if is_positioned else target.position
        position = len(target.file.seen) if target.append else position
        target.file.change(call.end_line, *_sectors(position, data))
        if not is_positioned:
            target.position = position + len(data)

    def _seek_call(self, call: Call) -> None:
        if (target := self._open_file(call)) is not None:
            target.position = call.result or 0

    def _truncate_call(self, call: Call) -> None:
        if (target := self._open_file(call)) is not None:
            target.file.change(call.end_line, partial(_resize, size=call.numbers[-1]))

    def _map_call(self, call: Call) -> None:
        is_open_here = any(path in call.paths for _, path in self._open_files)
        if is_open_here and "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments:
            raise UnsupportedCall(f"mmap({call.arguments})")

    def _duplicate_call(self, call: Call) -> None:
        if (target := self._open_file(call)) is not None:  # the same open file under another number
            self._open_files[call.result or 0, call.paths[0]] = target

    def _rename_call(self, call: Call) -> None:
        old_path, new_path = self._named_paths(call)[:2]
        source, target = self._directory_of(old_path), self._directory_of(new_path)
        node = source[0].seen.get(source[1]) if source else None
        if "RENAME_EXCHANGE" in call.arguments or (node is None and target is not None):
            raise UnsupportedCall(f"{call.name} {old_path} -> {new_path}")
        if source is None or node is None:
            return
        if target is not None and source[0] is target[0]:  # one change
            source[0].change(call.end_line, partial(_rename, nodes={source[1]: None, target[1]: node}))
        else:
            self._set_name(call, old_path, None)
            self._set_name(call, new_path, node)
        for (descriptor, path), opened in list(self._open_files.items()):  # also below a renamed directory
            if path == old_path or path.startswith(old_path + "/"):
                del self._open_files[descriptor, path]
                self._open_files[descriptor, new_path + path[len(old_path) :]] = opened

    def _remove_call(self, call: Call) -> None:
        self._set_name(call, self._named_paths(call)[0], None)  # who has it open goes on writing to it

    def _mkdir_call(self, call: Call) -> None:
        self._set_name(call, self._named_paths(call)[0], _Node.new({}))

    def _link_call(self, call: Call) -> None:
        old_path, new_path = self._named_paths(call)[:2]
        if (node := self._node(old_path)) is not None:
            self._set_name(call, new_path, node)

    def _sync_call(self, call: Call) -> None:
        opened = self._open_file(call)
        node = opened.file if opened else self._node(call.paths[0] if call.paths else "")
        if node is not None:
            node.sync(call.start_line)

    def _sync_all_call(self, call: Call) -> None:
        for node in _walk(self._top):
            node.sync(call.start_line)


def _load(path: Path) -> _Node:
    if not path.is_dir():
        return _Node.new(path.read_bytes())
    children = [child for child in path.iterdir() if child.is_file() or (child.is_dir() and not child.is_symlink())]
    return _Node.new({child.name: _load(child) for child in children})


def _store(node: _Node, target: Path, survives: Survives) -> None:
    content = node.after_failure(survives)
    if not node.is_directory:
        target.write_bytes(content)
        target.chmod(0o600)
        return
    target.mkdir(mode=0o700)
    for name, child in content.items():
        _store(child, target / name, survives)


def _differences(node: _Node | None, real: _Node | None, path: str) -> Iterator[str]:
    if node is None or real is None or node.is_directory != real.is_directory:
        yield path
    elif node.is_directory:
        for name in real.seen.keys() | node.seen.keys():
            yield from _differences(node.seen.get(name), real.seen.get(name), f"{path}/{name}")
    elif node.seen != real.seen:
        yield path


def _walk(node: _Node) -> Iterator[_Node]:
    """Yield all nodes that programs see, and those that are still on disk."""
    yield node
    if node.is_directory:
        for child in {**node.durable, **node.seen}.values():
            yield from _walk(child)
