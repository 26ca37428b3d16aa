"""What of a changed bridge file a running bridge takes up, and by which routes a message goes then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import read
from towline.bridge.config.model import Bridge, Uplink
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import check_resume
from towline.bridge.lines.statuses import read_checkpoint
from towline.bridge.runtime.reload import line_changes
from towline.bridge.uplink.query import RETIRED_ROUTE_S, ActiveRoutes, UplinkQuery
from towline.errors import ConfigError, TowlineError
from towline.guarantee import Guarantee

HEAD = """
name = "plant"
state_dir = "state"
mqtt = { brokers = "mqtt://b" }
kafka = { bootstrap_servers = "k:9092" }
"""
GOES_ON = {"processingTime": "0 seconds"}
DOWN = '[[downlink]]\nname = "back"\nfrom = "commands"\ntopic = "c/{key}"\n'


def line(*routes: str, name: str = "up", own: str = "") -> str:
    made = [f"[[uplink.route]]\n{route}\n" for route in routes]
    return f'[[uplink]]\nname = "{name}"\n{own}\n{"".join(made)}'


def route(filter_: str, topic: str = "t", more: str = "") -> str:
    return f'from = "{filter_}"\ntopic = "{topic}"\n{more}'


@pytest.fixture
def bridge(tmp_path: Path) -> Bridge:
    return read(HEAD + line(route("a/#")) + line(route("o/#"), name="other") + DOWN, tmp_path)


def changed(tmp_path: Path, *routes: str, own: str = "", head: str = HEAD) -> Bridge:
    return read(head + line(*routes, own=own) + line(route("o/#"), name="other") + DOWN, tmp_path)


def refused(before: Bridge, after: Bridge) -> list[str]:
    with pytest.raises(ConfigError) as told:
        line_changes(before, after)
    return str(told.value).splitlines()


@pytest.mark.parametrize(
    ("routes", "own", "added", "removed"),
    [
        ((route("a/#"), route("b/#")), "", ["b/#"], []),
        ((route("b/#"),), "", ["b/#"], ["a/#"]),
        ((route("a/#", more="qos = 2"),), "", ["a/#"], []),
        ((route("a/#", topic="u", more='key = "{mqtt.topic}"\nwhere = "qos = 1"'),), "", [], []),
        ((route("a/#"),), 'dead_letter_topic = "dead"', [], []),
        ((route("a/#"),), "max_messages_per_trigger = 10\nmax_trigger_delay_ms = 1000", [], []),
    ],
)
def test_routes_and_batches_of_a_line_may_change(
    bridge: Bridge, tmp_path: Path, routes: tuple[str, ...], own: str, added: list[str], removed: list[str]
) -> None:
    found = line_changes(bridge, changed(tmp_path, *routes, own=own))
    named = {one.new_line.name for one in found}
    assert named <= {"up", "other"}
    one = next(one for one in found if one.new_line.name == "up")
    assert (one.added_filters, one.removed_filters, one.starts_gateway) == (added, removed, bool(added or removed))
    # A topic of dead letters is one that no route of any line may name.
    assert named == ({"up", "other"} if "dead_letter_topic" in own else {"up"})


@pytest.mark.parametrize(
    ("own", "head", "keys"),
    [
        (
            'guarantee = "exactly_once"',
            HEAD,
            ["a guarantee that no line had before (fixed when Spark's session starts)"],
        ),
        (
            'dedupe = { key = "{mqtt.user.id}" }',
            HEAD,
            ["the first or the last dedupe (fixed when Spark's session starts)"],
        ),
        ("", HEAD.replace("k:9092", "secret:9092"), ["[kafka] bootstrap_servers"]),
        ("", HEAD.replace('"state"', '"elsewhere"'), ["state_dir"]),
        ("", HEAD + 'spark = { master = "local[3]" }\n', ["[spark] master"]),
        ("", HEAD.replace('9092" }', '9092", settings = { "linger.ms" = 7 } }'), ["[kafka] settings.linger.ms"]),
        ("", HEAD + 'monitor = { listen = "9999" }\n', ["[monitor] listen"]),
    ],
)
def test_what_needs_a_new_start_is_told_by_its_key_and_refuses_the_whole_file(
    bridge: Bridge, tmp_path: Path, own: str, head: str, keys: list[str]
) -> None:
    told = refused(bridge, changed(tmp_path, route("a/#"), route("b/#"), own=own, head=head))
    assert len(told) == len(keys)
    for key, text in zip(keys, told, strict=True):
        assert f"{key} needs a restart, and is unchanged until then" in text
        assert text.endswith("[TL-C169]")
    assert not any("secret" in text for text in told)


#: What a running gateway does not take up, and what Spark's query alone knows.
STARTS = [
    ('mqtt = { keep_alive_s = 7, will = { topic = "w" } }', True),
    ('journal = { max_bytes = "1 GB" }', True),
    ('ack_after = "kafka"', True),
    ('guarantee = "at_most_once"', True),
    ('gateways = ["g1"]', True),
    ("parallelism = 2", False),
    ("max_trigger_delay_ms = 500", False),
    ("max_trigger_delay_ms = 0", True),  # a line that rests has no linger after a silence then
    ("max_messages_per_trigger = 10", False),
]


@pytest.mark.parametrize(("own", "starts"), STARTS)
def test_a_gateway_is_started_again_where_it_has_to_be(tmp_path: Path, own: str, *, starts: bool) -> None:
    """Another line of the same guarantee, for which Spark's session is made."""
    other = line(route("o/#"), name="other", own='guarantee = "at_most_once"')
    before, after = (read(HEAD + line(route("a/#"), own=one) + other, tmp_path) for one in ("", own))
    (one,) = line_changes(before, after)
    assert (one.new_line.name, one.starts_gateway) == ("up", starts)
    assert one.summary().endswith("restarted" if starts else 'line "up": changed settings of its query')


