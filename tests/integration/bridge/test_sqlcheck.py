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
    """Rows of the source and of Kafka; what stands around an expression must not complete it."""
    monkeypatch.setattr("towline.bridge.runtime.session.create_session", lambda _: spark)
    monkeypatch.setenv("WORD", "hush-hush")
    file = tmp_path / "bridge.toml"
    file.write_text(
        GOOD + 'where = "lenght(payload) > 0"\n'
        f'{ROUTE}where = "paylod = \'${{WORD}}\'"\ndedupe = {{ key = "topic || (", within = "1 minute" }}\n'
        f"{ROUTE}where = \"length(concat('${{WORD}}', topic))\"\n"
        f'{ROUTE}where = "true) OR (true"\n{ROUTE}where = "max(qos) > 1"\n'
        + FIELDS.replace("get_json_object(body", "get_jason_object(boddy").replace("CAST(payload", "CAST(paylod")
        + f'{DOWNLINK}where = "payload IS NULL"\ntopic = {{ sql = "concat(\'a\', CAST(key AS STRING)" }}\n'
        'payload = { sql = "array(1)" }\n' + NOTICE.replace("concat(fault", "concat(falt").replace('"fault"', '"flt"')
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = ran(capsys, "check", "--spark", "bridge.toml")
    assert (code, out) == (2, "")
    assert "hush" not in err
    # PySpark's logger may have found the standard error of pytest, which the command can't redirect.
    lines = [line.removeprefix("bridge.toml:") for line in err.splitlines() if line.startswith("bridge.toml:")]
    up, down = 'uplink "telemetry" route', 'downlink "commands"'
    assert lines[0].startswith(f"16  {up} 1: where: Cannot resolve routine `lenght`")
    assert lines[0].endswith(". Correct it.   [TL-C74]")
    assert lines[1].startswith(f"21  {up} 2: where: A column, variable, or function parameter with name `paylod`")
    assert lines[2].startswith(f"22  {up} 2: dedupe.key: Syntax error at or near end of input")
    assert 'Filter expression "length(concat(…-…, topic))" of type "INT" is not a boolean' in lines[3]
    assert lines[4].startswith(f"32  {up} 4: where: Syntax error at or near ')'")
    assert "max(qos)" in lines[5]
    assert lines[6].startswith(f"42  {up} 6: fields.body: A column, variable, or function parameter with name `paylod`")
    assert lines[7].startswith(f"50  {down}: where: A column, variable, or function parameter with name `payload`")
    assert lines[8].startswith(f"51  {down}: topic: Syntax error at or near end of input")
    assert 'cannot cast "ARRAY<INT>" to "BINARY"' in lines[9]
    about = 'downlink "notices": failure_notice'
    assert f"{about}.payload: A column, variable, or function parameter with name `falt`" in lines[10]
    assert f"{about}.headers.why: A column, variable, or function parameter with name `flt`" in lines[11]
    assert len(lines) == 12, "what is made of a mistake is not another one"


def test_right_sql_passes(spark: SparkSession, tmp_path: Path) -> None:
    """Casts as without ANSI rules, any case, a comment at the end, variables of Spark; a notice is text throughout."""
    text = GOOD + (
        'where = "CAST(CAST(PAYLOAD AS STRING) AS INT) > 3 -- warm"\nheaders = { where = "no SQL" }\n'
        f"{ROUTE}where = \"from_json(CAST(payload AS STRING), 'a int').a > 1 AND received_at < current_timestamp()\"\n"
        'dedupe = { key = "uuid()", within = "1 minute" }\n'
        f"{ROUTE}where = \"topic = '$${{spark.sql.session.timeZone}}'\"\n"
        f'{DOWNLINK}fields = {{ some = "rand()" }}\nwhere = "some > 0.5"\nretain = {{ sql = "key IS NULL" }}\n'
        + FIELDS
        + NOTICE.replace("headers = {", 'headers = { at = { sql = "timestamp" }, ')
    )
    assert check_sql(read(text, tmp_path), spark) == {}


PROFILE = """
table = "plant"
[parameters]
site = { }
[[uplink]]
name = "plant"
[uplink.common]
topic = "t"
fields = { size = "lenght(${site})" }
header_map = "map('site', ${site}, 'size', 1)"
[[uplink.route]]
from = "a/#"
[[uplink.route]]
from = "b/#"
[[uplink.route]]
from = "c/#"
header_map = "array(${site})"
"""


def test_a_mistake_in_a_profile_has_its_line_there_and_is_told_once(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "plant.toml").write_text(PROFILE.replace('header_map = "array(${site})"\n', ""))
    text = f'{GOOD}[[uplink]]\nname = "up"\nprofile = "plant.toml"\n[plant]\nsite = "${{SITE}}"\n'
    (wrong,) = check_sql(read(text, tmp_path, {"SITE": "hush"}), spark).values()
    (line,) = [str(error).replace(f"{tmp_path}/", "") for error in wrong.errors()]
    assert line.startswith('plant.toml:9  uplink "up" route 1: fields.size: Cannot resolve routine `lenght`')
    (tmp_path / "plant.toml").write_text(PROFILE.replace("lenght", "length"))
    (wrong,) = check_sql(read(text, tmp_path, {"SITE": "hush"}), spark).values()
    (line,) = [str(error).replace(f"{tmp_path}/", "") for error in wrong.errors()]
    assert line.startswith('plant.toml:17  uplink "up" route 3: header_map: Cannot resolve')
    assert "hush" not in line


def test_an_error_that_pyspark_has_no_class_for_is_its_lines_own(spark: SparkSession, tmp_path: Path) -> None:
    """A lambda where no function takes it: Spark ends with an error within its analyzer."""
    bridge = read(f'{GOOD}where = "x -> x"\n{DOWNLINK}where = "kee IS NULL"\n', tmp_path)
    wrong = {
        name: [error.problem for error in mistakes.errors()] for name, mistakes in check_sql(bridge, spark).items()
    }
    assert wrong["telemetry"] == ["where: Spark can't analyze it (UnresolvedException)"]
    assert wrong.keys() == {"telemetry", "commands"}


def test_without_spark_nothing_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD + 'where = "lenght(payload) > 0"\n')
    code, out, err = ran(capsys, "check", str(file))
    assert (code, err) == (0, "")
    assert "\n  sql       checked by Spark when the line starts, or now with --spark\n" in out
    dedupe = 'dedupe = { key = "{device}", within = "1 minute" }\n'
    assert not has_sql(read(GOOD + f'{dedupe}{DOWNLINK}topic = "a/{{key}}"\n', tmp_path))
