"""``towline ui``: serves the page of a bridge."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, load_bridge, print_lines
from towline.files import user_name

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge


def ui(
    file: BridgeFile = Path("bridge.toml"),
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the page; port 0 is a free one.")
    ] = "127.0.0.1:9466",
) -> None:
    """Serve the page of a bridge until Ctrl-C: its lines live, their accounts, faults, dead letters, doctor.

    The printed link has a key: whoever has it may also pause, resume, restart and replay, as the user that runs this,
    unless [monitor] sets read_only. Works while the bridge runs and while it does not. An address off loopback needs
    cert_file, key_file and token_file of [monitor].

    Example:  towline ui bridge.toml
    """
    bridge, stopping = load_bridge(file), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with open_page(bridge, listen) as link:
        print_lines([f'page of bridge "{bridge.name}":   {link}', "Ctrl-C ends the page, and nothing else."])
        sys.stdout.flush()
        stopping.wait()


@contextlib.contextmanager
def open_page(bridge: Bridge, listen: str) -> Iterator[str]:
    """Serve the page of a bridge while the context is open; yields its link, whose key is for this user alone.

    Raises:
        ConfigError: As `towline.monitor.serving.serve_bridge`.
    """
    from towline.monitor.serving import serve_bridge  # noqa: PLC0415 - loaded when it is called

    key, actor = secrets.token_urlsafe(24), f"{user_name(os.geteuid())} on the page"
    scheme = "http" if bridge.monitor.cert_file is None else "https"
    host = listen.rpartition(":")[0] or "127.0.0.1"
    host = socket.gethostname() if host in ("0.0.0.0", "[::]") else host  # noqa: S104 - it only names the link
    with serve_bridge(bridge, listen, _print_action, link_key=key, actor=actor) as port:
        yield f"{scheme}://{host}:{port}/?key={key}"


def _print_action(text: str) -> None:
    print_lines([text])
    sys.stdout.flush()