def test_lines_that_come_touch_no_other_and_what_goes_or_is_another_needs_a_new_start(
    bridge: Bridge, tmp_path: Path
) -> None:
    new = line(route("n/#"), name="new") + line(route("o/#"), name="other")
    found = line_changes(bridge, read(HEAD + line(route("a/#")) + new + DOWN.replace("c/", "d/"), tmp_path))
    assert [(one.new_line.name, one.starts_gateway, one.summary()) for one in found] == [
        ("new", True, 'line "new": new'),
        ("back", False, 'line "back": changed settings of its query'),
    ]
    told = refused(bridge, read(HEAD + line(route("a/#")) + line(route("o/#"), name="back"), tmp_path))
    assert [text.split(": ", 1)[1].split(" needs")[0] for text in told] == [
        'uplink "other", which was removed,',
        'downlink "back", which was removed,',
        "the first or the last downlink (fixed when Spark's session starts)",
    ]


@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_filter_passes_into_one_of_the_same_topics_only_where_that_can_be_kept(
    tmp_path: Path, guarantee: Guarantee
) -> None:
    own, more = f'guarantee = "{guarantee}"', "qos = 2" if guarantee is Guarantee.EXACTLY_ONCE else ""
    before, after = (read(HEAD + line(route(one, more=more), own=own), tmp_path) for one in ("a/b/#", "a/#"))
    if guarantee is Guarantee.EXACTLY_ONCE:
        (told,) = refused(before, after)
        assert '"a/#" has topics of "a/b/#", which the session has and which is removed' in told
        assert told.endswith("[TL-C170]")
    else:
        assert [one.starts_gateway for one in line_changes(before, after)] == [True]


def test_a_key_for_repeats_lets_filters_pass(tmp_path: Path) -> None:
    own = 'guarantee = "exactly_once"\ndedupe = { key = "{mqtt.user.id}" }'
    before, after = (read(HEAD + line(route(one, more="qos = 2"), own=own), tmp_path) for one in ("a/b/#", "a/#"))
    assert len(line_changes(before, after)) == 1


def test_gateways_elsewhere_have_filters_of_their_own(tmp_path: Path) -> None:
    own = 'gateways = ["g1"]'
    before, after = (read(HEAD + line(route(one), own=own), tmp_path) for one in ("a/#", "b/#"))
    assert [one.starts_gateway for one in line_changes(before, after)] == [False]


# -- which routes a message goes by ------------------------------------------------------------------------------------


def uplink(tmp_path: Path, *routes: str, own: str = "") -> Uplink:
    return read(HEAD + line(*routes, own=own), tmp_path).uplinks[0]


def taken(made: Uplink) -> list[str]:
    return [f"{one.pattern.text} {one.topic.text}" for one in made.routes]


