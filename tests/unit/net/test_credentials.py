"""Credentials as they are read for each connection, and what is said when they can't be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import gateway_settings
from towline import ClientSettings
from towline.errors import ConfigError, TowlineError, Unreachable
from towline.net.settings import BrokerConnection, Headers

HANGS = threading.Event()


def text() -> str:
    return "t0ken"


def number() -> int:
    return 7


def away() -> str:
    raise OSError("s3cret")


def hangs() -> bytes:
    HANGS.wait(60)
    return b"late"


@pytest.fixture(autouse=True)
def hanging() -> Iterator[None]:
    """What hangs does so until the test is over."""
    HANGS.clear()
    yield
    HANGS.set()


class Told:
    """An authenticator that says what it was made of."""

    def __init__(self, username: str | None, password: bytes | None) -> None:
        self.method, self.made = "TOLD", (username, password)

    def start(self) -> bytes:
        return b""

    def challenge(self, data: bytes) -> bytes:
        return data

    def finish(self, data: bytes) -> None:
        del data


def options(**settings: Any) -> BrokerConnection:
    return ClientSettings(username="u", **settings).connection("ws://b", "c")


def read(
    wanted: BrokerConnection, cancelled: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Any], Headers, str]:
    return wanted.credentials(cancelled)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("password_file", "websocket_headers_file", "websocket_query_file")}
    told = gateway_settings(brokers="ws://b", authenticator=f"{__name__}:Told", **files)
    for wanted in (options(**files), told.connection):
        for turn in ("1", "2"):
            files["password_file"].write_text(f"p{turn}\n")
            files["websocket_headers_file"].write_text(f"\nA: h{turn}\nB:x\n")
            query = f"X-Amz-Signature={turn}?"
            files["websocket_query_file"].write_text(query if turn == "1" else f"wss://h:1/mqtt?{query}\n")
            login, headers, asked = read(wanted)
            assert (login["password"], asked) == (b"p" + turn.encode(), query)
            assert headers == (("A", f"h{turn}"), ("B", "x"))
            if isinstance(made := login["authenticator"], Told):
                assert made.made == (told.username, b"p" + turn.encode())
    assert isinstance(read(told.connection)[0]["authenticator"], Told)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("password_file", None, "password_file can't be read (no such file or directory). Check its name"),
        ("password_file", b"\n", "password_file is empty: is it being written?"),
        ("password_file", b"s3cret" * 11_000, "a password of MQTT has 1 to 65,535 bytes"),
        ("websocket_headers_file", None, "websocket_headers_file can't be read"),
        *(
            ("websocket_headers_file", text, "websocket_headers_file: each line must be a header of the form")
            for text in (b"A: s3cret\nb", b"a b: s3cret", b"A: s3cret\x07", b": s3cret")
        ),
        ("websocket_query_file", b"?", "has characters that a URI can't have"),
        ("websocket_query_file", b"a=s3cret b", "has characters that a URI can't have"),
        ("websocket_query_file", b"", "websocket_query_file is empty"),
    ],
)
def test_a_file_that_can_not_be(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(options(**{name: file}))
    assert caught.value.code == "TL-C31"
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "returned int and not a password, text or bytes"),
        ("away", "failed (OSError"),
        ("hangs", "returned no password: no answer within 0.2 s"),
        ("nothing", "can't be imported (AttributeError, "),
    ],
)
def test_a_provider_is_asked_again(name: str, words: str) -> None:
    assert read(options(token_provider=f"{__name__}:text"))[0]["password"] == b"t0ken"
    with pytest.raises(Unreachable) as caught:
        read(options(token_provider=f"{__name__}:{name}", connect_timeout_s=0.2 if name == "hangs" else 10))
    assert caught.value.code == "TL-C179"
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_provider_that_hangs_does_not_hold_up_the_end() -> None:
    with pytest.raises(Unreachable, match="cancelled"):
        read(options(token_provider=f"{__name__}:hangs"), lambda: True)


def test_one_thing_gives_the_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password and password_file both give the password"):
        options(password="x", password_file=tmp_path)
    with pytest.raises(TowlineError, match=r"must be module:function.*TL-C51"):
        options(token_provider="x")
    for way in ({"password_file": tmp_path}, {"token_provider": "m:f"}):
        with pytest.raises(ConfigError, match="a password needs a username"):
            ClientSettings(protocol="3.1.1", **way).connection("mqtt://b", "c")
