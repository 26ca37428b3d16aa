"""The Spark session of a bridge, what that needs of a cluster, and what the driver's process finds around it.

A Spark that is killed leaves its folders behind, wherever they are: here they lie in the bridge's state directory, one
for each start, and those of processes that have ended are removed. PySpark is loaded by what needs a session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline import files, providers
from towline.bridge.config.model import Bridge
from towline.bridge.config.tables import SparkSection
from towline.bridge.kafka_source import java_client
from towline.errors import SetupError
from towline.gateway.endpoint import short_place
from towline.guarantee import policy
from towline.spark import localfs
from towline.spark.java import OLDEST_JAVA, archive_of, java_version, jvm_options, light_home, sharing
from towline.spark.session import (
    addresses,
    brings_a_secret,
    is_cluster,
    pyspark_version,
    register,
    spark_conf,
    stays_here,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: For a line that drops repeats. One partition, because rows of a device must not be spread over several and come back
#: in another order; and no batch of its own to clear old keys, which the next batch clears as well.
_STATEFUL: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
#: Each operator of a plan is compiled by itself. Compiled as one method, what a line makes of its rows is too large for
#: the JVM's just-in-time compiler (8,000 bytes), and that of a Hono line larger than a method may be (65,535 bytes):
#: Java refuses it, in each batch anew (WholeStageCodegenExec).
_COMPILED: Final = {"spark.sql.codegen.wholeStage": "false"}
#: Where Spark makes the secret by itself, and where the file names one. Without one, another user of the machine, or of
#: its network, could read blocks of messages at Spark's ports, and hand the driver Java objects to deserialize.
_AUTHENTICATE: Final = {"spark.authenticate": "true"}
_SECRET: Final = "spark.authenticate.secret"  # noqa: S105 - its name
#: Names whose values Spark shows nowhere (the default of ``spark.redaction.regex``).
_REDACTED: Final = re.compile("(?i)secret|password|token|access[.]?key")
_LOOPBACK: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
#: Else ``observe`` counts the rows of all attempts of a task: Spark's default, which [spark.conf] must not change.
EACH_ONCE: Final[Mapping[str, str]] = {"spark.sql.legacy.observeMetricsAggregateAllAttempts": "false"}
#: Where executors have the sockets of their Python processes: a directory that every machine has. The driver's, or that
#: of a container of YARN, may have a name too long for a socket.
_SOCKETS: Final = {"spark.python.unix.domain.socket.dir": "/tmp"}  # noqa: S108 - on other machines; the names are UUIDs
#: An executor that is silent for ``spark.network.timeout`` (120 s), as on a machine that was suspended, is given up.
#: That of a local master can't come back, and its JVM ends ten minutes later (`HeartbeatReceiver`, `Executor`).
_PATIENT: Final = {"spark.storage.blockManagerHeartbeatTimeoutMs": "365d"}
#: Settings of Kafka's client that name a file, beside the secrets.
_FILES: Final = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location")
#: Of ``ssl.ca.location``: librdkafka looks for the machine's own certificates.
_PROBE: Final = "probe"
#: Seconds that one master may take to answer.
_ANSWER_S: Final = 5.0


def session(bridge: Bridge) -> SparkSession:
    """The Spark session of a bridge, both formats registered; what this process makes from now on is its user's alone.

    ``spark.sql.ansi.enabled`` is off: under ANSI rules one payload that does not cast in a ``where`` would raise, fail
    its batch for ever and stop the line; without them it is null, and the message is counted as such.
    """
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - see the module
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from towline.bridge.uplink.sink import FORMATS  # noqa: PLC0415

    if bridge.downlinks:
        java_client(bridge.kafka.client())  # its secrets, in the environment the JVM inherits
    # Blocks, artifacts and the sockets of Python workers, in /tmp, hold messages: the JVM and its workers inherit this.
    os.umask(0o077)
    if stays_here(bridge.spark.master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the web page would listen on every address
    conf = settings_of(bridge)
    secret = secret_of(bridge.spark)
    hidden = {name: conf.pop(name) for name in [*conf] if _REDACTED.search(name)}
    hidden |= {} if secret is None else {_SECRET: secret}
    user = _unnamed(bridge.state_dir)
    jars = conf.pop("spark.jars", "") if user else ""
    if jars:  # the launcher would log in to fetch them; behind Spark's own, as `towline.spark.localfs` has it
        hidden["spark.jars"] = jars
        behind = [os.environ.get("SPARK_DIST_CLASSPATH"), *jars.split(",")]
        os.environ["SPARK_DIST_CLASSPATH"] = os.pathsep.join(filter(None, behind))
    name, master = f"towline {bridge.name}", bridge.spark.master
    if hidden or user:  # once the JVM runs: what it is started with stands in its command line [I12]
        begun = SparkConf().setMaster(master).setAppName(name).setAll([*conf.items()])
        SparkContext._ensure_initialized(conf=begun)  # noqa: SLF001 - as the builder does it
        if user:
            login: Any = SparkContext._jvm.org.apache.hadoop.security.UserGroupInformation  # type: ignore[union-attr]  # noqa: SLF001
            login.setLoginUser(login.createRemoteUser(user))
        SparkContext.getOrCreate(begun.setAll([*hidden.items()]))
    spark = SparkSession.builder.master(master).appName(name).config(map={**conf}).getOrCreate()
    register(spark)
    for source in FORMATS:
        spark.dataSource.register(source)
    return spark


def _unnamed(home: Path) -> str | None:
    """``SPARK_USER``, or his number, for a user without a passwd entry, whom Hadoop refuses; None for others."""
    with contextlib.suppress(KeyError):
        pwd.getpwuid(os.geteuid())
        return None
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{quoted(f'-Duser.home={home}')} {given}"
    return os.environ.setdefault("SPARK_USER", str(os.geteuid()))


def secret_of(spark: SparkSection) -> str | None:
    """What the file of ``spark.authenticate``'s secret holds; None where none is named.

    Raises:
        ConfigError: TL-C141, it can't be read, or is empty.
    """
    file = spark.secret_file
    if file is None or brings_a_secret(spark.master):
        return None

    def text(content: bytes) -> str:
        if made := content.decode().strip():
            return made
        raise ValueError("it is empty")

    return providers.secret_of("Spark's secret", file, text, "TL-C141", "Write the cluster's into it, mode 0600.")


def settings_of(bridge: Bridge) -> dict[str, str]:
    """The settings of the bridge's session, without a secret.

    What names a place of this machine alone, is left out where tasks run elsewhere: the class path of the driver's file
    system, the directory of its sockets.
    """
    own, master = bridge.spark, bridge.spark.master
    here = not is_cluster(master)
    return {
        **spark_conf(),
        **(_LOOPBACK if stays_here(master) else {}),
        **(_AUTHENTICATE if brings_a_secret(master) or own.secret_file else {}),
        **(short_sockets(bridge.state_dir) if here else _SOCKETS),
        "spark.ui.enabled": str(own.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        **({**localfs.settings(), **_PATIENT} if here else {}),
        "spark.sql.ansi.enabled": "false",
        # Of each query, for a driver that is busy with another for a minute (`LineRunner`); by default Spark keeps 100.
        "spark.sql.streaming.numRecentProgressUpdates": "500",
        "spark.sql.session.timeZone": "UTC",
        **_COMPILED,
        "spark.sql.warehouse.dir": str(bridge.state_dir / "spark-warehouse"),
        **{name: value for line in bridge.lines for name, value in policy(line.guarantee).spark.items()},
        **(_STATEFUL if any(line.within for line in bridge.uplinks) else {}),
        **({"spark.jars": ",".join(map(str, own.kafka_jars))} if own.kafka_jars else {}),
        **{name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in own.conf.items()},
        **EACH_ONCE,
    }


def look_at_master(master: str) -> None:
    """See that a standalone master can be reached: Spark tries for a minute, and then says that it was stopped.

    Args:
        master: Spark's; of several one is enough. Another kind is left to Spark.

    Raises:
        SetupError: TL-S34, none answers.
    """
    silent = []
    for host, port in addresses(master):
        try:
            socket.create_connection((host, port), timeout=_ANSWER_S).close()
        except OSError as error:
            silent.append(f"{host}:{port} ({files.why(error)})")
        else:
            return
    if silent:
        what = f"no master answers at {', '.join(silent)}"
        raise SetupError("TL-S34", "spark", what, "Start it, or correct --master, or master in [spark].")


def look_at_executors(spark: SparkSession, bridge: Bridge) -> int:
    """Ask those that were not asked before; nothing with a local master. Raises as `check_executors`."""
    from towline.spark.executors import check_executors  # noqa: PLC0415 - loads PySpark

    return check_executors(spark, shared=shared_of(bridge), files=files_of(bridge))


def files_of(bridge: Bridge) -> list[str]:
    """The files that a task reads where it runs: secrets and certificates of Kafka's client."""
    client = bridge.kafka.client()
    return [value for name, value in client.items() if name.endswith(".file") or (name in _FILES and value != _PROBE)]


