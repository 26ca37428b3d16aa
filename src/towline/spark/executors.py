"""Whether each executor of a cluster can run Towline, asked with one small task before the first batch.

An executor is another machine: Python, its packages and files are there or not. Without this look a line would fail in
the midst of a batch, again and again, with a traceback of whichever executor had the task.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark import RDD, cloudpickle
from pyspark.serializers import CPickleSerializer

from towline.errors import SetupError
from towline.spark.session import is_cluster
from towline.version import version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What reading from a gateway and writing to Kafka load in a worker, with the oldest version (pyproject.toml).
NEEDED: Final[Mapping[str, str]] = {"pyarrow": "20", "confluent-kafka": "2.13.2", "crc32c": "2.7"}
_OURS: Final = "towline"

#: Seconds that the first executor may take to come, and that others may come after it.
FIRST_S: Final = 60.0
_OTHERS_S: Final = 2.0
_POLL_S: Final = 0.1
#: Tasks at a time; each is a job of its own, so that one executor's failure says nothing of another.
_AT_ONCE: Final = 16
#: Executors that a message names.
_NAMED: Final = 3
#: Characters of a foreign error that are shown.
_LONGEST: Final = 200
_ADVICE: Final = "Install there what the driver has, or ship it (docs/cluster.md, Python on the executors)."
_SHARE: Final = (
    "Move state_dir to a file system that all of them share, as the same user; or run that line with a local master, "
    "in a bridge file of its own."
)
_OTHER_PYTHON: Final = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version: (\S+?) than that in driver: (\S+?)[,\s]")
_NO_MODULE: Final = re.compile(r"No module named '?([\w.]+)")
_NO_PYTHON: Final = re.compile(r'Cannot run program "([^"]+)"')
#: Executors that have been found able, by application.
_able: Final[dict[str, set[str]]] = {}


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """An executor, and what it lacks.

    Attributes:
        name: Spark's id of it.
        address: Where it listens, ``HOST:PORT``, as Spark names it.
        host: Its machine, as that calls itself; "" when its Python did not answer.
        lacks: What it lacks, in words.
        unshared: Of the directories that it must share with the driver, those that it does not.
    """

    name: str
    address: str
    host: str = ""
    lacks: Sequence[str] = ()
    unshared: Sequence[str] = ()

    @property
    def called(self) -> str:
        """What a person calls it."""
        host = self.address.rpartition(":")[0]
        return f"executor {self.name} on {f'{self.host} ({host})' if self.host else host}"


def check_executors(
    spark: SparkSession,
    *,
    shared: Iterable[Path] = (),
    files: Iterable[str] = (),
    more: Mapping[str, str] | None = None,
    wait_s: float = FIRST_S,
) -> int:
    """See that each executor of a cluster has what Towline needs; nothing to see with a local master.

    Args:
        spark: The session. A Connect session is left alone: its executors are its server's business.
        shared: Directories that each executor must read and write as the driver does, for the state of a query.
        files: Files that each executor must be able to read: secrets, certificates.
        more: Further distributions with their oldest versions, of a transform of yours.
        wait_s: Seconds that the first executor may take to come.

    Returns:
        How many executors were asked now; one that was found able is not asked again.

    Raises:
        SetupError: TL-S31 an executor lacks something; TL-S32 none came; TL-S33 one has not a directory that is shared.
    """
    context = getattr(spark, "_sc", None)
    if context is None or not is_cluster(context.master):
        return 0
    able = _able.setdefault(context.applicationId, set())
    needed = {_OURS: version(), **NEEDED, **(more or {})}
    with _marked(shared) as marks, ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = partial(lacking, needed, marks, tuple(files))
        coming = (one for one in _registered(context, wait_s) if one.name not in able)
        # One is asked while others are waited for.
        answers = [pool.submit(_ask, context, one, asked) for one in coming]
        reports = [answer.result() for answer in answers]
    if error := complaint(reports):
        raise error
    for one in reports:
        if one.unshared:
            what = "it can't read and write {} as the driver does, where a line with dedupe keeps its state"
            raise SetupError("TL-S33", one.called, what.format(one.unshared[0]), _SHARE)
    able.update(one.name for one in reports)
    return len(reports)


def complaint(reports: Sequence[ExecutorReport]) -> SetupError | None:
    """One line for all executors that lack something; None where none does. Pure."""
    told = [(one.called, ", ".join(one.lacks)) for one in reports if one.lacks]
    if not told:
        return None
    (where, what), *others = told
    what += "".join(f"; {place}: {words}" for place, words in others[: _NAMED - 1])
    if len(told) > _NAMED:
        what += f"; and {len(told) - _NAMED} more executors"
    return SetupError("TL-S31", where, what, _ADVICE)


def without_answer(error: str) -> str:
    """What an executor lacks whose Python did not answer, by what Spark says. Pure."""
    if other := _OTHER_PYTHON.search(error):
        return f"its Python is {other[1]}, the driver's is {other[2]}"
    if none := _NO_PYTHON.search(error):
        return f"it has no {none[1]}, the Python that PYSPARK_PYTHON of the driver names"
    if absent := _NO_MODULE.search(error):
        return f"its Python has no {absent[1]}"
    first = next((line.strip() for line in error.splitlines() if line.strip()), "no reason is told")
    return f"its Python gave no answer ({first[:_LONGEST]})"


# -- asking --------------------------------------------------------------------------------------------------------


@contextmanager
def _marked(places: Iterable[Path]) -> Iterator[tuple[str, ...]]:
    """A file in each directory that must be shared, with a name that no other file has."""
    marks = [place / f".towline-{secrets.token_hex(16)}" for place in places]
    try:
        for mark in marks:
            mark.touch(0o600)
        yield tuple(map(str, marks))
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def _registered(context: Any, wait_s: float) -> Iterator[ExecutorReport]:
    """The executors as they come, until one is there and no other one has come for a moment."""
    deadline = time.monotonic() + wait_s
    seen: set[str] = set()
    while True:
        for one in _listed(context):
            if one.name not in seen:
                seen.add(one.name)
                deadline = time.monotonic() + _OTHERS_S
                yield one
        if time.monotonic() >= deadline:
            if seen:
                return
            what = f"no executor came within {wait_s:.0f} s"
            do = (
                "Has the cluster a free worker with the memory and cores that are asked for (its web page tells), and "
                f"do its workers reach the driver at {context.getConf().get('spark.driver.host', 'its address')}?"
            )
            raise SetupError("TL-S32", context.master, what, do)
        time.sleep(_POLL_S)


def _listed(context: Any) -> list[ExecutorReport]:
    """Spark's live executors, without the driver."""
    known = context._jsc.sc().statusStore().executorList(True)  # noqa: SLF001 - there is no public way
    summaries = [known.apply(index) for index in range(known.size())]
    return [ExecutorReport(one.id(), one.hostPort()) for one in summaries if one.id() != "driver"]


