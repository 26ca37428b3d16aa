"""Reads ``[[uplink.member]]``: the gateways that share one line's messages, and what each of them is told.

Whether two members take the same topic is proven (`towline.mqtt.filters.common`): what two filters take both is one
filter, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from towline.bridge.config.model import NAME, Line, UplinkSection
from towline.bridge.config.places import KeyPath
from towline.bridge.config.section import Section
from towline.bridge.config.subscriptions import SubscribedRoute, repeatable
from towline.bridge.config.tables import Tables
from towline.gateway.clients import MEMBERS
from towline.gateway.settings import GatewaySettings, ShareSettings, ShareWay
from towline.mqtt.events import Filter
from towline.mqtt.filters import common
from towline.mqtt.rules import filter_problem

__all__ = ["MemberSection", "MembersReader", "render_share", "restricted", "share_plan", "share_warnings"]

#: Of a gateway's name, as rows have it.
_LONGEST_NAME = 64


class MemberSection(Section):
    """``[[uplink.member]]`` as written.

    Attributes:
        name: Fixed: its journal, its client id and its rows are named after it.
        filters: What it takes of the line's messages, with ``share = "filters"``.
    """

    name: Annotated[str, Field(pattern=NAME)]
    filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Line:
    """What the members have in common."""

    uplink: UplinkSection
    gateway: GatewaySettings
    routes: Sequence[SubscribedRoute]
    group: str


class MembersReader:
    """Reads the members of one line.

    Args:
        tables: Of the file.
        path: Of the line.
        subject: The line in words.
        table: Of the line, as written.
    """

    def __init__(self, tables: Tables, path: KeyPath, subject: str, table: dict[str, Any]) -> None:
        self._tables = tables
        self._path = path
        self._subject = subject
        self._table = table

    def members(
        self, uplink: UplinkSection, gateway: GatewaySettings, routes: Sequence[SubscribedRoute], bridge: str
    ) -> tuple[GatewaySettings, ...]:
        """What each member's gateway is told; none where there are no members, or where there are mistakes.

        Args:
            uplink: The line's own keys.
            gateway: What the line's gateway would be told if it were the only one.
            routes: Of the line.
            bridge: Its name.
        """
        sections = self._sections()
        way = self._way(uplink, sections)
        if way is None or not sections:
            return ()
        line = _Line(uplink, gateway, routes, uplink.share_group or f"{bridge}-{uplink.name}")
        if not (self._fits_way(way, sections) and self._fits_line(way, line)):
            return ()
        members = tuple(self._member(way, line, sections, index) for index in range(len(sections)))
        made = tuple(one for one in members if one is not None)
        if len(made) == len(members):
            self._apart(way, made)
        return made

    def _note(self, code: str, key: KeyPath, what: str, do: str) -> None:
        self._tables.mistakes.add(code, self._path + key, self._subject, what, do)

    def _sections(self) -> tuple[MemberSection, ...]:
        tables = self._table.get("member", [])
        if not isinstance(tables, list) or ("member" in self._table and not tables):
            self._note("TL-C122", ("member",), "members are written [[uplink.member]]", "Add one with a name.")
            return ()
        found: list[MemberSection] = []
        for index, table in enumerate(tables):
            subject = f"{self._subject} member {index + 1}"
            section = self._tables.model(MemberSection, table, (*self._path, "member", index), subject)
            if section is None:
                return ()
            if section.name in {one.name for one in found}:
                what = f'two members are named "{section.name}"'
                self._note("TL-C122", ("member", index, "name"), what, "Rename one.")
                return ()
            found.append(section)
        return tuple(found)

    def _way(self, uplink: UplinkSection, sections: Sequence[MemberSection]) -> ShareWay | None:
        if sections:
            if uplink.share is not None:
                return uplink.share
            if any(one.filters for one in sections):
                return ShareWay.FILTERS
            do = 'Give each member filters, or write share = "subscription".'
            self._note("TL-C122", ("member",), "nothing says how the members share the line's messages", do)
            return None
        for key in ("share", "share_group"):
            if getattr(uplink, key) is not None and "member" not in self._table:
                what = f"{key} says how members share a line, and it has none"
                self._note("TL-C122", (key,), what, "Add [[uplink.member]] with a name, or remove it.")
        return None

    def _fits_way(self, way: ShareWay, sections: Sequence[MemberSection]) -> bool:
        """Filters stand exactly where they say something, and are filters."""
        clean = True
        for index, one in enumerate(sections):
            if way is ShareWay.FILTERS and not one.filters:
                what, do = f'member "{one.name}" has no filters, so it would take nothing', "Give it some."
            elif way is not ShareWay.FILTERS and one.filters:
                what = f'member "{one.name}" has filters, and share = "{way}" says what it takes'
                do = "Remove one of the two."
            else:
                clean = all(self._is_filter(index, at, text) for at, text in enumerate(one.filters)) and clean
                continue
            clean = False
            self._note("TL-C122", ("member", index, "filters"), what, do)
        return clean

    def _is_filter(self, index: int, at: int, text: str) -> bool:
        problem = filter_problem(text) or ("it is a shared subscription" if text.startswith("$share/") else None)
        if problem or not text:
            do = 'Write a plain filter, as "telemetry/north/#".'
            self._note("TL-C67", ("member", index, "filters", at), f'"{text}": {problem or "it is empty"}', do)
        return bool(text) and problem is None

    def _fits_line(self, way: ShareWay, line: _Line) -> bool:
        """What of the line contradicts its members."""
        shared = [route for route in line.routes if route.pattern.share]
        if shared:
            what = f'"{shared[0].pattern.text}" is a shared subscription, and the line has members'
            self._note("TL-C125", ("route",), what, 'Write the plain filter, and share = "subscription".')
            return False
        if way is not ShareWay.SUBSCRIPTION:
            if line.uplink.share_group is not None:
                self._note("TL-C122", ("share_group",), f'share_group says nothing with share = "{way}"', "Remove it.")
            return line.uplink.share_group is None
        gateway = line.gateway
        problems = {
            "route": any(one.no_local for one in gateway.subscriptions) and "no_local [MQTT-3.8.3-4]",
            "receipts": gateway.receipts is not None and "receipts, which need every message of a publisher",
            "mqtt": gateway.protocol in {"3.1.1", "3.1"} and "MQTT 3.x, which has no shared subscriptions",
        }
        for key, problem in problems.items():
            if problem:
                what = f'share = "subscription" does not go with {problem}'
                self._note("TL-C125", (key,), what, 'Change it, or take share = "filters".')
        return not any(problems.values())

    def _member(
        self, way: ShareWay, line: _Line, sections: Sequence[MemberSection], index: int
    ) -> GatewaySettings | None:
        gateway, section = line.gateway, sections[index]
        name = f"{gateway.name}-{section.name}"
        if len(name) > _LONGEST_NAME:
            what = f'"{name}" names this gateway in its rows, and has more than {_LONGEST_NAME} characters'
            self._note("TL-C125", ("member", index, "name"), what, "Shorten one of the two names.")
            return None
        subscriptions = self._subscriptions(way, line, section, index)
        if not subscriptions:
            return None
        share = ShareSettings(
            member=section.name,
            members=tuple(sorted(one.name for one in sections)),
            way=way,
            client_id=gateway.mqtt_client_id,
        )
        values = {name: getattr(gateway, name) for name in GatewaySettings.model_fields}
        values |= {
            "name": name,
            "client_id": share.id_of(section.name),
            "state_dir": gateway.state_dir / MEMBERS / section.name,
            "subscriptions": subscriptions,
            "repeatable": repeatable(line.routes, [one.pattern for one in subscriptions]),
            "share": share,
        }
        try:
            return GatewaySettings.model_validate(values)
        except ValidationError as error:
            path = (*self._path, "member", index)
            self._tables.mistakes.add_details(error.errors(), GatewaySettings, path, self._subject)
            return None

    def _subscriptions(self, way: ShareWay, line: _Line, section: MemberSection, index: int) -> tuple[Filter, ...]:
        every = line.gateway.subscriptions
        if way is ShareWay.SUBSCRIPTION:
            return tuple(replace(one, pattern=f"$share/{line.group}/{one.pattern}") for one in every)
        for at, text in enumerate(section.filters):
            if not restricted((text,), every):
                what = f'"{text}" of member "{section.name}" takes nothing that a route of the line takes'
                self._note("TL-C124", ("member", index, "filters", at), what, "Correct it, or add a route.")
                return ()
        return restricted(section.filters, every)

    def _apart(self, way: ShareWay, members: Sequence[GatewaySettings]) -> None:
        """No topic is taken by two members: it would be stored twice."""
        if way is not ShareWay.FILTERS:
            return
        for (first, one), (second, other) in combinations(enumerate(members), 2):
            pairs = ((a.pattern, b.pattern) for a in one.subscriptions for b in other.subscriptions)
            both = next((found for a, b in pairs if (found := common(a, b)) is not None), None)
            if both is not None and one.share and other.share:
                names = f'"{one.share.member}" and "{other.share.member}"'
                what = f'members {names} both take "{both}", so that it would be doubled'
                do = "Give the members filters that have no topic in common."
                self._note("TL-C121", ("member", max(first, second), "filters"), what, do)


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
