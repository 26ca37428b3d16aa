"""The SQL of a bridge file, judged by Spark: what the driver says of it at a start and at a reload."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.runtime.sqlcheck import check_sql

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


def test_mistakes_in_sql_have_their_lines(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands around an expression must not complete it."""
    monkeypatch.setenv("WORD", "hush-hush")
    text = (
        f'{GOOD}where = "paylod = \'${{WORD}}\'"\ndedupe = {{ key = "topic || (", within = "1 minute" }}\n'
        f'{ROUTE}where = "length(concat(\'${{WORD}}\', topic))"\n{ROUTE}where = "true) OR (true"\n'
        + FIELDS.replace("get_json_object(body", "get_jason_object(boddy").replace("CAST(payload", "CAST(paylod")
        + f'{DOWNLINK}topic = {{ sql = "concat(\'a\', CAST(key AS STRING)" }}\npayload = {{ sql = "array(1)" }}\n'
        + f'where = "x -> x"\n{NOTICE.replace("concat(fault", "concat(falt")}'
    )
    found = check_sql(read(text, tmp_path, {"WORD": "hush-hush"}), spark)
    lines = [str(error).replace(f"{tmp_path}/", "") for errors in found.values() for error in errors.errors()]
    assert "hush" not in "".join(lines)
    up, down = 'uplink "telemetry" route', 'downlink "commands": '
    column = "A column, variable, or function parameter with name"
    expected = [
        f"bridge.toml:16  {up} 1: where: {column} `paylod`",
        f"bridge.toml:17  {up} 1: dedupe.key: Syntax error at or near end of input",
        f'bridge.toml:22  {up} 2: where: Cannot resolve "length(concat(…-…, topic))" due to data type mismatch',
        f"bridge.toml:27  {up} 3: where: Syntax error at or near ')'",
        f"bridge.toml:32  {up} 4: fields.body: {column} `paylod`",
        f"bridge.toml:40  {down}topic: Syntax error at or near end of input",
        f'bridge.toml:41  {down}payload: Cannot resolve "CAST(array(1) AS BINARY)" due to data type mismatch',
        f"bridge.toml:42  {down}where: Spark can't analyze it (UnresolvedException)",
        f'bridge.toml:51  downlink "notices": failure_notice.payload: {column} `falt`',
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
