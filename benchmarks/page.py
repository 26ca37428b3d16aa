"""What the page costs the bridge that serves it: its supervisor's CPU without a page, with one, and with twenty.

A real bridge of ten lines takes in messages at a steady rate. A page is what a browser asks for: a stream of states
with one line's details, and the line's history every seven seconds. CPU is that of the supervisor process, which
serves the page, in rounds that follow each other; beside it the share of the messages that were in Kafka at the end of
a window, with the pages and without.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from towline.bridge.runtime.state import read_state
from towline_prove.devstack import Kafka, Mosquitto, free_port
from towline_prove.devstack.process import wait_for

PAGES: Final = (0, 1, 20)
_HISTORY_S: Final = 7.0
_RATE: Final = 200
_FILE: Final = """\
name = "page"
state_dir = "state"
mqtt = {{ brokers = "{mqtt}" }}
kafka = {{ bootstrap_servers = "{kafka}", create_topics = {{ partitions = 1 }} }}
spark = {{ master = "local[2]" }}
monitor = {{ listen = "127.0.0.1:{port}", page = true }}
"""
_LINE: Final = '[[uplink]]\nname = "line-{0}"\nroute = [{{ from = "line-{0}/#", topic = "line-{0}" }}]\n'


def run(*, lines: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory, port = Path(name), free_port()
        broker = stack.enter_context(Mosquitto(directory / "broker", settings={"max_queued_messages": "0"}))
        kafka = stack.enter_context(Kafka(directory / "kafka"))
        file = directory / "bridge.toml"
        head = _FILE.format(mqtt=broker.uri, kafka=kafka.bootstrap, port=port)
        file.write_text(head + "".join(map(_LINE.format, range(lines))))
        process = stack.enter_context(_bridge(file))
        state = _wait_until_running(directory / "state", lines)
        stack.enter_context(_load(broker.uri, lines))
        time.sleep(seconds)
        shares: dict[int, list[float]] = {pages: [] for pages in PAGES}
        waiting: dict[int, list[float]] = {pages: [] for pages in PAGES}
        for _ in range(rounds):
            for pages in PAGES:
                with _pages(port, pages, [*state["lines"]]):
                    time.sleep(2.0)
                    began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
                    time.sleep(seconds)
                    spent = sum(process.cpu_times()[:2]) - cpu
                    shares[pages].append(100 * spent / (time.monotonic() - began))
                    accounts = [
                        line["account"] or {} for line in (read_state(directory / "state") or state)["lines"].values()
                    ]
                    waiting[pages].append(sum(account.get("waiting", 0) for account in accounts))
    for pages in PAGES:
        own = statistics.median(shares[pages]) - statistics.median(shares[0])
        print(
            f"{pages:>3} pages   supervisor {statistics.median(shares[pages]):5.2f} % of a core "
            f"({min(shares[pages]):.2f} to {max(shares[pages]):.2f}), of them the pages {own:5.2f} %   "
            f"waiting {statistics.median(waiting[pages]):,.0f} messages"
        )
    return {f"{pages} pages": [round(share, 2) for share in shares[pages]] for pages in PAGES}


@contextlib.contextmanager
def _bridge(file: Path) -> Iterator[psutil.Process]:
    with (file.parent / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "towline", "run", str(file)], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_running(state_dir: Path, lines: int) -> dict[str, Any]:
    def all_running() -> bool:
        state = read_state(state_dir) or {"lines": {}}
        running = [line for line in state["lines"].values() if line["query"] == "running" and line["account"]]
        return len(running) == lines

    wait_for(all_running, 240, 0.5)
    return read_state(state_dir) or {"lines": {}}


@contextlib.contextmanager
def _load(uri: str, lines: int) -> Iterator[None]:
    """Publish at a steady rate to each line."""
    from towline import Client  # noqa: PLC0415

    stopping = threading.Event()

    def publish() -> None:
        with Client(uri, client_id="load") as client:
            number = 0
            while not stopping.wait(0.1):
                for _ in range(_RATE // 10):
                    number += 1
                    client.publish(f"line-{number % lines}/d{number % 50}", b"x" * 150, qos=1)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextlib.contextmanager
def _pages(port: int, count: int, names: list[str]) -> Iterator[None]:
    stopping = threading.Event()
    threads = [
        threading.Thread(target=work, args=(port, names[number % len(names)], stopping), daemon=True)
        for number in range(count)
        for work in (_read_states, _read_history)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.15)  # the server takes ten clients a second
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _read_states(port: int, name: str, stopping: threading.Event) -> None:
    _answer(port, f"/page/events?line={name}", lambda answer: _drain(answer, stopping))


def _drain(answer: http.client.HTTPResponse, stopping: threading.Event) -> None:
    while not stopping.is_set() and answer.readline():
        pass


def _read_history(port: int, name: str, stopping: threading.Event) -> None:
    while not stopping.wait(_HISTORY_S):
        _answer(port, f"/page/history?line={name}&seconds=3600", lambda answer: json.loads(answer.read()))


def _answer(port: int, path: str, read: Callable[[http.client.HTTPResponse], object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        read(answer)
