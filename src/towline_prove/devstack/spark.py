"""Fast start of Spark, and a real standalone cluster on this machine whose servers can't read each other's files.

The workers have addresses of their own (127.0.0.2, 127.0.0.3 ...), which all of 127.0.0.0/8 is on Linux, and so do
the executors that they start. They see the system's programs, Python, Spark and their own directory, but not the
state directory of a gateway or of a bridge. Each has a mount namespace with a root of its own, into which only the
listed paths are bound (``unshare`` and ``pivot_root`` of util-linux), and keeps its pid. It is no protection against an
attacker: processes see each other, and share the network.
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
from towline.spark.java import (
    QUICK_JVM,
    archive_options,
    find_java,
    jvm_options,
    light_spark_home,
    spark_archive_path,
)
from towline_prove.devstack.kafka import PERFORMANCE_VARIABLE
from towline_prove.devstack.process import LOOPBACK, wait_for
from towline_prove.devstack.server import Server, ServerGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

_ANSWER_SECONDS: Final = 2.0
#: Of a master or worker, which hold lists of names only.
_DAEMON_HEAP: Final = "128m"
#: Resources of a worker, and the default of an application: rows are in Python, not in the heap.
_CORES: Final = 2
_MEMORY: Final = "1g"
_EXECUTOR_MEMORY: Final = "512m"
_SECRET_BYTES: Final = 32
#: Environment variables that are passed on from the caller of devstack.
_INHERITED_VARIABLES: Final = ("LANG", "LC_ALL", "LC_CTYPE")
#: As `towline.spark.java` starts Spark's JVM; class data sharing prints warnings by default.
_QUIET: Final = ("-Xshare:auto", "-Xlog:disable", "-Xlog:all=error:stderr", "-XX:-UsePerfData")
#: spark-submit passes the options in this variable to its JVM.
_SUBMIT_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
_UNSHARE_TEST_S: Final = 20
#: Paths that every program needs; `/etc` has the resolver, certificates and Java's settings.
_SYSTEM_PATHS: Final = ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/opt", "/etc")
#: The kernel's own, which say themselves who may write what.
_WRITABLE_PATHS: Final = ("/proc", "/sys", "/dev")
#: The ways to a mount namespace: as root, and with a user namespace around it.
_UNSHARE_COMMANDS: Final = (("unshare",), ("unshare", "--user", "--map-root-user"))
_UNSHARE_OPTIONS: Final = ("--mount", "--propagation", "private", "--")
#: Run in the new namespace. Arguments: where the root is made, the directory in which the command starts, all that is
#: to be seen, parents first and with a ``+`` before what may be written, ``--``, and the command.
_ENCLOSE_SCRIPT: Final = """
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


