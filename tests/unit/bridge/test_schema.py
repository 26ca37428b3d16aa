"""The schema for editors takes what `towline check` takes, and refuses unknown keys and wrong types as check does."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from towline.bridge.config.file import load
from towline.bridge.config.schema import bridge_schema
from towline.cli import main
from towline.errors import ConfigErrors

ROOT = Path(__file__).parents[3]
WHOLE = Draft202012Validator(bridge_schema())
STRUCTURE = {"TL-C01", "TL-C03", "TL-C16"}


def blocks() -> Iterator[Any]:
    for file in sorted((ROOT / "examples").rglob("*.toml")):
        yield pytest.param(file.read_text(), id=file.name)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, text in enumerate(found, start=1):
            yield pytest.param(text, id=f"{page.name}-{number}")


def told(validator: Draft202012Validator, document: Any) -> list[str]:
    return [f"{one.json_path}: {one.message[:200]}" for one in validator.iter_errors(document)]


def test_the_command_prints_a_schema_and_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    assert (ended.value.code, schema) == (0, WHOLE.schema)
    Draft202012Validator.check_schema(schema)
    for name in ("UplinkTable", "DownlinkTable", "RouteSection", "MqttSettings", "KafkaSection", "SparkSection", "Tls"):
        properties = schema["properties"] | schema["$defs"][name]["properties"]
        assert [key for key, one in properties.items() if "description" not in one] == [], name
    assert "None" not in json.dumps(schema)


@pytest.mark.parametrize("text", [*blocks()])
def test_examples_and_what_the_pages_show_are_right(text: str) -> None:
    """A page shows what it is about, a table of a line without the line's head too; the rest is added here."""
    if re.match(r"\s*\[\[uplink\.route", text):
        text = f'[[uplink]]\nname = "x"\n{text}'
    if re.match(r"\s*\[uplink\.", text):
        text = f'[[uplink]]\nname = "x"\nroute = [{{ from = "a", topic = "a" }}]\n{text}'
    document = tomllib.loads(text)
    for kind in ("uplink", "downlink"):  # of a line that a page shows only what it is about
        for one in document.get(kind, []):
            one.setdefault("name", "x")
            if kind == "uplink" and "profile" not in one:
                one.setdefault("route", [{"from": "a", "topic": "a"}])
            if kind == "downlink" and "profile" not in one:
                one.setdefault("from", "a")
    document = {"name": "x", "state_dir": "x", **document}
    document["mqtt"] = {"brokers": "mqtt://x", **document.get("mqtt", {})}
    document["kafka"] = {"bootstrap_servers": "x", **document.get("kafka", {})}
    if not document.keys() & {"uplink", "downlink"}:
        document["uplink"] = [{"name": "x", "route": [{"from": "a", "topic": "a"}]}]
    assert told(WHOLE, document) == []


FULL: dict[str, Any] = tomllib.loads("""
name = "plant-7"
state_dir = "state"
[mqtt]
brokers = ["mqtt://a:1883"]
keep_alive_s = 30
linger_ms = 0.5
max_packet_bytes = "1 MiB"
follow_redirects = false
[kafka]
bootstrap_servers = "k1:9092"
create_topics = { partitions = 3 }
settings = { "client.rack" = "r1" }
[spark]
conf = { "spark.ui.retainedJobs" = 10 }
[gateway]
ticket_valid_s = 600
[hono]
tenants = { t1 = { defaults = { ttl = 3 }, resource-limits = { max-ttl = 60 }, gateways = ["g"] } }
[[uplink]]
name = "telemetry"
guarantee = "at_least_once"
dedupe = { key = "{mqtt.user.id}", within = "5 minutes" }
journal = { max_bytes = "20 GB", retain_bytes = 0 }
mqtt = { keep_alive_s = 20 }
[[uplink.route]]
from = "telemetry/{device}/#"
topic = "telemetry"
qos = 1
headers = { device = "{device}" }
fields = { f = "1" }
[[uplink]]
name = "several"
share = "filters"
route = [{ from = "a/#", topic = "a" }]
member = [{ name = "g1", filters = ["a/b/#"] }]
[[downlink]]
name = "commands"
from = ["commands"]
payload = { sql = "value" }
expiry = 60
failure_notice = { topic = "notices", headers = { a = "b" } }
outbox = { max_age_s = 60.0, max_bytes = "1 GiB" }
""")


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def codes(document: dict[str, Any], directory: Path) -> set[str]:
    """What check finds."""
    file = directory / "bridge.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in document.items()))
    try:
        load(file, {"NUMBER": "7", "WORD": "at_most_once", "TRUTH": "true"})
    except ConfigErrors as found:
        return {one.code for one in found.errors}
    return set()


def tables(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from tables(item, (*path, key))


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


WRONG: tuple[Any, ...] = (4711, "no such word", [[1]], {"no": {"such": 1}})


@example([(29, 2, {"no": {"such": 1}})])
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from([*WRONG, None])), max_size=3))
def test_what_check_finds_the_schema_refuses(wrong: list[tuple[int, int, object]]) -> None:
    """Keys that are gone, unknown or of another kind, in any tables together: `codes` takes nothing but mistakes."""
    document = deepcopy(FULL)
    for number, key, value in wrong:
        places = [path for path in tables(document) if "settings" not in path]
        table = at(document, places[number % len(places)])
        name = [*table, "no_such_key"][key % (len(table) + 1)]
        if name == "settings" and isinstance(value, dict):
            continue  # names of librdkafka's properties: no schema has them
        table.pop(name, None)
        table |= {} if value is None else {name: deepcopy(value)}
    with tempfile.TemporaryDirectory() as directory:
        if codes(document, Path(directory)) & STRUCTURE:
            assert told(WHOLE, document)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"keep_alive_s": 30', '"keep_alive_s": "${NUMBER}"'),
        ('"follow_redirects": false', '"follow_redirects": "${TRUTH}"'),
        ('"guarantee": "at_least_once"', '"guarantee": "${WORD}"'),
        ('"partitions": 3', '"partitions": "1${NUMBER}"'),
    ],
)
def test_a_variable_stands_where_the_loader_takes_it(tmp_path: Path, old: str, new: str) -> None:
    text = json.dumps(FULL)
    assert old in text
    document = json.loads(text.replace(old, new))
    assert codes(document, tmp_path) & STRUCTURE == set()
    assert told(WHOLE, document) == []
    assert told(WHOLE, json.loads(text.replace(old, f'{old.partition(":")[0]}: "seven"'))) != []
