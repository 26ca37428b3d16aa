"""Spark session of a bridge, checks of Java, Python and the cluster, and environment of the driver process.

A killed Spark process leaves its temporary directories behind. They are in the bridge's state directory, one for each
start, and those of ended processes are removed. PySpark is imported only where a session is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import socket
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
from towline.gateway.endpoint import short_directory
from towline.guarantee import policy
from towline.spark.java import (
    archive_options,
    jvm_options,
    light_spark_home,
    local_fs_settings,
    local_fs_variables,
    spark_archive_path,
)
from towline.spark.session import (
    generates_secret,
    is_cluster,
    register,
    spark_conf,
    standalone_addresses,
    uses_loopback_only,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: For a line with dedupe. One partition: the rows of a device must not be spread over several and come back in another
#: order. No extra batch that clears old keys: the next batch does it.
_DEDUPE: Final = {"spark.sql.shuffle.partitions": "1", "spark.sql.streaming.noDataMicroBatches.enabled": "false"}
#: Each operator of a plan is compiled alone. Compiled as one method, the expressions of a line are too large for the
#: JVM's just-in-time compiler (8,000 bytes), and those of a Hono line exceed the limit of a method (65,535 bytes):
#: Java refuses it, in every batch again (WholeStageCodegenExec).
_CODEGEN_SETTINGS: Final = {"spark.sql.codegen.wholeStage": "false"}
#: With a secret of Spark's own, or of the file. Without one, another user of the machine, or of
#: its network, could read blocks of messages at Spark's ports, and hand the driver Java objects to deserialize.
_AUTHENTICATION_SETTINGS: Final = {"spark.authenticate": "true"}
_SECRET_SETTING: Final = "spark.authenticate.secret"  # noqa: S105 - its name
#: Names of settings whose values Spark redacts (default of ``spark.redaction.regex``).
_SECRET_NAMES: Final = re.compile("(?i)secret|password|token|access[.]?key")
_LOOPBACK_SETTINGS: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
#: Count the rows of one attempt of a task in ``observe``: Spark's default, which [spark.conf] must not change.
OBSERVE_SETTINGS: Final[Mapping[str, str]] = {"spark.sql.legacy.observeMetricsAggregateAllAttempts": "false"}
#: Socket directory of executors' Python processes, which every machine has. The driver's directory, or that
#: of a YARN container, may be too long for a socket path.
_EXECUTOR_SOCKET_SETTINGS: Final = {"spark.python.unix.domain.socket.dir": "/tmp"}  # noqa: S108 - on other machines; the names are UUIDs
#: Spark removes an executor without a heartbeat for ``spark.network.timeout`` (120 s), as on a suspended machine.
#: The executor of a local master can't register again; its JVM ends ten minutes later (`HeartbeatReceiver`).
_HEARTBEAT_SETTINGS: Final = {"spark.storage.blockManagerHeartbeatTimeoutMs": "365d"}
#: Settings of the Kafka client with the path of a file, beside the secrets.
_CERTIFICATES: Final = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location")
#: Value of ``ssl.ca.location``: librdkafka searches for the machine's certificates.
_PROBE: Final = "probe"
#: Seconds for a connection to one master.
_CONNECT_TIMEOUT_S: Final = 5.0


def create_session(bridge: Bridge) -> SparkSession:
    """Return the Spark session of a bridge, with both data sources registered; sets the umask of this process to 077.

    ``spark.sql.ansi.enabled`` is off: with ANSI rules a payload that can't be cast in a ``where`` would raise, fail its
    batch at every retry and stop the line. Without them the value is null, and the message is counted.
    """
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - see the module
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from towline.bridge.uplink.sink import FORMATS  # noqa: PLC0415

    if bridge.downlinks:
        java_client(bridge.kafka.client_settings())  # its secrets, in the environment the JVM inherits
    # Blocks, artifacts and the sockets of Python workers, in /tmp, hold messages: the JVM and its workers inherit this.
    os.umask(0o077)
    if uses_loopback_only(bridge.spark.master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # else the web UI listens on every address
    conf = session_settings(bridge)
    secret = cluster_secret(bridge.spark)
    secret_settings = {name: conf.pop(name) for name in [*conf] if _SECRET_NAMES.search(name)}
    secret_settings |= {} if secret is None else {_SECRET_SETTING: secret}
    user = _user_without_passwd_entry(bridge.state_dir)
    jars = conf.pop("spark.jars", "") if user else ""
    if jars:  # the launcher would log in to fetch them; after Spark's own jars, as in `local_fs_variables`
        secret_settings["spark.jars"] = jars
        class_path = [os.environ.get("SPARK_DIST_CLASSPATH"), *jars.split(",")]
        os.environ["SPARK_DIST_CLASSPATH"] = os.pathsep.join(filter(None, class_path))
    name, master = f"towline {bridge.name}", bridge.spark.master
    if secret_settings or user:  # set in the running JVM: its command line is visible to other users [I12]
        context_conf = SparkConf().setMaster(master).setAppName(name).setAll([*conf.items()])
        SparkContext._ensure_initialized(conf=context_conf)  # noqa: SLF001 - as the builder does it
        if user:
            login: Any = SparkContext._jvm.org.apache.hadoop.security.UserGroupInformation  # type: ignore[union-attr]  # noqa: SLF001
            login.setLoginUser(login.createRemoteUser(user))
        SparkContext.getOrCreate(context_conf.setAll([*secret_settings.items()]))
    spark = SparkSession.builder.master(master).appName(name).config(map={**conf}).getOrCreate()
    register(spark)
    for source in FORMATS:
        spark.dataSource.register(source)
    return spark


def _user_without_passwd_entry(home: Path) -> str | None:
    """Return the user name for Hadoop, which refuses users without a passwd entry; None for a user with an entry.

    The name is ``SPARK_USER``, or the user id. It also sets ``user.home`` in ``SPARK_SUBMIT_OPTS``.
    """
    with contextlib.suppress(KeyError):
        pwd.getpwuid(os.geteuid())
        return None
    user_options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{quote_option(f'-Duser.home={home}')} {user_options}"
    return os.environ.setdefault("SPARK_USER", str(os.geteuid()))


def cluster_secret(spark: SparkSection) -> str | None:
    """Return the secret of ``spark.authenticate`` from its file; None without a file.

    Raises:
        ConfigError: TL-C141, the file can't be read, or is empty.
    """
    file = spark.secret_file
    if file is None or generates_secret(spark.master):
        return None

    def parse_secret(content: bytes) -> str:
        if secret := content.decode().strip():
            return secret
        raise ValueError("it is empty")

    remedy = "Write the cluster's secret to it, mode 0600."
    return providers.read_secret("Spark's secret", file, parse_secret, "TL-C141", remedy)


def session_settings(bridge: Bridge) -> dict[str, str]:
    """Return the Spark settings of the session, without secrets.

    On a cluster the settings that name a path of this machine are left out: class path of the driver's file system,
    directory of its sockets.
    """
    section, master = bridge.spark, bridge.spark.master
    is_local = not is_cluster(master)
    return {
        **spark_conf(),
        **(_LOOPBACK_SETTINGS if uses_loopback_only(master) else {}),
        **(_AUTHENTICATION_SETTINGS if generates_secret(master) or section.secret_file else {}),
        **(socket_settings(bridge.state_dir) if is_local else _EXECUTOR_SOCKET_SETTINGS),
        "spark.ui.enabled": str(section.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        **({**local_fs_settings(), **_HEARTBEAT_SETTINGS} if is_local else {}),
        "spark.sql.ansi.enabled": "false",
        # For each query; the driver may be busy with another query for a minute (`LineRunner`). Spark's default is 100.
        "spark.sql.streaming.numRecentProgressUpdates": "500",
        "spark.sql.session.timeZone": "UTC",
        **_CODEGEN_SETTINGS,
        "spark.sql.warehouse.dir": str(bridge.state_dir / "spark-warehouse"),
        **{name: value for line in bridge.lines for name, value in policy(line.guarantee).spark_settings.items()},
        **(_DEDUPE if any(line.dedupe_window for line in bridge.uplinks) else {}),
        **({"spark.jars": ",".join(map(str, section.kafka_jars))} if section.kafka_jars else {}),
        **{name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in section.conf.items()},
        **OBSERVE_SETTINGS,
    }


def check_master(master: str) -> None:
    """Check that one standalone master of a URL accepts connections: Spark itself tries for a minute.

    Raises:
        SetupError: TL-S34, no master answers.
    """
    unreachable_hosts = []
    for host, port in standalone_addresses(master):
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            unreachable_hosts.append(f"{host}:{port} ({files.os_error_text(error)})")
        else:
            return
    if unreachable_hosts:
        problem = f"no master answers at {', '.join(unreachable_hosts)}"
        raise SetupError("TL-S34", "spark", problem, "Start it, or correct master in [spark].")


def check_new_executors(spark: SparkSession, bridge: Bridge) -> None:
    """Check the executors that were not checked before; none with a local master. Raises as `check_executors`."""
    from towline.spark.executors import check_executors  # noqa: PLC0415 - loads PySpark

    settings = bridge.kafka.client_settings()
    names = (name for name in settings if name.endswith(".file") or name in _CERTIFICATES)
    files_of_tasks = [settings[name] for name in names if settings[name] != _PROBE]
    # Tasks and driver share the state of lines that drop repeats.
    directories = [bridge.state_dir] if any(line.dedupe_window for line in bridge.uplinks) else []
    check_executors(spark, shared_directories=directories, files=files_of_tasks)


# -- environment of the driver process ---------------------------------------------------------------------------------

#: Name of the scratch directory in the state directory; not a legal name of a line.
SCRATCH_DIR: Final = ".tmp"

#: Python of a local master's tasks: this one has the packages that they import, whatever the user set for others.
_OWN_PYTHON: Final = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}

#: Length of ``/.UUID.sock``, the name of a socket of Spark's Python processes.
_SOCKET_NAME_LENGTH: Final = 43


def create_scratch_dir(state_dir: Path) -> tuple[Path, int]:
    """Create a scratch directory for a Spark process, and remove those of ended processes.

    Returns:
        The directory, and a descriptor that locks it until the process that inherits it ends.
    """
    root = state_dir / SCRATCH_DIR
    root.mkdir(mode=0o700, exist_ok=True)
    for old_directory in root.glob("spark-*"):
        handle = os.open(old_directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if files.try_lock(handle):  # else its process is still ending
                shutil.rmtree(old_directory, ignore_errors=True)
        finally:
            os.close(handle)
    directory = Path(tempfile.mkdtemp(prefix="spark-", dir=root))
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return directory, handle


def driver_environment(bridge: Bridge, scratch_dir: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of the driver process; a ``spark.local.dir`` of the user is not changed.

    With a local or standalone master, Spark starts faster from a home directory of our own, with a class archive. With
    a local master its checkpoints are written by the file system of `local_fs_settings`.
    """
    variables = dict(environ)
    master = bridge.spark.master
    # Executors of a standalone cluster use their worker's home; others may need the driver's copy of PySpark.
    uses_own_home = not is_cluster(master) or master.startswith("spark://")
    home = light_spark_home() if uses_own_home else None
    options = jvm_options() if uses_own_home else []
    variables |= local_fs_variables(environ) if not is_cluster(master) else {}
    variables |= _executor_python(bridge, scratch_dir, environ) if is_cluster(master) else _OWN_PYTHON
    if home is not None:
        variables["SPARK_HOME"] = str(home)
        with contextlib.suppress(SetupError):  # Spark may find a Java elsewhere
            options += archive_options(spark_archive_path(home))
    # The JVM encodes file names by the locale: with another one it can't open a directory with a UTF-8 name.
    locale = next(filter(None, map(environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if "utf" not in locale.lower():
        variables["LC_ALL"] = "C.UTF-8"
    if "spark.local.dir" not in bridge.spark.conf:
        variables.setdefault("SPARK_LOCAL_DIRS", str(scratch_dir))
    # The last one of equal options counts: ours, then the user's, then the directory.
    submit_options = [*map(quote_option, options), environ.get("SPARK_SUBMIT_OPTS", "")]
    if not os.statvfs(scratch_dir).f_flag & os.ST_NOEXEC:  # native libraries are unpacked and loaded there
        submit_options.append(quote_option(f"-Djava.io.tmpdir={scratch_dir}"))
    variables["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, submit_options))
    return variables


def _executor_python(bridge: Bridge, scratch_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select the Python of executors; Spark runs it on the driver too.

    A name is searched on PATH. A relative path, such as ``./environment/bin/python``, is inside an archive that each
    executor unpacks in its working directory; the driver's gets a link of that name.
    """
    python = Path(environ.get("PYSPARK_PYTHON") or str(bridge.spark.conf.get("spark.pyspark.python", sys.executable)))
    variables = {"PYSPARK_PYTHON": str(python)}
    if python.is_absolute():
        return variables
    if len(python.parts) > 1:
        (scratch_dir / python.parts[0]).symlink_to(sys.prefix)
        return variables
    return {**variables, "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), environ.get("PATH"))))}


def quote_option(option: str) -> str:
    """Quote an option for Spark's launcher (`CommandBuilderUtils.parseOptionString`)."""
    escaped_option = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped_option}"' if " " in option or escaped_option != option else option


def socket_settings(state_dir: Path) -> dict[str, str]:
    """Return the setting of a short socket directory for Python workers, if the default path is too long."""
    default_directory = f"{state_dir.absolute()}/{SCRATCH_DIR}/spark-abcdefgh"
    directory = short_directory(_SOCKET_NAME_LENGTH, default_directory, tempfile.gettempdir())
    return {"spark.python.unix.domain.socket.dir": directory} if directory != default_directory else {}
