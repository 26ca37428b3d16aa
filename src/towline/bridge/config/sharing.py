"""What a line with members does, and what that means for order, in words: for `towline check`."""

from __future__ import annotations

from typing import Any, Final

from towline.bridge.config.model import Line
from towline.gateway.settings import ShareWay

__all__ = ["render_share", "share_plan", "share_warnings"]

_COSTS: Final = {
    ShareWay.FILTERS: "each member receives its own messages",
    ShareWay.SUBSCRIPTION: "the broker gives each message to one member",
}


#: What is in the order in which it was published.
_ORDER: Final = {
    ShareWay.FILTERS: "kept for each topic, and for each device whose topics one member takes",
    ShareWay.SUBSCRIPTION: "not kept",
}


def share_plan(line: Line) -> dict[str, Any] | None:
    """How the line is shared, as JSON values; None for a line with one gateway."""
    share = line.members[0].share if line.members else None
    if share is None:
        return None
    return {
        "way": share.way.value,
        "order": _ORDER[share.way],
        "cost": _COSTS[share.way],
        "members": [
            {
                "name": one.share.member,
                "client_id": one.mqtt_client_id,
                "gateway": one.name,
                "subscriptions": [{"filter": s.pattern, "qos": s.qos} for s in one.subscriptions],
                "state_dir": str(one.state_dir),
            }
            for one in line.members
            if one.share
        ],
    }


def share_warnings(line: Line) -> list[str]:
    """What is allowed for a line with members and yet deserves a thought."""
    share = line.members[0].share if line.members else None
    if share is None:
        return []
    texts = list(_WARNINGS[share.way](line))
    if line.gateway.receipts is not None:
        texts.append(
            "receipts: each member knows its own messages alone; a publisher whose messages come to several members "
            "never has all its receipts, and goes on sending."
        )
    return texts


def _of_filters(line: Line) -> list[str]:
    taken = {s.pattern for one in line.members for s in one.subscriptions}
    left = [s.pattern for s in line.gateway.subscriptions if s.pattern not in taken]
    return [
        f'of "{pattern}" only what the members\' filters take is received; the rest comes to nobody.'
        for pattern in left
    ]


def _of_subscription(line: Line) -> list[str]:
    texts = [
        'the order of a device\'s messages is not kept: the broker gives them to any member (share = "subscription").',
        "what the broker has queued for a member that is away waits in its session, and is given to no other.",
        "a shared subscription brings no retained messages.",
    ]
    if line.within:
        texts.append("repeats may come to different members; one query that reads all of them drops them all the same.")
    return texts


_WARNINGS: Final = {
    ShareWay.FILTERS: _of_filters,
    ShareWay.SUBSCRIPTION: _of_subscription,
}


def render_share(plan: dict[str, Any]) -> list[str]:
    """The lines of `towline check`."""
    out = [f"  share     {plan['way']}   order {plan['order']}; {plan['cost']}"]
    for one in plan["members"]:
        filters = "   ".join(f"{s['filter']} (QoS {s['qos']})" for s in one["subscriptions"])
        out.append(f"  member    {one['name']}   client id {one['client_id']}   {filters}")
    return out
