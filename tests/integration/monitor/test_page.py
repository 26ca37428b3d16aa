"""The page in a real browser: of a bridge whose state a test plays, and of one with real brokers and kills.

``--pictures DIR`` keeps what the browser shows; docs/pictures has some of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import NewTopic
from tests.helpers import present, wait_until
from tests.integration.bridge.conftest import a_bridge
from tests.integration.bridge.running import PATIENCE, Flow, publish
from tests.integration.monitor.browsing import Visitor, chromium, picture
from tests.unit.monitor.playing import PlayedBridge
from towline.bridge.config.file import load
from towline.bridge.runtime.state import STOPPED
from towline.cli.ui import open_page
from towline.gateway.endpoint import GatewayEndpoint
from towline.monitor.history import HistoryRecorder
from towline.monitor.serving import serve_bridge
from towline_prove.devstack import Kafka, Mosquitto, free_port

#: Markup in a name, a topic, an error; run, it would change the title.
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
KEY = "key-of-the-link"
#: As a browser does with a tab that is covered, or shown again.
HIDE: Final = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    directory: Path | None = request.config.getoption("--pictures")
    return directory


class Played:
    """A bridge whose state a test plays once a second, with its page at one port."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.bridge = PlayedBridge(directory, names, "[monitor]\nbroker_queue_messages = 1000\n")
        self.status: dict[str, Any] = {}
        self.change: Callable[[PlayedBridge], object] = lambda _: None
        self.port = free_port()
        self.page = contextlib.ExitStack()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._recorder = HistoryRecorder()

    def __enter__(self) -> Self:
        self._thread.start()
        self._recorder.start(self.bridge.state, self.bridge.bridge.state_dir)
        self.serve()
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()
        self._ended.set()
        self._thread.join()
        self._recorder.stop()

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/?key={KEY}"

    def serve(self) -> None:
        self.page.enter_context(
            serve_bridge(self.bridge.bridge, f"127.0.0.1:{self.port}", str, link_key=KEY, actor="anna")
        )

    def _play(self) -> None:
        while not self._ended.wait(0.5):
            self.bridge.step(messages=100, **self.status)
            with self.bridge.state.lock:
                self.change(self.bridge)
                self.bridge.state.save()


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Callable[..., Played]]:
    with contextlib.ExitStack() as stack:
        yield lambda *names: stack.enter_context(Played(tmp_path, [*names] or ["telemetry", "alarms"]))


def state_of(page: Page, line: str) -> Any:
    return page.locator("#lines tbody tr", has_text=line).locator(".state")


def test_what_devices_and_brokers_send_stays_text(browser: Browser, played: Callable[..., Played]) -> None:
    bridge, visitor = played(), Visitor(browser)
    bridge.status = {"state": "offline", "last_error": {"text": f"the broker says {MARKUP}"}, "client_id": MARKUP}
    page = visitor.open(bridge.link)
    expect(page.locator("#advice")).to_contain_text(MARKUP)
    expect(page.locator("#picture")).to_contain_text(MARKUP)
    bridge.change = lambda played: setattr(played.state.lines["telemetry"], "query_error", MARKUP)
    expect(page.locator("#faults")).to_contain_text(f"query: {MARKUP}")
    assert page.title() == "plant-7 · Towline"
    assert page.locator("main img, main script").count() == 0
    visitor.check()


def test_a_lost_connection_is_shown_and_heals(browser: Browser, played: Callable[..., Played]) -> None:
    bridge, visitor = played(), Visitor(browser)
    page = visitor.open(bridge.link)
    expect(page.locator("#connection")).to_contain_text("live")
    bridge.page.close()
    expect(page.locator("#connection")).to_contain_text("no answer since")
    assert page.locator("body.stale").count() == 1
    bridge.serve()  # another process, which does not know the session
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    page.get_by_label("Token").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#verdict")).to_contain_text("Every message is accounted for")
    expect(page.locator("#connection")).to_contain_text("live")


