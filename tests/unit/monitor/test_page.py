"""The page of a bridge: who gets what of it, and what its stream says."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.helpers import wait_until
from tests.unit.monitor.playing import PlayedBridge
from tests.unit.monitor.test_server import Served
from towline.bridge.runtime.state import PAUSED, STOPPED, pause, read_pause
from towline.bridge.runtime.status import collect_bridge_status
from towline.errors import ConfigError
from towline.monitor import lines, page, server, sessions
from towline.monitor.history import History, line_history
from towline.monitor.server import TlsContext, serve
from towline.monitor.serving import serve_bridge

TOKEN = "0123456789abcdef"  # noqa: S105
KEY = "the-key-of-the-link"
HOME = "127.0.0.1:0"


class Browser(Served):
    """A client with a cookie, as a browser is."""

    cookie = ""

    def ask(
        self, path: str, method: str = "GET", site: str = "same-origin", **headers: str
    ) -> http.client.HTTPResponse:
        headers |= {"Cookie": self.cookie} if self.cookie else {}
        headers |= {"Sec-Fetch-Site": site} if site else {}
        answer, self.body = self.answer(path, method, **headers)
        if cookie := answer.headers.get("Set-Cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer

    def sign_in(self, key: str = KEY) -> Browser:
        assert self.ask(f"/?key={key}", site="none").status == 303
        return self


class Open:
    """Pages of bridges that a test plays, with what their servers announce."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self.stack, self.announced = directory, stack, list[str]()
        (directory / "token").write_text(f"{TOKEN}\n")
        (directory / "token").chmod(0o600)

    def __call__(self, monitor: str = "", names: tuple[str, ...] = ("telemetry", "alarms"), **options: Any) -> Browser:
        table = f"[monitor]\n{monitor}\n" if monitor else ""
        self.played = PlayedBridge(self.directory, [*names], table)
        self.played.step()
        address = self.played.bridge.monitor.listen or HOME
        manager = serve_bridge(self.played.bridge, address, self.announced.append, **options)
        return Browser(self.stack.enter_context(manager))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(server, "_ACCEPT_INTERVAL_S", 0.0)
    with contextlib.ExitStack() as stack:
        yield Open(tmp_path, stack)


