"""Files that include others, and environments that go over them: what comes of it, and the place of each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.config.sources import compose
from towline.bridge.config.sqlcheck import judge
from towline.errors import ConfigError

MAIN = """\
include = ["lines/*.toml"]
name = "plant-7"
state_dir = "state"

[mqtt]
brokers = ["mqtt://a:1883"]

[kafka]
bootstrap_servers = "k1:9092"
settings = { "security.protocol" = "PLAINTEXT" }
"""
LINE = """\
[[uplink]]
name = "{name}"
[[uplink.route]]
from = "{name}/#"
topic = "{name}"
"""
ENVIRONMENTS = """
[environment.staging]
name = "plant-7-staging"
[environment.production]
state_dir = "/var/lib/towline"
[environment.production.kafka]
bootstrap_servers = "k1:9092,k2:9092"
settings.security.protocol = "SSL"
[environment.production.uplink.a]
guarantee = "exactly_once"
"""


def write(directory: Path, **files: str) -> Path:
    """Files by their names without ending, ``_`` for ``/``; the first is the one to be read."""
    for name, text in files.items():
        file = directory / f"{name.replace('_', '/')}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return directory / f"{next(iter(files))}.toml"


def line(name: str) -> str:
    return LINE.replace("{name}", name)


def told(file: Path, environment: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, {}, environment=environment)
    return [text.replace(f"{file.parent}/", "") for text in str(caught.value).splitlines()]


def test_lines_of_several_files_are_lines_of_one_bridge(tmp_path: Path) -> None:
    file = write(tmp_path, bridge=MAIN + line("own"), lines_b=line("b"), lines_a=line("a") + line("a2"))
    bridge = load(file, {})
    assert [one.name for one in bridge.lines] == ["own", "a", "a2", "b"]
    assert [one.name for one in bridge.files] == ["bridge.toml", "a.toml", "b.toml"]
    assert bridge.uplinks[3].gateway.state_dir == tmp_path / "state" / "b"
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge


def test_tables_are_put_together_key_by_key(tmp_path: Path) -> None:
    more = '[kafka]\ncreate_topics = { partitions = 3 }\n[kafka.settings]\nclient.rack = "r1"\n'
    bridge = load(write(tmp_path, bridge=MAIN, lines_a=line("a"), lines_kafka=more), {})
    assert bridge.kafka.settings == {"security.protocol": "PLAINTEXT", "client.rack": "r1"}
    assert bridge.kafka.create_topics is not None
    assert bridge.kafka.create_topics.partitions == 3


def test_a_path_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    a = line("a") + '[uplink.mqtt]\npassword_file = "a.password"\nusername = "a"\n'
    common = '[kafka]\npassword_file = "kafka.password"\n'
    file = write(tmp_path, bridge=MAIN, lines_a=a, lines_kafka=common)
    (tmp_path / "lines" / "a.password").write_text("x")
    (tmp_path / "lines" / "kafka.password").write_text("x")
    bridge = load(file, {})
    assert bridge.lines[0].gateway.password_file == tmp_path / "lines" / "a.password"
    assert bridge.kafka.password_file == tmp_path / "lines" / "kafka.password"


def test_a_mistake_names_the_file_that_it_is_in(tmp_path: Path) -> None:
    wrong = line("b").replace("topic =", "topik =") + '\n[uplink.mqtt]\npassword_file = "none"\n'
    file = write(tmp_path, bridge=MAIN + "\n[spark]\nuii = true\n", lines_a=line("a"), lines_b=wrong)
    assert told(file) == [
        'bridge.toml:13  [spark]: unknown key "uii". Did you mean "ui"?   [TL-C01]',
        'lines/b.toml:3  uplink "b" route 1: "topic" is missing. Add it.   [TL-C02]',
        'lines/b.toml:5  uplink "b" route 1: unknown key "topik". Did you mean "topic"?   [TL-C01]',
        f'lines/b.toml:8  uplink "b": password_file {tmp_path}/lines/none is not there. Write the secret into it, mode '
        "0600.   [TL-C15]".replace(f"{tmp_path}/", ""),
    ]


def test_two_files_that_set_one_key_are_both_named(tmp_path: Path) -> None:
    twice = 'name = "other"\n[kafka]\nbootstrap_servers = "k2:9092"\n[kafka.settings.security]\nprotocol = "SSL"\n'
    also = "too, and one of the two would not count. Keep one of them.   [TL-C159]"
    assert told(write(tmp_path, bridge=MAIN, lines_a=line("a"), lines_b=twice)) == [
        f'lines/b.toml:1: "name" is set in bridge.toml:2 {also}',
        f'lines/b.toml:3  [kafka]: "bootstrap_servers" is set in bridge.toml:9 {also}',
        f'lines/b.toml:5  [kafka]: "security.protocol" is set in bridge.toml:10 {also}',
    ]


def test_what_an_include_names_is_there(tmp_path: Path) -> None:
    text = MAIN.replace('"lines/*.toml"', '"lines/*.toml", "more.toml"') + line("own")
    assert told(write(tmp_path, bridge=text)) == [
        f'bridge.toml:1: include "{name}" names no file, and what it should say would be missing. Correct it; it is '
        f"relative to {tmp_path}.   [TL-C157]"
        for name in ("lines/*.toml", "more.toml")
    ]
    (tmp_path / "more.toml").symlink_to("nowhere")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / ".hidden.toml").write_text("no = 1")
    (found, other) = told(tmp_path / "bridge.toml")
    assert "lines/*.toml" in found, "a hidden file is an editor's"
    assert "more.toml can't be read (no such file or directory)" in other


@pytest.mark.parametrize("said", ["3", '["a.toml", 3]', '[""]'])
def test_an_include_is_a_list_of_files(tmp_path: Path, said: str) -> None:
    text = MAIN.replace('["lines/*.toml"]', said) + line("own")
    assert told(write(tmp_path, bridge=text)) == [
        'bridge.toml:1: "include" must be a list of files in [ ]. Write it as include = ["lines/*.toml"].   [TL-C03]'
    ]


def test_includes_go_in_no_circle(tmp_path: Path) -> None:
    a = 'include = "../bridge.toml"\n' + line("a")
    (found,) = told(write(tmp_path, bridge=MAIN, lines_a=a))
    assert found == (
        "lines/a.toml:1: include goes in a circle: lines/../bridge.toml leads here, or is this file. Let one file "
        "include the others, and none of them that one.   [TL-C158]"
    )


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    text = MAIN.replace('"lines/*.toml"', '"lines/*.toml", "lines/a.toml"')
    b = 'include = ["a.toml"]\n' + line("b")
    assert [one.name for one in load(write(tmp_path, bridge=text, lines_a=line("a"), lines_b=b), {}).lines] == [
        "a",
        "b",
    ]


def test_an_included_file_is_toml(tmp_path: Path) -> None:
    assert told(write(tmp_path, bridge=MAIN, lines_a="[[uplink]\n")) == [
        "lines/a.toml:1: not TOML: expected ']]' at the end of an array declaration. Correct the line.   [TL-C11]"
    ]


def test_an_environment_goes_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, bridge=MAIN + ENVIRONMENTS, lines_a=line("a"), lines_b=line("b"))
    plain, production = load(file, {}), load(file, {}, environment="production")
    assert (plain.environment, plain.environments) == ("", ("production", "staging"))
    assert (plain.kafka.bootstrap_servers, plain.state_dir) == ("k1:9092", tmp_path / "state")
    assert (production.kafka.bootstrap_servers, str(production.state_dir)) == ("k1:9092,k2:9092", "/var/lib/towline")
    assert production.kafka.settings == {"security.protocol": "SSL"}
    assert [one.guarantee.value for one in production.lines] == ["exactly_once", "at_least_once"]
    assert production.named == f"{file} --environment production"
    assert load(file, {"TOWLINE_ENVIRONMENT": "staging"}).name == "plant-7-staging"
    assert load(file, {"TOWLINE_ENVIRONMENT": "staging"}, environment="production").environment == "production"
    assert load(file, {"TOWLINE_ENVIRONMENT": "staging"}, environment="").environment == ""


def test_an_environment_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    own = '[environment.production.mqtt]\npassword_file = "p"\nusername = "u"\nkeep_alive_s = "x"\n'
    file = write(tmp_path, bridge=MAIN + ENVIRONMENTS, lines_a=line("a"), lines_production=own)
    (tmp_path / "lines" / "p").write_text("secret")
    (found,) = told(file, "production")
    assert found.startswith('lines/production.toml:4  uplink "a": "keep_alive_s" must be a whole number')


def test_a_mistake_of_an_environment_is_placed_there(tmp_path: Path) -> None:
    text = MAIN + line("a") + ENVIRONMENTS + "[environment.production.kafka.create_topics]\npartitions = 0\n"
    text = text.replace('guarantee = "exactly_once"', 'guarantee = "exactly_twice"').replace("lines/*", "*/*")
    found = told(write(tmp_path, bridge=text, lines_b=line("b")), "production")
    words = '"at_most_once", "at_least_once", "by_qos" or "exactly_once"'
    assert found == [
        f'bridge.toml:25  uplink "a": "guarantee" must be {words}. Choose one.   [TL-C03]',
        'bridge.toml:27  [kafka]: "partitions" must be at least 1. Change the number.   [TL-C03]',
    ]


def test_a_variable_of_another_environment_need_not_be_set(tmp_path: Path) -> None:
    text = MAIN.replace('include = ["lines/*.toml"]', "") + line("a")
    text += '[environment.production.kafka]\nbootstrap_servers = "${NOWHERE}"\n'
    file = write(tmp_path, bridge=text)
    assert load(file, {}).kafka.bootstrap_servers == "k1:9092"
    (found,) = told(file, "production")
    assert "bridge.toml:17  [kafka]: the environment variable NOWHERE is not set" in found


def test_an_unknown_environment_is_answered_with_those_there_are(tmp_path: Path) -> None:
    file = write(tmp_path, bridge=MAIN + ENVIRONMENTS, lines_a=line("a"))
    assert told(file, "prod") == [
        (
            'bridge.toml: there is no environment "prod". There are production, staging; choose with --environment or '
            "TOWLINE_ENVIRONMENT.   [TL-C160]"
        )
    ]
    file = write(tmp_path, bridge=MAIN, lines_a=line("a"))
    assert told(file, "prod") == [
        (
            'bridge.toml: there is no environment "prod". Leave out --environment and TOWLINE_ENVIRONMENT, or add '
            "[environment.prod].   [TL-C160]"
        )
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[environment.x]\ninclude = []", '[environment.x]: "include" belongs to the file'),
        ("[environment.x.uplink.b]\nguarantee = 'by_qos'", '[environment.x]: there is no uplink "b". Known here: a.'),
        ("[[environment.x.uplink]]\nname = 'b'", '[environment.x]: "uplink" must be a table for each line.'),
        ("[environment.x.uplink]\na = 3", '[environment.x]: "a" must be a table.'),
        ("[environment]\nx = 3", '"x" must be a table.'),
        ("[[environment]]\nx = 3", '"environment" must be a table.'),
    ],
)
def test_the_shape_of_an_environment_is_told_though_it_is_not_chosen(tmp_path: Path, text: str, found: str) -> None:
    main = MAIN.replace('include = ["lines/*.toml"]', "") + line("a") + text + "\n"
    (said,) = told(write(tmp_path, bridge=main))
    assert found in said
    assert said.startswith("bridge.toml:1")
    assert "[TL-C161]" in said


def test_what_only_an_environment_has_is_said_where_it_is_missing(tmp_path: Path) -> None:
    text = MAIN.replace('bootstrap_servers = "k1:9092"\n', "").replace('brokers = ["mqtt://a:1883"]\n', "")
    text += '[environment.x]\nkafka.bootstrap_servers = "k:1"\nmqtt.brokers = "mqtt://b"\n'
    file = write(tmp_path, bridge=text, lines_a=line("a"))
    assert load(file, {}, environment="x").kafka.bootstrap_servers == "k:1"
    found = told(file)
    assert all("is missing" in one and "Or choose an environment that has it: x." in one for one in found)
    assert len(found) == 2


def test_sql_of_an_included_file_is_told_with_its_place(tmp_path: Path) -> None:
    """`towline.bridge.config.sqlcheck` finds the line again, in a process that has the values only."""
    file = write(tmp_path, bridge=MAIN + line("own"), lines_a=line("a") + 'where = "length("\n')

    class NoJvm:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *_: object, **__: object) -> Any:
            return self

        def parseExpression(self, _: object) -> Any:  # noqa: N802 - Spark's name
            raise ValueError("[PARSE_SYNTAX_ERROR] Syntax error at end of input.")

    wrong, _ = judge(load(file, {}), NoJvm())
    (mistake,) = wrong["a"].found()
    assert mistake.where == f'{tmp_path}/lines/a.toml:6  uplink "a" route 1'


KEYS = st.sampled_from(["a", "b", "c", "d.e"])
VALUES = st.one_of(st.integers(0, 3), st.text("xy", max_size=2), st.lists(st.integers(0, 2), max_size=2))
TABLES = st.recursive(VALUES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
DOCUMENTS = st.dictionaries(KEYS, TABLES, max_size=3)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {as_toml(item)}' for key, item in value.items()) + "}"
    return json.dumps(value)


def document(table: dict[str, Any]) -> str:
    return "".join(f'"{key}" = {as_toml(item)}\n' for key, item in table.items())


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(value, dict) and value:
        return {where: item for key, one in value.items() for where, item in leaves(one, (*path, key)).items()}
    return {path: value}


@given(DOCUMENTS, DOCUMENTS)
def test_an_overlay_has_the_last_word_and_nothing_else_changes(base: dict[str, Any], over: dict[str, Any]) -> None:
    text = document(base) + f"environment = {{ e = {as_toml(over)} }}\n"
    raw, plain = compose(text, Path("f.toml"), "e").raw, compose(text, Path("f.toml")).raw
    assert plain == base
    merged, said = leaves(raw), leaves(over)
    for path, value in said.items():
        assert value == {} or merged[path] == value
    for path, value in leaves(base).items():
        touched = any(path[: len(one)] == one or one[: len(path)] == path for one in said if one)
        assert touched or path == () or merged[path] == value
    assert compose(document(raw), Path("f.toml")).raw == raw


def clash(first: Any, second: Any) -> bool:
    """Whether both say something that is no table."""
    if isinstance(first, dict) and isinstance(second, dict):
        return any(clash(first[key], second[key]) for key in first.keys() & second.keys())
    return True


@given(DOCUMENTS, DOCUMENTS)
def test_two_files_say_together_what_each_says_or_are_told_where_they_clash(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, Any], second: dict[str, Any]
) -> None:
    home = tmp_path_factory.mktemp("joined")
    (home / "b.toml").write_text(document(second))
    sources = compose(f'include = "b.toml"\n{document(first)}', home / "a.toml")
    assert bool(sources.misfits) == clash(first, second)
    joined = leaves(sources.raw)
    for path, value in leaves(first).items():
        assert path == () or value == {} or joined[path] == value
    if not sources.misfits:
        said = {**leaves(first), **leaves(second)}
        assert {path: item for path, item in joined.items() if item != {}} == {
            path: item for path, item in said.items() if item != {}
        }