def test_a_session_that_has_ended_asks_for_another(browser: Browser, played: Callable[..., Played]) -> None:
    """In two tabs of one browser: one leaves, and the other is told at its next request."""
    bridge, visitor = played(), Visitor(browser)
    first, second = visitor.open(bridge.link), visitor.open(f"http://127.0.0.1:{bridge.port}/#alarms")
    expect(second.locator("#line-title")).to_have_text("alarms")
    expect(first.locator("#line-title")).to_have_text("telemetry")
    first.get_by_role("button", name="Sign out").click()
    expect(first.get_by_role("button", name="Sign in")).to_be_visible()
    second.get_by_role("button", name="6 h").click()
    expect(second.get_by_role("button", name="Sign in")).to_be_visible()


def test_actions_ask_and_are_recorded(browser: Browser, played: Callable[..., Played]) -> None:
    bridge, visitor = played(), Visitor(browser)
    page = visitor.open(bridge.link)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its gateway goes on receiving")
    page.get_by_role("button", name="Cancel").click()
    paused = bridge.bridge.bridge.state_dir / "telemetry" / "paused"
    assert not paused.exists()
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert '"by": "anna"' in paused.read_text()
    expect(page.locator("#faults")).to_contain_text("pause by anna")
    visitor.check()


def test_two_hundred_lines_sort_and_filter(
    browser: Browser, played: Callable[..., Played], pictures: Path | None
) -> None:
    bridge, visitor = played(*(f"line-{number:03d}" for number in range(200))), Visitor(browser)
    bridge.change = lambda played: setattr(played.state.lines["line-150"], "query", STOPPED)
    page = visitor.open(bridge.link)
    rows = page.locator("#lines tbody tr")
    expect(rows).to_have_count(200)
    expect(rows.first).to_contain_text("line-150")
    expect(rows.first.locator(".state")).to_have_text("receiving, query stopped")
    expect(page.locator("#verdict")).to_contain_text("1 line needs help")
    by_name = page.get_by_role("columnheader", name="Line", exact=True)
    by_name.get_by_role("button").click()
    expect(rows.first).to_contain_text("line-000")
    by_name.get_by_role("button").click()
    expect(rows.first).to_contain_text("line-199")
    expect(by_name).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Filter").fill("line-04")
    expect(rows).to_have_count(10)
    rows.nth(3).get_by_role("button").press("Enter")
    expect(page.locator("#line-title")).to_have_text("line-046")
    expect(page.locator("#picture .node")).to_have_count(5)
    picture(page, pictures, "lines-200")
    visitor.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_everybody_can_use_it(
    browser: Browser, played: Callable[..., Played], pictures: Path | None, scheme: str, width: int
) -> None:
    """axe-core: contrast, names, roles; and a phone scrolls in one direction only."""
    names = ("telemetry", "meters", "doors", "presses", "commands", "ovens", "pumps", "valves", "lights", "setpoints")
    bridge = played(*names)
    error = 'kafka.example:9092: the topic "doors" is not there. Create it, or let Towline do it.   [TL-K04]'
    bridge.change = lambda played: setattr(played.state.lines["doors"], "query_error", error)
    visitor = Visitor(browser, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = visitor.open(bridge.link)
    expect(page.locator("#faults")).to_contain_text("now" if width == 1440 else "")
    expect(page.locator("#picture .node")).to_have_count(5)
    expect(page.locator(".chart")).to_have_count(3)
    for panel in ("message", "doctor"):
        page.locator(f"#{panel} summary").click()
    assert visitor.serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    picture(page, pictures, "page" if (scheme, width) == ("light", 1440) else f"page-{scheme}-{width}")
    visitor.check()


def test_a_page_that_nobody_sees_asks_for_nothing(browser: Browser, played: Callable[..., Played]) -> None:
    bridge, visitor = played(), Visitor(browser)
    page = visitor.open(bridge.link)
    expect(page.locator("#connection")).to_contain_text("live")
    page.evaluate(HIDE, arg=True)
    received = page.locator("#account").text_content()
    wait_until(lambda: bridge.bridge.received["telemetry"] > 500, what="more messages")
    assert page.locator("#account").text_content() == received
    page.evaluate(HIDE, arg=False)
    expect(page.locator("#account")).not_to_have_text(received or "")
    visitor.check()


# -- a bridge with real brokers ---------------------------------------------------------------------------------------

LINE = """
[[uplink]]
name = "telemetry"
dead_letter_topic = "{dead}"
[[uplink.route]]
from = "t/{{device}}/#"
topic = "{topic}"
key = "{{device}}"
timestamp = "{{payload.at}}"
"""


@pytest.mark.spark
def test_kills_recovery_letters_and_one_message(
    browser: Browser,
    tmp_path: Path,
    broker: Mosquitto,
    kafka: Kafka,
    topic: NewTopic,
    pictures: Path | None,
) -> None:
    name, dead = f"telemetry.{uuid.uuid4().hex[:6]}", topic("dead")
    kafka.create_topics({name: 1})
    lines = LINE.format(topic=name, dead=dead)
    with a_bridge(tmp_path) as bridge, contextlib.ExitStack() as stack:
        bridge.write(broker.uri, kafka.bootstrap, lines)
        bridge.start()
        wait_until((bridge.directory / "state" / "bridge.json").exists, PATIENCE, "the bridge")
        visitor = Visitor(browser)
        page = visitor.open(stack.enter_context(open_page(load(bridge.file), "127.0.0.1:0")))
        wait_until(lambda: bridge.online("telemetry"), PATIENCE, "the gateway")
        with Flow(
            broker, lambda b, first, count: publish(b, first, count, text='{{"at": 1700000000000, "n": {}}}'), 20
        ):
            expect(page.locator("#account")).to_have_text(re.compile(r"in Kafka [1-9]"))
            first = page.locator("#account").text_content() or ""
            expect(page.locator("#account")).not_to_have_text(first)
            endpoint = present(GatewayEndpoint.read(bridge.state_dir.with_name("telemetry")))
            os.kill(endpoint.pid, signal.SIGKILL)
            expect(page.locator("#faults")).to_contain_text(re.compile(r"\(.*\)\s+gateway: "))
            bridge.kill("org.apache.spark.deploy.SparkSubmit")
            expect(page.locator("#faults")).to_contain_text(re.compile(r"\(.*\)\s+spark: "))
            expect(state_of(page, "telemetry")).to_have_text("running")
        expect(page.locator("#account")).to_contain_text("waiting 0")
        picture(page, pictures, "page-kills")
        publish(
            broker,
            0,
            1,
            topic="t/d/<b>bold</b>",
            text=f'{{{{"at": "never", "text": "{MARKUP.replace(chr(34), chr(39))}"}}}}',
        )
        wait_until(lambda: bridge.account("telemetry").get("dead_lettered") == 1, PATIENCE, "the dead letter")
        page.locator("#letters summary").click()
        letters = page.locator("#letters")
        expect(letters).to_contain_text("t/d/<b>bold</b>")
        letters.get_by_role("button", name="Show").click()
        expect(letters.locator("pre")).to_contain_text("<script>document.title='run'</script>")
        letters.get_by_role("button", name="hex").click()
        expect(letters.locator("pre")).to_contain_text("000000  7b 22 61 74 22")
        bridge.file.write_text(bridge.file.read_text().replace('timestamp = "{payload.at}"\n', ""))
        letters.get_by_label("choose").check()
        letters.get_by_role("button", name="Replay the chosen").click()
        expect(page.get_by_role("dialog")).to_contain_text(
            f"1 would be written to {name}. Each letter is replayed at most once."
        )
        page.get_by_role("button", name="Replay", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text(f"1 written to {name}")
        page.get_by_role("button", name="Close").click()
        expect(letters).to_contain_text("No dead letters wait.")
        page.locator("#message summary").click()
        message = page.locator("#message")
        message.get_by_label("Which").fill("0")
        message.get_by_role("button", name="Find").click()
        expect(message.locator(".steps")).to_contain_text("journaled")
        message.get_by_label("By").select_option("device")
        message.get_by_label("Which").fill("d")
        message.get_by_role("button", name="Find").click()
        expect(message.locator("table")).to_contain_text(f"{name}/0/")
        message.get_by_role("button", name="Story").last.click()
        expect(message.locator(".steps")).to_contain_text("dead letter, ")
        assert page.title() == "tests · Towline"
        assert page.locator("main b, main img").count() == 0
        visitor.check()