def _ask(context: Any, executor: ExecutorReport, asked: Callable[[], tuple[Any, ...]]) -> ExecutorReport:
    """One task on one executor, which takes its function and plain values along instead of names of modules."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    try:
        ((host, lacks, unshared),) = _located(context, executor).map(lambda _: asked()).collect()
    except Exception as error:  # noqa: BLE001 - whatever Spark says is this executor's answer
        return replace(executor, lacks=[without_answer(str(error))])
    return replace(executor, host=host, lacks=lacks, unshared=unshared)


def _located(context: Any, executor: ExecutorReport) -> RDD[Any]:
    """One element that wants to be on this executor (`ExecutorCacheTaskLocation`)."""
    jvm, serializer = context._jvm, CPickleSerializer()  # noqa: SLF001 - Python has no call that names an executor
    element = bytearray(serializer.dumps(None))  # type: ignore[no-untyped-call]
    place = jvm.PythonUtils.toSeq([f"executor_{executor.address.rpartition(':')[0]}_{executor.name}"])
    kind = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    located = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([jvm.scala.Tuple2(element, place)]), kind)  # noqa: SLF001
    return RDD(jvm.org.apache.spark.api.java.JavaRDD(located, kind), context, serializer)


def lacking(
    needed: Mapping[str, str], marks: tuple[str, ...], files: tuple[str, ...]
) -> tuple[str, list[str], list[str]]:
    """What an executor lacks, asked in a task. It travels as code: an executor may have nothing of Towline's.

    Args:
        needed: Distributions, as PyPI has them, with their oldest versions; of Towline the driver's own. A module has
            the same name with underscores.
        marks: A file of each shared directory, which it must read and write.
        files: Files that must be readable.

    Returns:
        Its host's name, what it lacks in words, and those of the shared directories that it does not see.
    """
    import os  # noqa: PLC0415 - the code travels without its module
    import re  # noqa: PLC0415
    import socket  # noqa: PLC0415
    from importlib import import_module, metadata  # noqa: PLC0415

    def numbers(text: str) -> list[int]:
        """A version as far as it is one: ``2.13.2rc1`` is 2, 13, 2."""
        return [int(part) for part in re.findall(r"^[\d.]*", text.strip())[0].split(".") if part]

    lacks = []
    for name, oldest in needed.items():
        try:
            import_module(name.replace("-", "_"))
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            there = ""  # it is, without its version
        except ModuleNotFoundError:
            lacks.append(f"{name} is missing")
            continue
        except Exception as error:  # noqa: BLE001 - a library of the system is missing, for another libc, ...
            lacks.append(f"{name} can't be loaded ({type(error).__name__}: {error})")
            continue
        if name == "towline" and there != oldest:
            lacks.append(f"towline is {there or 'of an unknown version'}, the driver's is {oldest}")
        elif name != "towline" and there and numbers(there) < numbers(oldest):
            lacks.append(f"{name} {there} is older than {oldest}")
    lacks += [f"the file {file} can't be read" for file in files if not os.access(os.path.expanduser(file), os.R_OK)]  # noqa: PTH111
    unshared = []
    for mark in marks:
        try:
            open(mark, "r+b").close()  # noqa: PTH123 - one import less
        except OSError:
            unshared.append(os.path.dirname(mark))  # noqa: PTH120
    return socket.gethostname(), lacks, unshared
