"""Spark quickly started, and a real standalone cluster on this machine, whose servers read no files of each other.

The workers are at addresses of their own (127.0.0.2, 127.0.0.3 ...), which all of 127.0.0.0/8 is on Linux, and so are
the executors that they start. They see the system's programs, Python, Spark and their own directory: what lies in the
state directory of a gateway or of a bridge is out of their sight. Each has a mount namespace with a root of its own,
into which only what is listed is bound (``unshare`` and ``pivot_root`` of util-linux), and keeps its pid. It is no
fence against an attacker: processes see each other, and share the network.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from towline import files
from towline.errors import SetupError
from towline.spark.java import QUICK, Tier, archive_of, find_java, jvm_options, light_home, sharing
from towline_prove.devstack.kafka import PERFORMANCE
from towline_prove.devstack.ports import LOOPBACK
from towline_prove.devstack.process import wait_for
from towline_prove.devstack.server import Server, Together

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

_ANSWER_SECONDS: Final = 2.0
#: Of a master or worker, which hold lists of names only.
_HEAP: Final = "128m"
#: What a worker offers, and what an application takes of it that says nothing: rows are in Python, not in the heap.
_CORES: Final = 2
_MEMORY: Final = "1g"
_EXECUTOR_MEMORY: Final = "512m"
_SECRET_BYTES: Final = 32
#: What is handed on from the environment in which devstack was started.
_KEPT: Final = ("LANG", "LC_ALL", "LC_CTYPE")
#: As `towline.spark.java` starts Spark's JVM; class data sharing speaks up unless it is told not to.
_QUIET: Final = ("-Xshare:auto", "-Xlog:disable", "-Xlog:all=error:stderr", "-XX:-UsePerfData")
#: spark-submit adds what this variable holds to its JVM.
_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
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


def start_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let every local Spark and every Kafka that is started with this environment start quickly, and run less quickly.

    Args:
        environment: Gets ``SPARK_HOME`` and ``SPARK_SUBMIT_OPTS``; what the latter holds already stays, and wins. And
            ``KAFKA_JVM_PERFORMANCE_OPTS``, where there is none.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    home = light_home()
    options = jvm_options(Tier.QUICK)
    if home is not None:
        environment["SPARK_HOME"] = str(home)
        options += sharing(archive_of(home))
    environment.setdefault(PERFORMANCE, " ".join(QUICK))
    environment[_VARIABLE] = " ".join([shlex.join(options), environment.get(_VARIABLE, "")]).strip()


@dataclass(frozen=True, slots=True)
class WorkerMachine:
    """What the machine of a worker has, beside the system's programs, Java and Spark.

    Attributes:
        bare: A Python, and nothing of ours in it: an application has to bring Towline and all that it needs.
        files: At the same paths as here: certificates, secrets of Kafka.
        shared: Directories that it writes as this machine does, as on a file system of all of them.
    """

    bare: bool = False
    files: tuple[Path, ...] = ()
    shared: tuple[Path, ...] = ()


class SparkServer(Server):
    """A master or a worker; its web page answers for it.

    Args:
        directory: As of every server; the only one that it may write.
        secret: File with the secret of ``spark.authenticate``.
    """

    port_count: ClassVar[int] = 2
    start_seconds: ClassVar[float] = 45.0
    #: The class that is run.
    _main: ClassVar[str]
    #: Where it listens.
    host: str = LOOPBACK
    #: What its machine has; a master needs no more.
    machine: WorkerMachine = WorkerMachine()

    def __init__(self, directory: Path, secret: Path) -> None:
        super().__init__(directory)
        self._secret = secret

    @property
    def version(self) -> str:
        """Spark's version."""
        return version("pyspark")

    @property
    def address(self) -> str:
        """How Spark names it."""
        return f"spark://{self.host}:{self.port}"

    def asked(self) -> dict[str, Any]:
        """What its web page says, in JSON; nothing while it gives no answer."""
        page = f"http://{self.host}:{self.ports[1]}/json/"
        try:
            with urllib.request.urlopen(page, timeout=_ANSWER_SECONDS) as answer:
                said: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return said

    def _command(self, ports: tuple[int, ...]) -> Sequence[str | Path]:
        properties = self.directory / "spark.properties"
        text = "".join(f"{key} {value}\n" for key, value in self._properties().items())
        files.replace(properties, text, synced=False)  # mode 0600: the secret is in it
        listening = ["--host", self.host, "--port", str(ports[0]), "--webui-port", str(ports[1])]
        program = self._home / "bin" / "spark-class"
        command = [program, self._main, *listening, "--properties-file", properties, *self._arguments()]
        return enclosed(command, self.directory, self._visible(), self.machine.shared)

    def _properties(self) -> dict[str, str]:
        said = {"spark.authenticate": "true", "spark.authenticate.secret": _secret_of(self._secret)}
        return {**said, "spark.decommission.enabled": "true"}  # with SIGPWR a worker is

    def _arguments(self) -> list[str | Path]:
        return []

    @property
    def _home(self) -> Path:
        """Of Spark: in the light one Python processes start sooner, but it has no copy of PySpark."""
        if self.machine.bare:
            return _installed()
        named = os.environ.get("SPARK_HOME")
        return Path(named) if named else light_home() or _installed()

    def _visible(self) -> list[Path]:
        python = python_only() if self.machine.bare else python_of_ours()
        return [self._home, _installed(), java_place(), *python, *self.machine.files]

    def _environment(self) -> dict[str, str]:
        """All that it inherits and hands on to executors: nothing of the user's."""
        quick = shlex.join([*_QUIET, *QUICK, *sharing(archive_of(self._home))])
        python = Path(sys.base_prefix if self.machine.bare else sys.prefix) / "bin"
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join([str(python), *os.defpath.split(os.pathsep), "/usr/sbin", "/sbin"]),
            "HOME": str(self.directory),
            "JAVA_HOME": str(java_place()),
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": self.host,
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_DAEMON_MEMORY": _HEAP,
            "SPARK_DAEMON_JAVA_OPTS": quick,
            "SPARK_LAUNCHER_OPTS": " ".join(QUICK),
        }

    def _forget_data(self) -> None:
        for name in ("work", "local", "recovery"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


class SparkMaster(SparkServer):
    """The master: it knows workers and applications, and knows them again after a kill."""

    name: ClassVar[str] = "spark-master"
    _main = "org.apache.spark.deploy.master.Master"

    def _properties(self) -> dict[str, str]:
        return {
            **super()._properties(),
            "spark.master.rest.enabled": "false",  # a port of its own, by which anyone could submit
            "spark.deploy.recoveryMode": "FILESYSTEM",
            "spark.deploy.recoveryDirectory": str(self.directory / "recovery"),
            # Seconds until a worker that says nothing counts as dead; Spark's own value is 60.
            "spark.worker.timeout": "15",
        }

    def workers(self) -> list[str]:
        """The hosts of the workers that it has."""
        return sorted(one["host"] for one in self.asked().get("workers", []) if one["state"] == "ALIVE")

    def _answers(self, port: int) -> bool:
        del port
        return self.asked().get("status") == "ALIVE"


class SparkWorker(SparkServer):
    """A worker; executors are its children and see what it sees.

    Args:
        directory: As of every server.
        secret: As `SparkServer`.
        master: Whom it belongs to.
        number: From 1; it is at 127.0.0.1 and that many further.
        machine: What its machine has.
    """

    name: ClassVar[str] = "spark-worker"
    _main = "org.apache.spark.deploy.worker.Worker"

    def __init__(self, directory: Path, secret: Path, master: SparkMaster, number: int, machine: WorkerMachine) -> None:
        super().__init__(directory, secret)
        self.label = f"{self.name}-{number}"
        self.host = f"127.0.0.{number + 1}"
        self.machine = machine
        self._master = master

    def _command(self, ports: tuple[int, ...]) -> Sequence[str | Path]:
        # One that finds no master tries again after five to fifteen seconds (Worker's registration).
        if not wait_for(lambda: self._master.running and self._master._answers(0), self._master.start_seconds, 0.05):  # noqa: SLF001
            advice = "Start it: towline devstack restart spark-master."
            raise SetupError("TL-S17", f"spark-master in {self._master.directory}", "does not run", advice)
        return super()._command(ports)

    def _arguments(self) -> list[str | Path]:
        work = self.directory / "work"
        return ["--cores", str(_CORES), "--memory", _MEMORY, "--work-dir", work, self._master.address]

    def _environment(self) -> dict[str, str]:
        made = super()._environment()
        # What an executor's JVM is started with is the application's to say; this is this machine's own word.
        return {**made, "JDK_JAVA_OPTIONS": made["SPARK_DAEMON_JAVA_OPTS"]}

    def _answers(self, port: int) -> bool:
        del port
        return self.host in self._master.workers()


class SparkCluster(Together):
    """A master and its workers.

    Args:
        directory: Each has a folder in it; beside them the secret, and ``client.properties`` for ``spark-submit``.
        workers: How many.
        machine: As `SparkWorker`, of each of them.
    """

    def __init__(self, directory: Path, *, workers: int = 2, machine: WorkerMachine = WorkerMachine()) -> None:
        self.directory = Path(directory).absolute()
        self.secret_file = self.directory / "secret"
        self.master = SparkMaster(self.directory / "master", self.secret_file)
        self.workers = tuple(
            SparkWorker(self.directory / f"worker-{number}", self.secret_file, self.master, number, machine)
            for number in range(1, workers + 1)
        )

    @property
    def servers(self) -> tuple[SparkServer, ...]:
        """The master, then the workers."""
        return self.master, *self.workers

    @property
    def properties_file(self) -> Path:
        """For ``spark-submit --properties-file``: where the master is and the secret, readable by this user alone."""
        return self.directory / "client.properties"

    def start(self) -> Self:
        """As `Together.start`."""
        self.prepare()
        super().start()
        self.describe()
        return self

    def prepare(self) -> None:
        """Make the secret, once."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.secret_file.exists():
            files.replace(self.secret_file, secrets.token_hex(_SECRET_BYTES) + "\n", synced=False)

    def describe(self) -> None:
        """Write `properties_file`, once the master has its port."""
        said = {
            "spark.master": self.master.address,
            "spark.authenticate": "true",
            "spark.authenticate.secret": _secret_of(self.secret_file),
            "spark.executor.memory": _EXECUTOR_MEMORY,
        }
        files.replace(self.properties_file, "".join(f"{key} {value}\n" for key, value in said.items()), synced=False)


def _secret_of(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _installed() -> Path:
    """Spark as PySpark brings it.

    Raises:
        SetupError: TL-S20, there is none.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SetupError("TL-S20", "pyspark", "is not installed", 'Install it: pip install "towline[spark]".')
    return Path(spec.origin).parent


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
