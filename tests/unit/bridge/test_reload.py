"""What of a changed bridge file a running bridge takes up, and by which routes a message goes then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.noted import committed, journals, planned
from tests.unit.bridge.test_config import read
from towline.bridge.config.model import Bridge, Uplink
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import check_resume
from towline.bridge.runtime.reload import line_changes
from towline.bridge.uplink.query import RETIRED_ROUTE_S, ActiveRoutes, UplinkQuery
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError, TowlineError

HEAD = """
name = "plant"
state_dir = "state"
mqtt = { brokers = "mqtt://b" }
kafka = { bootstrap_servers = "k:9092" }
"""
GOES_ON = {"processingTime": "0 seconds"}
DOWN = '[[downlink]]\nname = "back"\nfrom = "commands"\ntopic = "c/{key}"\n'
DEDUPE = 'dedupe = { key = "{mqtt.user.id}" }'
ONCE = 'guarantee = "exactly_once"\n'
MOST = 'guarantee = "at_most_once"\n'


def line(*routes: str, name: str = "up", own: str = "") -> str:
    made = [f"[[uplink.route]]\n{route}\n" for route in routes]
    return f'[[uplink]]\nname = "{name}"\n{own}\n{"".join(made)}'


def route(filter_: str, topic: str = "t", more: str = "") -> str:
    return f'from = "{filter_}"\ntopic = "{topic}"\n{more}'


OTHER = line(route("o/#"), name="other", own=MOST)


def changed(tmp_path: Path, *routes: str, own: str = "", head: str = HEAD) -> Bridge:
    return read(head + line(*routes, own=own) + OTHER + DOWN, tmp_path)


@pytest.fixture
def bridge(tmp_path: Path) -> Bridge:
    return changed(tmp_path, route("a/#"))


def refused(before: Bridge, after: Bridge) -> list[str]:
    with pytest.raises(ConfigError) as told:
        line_changes(before, after)
    return str(told.value).splitlines()


ONE = (route("a/#"),)


@pytest.mark.parametrize(
    ("routes", "own", "restarts"),
    [
        ((route("a/#"), route("b/#")), "", True),
        ((route("b/#"),), "", True),
        ((route("a/#", more="qos = 2"),), "", True),
        ((route("a/#", topic="u", more='where = "qos = 1"'),), "", False),
        (ONE, "parallelism = 2\nmax_messages_per_trigger = 10\nmax_trigger_delay_ms = 500", False),
        (ONE, "max_trigger_delay_ms = 0", True),  # a line that rests has no linger then
        (ONE, "mqtt = { keep_alive_s = 7 }", True),
        (ONE, 'journal = { max_bytes = "1 GB" }', True),
        (ONE, 'ack_after = "kafka"', True),
        (ONE, MOST, True),
        ((route("b/#"),), 'gateways = ["g1"]', True),
    ],
)
def test_a_gateway_is_restarted_where_its_own_settings_change(
    bridge: Bridge, tmp_path: Path, routes: tuple[str, ...], own: str, *, restarts: bool
) -> None:
    (one,) = line_changes(bridge, changed(tmp_path, *routes, own=own))
    assert one.starts_gateway is restarts
    assert one.summary() == f'line "up": {"gateway and query" if restarts else "query"} restarted'


FIXED = "(fixed when Spark's session starts)"


@pytest.mark.parametrize(
    ("own", "head", "key"),
    [
        (ONCE, HEAD, f"a guarantee that no line had before {FIXED}"),
        (DEDUPE, HEAD, f"the first or the last dedupe {FIXED}"),
        ("", HEAD.replace("k:9092", "secret:9092"), "[kafka]"),
        ("", HEAD.replace('"state"', '"elsewhere"'), "state_dir"),
        ("", HEAD.replace('9092" }', '9092", settings = { "linger.ms" = 7 } }'), "[kafka]"),
    ],
)
def test_what_needs_a_new_start_is_told_by_its_key_and_refuses_the_whole_file(
    bridge: Bridge, tmp_path: Path, own: str, head: str, key: str
) -> None:
    (told,) = refused(bridge, changed(tmp_path, route("a/#"), route("b/#"), own=own, head=head))
    assert f"{key} needs a restart, and is unchanged until then" in told
    assert told.endswith("[TL-C169]")
    assert "secret" not in told


def test_lines_that_come_touch_no_other_and_what_goes_or_is_another_needs_a_new_start(
    bridge: Bridge, tmp_path: Path
) -> None:
    new = line(route("n/#"), name="new") + OTHER
    found = line_changes(bridge, read(HEAD + line(route("a/#")) + new + DOWN.replace("c/", "d/"), tmp_path))
    assert [(one.new_line.name, one.starts_gateway, one.summary()) for one in found] == [
        ("new", True, 'line "new": new'),
        ("back", False, 'line "back": query restarted'),
    ]
    told = refused(bridge, read(HEAD + line(route("a/#")) + line(route("o/#"), name="back", own=MOST), tmp_path))
    assert [text.split(": ", 1)[1].split(" needs")[0] for text in told] == [
        'uplink "other", which was removed,',
        'downlink "back", which was removed,',
        f"the first or the last downlink {FIXED}",
    ]


@pytest.mark.parametrize(
    ("own", "starts"), [(ONCE, None), (ONCE + DEDUPE, True), ("", True), (MOST, True), ('gateways = ["g1"]', False)]
)
def test_a_filter_passes_into_one_of_the_same_topics_only_where_that_can_be_kept(
    tmp_path: Path, own: str, starts: bool | None
) -> None:
    more = "qos = 2" if ONCE in own else ""
    before, after = (read(HEAD + line(route(one, more=more), own=own), tmp_path) for one in ("a/b/#", "a/#"))
    if starts is None:
        (told,) = refused(before, after)
        assert '"a/#" has topics of "a/b/#", which the session has and which is removed' in told
        assert told.endswith("[TL-C170]")
        return
    (one,) = line_changes(before, after)
    assert one.starts_gateway is starts, "gateways elsewhere have filters of their own"


# -- which routes a message goes by ------------------------------------------------------------------------------------


def uplink(tmp_path: Path, *routes: str, own: str = "") -> Uplink:
    return read(HEAD + line(*routes, own=own), tmp_path).uplinks[0]


def taken(made: Uplink) -> list[str]:
    return [f"{one.pattern.text} {one.topic.text}" for one in made.routes]


def test_a_retired_route_takes_only_what_no_other_takes(tmp_path: Path) -> None:
    """It is stored with the identity, and is not retired twice when it comes back."""
    first = uplink(tmp_path, route("a/{x}", "one-{x}"), route("b/#", "two"))
    second = uplink(tmp_path, route("c/#", "three"), route("b/#", "four"))
    kept = ActiveRoutes.replacing(second, ActiveRoutes.replacing(first), 100.0)
    assert taken(kept.apply_to(second)) == ["c/# three", "b/# four", "a/{x} one-{x}"]
    assert kept.apply_to(second).gateway.subscriptions == second.gateway.subscriptions
    assert (ActiveRoutes.from_mapping(kept.mapping), ActiveRoutes.from_mapping("")) == (kept, None)
    third = uplink(tmp_path, route("a/1", "five"))
    again = ActiveRoutes.replacing(third, kept, 200.0)
    assert taken(again.apply_to(third)) == ["a/1 five", "c/# three", "b/# four", "a/{x} one-{x}"]
    assert [at for _, at in again.retired] == [200.0, 200.0, 100.0]
    back = ActiveRoutes.replacing(second, again, 250.0)
    assert taken(back.apply_to(second)) == ["c/# three", "b/# four", "a/1 five", "a/{x} one-{x}"]
    wide = uplink(tmp_path, route("#", "all"))
    assert taken(ActiveRoutes.replacing(wide, again, 300.0).apply_to(wide)) == ["# all"]


def test_a_retired_route_is_forgotten_when_nothing_can_be_left_for_it(tmp_path: Path) -> None:
    one, other = uplink(tmp_path, route("a/#", "one")), uplink(tmp_path, route("b/#", "two"))
    kept = ActiveRoutes.replacing(other, ActiveRoutes.replacing(one), 1000.0)
    soon, late = 1000.0 + RETIRED_ROUTE_S, 1001.0 + RETIRED_ROUTE_S
    assert ActiveRoutes.replacing(other, kept, soon).retired
    assert not ActiveRoutes.replacing(other, kept, late).retired
    assert ActiveRoutes.replacing(other, kept, late, oldest_message=2000.0).retired, "older messages wait"
    assert not ActiveRoutes.replacing(other, kept, 2 * late, oldest_message=late).retired


def test_a_retired_route_keeps_what_it_drops_repeats_by(tmp_path: Path) -> None:
    """The key of the line may name what only the routes of that file capture."""
    first = uplink(tmp_path, route("a/{x}", "one"), own='dedupe = { key = "{x}" }')
    second = uplink(tmp_path, route("b/{y}", "two"), own='dedupe = { key = "{y}", within = "1 hour" }')
    made = ActiveRoutes.replacing(second, ActiveRoutes.replacing(first), 1.0).apply_to(second)
    assert [getattr(one.dedupe, "text", None) for one in made.routes] == ["{y}", "{x}"]
    plain = uplink(tmp_path, route("c/#", "three"), route("d/{z}", more='dedupe = { key = "{z}" }'))
    made = ActiveRoutes.replacing(second, ActiveRoutes.replacing(plain), 1.0).apply_to(second)
    assert [getattr(one.dedupe, "text", None) for one in made.routes] == ["{y}", None, "{z}"]


@pytest.mark.parametrize("more", ["parallelism = 3", DEDUPE, 'dead_letter_topic = "other"'])
def test_a_batch_that_was_begun_is_finished_as_it_was(tmp_path: Path, more: str) -> None:
    """Its routes, `dedupe`, dead-letter topic and parts: some of them may be in Kafka."""
    first, second = (
        read(HEAD + line(route("a/#", topic, more="qos = 2"), own=f"{ONCE}{own}"), tmp_path)
        for topic, own in (("one", "parallelism = 2"), ("two", more))
    )
    checkpoint, state_dir = first.uplinks[0].checkpoint, first.uplinks[0].gateway.state_dir
    began = UplinkQuery(first, first.uplinks[0]).query_to_start()
    assert began._mapping == ActiveRoutes.replacing(first.uplinks[0]).mapping
    identity = Identity.of_line(first, first.uplinks[0]).update(state_dir, parallelism=2, mapping=began._mapping)
    planned(checkpoint, 0, journals(), done=False)
    again = UplinkQuery(first, first.uplinks[0]).query_to_start()
    assert (again.line, again._trigger()) == (began.line, GOES_ON), "nothing has changed"
    finishing = UplinkQuery(second, second.uplinks[0]).query_to_start()
    assert finishing._trigger() == {"once": True}
    assert finishing.line.model_copy(update={"gateway": began.line.gateway}) == began.line
    assert Identity.of_line(first, first.uplinks[0]) == identity, "a kill here changes nothing of it"
    committed(checkpoint, 0)
    after = UplinkQuery(second, second.uplinks[0]).query_to_start()
    assert (taken(after.line), after.line.parallelism) == (["a/# two"], second.uplinks[0].parallelism)
    assert (after.line.dedupe_window, after._trigger()) == (second.uplinks[0].dedupe_window, GOES_ON)


def noted(line_: Uplink, guarantee: str, mapping: str = "") -> None:
    mapping = mapping or ActiveRoutes.replacing(line_).mapping
    identity = Identity("up", "plant.up", query="q", guarantee=guarantee, parallelism=1, mapping=mapping)
    identity.save(line_.gateway.state_dir)


def test_a_start_without_the_checkpoint_changes_nothing_of_what_a_batch_was_begun_by(tmp_path: Path) -> None:
    """It is brought back, as TL-B22 says, and the batch is finished as it was begun."""
    first = uplink(tmp_path, route("a/#", "one", more="qos = 2"), own=ONCE)
    second = read(HEAD + line(route("a/#", "two", more="qos = 2"), own=ONCE + DEDUPE), tmp_path)
    noted(first, "exactly_once")
    query = UplinkQuery(second, second.uplinks[0])
    without = query.query_to_start()
    with pytest.raises(TowlineError, match="TL-B22"):
        check_resume(second, without.line, Identity.of_line(second, without.line), Checkpoint(str(first.checkpoint)))
    planned(first.checkpoint, 0, journals(), done=False)
    finishing = query.query_to_start()
    assert (finishing._trigger(), taken(finishing.line)) == ({"once": True}, ["a/# one"])


def test_routes_that_are_refused_now_are_not_forgotten_in_silence(tmp_path: Path) -> None:
    """Messages may wait for them, in the journal or at the broker."""
    bridge = read(HEAD + line(route("a/#", "two")), tmp_path)
    noted(bridge.uplinks[0], "", '{"routes":[{"from":"a/#","topic":"one","former":1}]}')
    with pytest.raises(ConfigError, match=r"messages wait, with settings that this version refuses.*TL-C210"):
        UplinkQuery(bridge, bridge.uplinks[0]).query_to_start()
    planned(bridge.uplinks[0].checkpoint, 0, journals(), done=False)
    with pytest.raises(ConfigError, match=r'a batch was begun.*"mapping": "".*reset.*TL-C210'):
        UplinkQuery(bridge, bridge.uplinks[0]).query_to_start()
