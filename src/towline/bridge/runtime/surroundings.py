"""What the driver's process finds around it: Java, its environment, and a directory for what Spark drops.

A Spark that is killed leaves its folders behind, wherever they are: here they lie in the bridge's state directory, one
for each start, and those of processes that have ended are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from towline import files
from towline.bridge.config.model import Bridge
from towline.errors import SetupError
from towline.gateway.endpoint import short_place
from towline.spark import localfs
from towline.spark.java import OLDEST_JAVA, java_version
from towline.spark.quickstart import archive_of, jvm_options, light_home, sharing
from towline.spark.session import is_cluster, pyspark_version

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
