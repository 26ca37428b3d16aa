"""The SQL of a bridge file, judged by Spark: what ``towline check --spark`` and the driver say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.cli.test_main import ran
from towline.bridge.runtime.sqlcheck import check_sql, has_sql

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ROUTE = """
[[uplink.route]]
from = "event/#"
topic = "event"
"""
DOWNLINK = """
[[downlink]]
name = "commands"
from = "commands"
"""
#: Fields, reject and a failure notice: judged with the names they may use.
FIELDS = (
    f'{ROUTE}fields = {{ body = "CAST(payload AS STRING)", id = "get_json_object(body, \'$.id\')" }}\n'
    'key = "{id}"\nwhere = "id IS NOT NULL"\nreject = "IF(body = \'\', \'empty\', NULL)"\n'
)
NOTICE = DOWNLINK.replace('"commands"', '"notices"') + (
    'dead_letter_topic = "dead"\nreject = "IF(key IS NULL, \'no key\', NULL)"\n[downlink.failure_notice]\n'
    'topic = "answers"\npayload = { sql = "concat(fault, CAST(key AS STRING))" }\n'
    'headers = { why = { sql = "fault" } }\n'
)


def test_every_mistake_in_sql_has_its_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands around an expression must not complete it."""
    monkeypatch.setattr("towline.bridge.runtime.session.create_session", lambda _: spark)
    monkeypatch.setenv("WORD", "hush-hush")
    (tmp_path / "bridge.toml").write_text(
        f'{GOOD}where = "paylod = \'${{WORD}}\'"\ndedupe = {{ key = "topic || (", within = "1 minute" }}\n'
        f'{ROUTE}where = "length(concat(\'${{WORD}}\', topic))"\n{ROUTE}where = "true) OR (true"\n'
        + FIELDS.replace("get_json_object(body", "get_jason_object(boddy").replace("CAST(payload", "CAST(paylod")
        + f'{DOWNLINK}topic = {{ sql = "concat(\'a\', CAST(key AS STRING)" }}\npayload = {{ sql = "array(1)" }}\n'
        + f'where = "x -> x"\n{NOTICE.replace("concat(fault", "concat(falt")}'
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = ran(capsys, "check", "--spark", "bridge.toml")
    assert (code, out) == (2, "")
    assert "hush" not in err
    # PySpark's logger may have found the standard error of pytest, which the command can't redirect.
    lines = [line for line in err.splitlines() if "toml:" in line]
    up, down = 'uplink "telemetry" route', 'downlink "commands": '
    column = "A column, variable, or function parameter with name"
    expected = [
        f"bridge.toml:16  {up} 1: where: {column} `paylod`",
        f"bridge.toml:17  {up} 1: dedupe.key: Syntax error at or near end of input",
        f'bridge.toml:22  {up} 2: where: Cannot resolve "length(concat(…-…, topic))" due to data type mismatch',
        f"bridge.toml:27  {up} 3: where: Syntax error at or near ')'",
        f"bridge.toml:32  {up} 4: fields.body: {column} `paylod`",
        f"bridge.toml:40  {down}topic: Syntax error at or near end of input",
        f'bridge.toml:41  {down}payload: Cannot resolve "array(1)" due to data type mismatch',
        f"bridge.toml:42  {down}where: Spark can't analyze it (UnresolvedException)",
        f'bridge.toml:50  downlink "notices": failure_notice.payload: {column} `falt`',
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert all(line.endswith(". Correct it.   [TL-C74]") for line in lines)


def test_right_sql_passes(spark: SparkSession, tmp_path: Path) -> None:
    """Casts as without ANSI rules, any case, a comment at the end, variables of Spark; a notice is text throughout."""
    text = GOOD + (
        'where = "CAST(CAST(PAYLOAD AS STRING) AS INT) > 3 -- warm"\nheaders = { where = "no SQL" }\n'
        f"{ROUTE}where = \"topic = '$${{spark.sql.session.timeZone}}'\"\n"
        f'{DOWNLINK}fields = {{ some = "rand()" }}\nwhere = "some > 0.5"\nretain = {{ sql = "key IS NULL" }}\n'
        + FIELDS
        + NOTICE.replace("headers = {", 'headers = { at = { sql = "timestamp" }, ')
    )
    assert check_sql(read(text, tmp_path), spark) == {}


def test_without_spark_nothing_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD + 'where = "lenght(payload) > 0"\n')
    code, out, err = ran(capsys, "check", str(file))
    assert (code, err) == (0, "")
    assert "\n  sql       checked by Spark when the line starts, or now with --spark\n" in out
    dedupe = 'dedupe = { key = "{device}", within = "1 minute" }\n'
    assert not has_sql(read(GOOD + f'{dedupe}{DOWNLINK}topic = "a/{{key}}"\n', tmp_path))
