"""Has a gateway drained, from another process, and shows how far it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from towline.errors import GatewayError
from towline.gateway.clients import read_clients
from towline.gateway.launch import discover, ensure
from towline.gateway.membership import Start, drainable
from towline.gateway.sharing import ShareWay

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient
    from towline.gateway.settings import GatewaySettings

__all__ = ["drained", "progress", "taken_back"]

#: Seconds between two looks.
_LOOK_S: Final = 0.2
#: How long a gateway that does not answer is looked for before it counts as gone, in seconds.
_SILENT_S: Final = 10.0


def drained(settings: GatewaySettings, say: Callable[[str], None]) -> int:
    """Drain the gateway of a state directory: the one that runs, or one that is started for it and ends with us.

    Args:
        settings: Of the gateway.
        say: Takes each change in one line.

    Returns:
        0 when it has left.

    Raises:
        ConfigError: TL-G57, it can't be drained.
        GatewayError: TL-G58, it ended before all was done, or the drain was taken back.
        TowlineError: What kept it from starting.
    """
    drainable(settings)
    began = time.time()
    running = discover(settings.state_dir)
    try:
        client = running or ensure(settings, owner_pid=os.getpid(), start=Start.DRAIN)
    except GatewayError as error:
        if error.code != "TL-G55":
            raise
        say(f"{settings.name} is drained already")
        return 0
    with client:
        client.drain()
        if settings.share is None or settings.share.way is not ShareWay.SUBSCRIPTION:
            say(f"{settings.name}: what is published for it from now on comes to nobody")
        _watch(settings, client, say, began)
    if not _has_left(settings, began):
        what = "the gateway ended before it was drained"
        raise GatewayError("TL-G58", settings.name, what, "Nothing is lost. Run the same command again: it goes on.")
    say(f"{settings.name} is drained: all is committed, and its session at the broker is ended")
    return 0


def _watch(settings: GatewaySettings, client: GatewayClient, say: Callable[[str], None], began: float) -> None:
    """Tell how far it is until it is gone."""
    said, silent_since = "", None
    while True:
        try:
            status = client.status()
        except GatewayError:
            now = time.monotonic()
            silent_since = silent_since or now
            if _has_left(settings, began) or _gone(settings) or now - silent_since > _SILENT_S:
                return
        else:
            silent_since = None
            text = progress(status)
            if said and not text:
                what = "the drain was taken back by somebody else"
                raise GatewayError("TL-G58", settings.name, what, "The gateway takes part again.")
            if text != said:
                said = text
                say(f"{settings.name}: {text}")
        time.sleep(_LOOK_S)


def progress(status: Mapping[str, Any]) -> str:
    """How far a drain is, from the answer to ``status``; "" where none has begun."""
    drain = status.get("drain")
    if drain is None:
        return ""
    text = str(drain["step"])
    if status.get("state") != "online" and (error := (status.get("last_error") or {}).get("text")):
        return f"{text}   {error}"
    waiting = int(status["end"]) - int(status["committed"])
    readers = ", ".join(status.get("consumers") or {}) or "nobody, so far"
    return f"{text}   {waiting:,} to be committed by {readers}" if waiting else text


def _gone(settings: GatewaySettings) -> bool:
    running = None
    with contextlib.suppress(GatewayError):
        running = discover(settings.state_dir)
    if running is not None:
        running.close()
    return running is None


def _has_left(settings: GatewaySettings, began: float) -> bool:
    """Whether its session was ended since: nothing comes after that but the end of the process."""
    mine = settings.mqtt_client_id
    return any(
        one.client_id == mine and one.how == "drained" and one.ended is not None and one.ended >= began
        for one in read_clients(settings.state_dir)
    )


def taken_back(settings: GatewaySettings) -> bool:
    """Have the gateway that runs take part again; whether there is one that does.

    Raises:
        GatewayError: It does not answer.
    """
    running = discover(settings.state_dir)
    if running is None:
        return False
    with running:
        running.drain(begin=False)
        while not _gone(settings):  # it may have come to its end before it was told
            if running.status()["drain"] is None:
                return True
            time.sleep(_LOOK_S)
    return False
