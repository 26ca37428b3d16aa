"""What a journal remembers of its gateway's part in a line: its share of the messages, and whether it is drained.

Both are notes in the journal, so that they are as old as the rows beside them. A share that was changed while messages
wait, on disk or in the session at the broker, would bring a device's messages to two journals, or to none.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from towline.errors import ConfigError, GatewayError
from towline.gateway.clients import end_client, siblings
from towline.gateway.sharing import ShareSettings
from towline.schema import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.gateway.settings import GatewaySettings
    from towline.journal import Journal

__all__ = ["DRAIN_NOTE", "SHARE_NOTE", "Start", "drainable", "enter", "since_of"]

SHARE_NOTE: Final = "share"
#: ``{"since": seconds}`` from the first word of a drain on, with ``"done": seconds`` from its end on.
DRAIN_NOTE: Final = "drain"
#: What must be equal among the members that have not been drained.
_COMMON: Final = ("way", "members", "key")


class Start(StrEnum):
    """What a gateway is started for."""

    #: To go on as it was: also with a drain that had begun.
    GO_ON = "go-on"
    #: To be drained.
    DRAIN = "drain"
    #: To take part, also when it is drained or being drained.
    JOIN = "join"


def since_of(inbox: Journal) -> float | None:
    """When the drain began that is not done; None for none."""
    note = inbox.notes.get(DRAIN_NOTE)
    return float(note["since"]) if note and not note.get("done") else None


def enter(settings: GatewaySettings, inbox: Journal, start: Start = Start.GO_ON) -> GatewaySettings:
    """Let a gateway take its part; before anything is taken in.

    Returns:
        The settings; while it is drained, with the share that its journal knows.

    Raises:
        GatewayError: TL-G55, it is drained.
        ConfigError: TL-G56, its share was changed, or is not that of the members beside; TL-G57, a drain that can't be.
    """
    drained = (inbox.notes.get(DRAIN_NOTE) or {}).get("done")
    if drained and start is not Start.JOIN:
        with contextlib.suppress(OSError):  # a kill may have come before it was written there
            end_client(settings.state_dir, settings.mqtt_client_id, "drained")
        at = datetime.fromtimestamp(float(drained), UTC)
        what = f"this gateway was drained at {at:%Y-%m-%d %H:%M:%S} UTC, and has no session at the broker any more"
        raise GatewayError("TL-G55", settings.name, what, "Start it with towline gateway --join to take part again.")
    notes: dict[str, Any] = {}
    if start is Start.DRAIN:
        drainable(settings)
        if since_of(inbox) is None:
            notes[DRAIN_NOTE] = {"since": time.time()}
    elif start is Start.JOIN and inbox.notes.get(DRAIN_NOTE):
        notes[DRAIN_NOTE] = None
    draining = start is Start.DRAIN or (start is not Start.JOIN and since_of(inbox) is not None)
    share = _share(settings, inbox, draining=draining)
    said = share.model_dump(mode="json") if share else None
    if said != inbox.notes.get(SHARE_NOTE):
        notes[SHARE_NOTE] = said
    if notes:
        inbox.append(NO_ROWS, held={}, released=(), notes=notes)
    return settings.model_copy(update={"share": share})


def drainable(settings: GatewaySettings) -> None:
    """See that a gateway can be drained.

    Raises:
        ConfigError: TL-G57, it can't.
    """
    if settings.outbox is not None:
        what = "a gateway with an outbox is not drained: what it holds leaves by itself"
        raise ConfigError("TL-G57", settings.name, what, "Stop what writes to it, and look at towline status.")
    if settings.several_sessions:
        what = "its brokers may each have a session of its own, and only the one in use would be emptied"
        do = "Set brokers_share_sessions where they are one cluster, or drain it at each broker by itself."
        raise ConfigError("TL-G57", settings.name, what, do)


def _share(settings: GatewaySettings, inbox: Journal, *, draining: bool) -> ShareSettings | None:
    note = inbox.notes.get(SHARE_NOTE)
    known = ShareSettings.model_validate(note) if note else None
    if draining:  # what waits was shared as it was
        return known or settings.share
    wanted = settings.share
    if note and (known.promise if known else None) != (wanted.promise if wanted else None):
        raise _changed(settings, f"this journal was filled as {_said(known)}, and is to be {_said(wanted)} now")
    if wanted is not None:
        _beside(settings, wanted)
    return wanted


def _beside(settings: GatewaySettings, share: ShareSettings) -> None:
    """The members on this machine that may still take messages share as this one does."""
    mine = share.promise
    for directory, sessions in siblings(settings.state_dir).items():
        for one in sessions:
            theirs = one.share
            if one.ended is None and theirs and any(theirs.get(name) != mine.get(name) for name in _COMMON):
                beside = f'"{directory.name}" beside it is one of {_members(theirs)}'
                raise _changed(settings, f"{beside}, and this would be one of {_members(mine)}")


def _changed(settings: GatewaySettings, what: str) -> ConfigError:
    do = (
        "Set it back. To change it: drain every member of the line (towline gateway --member NAME --drain), change the "
        "file on every machine, then start each with --join; what is published in between is received by nobody."
    )
    return ConfigError("TL-G56", settings.name, f"{what}: a device's messages would come to other journals", do)


def _said(share: ShareSettings | None) -> str:
    if share is None:
        return "a line's only gateway"
    return f'"{share.member}" of {_members(share.promise)}'


def _members(promise: Mapping[str, Any]) -> str:
    """The members as a share's promise names them."""
    if "members" not in promise:
        return f'members with share = "{promise.get("way")}"'
    names = ", ".join(promise["members"])
    return f"{len(promise['members'])} members ({names}) by hash of {promise['key'] or 'the topic'}"
