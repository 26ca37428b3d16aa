"""A real Prometheus with the rules of examples/monitoring, in a hurry: it scrapes and judges every half second."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.engines.alert_rules import EXAMPLES
from tests.helpers import lacking, wait_until
from towline_prove.devstack.process import free_port

__all__ = ["Prometheus"]


class Prometheus:
    """One server; a context manager.

    What has to last minutes has to last a second here, and what is looked at over minutes is looked at over five
    seconds; otherwise the rules are those of the file.

    Args:
        directory: Configuration, log and data live here.
        target: ``HOST:PORT`` of an endpoint.
    """

    def __init__(self, directory: Path, target: str) -> None:
        program = shutil.which("prometheus")
        if program is None:
            lacking("prometheus is not installed (Debian: apt install prometheus)")
        directory.mkdir()
        rules = (EXAMPLES / "alerts.yml").read_text()
        rules = re.sub(r"for: \d+m", "for: 1s", rules)
        (directory / "alerts.yml").write_text(re.sub(r"\[\d+[mh]\]", "[5s]", rules))
        config = (EXAMPLES / "prometheus.yml").read_text().replace("127.0.0.1:9464 ", f"{target} ")
        (directory / "prometheus.yml").write_text(config.replace("interval: 15s", "interval: 500ms"))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = directory / "log"
        self._command = [
            program,
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, what="Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return bool(self._get("query", query="1")["resultType"] == "scalar")
        except OSError:
            return False

    def _get(self, what: str, **arguments: str) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - ours
            return json.load(answer)["data"]

    def query(self, expression: str) -> dict[str, float]:
        """The value of each series, by its name and labels."""
        answer = self._get("query", query=expression)
        return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in answer["result"]}

    def alerts(self) -> dict[str, str]:
        """Name → ``pending`` or ``firing``."""
        return {one["labels"]["alertname"]: one["state"] for one in self._get("alerts")["alerts"]}

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return {name for name, state in self.alerts().items() if state == "firing"}

    def rounds(self) -> float:
        """How often the rules were judged."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:  # noqa: S310 - ours
            found = re.search(
                r"^prometheus_rule_group_iterations_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE
            )
        return 0.0 if found is None else float(found[1])

    def was_pending(self, alert: str) -> bool:
        """Whether it was, before it fired."""
        return bool(self.query(f'max_over_time(ALERTS{{alertname="{alert}", alertstate="pending"}}[10m])'))
