"""What a line with members does, and what that means for order, in words: for `towline check`."""

from __future__ import annotations

from typing import Any, Final

from towline.bridge.config.model import Line
from towline.gateway.sharing import ShareWay

__all__ = ["render_share", "share_plan", "share_warnings"]

_COSTS: Final = {
    ShareWay.FILTERS: "each member receives its own messages",
    ShareWay.HASH: "each member receives all messages, and stores its own",
    ShareWay.SUBSCRIPTION: "the broker gives each message to one member",
}


def share_plan(line: Line) -> dict[str, Any] | None:
    """How the line is shared, as JSON values; None for a line with one gateway."""
    share = line.members[0].share if line.members else None
    if share is None:
        return None
    return {
        "way": share.way.value,
        "key": share.key or None,
        "order": _order(share.way, share.key),
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


def _order(way: ShareWay, key: str) -> str:
    """What is in the order in which it was published."""
    if way is ShareWay.SUBSCRIPTION:
        return "not kept"
    if way is ShareWay.HASH and not key:
        return "kept for each topic"
    return f"kept for each {key or 'topic, and for each device whose topics one member takes'}"


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


def _of_hash(line: Line) -> list[str]:
    share = line.members[0].share
    texts = ["for a member that is away the broker queues the messages of all members: its limits have to hold them."]
    if share is not None and not share.key:
        what = "share by the whole topic: a device's messages on two topics may come to two members"
        texts.append(f"{what}. Give share_key.")
    return texts


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
    ShareWay.HASH: _of_hash,
    ShareWay.SUBSCRIPTION: _of_subscription,
}


def render_share(plan: dict[str, Any]) -> list[str]:
    """The lines of `towline check`."""
    by = f" by {plan['key'] or 'the whole topic'}" if plan["way"] == ShareWay.HASH else ""
    out = [f"  share     {plan['way']}{by}   order {plan['order']}; {plan['cost']}"]
    for one in plan["members"]:
        filters = "   ".join(f"{s['filter']} (QoS {s['qos']})" for s in one["subscriptions"])
        out.append(f"  member    {one['name']}   client id {one['client_id']}   {filters}")
    return out
