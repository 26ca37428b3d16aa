"""A real Spark standalone cluster on this machine: a master and workers, each with files that no other one reads.

The workers are at addresses of their own (127.0.0.2, 127.0.0.3 ...), which all of 127.0.0.0/8 is on Linux, and so are
the executors that they start. They see the system's programs, Python, Spark and their own directory: what lies in the
state directory of a gateway or of a bridge is out of their sight.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sys
import urllib.request
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from towline import files
from towline.errors import SetupError
from towline.spark.quickstart import QUICK, archive_of, light_home, sharing
from towline_prove.devstack.enclosure import enclosed, java_place, python_of_ours, python_only
from towline_prove.devstack.ports import LOOPBACK
from towline_prove.devstack.process import wait_for
from towline_prove.devstack.server import Server
from towline_prove.devstack.together import Together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SparkCluster", "SparkMaster", "SparkServer", "SparkWorker", "WorkerMachine"]

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
#: As `towline.spark.quickstart` starts Spark's JVM; class data sharing speaks up unless it is told not to.
_QUIET: Final = ("-Xshare:auto", "-Xlog:disable", "-Xlog:all=error:stderr", "-XX:-UsePerfData")


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
        settings: Lines of its properties file.
    """

    port_count: ClassVar[int] = 2
    start_seconds: ClassVar[float] = 45.0
    #: The class that is run.
    _main: ClassVar[str]
    #: Where it listens.
    host: str = LOOPBACK
    #: What its machine has; a master needs no more.
    machine: WorkerMachine = WorkerMachine()

    def __init__(self, directory: Path, secret: Path, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, settings=settings)
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
        text = "".join(f"{key} {value}\n" for key, value in {**self._properties(), **self.settings}.items())
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
        settings: As `SparkServer`.
    """

    name: ClassVar[str] = "spark-worker"
    _main = "org.apache.spark.deploy.worker.Worker"

    def __init__(
        self,
        directory: Path,
        secret: Path,
        master: SparkMaster,
        number: int,
        *,
        machine: WorkerMachine = WorkerMachine(),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, secret, settings=settings)
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
            SparkWorker(self.directory / f"worker-{number}", self.secret_file, self.master, number, machine=machine)
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
