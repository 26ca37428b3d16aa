"""A process that sees the programs of this machine, a directory of its own and what it is given, and no more.

As on a machine of its own: it has a mount namespace with a root of its own, into which only what is listed is bound
(``unshare`` and ``pivot_root`` of util-linux). The process keeps its pid. It is no fence against an attacker: processes
see each other, and share the network.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import SetupError
from towline.spark.java import find_java

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["enclosed", "java_place", "python_of_ours", "python_only"]

_TRIAL_SECONDS: Final = 20
#: What every program needs; `/etc` has the resolver, certificates and Java's settings.
_PROGRAMS: Final = ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/opt", "/etc")
#: The kernel's own, which say themselves who may write what.
_WRITTEN: Final = ("/proc", "/sys", "/dev")
#: The ways to a mount namespace: as root, and with a user namespace around it.
_WAYS: Final = (("unshare",), ("unshare", "--user", "--map-root-user"))
_APART: Final = ("--mount", "--propagation", "private", "--")
#: Run in the new namespace. Arguments: where the root is made, the directory in which the command starts, all that is
#: to be seen, parents first and with a ``+`` before what may be written, ``--``, and the command.
_SCRIPT: Final = """
set -eu
root=$1 own=$2
shift 2
mount -t tmpfs -o mode=755,size=4m towline "$root"
mkdir "$root/tmp"
mount -t tmpfs -o mode=1777,size=1g towline "$root/tmp"
while [ "$1" != -- ]; do
  place=${1#+}
  if [ -L "$place" ]; then
    ln -s "$(readlink "$place")" "$root$place"
  else
    if [ -d "$place" ]; then mkdir -p "$root$place"; else mkdir -p "$root${place%/*}" && : > "$root$place"; fi
    mount --rbind "$place" "$root$place"
    [ "$place" != "$1" ] || mount -o remount,bind,ro "$root$place" 2>/dev/null || :
  fi
  shift
done
shift
mount -t tmpfs -o mode=1777,size=64m towline "$root/dev/shm"
cd "$root"
pivot_root . .
umount -l .
cd "$own"
exec "$@"
"""


def enclosed(
    command: Sequence[str | Path], own: Path, visible: Iterable[Path], shared: Iterable[Path] = ()
) -> list[str | Path]:
    """The command line that runs a command with a root of its own, the process keeping its pid.

    Args:
        command: What is run.
        own: The directory that it may write, and where it starts; it exists.
        visible: Directories and files that it may read, beside the system's programs.
        shared: Directories that it may write as others may, as on a file system of several machines.

    Raises:
        SetupError: TL-S30, this machine allows no mount namespaces.
    """
    root = own.with_name(f".{own.name}.root")
    root.mkdir(mode=0o700, exist_ok=True)
    written = {own, *shared, *map(Path, _WRITTEN)}
    places = [place for place in _outermost([*map(Path, _PROGRAMS), *visible, *written]) if place.exists()]
    seen = [f"{'+' * (place in written)}{place}" for place in places]
    return [*_unshare(), "sh", "-c", _SCRIPT, "towline", root, own, *seen, "--", *command]


def python_of_ours() -> tuple[Path, ...]:
    """Where this Python is, with its packages and Towline."""
    towline = find_spec("towline")
    assert towline is not None
    assert towline.origin is not None
    return Path(sys.prefix), Path(sys.base_prefix), Path(towline.origin).parents[1]


def python_only() -> tuple[Path, ...]:
    """Where a Python of the same version is that has none of our packages."""
    return (Path(sys.base_prefix),)


def java_place() -> Path:
    """The directory of the Java that is used.

    Raises:
        SetupError: TL-S14, there is none.
    """
    return find_java().resolve().parents[1]


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Without those that lie in another one of them; parents first."""
    kept: list[Path] = []
    for place in sorted(set(places)):
        if not any(place.is_relative_to(other) for other in kept):
            kept.append(place)
    return kept


@cache
def _unshare() -> tuple[str, ...]:
    """How this user gets a mount namespace in which it may mount."""
    for way in _WAYS:
        trial = [*way, *_APART, "sh", "-c", "mount -t tmpfs towline /tmp && command -v pivot_root"]
        try:
            answer = subprocess.run(trial, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return (*way, *_APART)
    what = "Spark's processes need a mount namespace each, so that none reads another's files, and this user gets none"
    do = "Run it as root, or allow user namespaces (sysctl user.max_user_namespaces); in a container add SYS_ADMIN."
    raise SetupError("TL-S30", "unshare --mount", what, do)
