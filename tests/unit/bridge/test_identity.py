"""Lines are recognised by the state they left, whatever they are called now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.model import Bridge
from towline.bridge.lines.identity import IDENTITY_FILE, Identity, assign_identities, sink_ids
from towline.bridge.lines.recovery import reset_line
from towline.errors import ConfigError

BROKERS = ("mqtt://a:1883",)


def bridge(directory: Path, *lines: str) -> Bridge:
    head, tail = GOOD.split("[[uplink]]", 1)
    return read(head + "".join("[[uplink]]" + tail.replace('"telemetry"', f'"{name}"', 1) for name in lines), directory)


def test_a_new_line_is_named_after_bridge_and_line(tmp_path: Path) -> None:
    assert assign_identities(bridge(tmp_path, "a")) == []
    assert Identity.read(tmp_path / "state" / "a") == Identity("a", "plant-7.a", brokers=BROKERS)
    assert (tmp_path / "state" / "a" / IDENTITY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_lost_file_comes_back_the_same(tmp_path: Path) -> None:
    (tmp_path / "state" / "a" / "inbox").mkdir(parents=True)
    assign_identities(bridge(tmp_path, "a"))
    assert Identity.read(tmp_path / "state" / "a") == Identity("a", "plant-7.a", brokers=BROKERS)


def test_a_renamed_line_is_asked_about_with_both_ways_out(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a", "b"))
    with pytest.raises(ConfigError) as caught:
        assign_identities(bridge(tmp_path, "c", "b"))
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert message == (
        'bridge.toml: line "c" is new, and line "a" is no longer in bridge.toml but its journal and checkpoint are in '
        "state/a. Was it renamed? Then: mv state/a state/c, and keep its MQTT session with "
        'mqtt = { client_id = "plant-7-a" }. Is it another line? Then: towline retire bridge.toml a, which '
        "delivers the waiting messages.   [TL-B20]"
    )
    assert not (tmp_path / "state" / "c").exists()


def test_the_way_out_keeps_the_sink_id(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a"))
    (tmp_path / "state" / "a").rename(tmp_path / "state" / "c")
    assert assign_identities(bridge(tmp_path, "c")) == ['line "c" was "a": it continues there, as sink "plant-7.a"']
    assert Identity.read(tmp_path / "state" / "c") == Identity("c", "plant-7.a", brokers=BROKERS)
    assert assign_identities(bridge(tmp_path, "c")) == []


def test_a_bridge_that_is_called_otherwise_keeps_its_sinks(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a"))
    assert assign_identities(bridge(tmp_path, "a").model_copy(update={"name": "plant-8"})) == []
    assert sink_ids(tmp_path / "state" / "a") == {"plant-7.a"}


def test_a_broker_that_is_named_no_more_is_told_once(tmp_path: Path) -> None:
    """Nothing else would tell of what waits there."""
    assign_identities(bridge(tmp_path, "a"))
    text = (tmp_path / "bridge.toml").read_text()
    moved = read(text.replace("mqtt://a:1883", "mqtt://b:1883"), tmp_path)
    (message,) = assign_identities(moved)
    assert message.startswith('line "a": what waits at mqtt://a:1883 in the session "plant-7-a" is fetched only while')
    assert assign_identities(moved) == []
    more = text.replace('["mqtt://a:1883"]', '["mqtt://b:1883", "mqtt://a:1883"]')
    assert assign_identities(read(more, tmp_path)) == []


def test_a_line_that_was_only_removed_is_no_matter(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a", "b"))
    assert assign_identities(bridge(tmp_path, "b")) == []


def test_a_copied_directory_is_refused(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a"))
    shutil.copytree(tmp_path / "state" / "a", tmp_path / "state" / "b")
    with pytest.raises(ConfigError, match=r'"a" and "b" are both sink "plant-7\.a".*\[TL-B21\]'):
        assign_identities(bridge(tmp_path, "a", "b"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"line": 1}'])
def test_a_foreign_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / IDENTITY_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"can't be read.*\[TL-B26\]"):
        Identity.read(tmp_path)


def test_a_line_that_is_called_as_another_one_that_began_again_has_a_sink_of_its_own(tmp_path: Path) -> None:
    """Sink ids are names with dots between: "plant-7.a" begun again, and a line "a.2" that is new."""
    assign_identities(bridge(tmp_path, "a"))
    Identity("a", "plant-7.a.2", generation=2, query="q").save(tmp_path / "state" / "a")
    assign_identities(bridge(tmp_path, "a", "a.2"))
    assert sink_ids(tmp_path / "state" / "a") == {"plant-7.a.2", "plant-7.a.2.2"}
    assign_identities(bridge(tmp_path, "a", "a.2"))
    assert sink_ids(tmp_path / "state" / "a") == {"plant-7.a.2", "plant-7.a.2.2"}


def test_beginning_again_leaves_the_sink_id_of_another_line_alone(tmp_path: Path) -> None:
    lines = bridge(tmp_path, "a", "a.2", "a.3")
    assign_identities(lines)
    reset_line(lines.lines[0])
    fresh = Identity.read(lines.lines[0].gateway.state_dir)
    assert fresh is not None
    assert (fresh.sink, fresh.generation, fresh.with_new_sink().sink) == ("plant-7.a.4", 4, "plant-7.a.5")