def events(browser: Browser, line: str = "") -> Generator[tuple[str, Any], None, None]:
    """Name and data of each event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", browser.port, timeout=30)
    connection.request("GET", f"/page/events?line={line}", headers={"Cookie": browser.cookie})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    try:
        for text in iter(answer.readline, b""):
            if text.startswith(b"event: "):
                name, data = text[7:].decode().strip(), answer.readline().removeprefix(b"data: ")
                yield name, json.loads(data)
    finally:
        answer.close()
        connection.close()


# -- who gets in -----------------------------------------------------------------------------------------------------


def test_the_page_of_a_link_is_for_its_key_alone(opened: Open) -> None:
    browser = opened(link_key=KEY)
    for path in ("/", "/lines", "/page/history?line=telemetry", "/page/access", "/page/events"):
        assert browser.ask(path).status == 401, path
    assert browser.ask("/").headers["Content-Type"] == "text/html; charset=utf-8"
    assert b'name="token"' in browser.body
    assert browser.ask("/?key=wrong").status == 401
    assert browser.cookie == ""
    answer = browser.ask(f"/?key={KEY}")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Max-Age=43200", f"towline-{browser.port}="))
    assert [browser.ask(path).status for path in ("/", "/lines", "/page/access")] == [200, 200, 200]
    assert json.loads(browser.body)["signed_in"] is True
    assert browser.ask("/page/leave", "POST").status == 303
    assert browser.ask("/").status == 401, "the session has ended, not only its cookie"
    assert KEY not in "".join(opened.announced)


def test_everybody_of_this_machine_may_look_and_a_token_may_act(opened: Open, tmp_path: Path) -> None:
    browser = opened('page = true\ntoken_file = "token"')
    assert browser.ask("/").status == 200
    assert browser.ask("/page/access").status == 200
    assert json.loads(browser.body) == {"signed_in": False, "read_only": False, "can_sign_in": True}
    assert browser.ask("/lines/telemetry/pause", "POST").status == 401
    assert browser.ask("/page/call/letters", "POST").status == 401
    connection = http.client.HTTPConnection("127.0.0.1", browser.port, timeout=30)
    connection.request("POST", "/page/session", body=f"token={TOKEN}")
    answer = connection.getresponse()
    assert answer.status == 303
    browser.cookie = answer.headers["Set-Cookie"].partition(";")[0]
    connection.close()
    assert browser.ask("/lines/telemetry/pause", "POST").status == 202
    pause_file = read_pause(opened.played.bridge.state_dir / "telemetry")
    assert pause_file is not None
    assert pause_file["by"] == "[monitor]"
    (tmp_path / "token").write_text("another-token-of-16\n")
    assert browser.ask("/lines/telemetry/resume", "POST").status == 401, "a token that is gone ends its sessions"


def test_a_form_is_bounded(opened: Open) -> None:
    browser = opened(link_key=KEY)
    with browser.connect() as client:
        client.sendall(b"POST /page/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\ntoken=")
        with contextlib.suppress(OSError):
            for _ in range(200):
                client.sendall(b"x" * 65536)
        assert client.recv(100).startswith(b"HTTP/1.1 401")


def test_another_page_of_the_browser_changes_nothing(opened: Open) -> None:
    """The cookie goes to every port of the machine: only the page's own requests count."""
    browser = opened(link_key=KEY).sign_in()
    for site in ("cross-site", "same-site", "none"):
        assert browser.ask("/lines/telemetry/pause", "POST", site).status == 401, site
    for origin in (f"http://127.0.0.1:{browser.port + 1}", "http://evil.example", "null", ""):
        assert browser.ask("/lines/telemetry/pause", "POST", "", Origin=origin).status == 401, origin
    assert read_pause(opened.played.bridge.state_dir / "telemetry") is None
    assert browser.ask("/lines/telemetry/pause", "POST", "", Origin=f"http://127.0.0.1:{browser.port}").status == 202


