"""The gateways of a line on this machine, and the sessions that it has left at a broker: for `towline status`.

What was written down on another machine can't be seen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from towline.bridge.config.model import AnyLine
from towline.bridge.lines.evidence import gateway_status
from towline.gateway.clients import MEMBERS, read_clients


def wanted_clients(line: AnyLine) -> dict[str, str]:
    """Member → client id, as the file says; "" is the member of a line with one gateway."""
    return {one.share.member if one.share else "": one.mqtt_client_id for one in line.each_gateway}


def members_status(line_dir: Path, wanted: Mapping[str, str] | None) -> dict[str, Any]:
    """A line's ``members`` (none for one gateway; None where none answers here), ``left_sessions`` and ``drained``.

    Args:
        line_dir: State directory of the line.
        wanted: `wanted_clients`; None where no file was read, and then what is on disk counts.
    """
    names = [name for name in wanted if name] if wanted is not None else [name for name, _ in _places(line_dir) if name]
    return {
        "members": {name: gateway_status(line_dir / MEMBERS / name) for name in names},
        "left_sessions": left_sessions(line_dir, wanted),
        "drained": is_drained(line_dir, wanted),
    }


def left_sessions(line_dir: Path, wanted: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Sessions that were not ended, of client ids that the file does not have any more.

    Args:
        line_dir: State directory of the line.
        wanted: `wanted_clients`; None where no file was read: nobody knows then what is wanted.
    """
    if wanted is None:
        return []
    return [
        {"member": name, "client_id": one.client_id, "brokers": list(one.brokers), "since": one.since}
        for name, directory in _places(line_dir)
        for one in read_clients(directory)
        if one.ended is None and wanted.get(name) != one.client_id
    ]


def is_drained(line_dir: Path, wanted: Mapping[str, str] | None) -> bool:
    """Whether the line's one gateway left it by a drain, and was not started again.

    Args:
        line_dir: State directory of the line.
        wanted: `wanted_clients`; None where no file was read, and then the last client id counts.
    """
    known = read_clients(line_dir)
    own = known[-1].client_id if wanted is None and known else (wanted or {}).get("")
    return any(one.client_id == own and one.how == "drained" for one in known)


def _places(line_dir: Path) -> Iterator[tuple[str, Path]]:
    yield "", line_dir
    with contextlib.suppress(OSError):
        yield from ((one.name, one) for one in sorted((line_dir / MEMBERS).iterdir()) if one.is_dir())


def told_of_sharing(line: Mapping[str, Any]) -> Iterator[str]:
    """What of a line's members, and of sessions that it left, a person has to know."""
    statuses = [line["gateway"] or {}, *(status or {} for status in line.get("members", {}).values())]
    if any((status.get("share") or {}).get("way") == "subscription" for status in statuses):
        yield 'the order of a device\'s messages is not kept: share = "subscription".'
    for one in line.get("left_sessions", ()):
        where = f"at {', '.join(one['brokers'])}" if one["brokers"] else "at its broker"
        what = f'the session "{one["client_id"]}" {where} was not ended, and nobody fetches what comes to it'
        if one["member"]:
            way = f'Put member "{one["member"]}" back into the file and drain it; or give it up with what it holds'
        else:
            way = "Drain it with the file as it was; or give it up with what it holds"
        yield f'{what}. {way}: mqtt = {{ abandon_session = "{one["client_id"]}" }}.   [TL-M51]'


def render_member(name: str, status: Mapping[str, Any] | None) -> str:
    """One line about a member."""
    if status is None:
        return f"  member    {name}   none answers on this machine"
    parts = [str(status.get("state")), f"{status.get('client_id')} at {status.get('broker') or 'no broker'}"]
    parts.append(f"received {status.get('received', 0):,}   waiting {status.get('waiting', 0):,}")
    if drain := status.get("drain"):
        parts.append(f"drain: {drain}")
    return f"  member    {name}   {'   '.join(parts)}"