def shared_of(bridge: Bridge) -> list[Path]:
    """The directories that tasks write and read as the driver does: state of lines that drop repeats."""
    return [bridge.state_dir] if any(line.within for line in bridge.uplinks) else []


# -- around the driver's process ---------------------------------------------------------------------------------------

#: In the bridge's state directory; no line can have this name.
SCRATCH: Final = ".tmp"

#: Asked of a Python: what tasks need is imported, or the last line says what is not there.
_ASKED: Final = (
    "import sys, pyspark, towline.spark.source; "
    "print('Python', '.'.join(map(str, sys.version_info[:2])), 'with PySpark', pyspark.__version__)"
)

#: Of ``/.UUID.sock``, as Spark names the sockets of its Python processes.
_SOCKET_NAME: Final = 43


def check_java(environ: Mapping[str, str] = os.environ, *, version: bool = False) -> None:
    """See that there is a Java as Spark looks for it (``bin/spark-class``), and of its version, which takes a moment.

    Raises:
        SetupError: TL-S21: nothing without it works at any later try.
    """
    if "SPARK_HOME" in environ or "SPARK_CONF_DIR" in environ:
        return  # its spark-env.sh may know one
    home = environ.get("JAVA_HOME")
    place = f"{home}/bin" if home else environ.get("PATH")
    java = shutil.which("java", path=place)
    problem = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is none on PATH"
    if java is not None:
        feature = java_version(java) if version else None
        if feature is None or feature >= OLDEST_JAVA:
            return
        problem = f"{java} is version {feature}"
    do = f"Install Java {OLDEST_JAVA} (Debian: apt install openjdk-{OLDEST_JAVA}-jre-headless), or set JAVA_HOME."
    raise SetupError("TL-S21", "java", f"Spark needs Java {OLDEST_JAVA} or newer, and {problem}", do)


