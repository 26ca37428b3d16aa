"""A real browser for the tests of the page: Debian's Chromium, led by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

#: What a page of the bridge may not have: errors of a script, refusals of the policy, failed requests.
_QUIET: Final = ("Failed to load resource: net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING")
#: Chromium asks nobody for updates, lists or its own start page.
_SILENT: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--disable-sync", "--disable-default-apps", "--metrics-recording-only"),
)
#: Severities of axe-core that are a defect.
_SERIOUS: Final = {"serious", "critical"}

expect.set_options(timeout=60_000)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium without a window; skips the test where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: scripts/setup.py test")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*_SILENT])
        yield browser
        browser.close()


class Visitor:
    """Pages of one person: what goes wrong in any of them, and where a request went."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        settings = {"locale": "en-GB", "timezone_id": "Europe/Berlin", "viewport": {"width": 1440, "height": 900}}
        self.context: BrowserContext = browser.new_context(**{**settings, **options})
        self.wrong: list[str] = []
        self.hosts: set[str] = set()

    def open(self, link: str) -> Page:
        """Open a page, and wait for its first state."""
        page = self.context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2].partition(":")[0]))
        page.on("dialog", lambda dialog: self.wrong.append(f"a dialog: {dialog.message}"))
        page.goto(link)
        return page

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def serious(self, page: Page) -> list[str]:
        """What axe-core finds that hinders somebody."""
        violations = Axe().run(page).response["violations"]
        return [
            f"{one['id']}: {node['html']}" for one in violations if one["impact"] in _SERIOUS for node in one["nodes"]
        ]

    def check(self) -> None:
        """Nothing went wrong, and nobody else was asked for anything."""
        assert [text for text in self.wrong if not any(quiet in text for quiet in _QUIET)] == []
        assert self.hosts <= {"127.0.0.1"}, self.hosts


def picture(page: Page, directory: Path | None, name: str) -> None:
    """Keep a picture of the whole page, if pictures are wanted."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        page.evaluate("document.getElementById('footer').hidden = true")  # the path of this machine
        page.screenshot(path=directory / f"{name}.png", full_page=True)