def test_a_retired_route_takes_only_what_no_other_takes(tmp_path: Path) -> None:
    first = uplink(tmp_path, route("a/{x}", "one-{x}"), route("b/#", "two"))
    second = uplink(tmp_path, route("c/#", "three"), route("b/#", "four"))
    kept = ActiveRoutes.replacing(second, ActiveRoutes.replacing(first), 100.0)
    assert taken(kept.apply_to(second)) == ["c/# three", "b/# four", "a/{x} one-{x}"]
    assert kept.apply_to(second).gateway.subscriptions == second.gateway.subscriptions
    third = uplink(tmp_path, route("a/1", "five"))
    again = ActiveRoutes.replacing(third, kept, 200.0)
    assert taken(again.apply_to(third)) == ["a/1 five", "c/# three", "b/# four", "a/{x} one-{x}"]
    assert [at for _, at in again.retired] == [200.0, 200.0, 100.0]
    wide = uplink(tmp_path, route("#", "all"))
    assert taken(ActiveRoutes.replacing(wide, again, 300.0).apply_to(wide)) == ["# all"]


def test_a_route_that_comes_back_is_not_retired_twice(tmp_path: Path) -> None:
    one, other = uplink(tmp_path, route("a/#", "one")), uplink(tmp_path, route("b/#", "two"))
    kept = ActiveRoutes.replacing(one)
    for step in range(6):
        kept = ActiveRoutes.replacing(other if step % 2 == 0 else one, kept, float(step))
    assert taken(kept.apply_to(one)) == ["a/# one", "b/# two"]


def test_a_retired_route_is_forgotten_when_nothing_can_be_left_for_it(tmp_path: Path) -> None:
    one, other = uplink(tmp_path, route("a/#", "one")), uplink(tmp_path, route("b/#", "two"))
    kept = ActiveRoutes.replacing(other, ActiveRoutes.replacing(one), 1000.0)
    soon, late = 1000.0 + RETIRED_ROUTE_S, 1001.0 + RETIRED_ROUTE_S
    assert ActiveRoutes.replacing(other, kept, soon).retired
    assert not ActiveRoutes.replacing(other, kept, late).retired
    assert ActiveRoutes.replacing(other, kept, late, oldest_message=2000.0).retired, (
        "older messages wait than it takes to be sure"
    )
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


@pytest.mark.parametrize(
    "more", ["", "parallelism = 3", 'dedupe = { key = "{mqtt.user.id}" }', 'dead_letter_topic = "other"']
)
def test_a_batch_that_was_begun_is_finished_as_it_was(tmp_path: Path, more: str) -> None:
    """Its routes, `dedupe`, dead-letter topic and parts: some of them may be in Kafka."""
    own = 'guarantee = "exactly_once"\n'
    first = read(HEAD + line(route("a/#", "one", more="qos = 2"), own=f"{own}parallelism = 2"), tmp_path)
    second = read(HEAD + line(route("a/#", "two", more="qos = 2"), own=f"{own}{more}"), tmp_path)
    checkpoint, state_dir = first.uplinks[0].checkpoint, first.uplinks[0].gateway.state_dir
    began = UplinkQuery(first, first.uplinks[0]).query_to_start()
    assert began._mapping == ActiveRoutes.replacing(first.uplinks[0]).mapping
    assert (began.line, began._trigger()) == (
        ActiveRoutes.replacing(first.uplinks[0]).apply_to(first.uplinks[0]),
        GOES_ON,
    )
    identity = Identity.of_line(first, first.uplinks[0]).update(state_dir, parallelism=2, mapping=began._mapping)
    begin_batch(checkpoint)
    again = UplinkQuery(first, first.uplinks[0]).query_to_start()
    assert (again.line, again._trigger()) == (began.line, GOES_ON), "nothing has changed"
    finishing = UplinkQuery(second, second.uplinks[0]).query_to_start()
    assert finishing._trigger() == {"once": True}
    assert finishing.line.model_copy(update={"gateway": began.line.gateway}) == began.line
    assert Identity.of_line(first, first.uplinks[0]) == identity, "a kill here changes nothing of it"
    (checkpoint / "commits" / "0").write_text("v1\n{}")
    after = UplinkQuery(second, second.uplinks[0]).query_to_start()
    assert (taken(after.line), after.line.parallelism) == (["a/# two"], second.uplinks[0].parallelism)
    assert after.line.dedupe_window == second.uplinks[0].dedupe_window
    assert after._trigger() == GOES_ON