def check_python(master: str, environ: Mapping[str, str] = os.environ) -> None:
    """See that the Python of Spark's tasks, if a variable names one, has the versions that this one has.

    Of a cluster each executor is asked (`towline.spark.executors`).

    Raises:
        SetupError: TL-B60, tasks would fail at each try.
    """
    named = environ.get("PYSPARK_PYTHON")
    if not named or is_cluster(master) or shutil.which(named, path=environ.get("PATH")) == sys.executable:
        return
    ours = f"Python {'.'.join(map(str, sys.version_info[:2]))} with PySpark {pyspark_version()}"
    command = [named, "-c", _ASKED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ, timeout=60, check=False)
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = [files.why(error) if isinstance(error, OSError) else "no answer"]
    if said != [ours]:
        what = f'Spark would run tasks with "{named}" ({"".join(said)}), and this is {ours}'
        do = "Unset the variable, or name a Python of this version with this PySpark and Towline."
        raise SetupError("TL-B60", "PYSPARK_PYTHON", what, do)


def scratch(state_dir: Path) -> tuple[Path, int]:
    """A new directory for a Spark process, once those of processes that have ended are gone.

    Returns:
        The directory, and a descriptor that locks it for as long as the process that inherits it lives.
    """
    root = state_dir / SCRATCH
    root.mkdir(mode=0o700, exist_ok=True)
    for left in root.glob("spark-*"):
        handle = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if files.locked(handle):  # else of a driver that is still ending
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(handle)
    place = Path(tempfile.mkdtemp(prefix="spark-", dir=root))
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return place, handle