def enable_fast_start(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set variables so that Spark and Kafka start faster, and run slower; SetupError TL-S21 without Java.

    Options in ``SPARK_SUBMIT_OPTS`` stay and win, and so does ``KAFKA_JVM_PERFORMANCE_OPTS``.
    """
    home = light_spark_home()
    options = jvm_options(quick=True)
    if home is not None:
        environment["SPARK_HOME"] = str(home)
        options += archive_options(spark_archive_path(home))
    environment.setdefault(PERFORMANCE_VARIABLE, " ".join(QUICK_JVM))
    environment[_SUBMIT_VARIABLE] = " ".join([shlex.join(options), environment.get(_SUBMIT_VARIABLE, "")]).strip()


@dataclass(frozen=True, slots=True)
class WorkerMachine:
    """Content of a worker's machine, beside the system's programs, Java and Spark.

    Attributes:
        bare: True for a Python without Towline and its dependencies: an application has to bring them.
        readable_files: Files at the same paths as here: certificates, secrets of Kafka.
        shared_directories: Directories that it may write as this machine does, as on a shared file system.
    """

    bare: bool = False
    readable_files: tuple[Path, ...] = ()
    shared_directories: tuple[Path, ...] = ()


class SparkServer(Server):
    """Spark master or worker; its web page serves as health check."""

    port_count: ClassVar[int] = 2
    start_seconds: ClassVar[float] = 45.0
    #: The class that is run.
    _main_class: ClassVar[str]
    #: Where it listens.
    host: str = LOOPBACK
    #: Content of its machine; a master needs no more.
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
        """Spark URL of the server."""
        return f"spark://{self.host}:{self.port}"

    def web_status(self) -> dict[str, Any]:
        """Return the JSON of its web page; empty while it does not answer."""
        url = f"http://{self.host}:{self.ports[1]}/json/"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
                status: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return status

    def _command(self, ports: tuple[int, ...]) -> Sequence[str | Path]:
        properties = self.directory / "spark.properties"
        text = "".join(f"{key} {value}\n" for key, value in self._properties().items())
        files.replace(properties, text, sync=False)  # mode 0600: the secret is in it
        listen_options = ["--host", self.host, "--port", str(ports[0]), "--webui-port", str(ports[1])]
        program = self._spark_home / "bin" / "spark-class"
        command = [program, self._main_class, *listen_options, "--properties-file", properties, *self._arguments()]
        return enclose_command(command, self.directory, self._visible_paths(), self.machine.shared_directories)

    def _properties(self) -> dict[str, str]:
        authentication = {"spark.authenticate": "true", "spark.authenticate.secret": _read_secret(self._secret)}
        return {**authentication, "spark.decommission.enabled": "true"}  # with SIGPWR a worker is

    def _arguments(self) -> list[str | Path]:
        return []

    @property
    def _spark_home(self) -> Path:
        """Spark's home directory; the light one starts Python sooner, but has no copy of PySpark."""
        if self.machine.bare:
            return _pyspark_home()
        configured_home = os.environ.get("SPARK_HOME")
        return Path(configured_home) if configured_home else light_spark_home() or _pyspark_home()

    def _visible_paths(self) -> list[Path]:
        python_paths = bare_python_paths() if self.machine.bare else towline_python_paths()
        return [self._spark_home, _pyspark_home(), java_home(), *python_paths, *self.machine.readable_files]

    def _environment(self) -> dict[str, str]:
        """Return the complete environment, also for executors: without the user's variables."""
        java_options = shlex.join([*_QUIET, *QUICK_JVM, *archive_options(spark_archive_path(self._spark_home))])
        python = Path(sys.base_prefix if self.machine.bare else sys.prefix) / "bin"
        return {
            **{name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ},
            "PATH": os.pathsep.join([str(python), *os.defpath.split(os.pathsep), "/usr/sbin", "/sbin"]),
            "HOME": str(self.directory),
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(self._spark_home),
            "SPARK_LOCAL_IP": self.host,
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_DAEMON_MEMORY": _DAEMON_HEAP,
            "SPARK_DAEMON_JAVA_OPTS": java_options,
            "SPARK_LAUNCHER_OPTS": " ".join(QUICK_JVM),
        }

    def _forget_data(self) -> None:
        for name in ("work", "local", "recovery"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


class SparkMaster(SparkServer):
    """Spark master with its workers and applications; it recovers them after a kill."""

    name: ClassVar[str] = "spark-master"
    _main_class = "org.apache.spark.deploy.master.Master"

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
        """Return the hosts of its live workers."""
        return sorted(worker["host"] for worker in self.web_status().get("workers", []) if worker["state"] == "ALIVE")

    def _answers(self, port: int) -> bool:
        del port
        return self.web_status().get("status") == "ALIVE"


class SparkWorker(SparkServer):
    """Spark worker at 127.0.0.1 plus its number, from 1; its executors are child processes and see the same files."""

    name: ClassVar[str] = "spark-worker"
    _main_class = "org.apache.spark.deploy.worker.Worker"

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
        environment = super()._environment()
        # An executor's JVM options belong to the application; these are the machine's.
        return {**environment, "JDK_JAVA_OPTIONS": environment["SPARK_DAEMON_JAVA_OPTS"]}

    def _answers(self, port: int) -> bool:
        del port
        return self.host in self._master.workers()


class SparkCluster(ServerGroup):
    """Spark master and workers in one directory, with the secret and ``client.properties`` for ``spark-submit``."""

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
        """Master, then workers."""
        return self.master, *self.workers

    @property
    def properties_file(self) -> Path:
        """File for ``spark-submit --properties-file`` with the master's address and secret; mode 0600."""
        return self.directory / "client.properties"

    def start(self) -> Self:
        """Start all servers, as `ServerGroup.start`."""
        self.prepare()
        super().start()
        self.describe()
        return self

    def prepare(self) -> None:
        """Create the secret, once."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.secret_file.exists():
            files.replace(self.secret_file, secrets.token_hex(_SECRET_BYTES) + "\n", sync=False)

    def describe(self) -> None:
        """Write `properties_file`, once the master has its port."""
        settings = {
            "spark.master": self.master.address,
            "spark.authenticate": "true",
            "spark.authenticate.secret": _read_secret(self.secret_file),
            "spark.executor.memory": _EXECUTOR_MEMORY,
        }
        files.replace(self.properties_file, "".join(f"{key} {value}\n" for key, value in settings.items()), sync=False)


def _read_secret(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _pyspark_home() -> Path:
    """Return the Spark home inside PySpark; SetupError TL-S20 without PySpark."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SetupError("TL-S20", "pyspark", "is not installed", 'Install it: pip install "towline[spark]".')
    return Path(spec.origin).parent


def enclose_command(
    command: Sequence[str | Path], own_directory: Path, visible: Iterable[Path], shared_directories: Iterable[Path] = ()
) -> list[str | Path]:
    """Return a command line that runs a command in a root directory of its own and keeps its pid.

    It may write `own_directory`, where it starts, and `shared_directories`, and read `visible` beside the system's
    programs. SetupError TL-S30 if this machine allows no mount namespaces.
    """
    root = own_directory.with_name(f".{own_directory.name}.root")
    root.mkdir(mode=0o700, exist_ok=True)
    writable = {own_directory, *shared_directories, *map(Path, _WRITABLE_PATHS)}
    paths = [path for path in _outermost_paths([*map(Path, _SYSTEM_PATHS), *visible, *writable]) if path.exists()]
    bind_arguments = [f"{'+' * (path in writable)}{path}" for path in paths]
    return [*_unshare(), "sh", "-c", _ENCLOSE_SCRIPT, "towline", root, own_directory, *bind_arguments, "--", *command]


def towline_python_paths() -> tuple[Path, ...]:
    """Return the paths of this Python, its packages and Towline."""
    towline = find_spec("towline")
    assert towline is not None
    assert towline.origin is not None
    return Path(sys.prefix), Path(sys.base_prefix), Path(towline.origin).parents[1]


def bare_python_paths() -> tuple[Path, ...]:
    """Return the path of a Python of the same version without our packages."""
    return (Path(sys.base_prefix),)


def java_home() -> Path:
    """Return the home directory of Java; SetupError TL-S21 without Java."""
    return find_java().resolve().parents[1]


def _outermost_paths(paths: Sequence[Path]) -> list[Path]:
    """Return the paths that are not below another one of them; parents first."""
    outermost: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(parent) for parent in outermost):
            outermost.append(path)
    return outermost


@cache
def _unshare() -> tuple[str, ...]:
    """Return the command by which this user gets a mount namespace with permission to mount."""
    for unshare_command in _UNSHARE_COMMANDS:
        test_script = "mount -t tmpfs towline /tmp && command -v pivot_root"
        test_command = [*unshare_command, *_UNSHARE_OPTIONS, "sh", "-c", test_script]
        try:
            result = subprocess.run(test_command, capture_output=True, timeout=_UNSHARE_TEST_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return (*unshare_command, *_UNSHARE_OPTIONS)
    problem = "this user gets no mount namespaces, which keep Spark's processes from reading each other's files"
    remedy = "Run it as root, or allow user namespaces (sysctl user.max_user_namespaces); in a container add SYS_ADMIN."
    raise SetupError("TL-S30", "unshare --mount", problem, remedy)