def test_a_start_without_the_checkpoint_changes_nothing_of_what_a_batch_was_begun_by(tmp_path: Path) -> None:
    """It is brought back, as TL-B22 says, and the batch is finished as it was begun."""
    own = 'guarantee = "exactly_once"\n'
    first = uplink(tmp_path, route("a/#", "one", more="qos = 2"), own=own)
    dedupe = 'dedupe = { key = "{mqtt.user.id}" }'
    second = read(HEAD + line(route("a/#", "two", more="qos = 2"), own=own + dedupe), tmp_path)
    mapping = ActiveRoutes.replacing(first).mapping
    Identity("up", "plant.up", query="q", guarantee="exactly_once", parallelism=1, mapping=mapping).save(
        first.gateway.state_dir
    )
    query = UplinkQuery(second, second.uplinks[0])
    without = query.query_to_start()
    with pytest.raises(TowlineError, match="TL-B22"):
        check_resume(without.line, "b", Identity.of_line(second, without.line), read_checkpoint(first.checkpoint))
    begin_batch(first.checkpoint)
    finishing = query.query_to_start()
    assert finishing._trigger() == {"once": True}
    assert (taken(finishing.line), finishing.line.dedupe_window) == (["a/# one"], None)


def test_a_batch_that_is_written_again_is_not_finished_before(tmp_path: Path) -> None:
    """It was begun at least once and with dedupe; there is no marker of it, and Spark has no use for its state."""
    dedupe = 'dedupe = { key = "{mqtt.user.id}" }'
    first = uplink(tmp_path, route("a/#", "one"), own=dedupe)
    once = 'guarantee = "exactly_once"'
    second = read(HEAD + line(route("a/#", "two", more="qos = 2"), own=once), tmp_path)
    mapping = ActiveRoutes.replacing(first).mapping
    Identity("up", "plant.up", query="q", guarantee="at_least_once", parallelism=1, mapping=mapping).save(
        first.gateway.state_dir
    )
    begin_batch(first.checkpoint)
    (first.checkpoint / "state").mkdir()
    query = UplinkQuery(second, second.uplinks[0]).query_to_start()
    assert query._trigger() == GOES_ON
    assert (taken(query.line), query.line.dedupe_window) == (["a/# two"], None)


def test_routes_that_are_refused_now_are_not_forgotten_in_silence(tmp_path: Path) -> None:
    """Messages may wait for them, in the journal or at the broker."""
    bridge = read(HEAD + line(route("a/#", "two")), tmp_path)
    state_dir = bridge.uplinks[0].gateway.state_dir
    refused = '{"routes":[{"from":"a/#","topic":"one","former":1}]}'
    identity = Identity("up", "plant.up", query="q", mapping=refused)
    identity.save(state_dir)
    with pytest.raises(ConfigError, match=r"routes that this version refuses.*TL-C210"):
        UplinkQuery(bridge, bridge.uplinks[0]).query_to_start()
    assert Identity.read(state_dir) == identity
    begin_batch(bridge.uplinks[0].checkpoint)
    with pytest.raises(ConfigError, match=r'a batch was begun.*"mapping": "".*reset.*TL-C210'):
        UplinkQuery(bridge, bridge.uplinks[0]).query_to_start()


def begin_batch(checkpoint: Path) -> None:
    """A batch that was begun and is not done, as Spark writes it down."""
    for log in ("offsets", "commits"):
        (checkpoint / log).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"q"}')
    (checkpoint / "offsets" / "0").write_text('v1\n{}\n{"gateways":{},"tick":0}')


def test_what_was_in_force_outlives_the_process(tmp_path: Path) -> None:
    more = 'key = "{x}"\nwhere = "qos > 0"\nfields = { f = "upper(topic)" }'
    first = uplink(tmp_path, route("a/{x}", "one-{x}", more))
    second = uplink(tmp_path, route("b/#", "two"), own='dead_letter_topic = "dead"')
    kept = ActiveRoutes.replacing(second, ActiveRoutes.replacing(first), 12.5)
    Identity("up", "plant.up").update(tmp_path / "made", mapping=kept.mapping)
    identity = Identity.read(tmp_path / "made")
    assert identity is not None
    assert ActiveRoutes.from_mapping(identity.mapping) == kept
    assert ActiveRoutes.from_mapping("") is None
