"""The gateways that share one line's messages: what each of them is told, and how that is shown.

Whether two members take the same topic is proven (`towline.mqtt.filters.common`): what two filters take both is one
filter, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import Line
from towline.bridge.config.subscriptions import SubscribedRoute, repeatable
from towline.gateway.clients import MEMBERS
from towline.gateway.settings import GatewaySettings, ShareSettings, ShareWay
from towline.mqtt.events import Filter
from towline.mqtt.filters import common

if TYPE_CHECKING:
    from towline.bridge.config.tables import UplinkTable

#: Of a gateway's name, as rows have it.
LONGEST_NAME: Final = 64


def member_settings(
    line: UplinkTable, number: int, gateway: GatewaySettings, routes: Sequence[SubscribedRoute], group: str
) -> dict[str, Any]:
    """What a member's gateway is told, still to be validated.

    Args:
        line: With its members.
        number: Of the member.
        gateway: What the line's gateway would be told if it were the only one.
        routes: Of the line.
        group: NAME in ``$share/NAME/FILTER``, unless the line says it.
    """
    member, way, every = line.member[number], share_way(line) or ShareWay.FILTERS, gateway.subscriptions
    names = tuple(sorted(one.name for one in line.member))
    share = ShareSettings(member=member.name, members=names, way=way, client_id=gateway.mqtt_client_id)
    if way is ShareWay.SUBSCRIPTION:
        prefix = f"$share/{line.share_group or group}"
        taken = tuple(replace(one, pattern=f"{prefix}/{one.pattern}") for one in every)
    else:
        taken = restricted(member.filters, every)
    return {
        **{key: getattr(gateway, key) for key in GatewaySettings.model_fields},
        "name": f"{gateway.name}-{member.name}",
        "client_id": share.id_of(member.name),
        "state_dir": gateway.state_dir / MEMBERS / member.name,
        "subscriptions": taken,
        "repeatable": repeatable(routes, [one.pattern for one in taken]),
        "share": share,
    }


def share_way(line: UplinkTable) -> ShareWay | None:
    """How the members of a line share it; None for no members, and where nothing says it."""
    way = line.share or (ShareWay.FILTERS if any(member.filters for member in line.member) else None)
    return way if line.member else None


def restricted(filters: Sequence[str], subscriptions: Sequence[Filter]) -> tuple[Filter, ...]:
    """The subscriptions, as far as one of the filters takes their topics; each with the options of the line's own."""
    found: dict[str, Filter] = {}
    for wanted in subscriptions:
        for text in filters:
            pattern = common(text, wanted.pattern)
            if pattern is not None and (pattern not in found or found[pattern].qos < wanted.qos):
                found[pattern] = replace(wanted, pattern=pattern)
    below = {wide: [one for one in found.values() if common(wide, one.pattern) == one.pattern] for wide in found}
    return tuple(
        replace(one, qos=max(other.qos for other in below[pattern]))
        for pattern, one in found.items()
        if not any(one in below[other] for other in found if other != pattern)
    )


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