def environment(bridge: Bridge, place: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The driver's environment, with a place from `scratch`; a ``spark.local.dir`` of the user's is left alone.

    With a local or a standalone master, Spark's processes start quicker in a home of our own, from an archive of
    classes; with a local one its checkpoints are written by `towline.spark.localfs`.
    """
    variables = dict(environ)
    master = bridge.spark.master
    # Executors of a standalone cluster have their worker's home; elsewhere they may need the driver's copy of PySpark.
    started = not is_cluster(master) or master.startswith("spark://")
    home = light_home() if started else None
    options = jvm_options(bridge.spark.tier) if started else []
    variables |= localfs.class_path(environ) if not is_cluster(master) else {}
    variables |= _python(bridge, place, environ) if is_cluster(master) else {}
    if home is not None:
        variables["SPARK_HOME"] = str(home)
        with contextlib.suppress(SetupError):  # Spark may know a Java that we do not
            options += sharing(archive_of(home))
    # The JVM names files in the locale's encoding: in any other it can't open a directory named by UTF-8.
    locale = next(filter(None, map(environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if "utf" not in locale.lower():
        variables["LC_ALL"] = "C.UTF-8"
    if "spark.local.dir" not in bridge.spark.conf:
        variables.setdefault("SPARK_LOCAL_DIRS", str(place))
    places: list[str] = []
    if not os.statvfs(place).f_flag & os.ST_NOEXEC:  # native libraries are unpacked there too
        places = [f"-Djava.io.tmpdir={place}"]
    # Of two that say the same the later one counts: the user's before ours, but for the place.
    said = [*map(quoted, options), environ.get("SPARK_SUBMIT_OPTS", ""), *map(quoted, places)]
    variables["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, said))
    return variables


def _python(bridge: Bridge, place: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The Python that executors run, which has to lead to this one on the driver: Spark runs it here too.

    A name is looked for on PATH. A relative path, as ``./environment/bin/python``, leads into an archive that each
    executor has unpacked where it stands; the driver stands in `place`, which gets a link of that name.
    """
    named = Path(environ.get("PYSPARK_PYTHON") or str(bridge.spark.conf.get("spark.pyspark.python", sys.executable)))
    made = {"PYSPARK_PYTHON": str(named)}
    if named.is_absolute():
        return made
    if len(named.parts) > 1:
        (place / named.parts[0]).symlink_to(sys.prefix)
        return made
    return {**made, "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), environ.get("PATH"))))}


def quoted(option: str) -> str:
    """As Spark's launcher reads a list of options (`CommandBuilderUtils.parseOptionString`)."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if " " in option or escaped != option else option


def short_sockets(state_dir: Path) -> dict[str, str]:
    """Where the sockets of Spark's Python processes go, if their paths would be too long in Java's directory."""
    javas = f"{state_dir.absolute()}/{SCRATCH}/spark-abcdefgh"
    short = short_place(_SOCKET_NAME, javas, tempfile.gettempdir())
    return {"spark.python.unix.domain.socket.dir": short} if short != javas else {}
