"""An endpoint read as Prometheus reads it."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import wait_until
from tests.integration.gateway.conftest import Gateway
from towline.monitor.gateway import GatewayFacts, GatewayMonitor
from towline.monitor.server import serve

__all__ = ["Scraped", "fetch", "looked_at"]

#: Metric without its prefix → value; of several series the sum.
Values = dict[str, float]


def fetch(url: str) -> tuple[int, str]:
    """Status and text."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - ours
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Scraped:
    """An endpoint.

    Args:
        address: Host and port.
    """

    def __init__(self, address: object) -> None:
        self._url = f"http://{address}"

    def text(self) -> str:
        status, text = fetch(f"{self._url}/metrics")
        assert status == 200, text
        return text

    def verdict(self, path: str) -> tuple[int, list[dict[str, Any]]]:
        status, text = fetch(f"{self._url}/{path}")
        return status, json.loads(text)["problems"]

    def until(self, condition: Callable[[Values], bool], timeout: float = 60, what: str = "") -> str:
        """The first scrape of which the condition is true."""
        last: Values = {}

        def shown() -> str | None:
            nonlocal last
            text = self.text()
            last = values_of(text)
            return text if condition(last) else None

        try:
            return wait_until(shown, timeout, what or "a scrape")
        except AssertionError as error:
            error.add_note(f"the last scrape: {last}")
            raise


def values_of(text: str) -> Values:
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("towline_"):
                name = sample.name.removeprefix("towline_")
                found[name] = found.get(name, 0.0) + sample.value
    return found


@contextlib.contextmanager
def looked_at(gateway: Gateway, queue: int | None = None, direction: str = "up") -> Iterator[Scraped]:
    """A gateway with an endpoint, as `towline gateway --metrics` makes it, in this process."""
    settings = gateway.settings
    facts = GatewayFacts("b", "line", settings.name, direction)
    with serve(GatewayMonitor(facts, settings.state_dir, queue), "127.0.0.1:0") as port:
        yield Scraped(f"127.0.0.1:{port}")