def test_a_session_ends(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = opened(link_key=KEY).sign_in()
    now = time.monotonic()
    monkeypatch.setattr("towline.monitor.sessions.time.monotonic", lambda: now + sessions.SESSION_S + 1)
    assert browser.ask("/page/access").status == 401


def test_sessions_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_SESSIONS", 2)
    first = opened(link_key=KEY).sign_in()
    others = [Browser(first.port).sign_in() for _ in range(2)]
    assert [browser.ask("/page/access").status for browser in (first, *others)] == [401, 200, 200]


def test_read_only_refuses_every_action(opened: Open) -> None:
    browser = opened("read_only = true", link_key=KEY).sign_in()
    for path in ("/lines/telemetry/pause", "/lines/telemetry/restart", "/page/call/replay", "/page/call/doctor"):
        assert browser.ask(path, "POST").status == 403, path
        assert b"TL-B73" in browser.body
    assert browser.ask("/page/access").status == 200
    assert json.loads(browser.body)["read_only"] is True


def test_an_action_is_recorded_with_who_and_when(opened: Open) -> None:
    browser = opened(link_key=KEY, actor="anna on the page").sign_in()
    began = time.time()
    assert browser.ask("/lines/telemetry/pause", "POST").status == 202
    assert opened.announced == ['line "telemetry": pause by anna on the page']
    (action,) = line_history(History(opened.played.bridge.state_dir), "telemetry", 0.0)["actions"]
    assert (action["action"], action["by"]) == ("pause", "anna on the page")
    assert began - 0.01 <= action["t"] <= time.time() + 0.01


def test_wrong_tokens_are_counted_in_the_log_once(opened: Open) -> None:
    browser = opened('page = true\ntoken_file = "token"')
    for _ in range(3):
        assert browser.ask("/?key=wrong").status == 401
    assert len(opened.announced) == 1
    assert opened.announced[0].endswith("[TL-B74]")


def test_another_host_name_reads_nothing(opened: Open) -> None:
    browser = opened(link_key=KEY).sign_in()
    assert browser.ask("/", Host="evil.example").status == 400


@pytest.mark.parametrize(
    ("monitor", "problem"),
    [
        ('listen = "0.0.0.0:0"\npage = true', "only with TLS and a token"),
        ('listen = "0.0.0.0:0"\npage = true\ntoken_file = "token"', "only with TLS and a token"),
        ('listen = "127.0.0.1:0"\ncert_file = "cert.pem"', "cert_file and key_file are needed together"),
    ],
)
def test_what_would_let_strangers_in_is_no_configuration(opened: Open, monitor: str, problem: str) -> None:
    (opened.directory / "cert.pem").write_text("")
    with pytest.raises(ConfigError, match=rf"bridge.toml:8  \[monitor\]: .*{problem}.*TL-C211"):
        opened(monitor)


def test_an_address_of_the_command_needs_the_same(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"\[monitor\]: .*only with TLS and a token.*listen on 127.0.0.1.*TL-C211"):
        opened.stack.enter_context(
            serve_bridge(PlayedBridge(opened.directory, ["a"]).bridge, "0.0.0.0:0", str, link_key=KEY)
        )


# -- the document -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/?key=wrong"])
def test_the_policy_permits_what_stands_in_the_document_and_nothing_else(opened: Open, path: str) -> None:
    browser = opened("page = true")
    answer = browser.ask(path)
    text, policy = browser.body.decode(), answer.headers["Content-Security-Policy"]
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        parts = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        allowed = re.search(rf"{directive} ([^;]*)", policy)
        assert allowed is not None
        assert allowed[1].split() == ([f"'sha256-{digest}'" for digest in digests] or ["'none'"])
    assert policy.startswith("default-src 'none'; connect-src 'self'; img-src data:;")
    assert "unsafe" not in policy
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", text)
    assert all(link.startswith(("data:", "#")) for link in links), links
    assert [answer.headers[name] for name in ("X-Frame-Options", "Referrer-Policy", "Cache-Control")] == [
        "DENY",
        "no-referrer",
        "no-store",
    ]


# -- the stream -------------------------------------------------------------------------------------------------------


def test_the_stream_has_the_table_and_the_line_of_the_page(opened: Open) -> None:
    browser = opened("broker_queue_messages = 1000", link_key=KEY).sign_in()
    stream = events(browser, "telemetry")
    (name, table), (line_name, line) = next(stream), next(stream)
    assert (name, line_name) == ("state", "line")
    assert (table["bridge"], table["verdict"], table["level"]) == ("plant-7", "Every message is accounted for", "good")
    assert [row["name"] for row in table["lines"]] == ["telemetry", "alarms"]
    account = line["status"]["account"]
    parts = [part for part in account["parts"] if part[1]]
    assert parts == [["received", 100, ""], ["in Kafka", 90, ""], ["waiting", 10, ""]]
    assert [*account][: len(account["parts"])][:2] == ["received", "in_kafka"], "the page reads the keys in this order"
    assert line["routes"] == [["telemetry/{device}/#", "telemetry"]]
    opened.played.step(state="offline", last_error={"text": "no answer"})
    wait_until(lambda: next(stream)[1].get("level") == "warn", what="the broker's outage")


def test_a_state_of_a_running_bridge_reads_no_checkpoint(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saved account is of the moment of its status; the notes on disk are newer."""
    browser, directories = opened(link_key=KEY).sign_in(), list[Path]()
    monkeypatch.setattr("towline.bridge.runtime.state.read_notes", directories.append)
    assert next(events(browser))[1]["lines"][0]["adds_up"] is True
    assert directories == []


def test_nothing_is_read_while_no_page_is_open(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    def collect(*arguments: Any, **options: Any) -> Any:
        reads.append(time.monotonic())
        return collect_bridge_status(*arguments, **options)

    monkeypatch.setattr(page, "collect_bridge_status", collect)
    monkeypatch.setattr(page, "_STATE_INTERVAL_S", 0.02)
    browser = opened(link_key=KEY).sign_in()
    browser.ask("/")
    assert reads == []
    streams = [events(browser) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert reads
    for stream in streams:
        stream.close()

    def is_quiet() -> bool:
        before = len(reads)
        time.sleep(0.2)
        return len(reads) == before

    wait_until(is_quiet, what="the end of reading")


def test_pages_share_one_reader_and_one_too_many_waits(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_STREAMS", 20)
    browser = opened(link_key=KEY).sign_in()
    streams = [events(browser, "alarms") for _ in range(20)]
    tables = [next(stream)[1] for stream in streams]
    assert {table["bridge"] for table in tables} == {"plant-7"}
    assert browser.ask("/page/events").status == 503
    assert browser.ask("/page/access").status == 200, "streams take no place of an answer"
    for stream in streams:
        stream.close()

    def has_place() -> bool:
        with contextlib.suppress(OSError):
            return bool(next(events(browser)))
        return False

    wait_until(has_place, what="a place again")


def test_a_file_with_an_error_is_said_and_the_next_state_is_sound(opened: Open) -> None:
    browser = opened(link_key=KEY).sign_in()
    stream, file = events(browser), opened.played.bridge.file
    text = file.read_text()
    next(stream)
    file.write_text("name = ")
    assert "[TL-C11]" in wait_until(lambda: next(stream)[1].get("error"), what="the error")
    file.write_text(text)
    wait_until(lambda: next(stream)[1].get("bridge"), what="a state")


@pytest.mark.parametrize(
    ("change", "level", "state"),
    [
        (lambda played: played.step(), "good", "running"),
        (lambda played: played.step(messages=0, end=50, received=50), "bad", "does not add up ✗"),
        (lambda played: played.step(state="offline", last_error={"text": "no answer"}), "warn", "broker offline"),
        (lambda played: played.step(held_back="journal full"), "warn", "throttled: journal full"),
        (lambda played: setattr(played.state.lines["telemetry"], "gateway_error", "gone"), "bad", "no gateway"),
        (lambda played: setattr(played.state.lines["telemetry"], "query", STOPPED), "bad", "receiving, query stopped"),
        (lambda played: setattr(played.state, "spark", "starting again"), "good", "receiving, spark starting again"),
    ],
)
def test_the_state_is_colour_and_word(
    opened: Open, change: Callable[[PlayedBridge], object], level: str, state: str
) -> None:
    browser = opened(names=("telemetry",), link_key=KEY).sign_in()
    change(opened.played)
    opened.played.state.save()
    row = next(events(browser))[1]["lines"][0]
    assert (row["level"], row["state"]) == (level, state)


def test_a_pause_says_who_and_what_waits(opened: Open) -> None:
    browser = opened(names=("telemetry",), link_key=KEY).sign_in()
    pause(opened.played.bridge.state_dir / "telemetry", "anna")
    opened.played.state.lines["telemetry"].query = PAUSED
    opened.played.state.save()
    stream = events(browser, "telemetry")
    row, line = next(stream)[1]["lines"][0], next(stream)[1]
    assert (row["level"], row["state"], row["paused"]["by"]) == ("warn", "paused", "anna")
    assert line["advice"][0].startswith("paused by anna")


def test_a_bridge_that_ended_shows_its_last_account_as_such(opened: Open) -> None:
    browser = opened(names=("telemetry",), link_key=KEY).sign_in()
    opened.played.state.save(has_ended=True)
    stream = events(browser, "telemetry")
    table, line = next(stream)[1], next(stream)[1]
    assert (table["running"], table["lines"][0]["waiting"]) == (False, None)
    assert line["status"]["account"] is None
    assert line["status"]["last"]["account"]["received"] == 100
    assert line["status"]["last"]["heard"] is not None


# -- commands -----------------------------------------------------------------------------------------------------


def test_a_command_gets_the_parameters_that_it_has(opened: Open) -> None:
    browser = opened(link_key=KEY).sign_in()
    assert browser.ask("/page/call/refused?line=telemetry&limit=5", "POST").status == 200
    assert json.loads(browser.body)["error"].endswith("[TL-C73]") or json.loads(browser.body)["result"] is not None
    for query in ("metrics=1", "--drop=1", "line=%1b", f"line={'x' * 400}"):
        assert browser.ask(f"/page/call/refused?{query}", "POST").status == 503, query
        assert b"TL-B76" in browser.body
        assert b"\x1b" not in browser.body
    assert browser.ask("/page/call/run", "POST").status == 404
    assert browser.ask("/page/call/letters").status == 405, "a link asks for nothing"


def test_a_value_is_never_an_option(opened: Open) -> None:
    words = [*page._words(page.COMMANDS["letters"], iter([("line", "--state-dir=/"), ("limit", "5")]))]
    assert words == ["--line=--state-dir=/", "--limit=5"]
    assert [*page._words(page.COMMANDS["replay"], iter([("at", "0/1"), ("at", "0/2"), ("dry_run", "yes")]))] == [
        "--at=0/1",
        "--at=0/2",
        "--dry-run",
    ]


def test_two_commands_run_at_a_time(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_COMMAND_WAIT_S", 0.1)
    browser = opened(link_key=KEY).sign_in()
    with page._running_commands, page._running_commands:
        assert browser.ask("/page/call/letters", "POST").status == 503
    assert b"run already" in browser.body


def test_a_report_of_doctor_is_kept_for_the_next(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "run_command", lambda *_: {"result": {"findings": [{"verdict": "holds"}]}})
    browser = opened(link_key=KEY).sign_in()
    assert browser.ask("/page/call/doctor", "POST").status == 200
    assert json.loads(browser.body)["result"]["previous"] is None
    browser.ask("/page/call/doctor", "POST")
    previous = json.loads(browser.body)["result"]["previous"]
    assert previous["findings"] == [{"verdict": "holds"}]
    (opened.played.bridge.state_dir / "doctor.json").write_text("half")
    browser.ask("/page/call/doctor", "POST")
    assert json.loads(browser.body)["result"]["previous"] is None


def test_a_replay_that_only_asks_is_no_action(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "run_command", lambda *_: {"result": {}})
    browser = opened(link_key=KEY, actor="anna").sign_in()
    assert browser.ask("/page/call/replay?line=telemetry&dry_run=yes", "POST").status == 200
    assert opened.announced == []
    assert browser.ask("/page/call/replay?line=telemetry", "POST").status == 200
    assert opened.announced == ['line "telemetry": dlq replay by anna']


def test_another_user_leaves_no_file(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of root in the directory of a service would stop the service's next start (TL-J23)."""
    monkeypatch.setattr(lines, "run_command", lambda *_: {"result": {"findings": []}})
    browser = opened(link_key=KEY).sign_in()
    monkeypatch.setattr("towline.monitor.lines.os.geteuid", lambda: 12345)
    browser.ask("/page/call/doctor", "POST")
    names = {path.name for path in opened.played.bridge.state_dir.iterdir()}
    assert not {"doctor.json", "history.jsonl"} & names
    assert len(opened.announced) == 1, "and it is logged all the same"


# -- TLS --------------------------------------------------------------------------------------------------------------


def test_tls_with_a_certificate_that_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who speaks no TLS, or nothing, stops nobody."""
    monkeypatch.setattr(server, "_ACCEPT_INTERVAL_S", 0.0)
    authority, other = trustme.CA(), trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(ca: trustme.CA) -> None:
        issued = ca.issue_cert("localhost")
        issued.private_key_pem.write_to_path(key)
        cert.write_bytes(issued.cert_chain_pems[0].bytes())

    def status_by(ca: trustme.CA, port: int) -> int:
        context = ssl.create_default_context()
        ca.configure_trust(context)
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            return connection.getresponse().status

    install(authority)
    with serve([], HOME, TlsContext(cert, key)) as port, Served(port).connect(), Served(port).connect() as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_by(authority, port) == 200
        cert.write_text("half")
        assert status_by(authority, port) == 200, "the last good one stays"
        install(other)
        wait_until(lambda: status_by(other, port) == 200, what="the renewed certificate")
        with pytest.raises(ssl.SSLCertVerificationError):
            status_by(authority, port)


def test_a_certificate_that_cant_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cert.pem.*TL-C97"):
        TlsContext(tmp_path / "cert.pem", tmp_path / "key.pem")
