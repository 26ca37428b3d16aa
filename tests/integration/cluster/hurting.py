"""Processes of a cluster, found and killed, and what they show: executors, the driver and its JVM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.integration.spark.searching import contents, crawled, running
from towline_prove.devstack.spark import SparkCluster, SparkWorker

_EXECUTOR = "CoarseGrainedExecutorBackend"


def executors_of(worker: SparkWorker) -> list[psutil.Process]:
    """The executors that a worker has started."""
    pid = worker.pid
    return [] if pid is None else [one for one in _below(pid) if _EXECUTOR in _command(one)]


def process_below(pid: int, part: str) -> psutil.Process | None:
    """The first child, near or far, whose command line has a text in it."""
    return next((one for one in _below(pid) if part in _command(one)), None)


def alive(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped, but has not ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """A process and its children, near and far."""
    return [process, *_below(process.pid)]


def kill(process: psutil.Process) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(process.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        process.wait(30)


#: Of `shown_by`: here executors have Spark's own secret from their worker, and nothing else.
ENVIRONMENTS = "environments"


def shown_by(cluster: SparkCluster, *pages: str, leaving_out: Iterable[Path] = ()) -> dict[str, str]:
    """What somebody sees who has none of the files of secrets, by where it is: pages, processes, files.

    Args:
        cluster: Its servers that run.
        pages: That of a driver, from which links lead on.
        leaving_out: Files of secrets that the machines have.
    """
    servers = [one for one in cluster.servers if one.running]
    own = [cluster.secret_file, cluster.properties_file, *leaving_out]
    own += [one.directory / "spark.properties" for one in cluster.servers]
    roots = [Path(f"/proc/{one.pid}/root") for one in servers]
    machines = [contents(root / "tmp", *(Path(f"{root}{file}") for file in own)) for root in roots]
    return {
        **crawled(*pages, *(f"http://{one.host}:{one.ports[1]}" for one in servers)),
        "command lines": running(psutil.process_iter(), "cmdline"),
        ENVIRONMENTS: running(psutil.process_iter(), "environ"),
        "temporary files of the other machines": "".join(machines),
        "Spark's files": contents(cluster.directory, *own),
    }


def seen_by(pid: int, path: Path) -> bool:
    """Whether a process can reach a path of ours by its name."""
    return Path(f"/proc/{pid}/root{path}").exists()


def _below(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
