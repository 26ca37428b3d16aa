"""The SQL of a bridge file: what `towline check` says of it, in a JVM without a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config import sqlcheck
from towline.bridge.config.sqlcheck import Findings, examine, expressions_of
from towline.bridge.runtime.surroundings import environment

ROUTE = """
[[uplink.route]]
from = "event/#"
topic = "event"
"""
CONF = '[spark.conf]\n"spark.sql.plant" = "a"\n\n[[uplink]]'
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
)


def checked(text: str, directory: Path, **environ: str) -> tuple[int, str, str]:
    """``towline check`` in a process of its own: another JVM of this one would translate Spark's errors."""
    (directory / "bridge.toml").write_text(text)
    command = [sys.executable, "-m", "towline", "check", "bridge.toml"]
    environment = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_every_mistake_in_sql_has_its_line(tmp_path: Path) -> None:
    """Rows of the source and of Kafka; what stands around an expression must not complete it."""
    text = GOOD + (
        'where = "lenght(payload) > 0"\n'
        f'{ROUTE}where = "paylod = \'${{WORD}}\'"\ndedupe = {{ key = "topic || (", within = "1 minute" }}\n'
        f'{ROUTE}where = "length(payload)"\n{ROUTE}where = "true) OR (true"\n{ROUTE}where = "max(qos) > 1"\n'
        + FIELDS.replace("get_json_object(body", "get_jason_object(boddy").replace("CAST(payload", "CAST(paylod")
        + f'{DOWNLINK}where = "payload IS NULL"\ntopic = {{ sql = "concat(\'a\', CAST(key AS STRING)" }}\n'
        'payload = { sql = "array(1)" }\n' + NOTICE.replace("concat(fault", "concat(falt")
    )
    code, out, err = checked(text, tmp_path, WORD="hush-hush")
    assert (code, out) == (2, "")
    assert "hush-hush" not in err
    lines = [line.replace("bridge.toml:", "") for line in err.splitlines()]
    up, down = 'uplink "telemetry" route', 'downlink "commands"'
    assert lines[0] == f'16  {up} 1: where: Spark has no function "lenght". Did you mean "length"?   [TL-C74]'
    assert lines[1].startswith(f"21  {up} 2: where: A column, variable, or function parameter with name `paylod`")
    assert lines[2] == f"22  {up} 2: dedupe.key: Syntax error at or near end of input. Correct it.   [TL-C74]"
    assert 'Filter expression "length(payload)" of type "INT" is not a boolean' in lines[3]
    assert lines[4] == f"32  {up} 4: where: Syntax error at or near ')'. Correct it.   [TL-C74]"
    assert "contains invalid expressions: max(qos)" in lines[5]
    assert lines[6].startswith(f"42  {up} 6: fields.body: A column, variable, or function parameter with name `paylod`")
    assert lines[7].startswith(f"50  {down}: where: A column, variable, or function parameter with name `payload`")
    assert lines[8].startswith(f"51  {down}: topic: Syntax error at or near end of input")
    assert lines[9].endswith('cannot cast "ARRAY<INT>" to "BINARY". Correct it.   [TL-C74]')
    assert 'downlink "notices"' in lines[10]
    assert "failure_notice.payload: A column, variable, or function parameter with name `falt`" in lines[10]
    assert len(lines) == 11, "what is made of a mistake is not another one"


def test_right_sql_passes_and_what_differs_each_time_is_told(tmp_path: Path) -> None:
    """Casts as without ANSI rules, any case, a comment at the end, variables of Spark, a transform's own columns."""
    text = GOOD.replace("[[uplink]]", CONF, 1) + (
        'where = "CAST(CAST(PAYLOAD AS STRING) AS INT) > 3 -- warm"\n'
        f"{ROUTE}where = \"from_json(CAST(payload AS STRING), 'a int').a > 1 AND received_at < current_timestamp()\"\n"
        'dedupe = { key = "uuid()", within = "1 minute" }\n'
        f"{ROUTE}where = \"topic = '${{spark.sql.plant}}'\"\n"
        f'{DOWNLINK}where = "rand() > 0.5"\ntransform = "a.b:c"\npayload = {{ sql = "own_function(extra)" }}\n'
        + FIELDS
        + NOTICE
    ).replace("${spark", "$${spark")
    code, out, err = checked(text, tmp_path)
    assert (code, err) == (0, "")
    assert "sql       checked by Spark" in out
    assert 'warning  line "telemetry": dedupe.key gives another value each time: a repeat would not be' in out
    assert 'warning  line "commands": where gives another value each time: a record of a batch' in out
    assert out.count("another value each time") == 2


def test_without_java_the_plan_says_that_sql_was_not_looked_at(tmp_path: Path) -> None:
    code, out, err = checked(GOOD + 'where = "lenght(payload) > 0"\n', tmp_path, PATH=str(tmp_path))
    assert (code, err) == (0, "")
    assert "\n  sql       not checked: there is no Java 17 or newer\n" in out


def test_without_pyspark_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlcheck, "find_spec", lambda _: None)
    bridge = read(GOOD + 'where = "lenght(payload) > 0"\n', tmp_path)
    assert examine(bridge) == Findings("not checked: PySpark is not installed")


def test_a_jvm_that_ends_at_once_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlcheck, "find_java", lambda: Path("/bin/false"))
    verdict = examine(read(GOOD + 'where = "length(payload) > 0"\n', tmp_path)).verdict
    assert verdict == "not checked: Spark's JVM can't be started (the JVM ended with code 1)"


#: What an application with a log of its own does.
LATER = """
import gc, logging, sys
from pathlib import Path
from towline.bridge.config.file import load
from towline.bridge.config.sqlcheck import examine
from towline.errors import ConfigError

logging.basicConfig()
gc.disable()
try:
    examine(load(Path("bridge.toml")))
except ConfigError as error:
    sys.stdout.write(f"{error}\\n")
gc.collect()
"""


def test_nothing_is_asked_of_a_jvm_that_is_gone(tmp_path: Path) -> None:
    """Nor is its secret sent to whoever has its port by then."""
    (tmp_path / "bridge.toml").write_text(GOOD + 'where = "lenght(payload) > 0"\n')
    done = subprocess.run([sys.executable, "-c", LATER], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "TL-C74" in done.stdout
    assert done.stderr == ""


def test_a_file_without_sql_starts_no_jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlcheck, "find_java", lambda: pytest.fail("a JVM for nothing"))
    text = GOOD + f'dedupe = {{ key = "{{device}}", within = "1 minute" }}\n{DOWNLINK}topic = "a/{{key}}"\n'
    assert examine(read(text, tmp_path)) == Findings()


def test_names_are_judged_where_only_spark_and_the_source_bring_them(tmp_path: Path) -> None:
    where = 'where = "qos > 0"\n'
    text = GOOD + where + DOWNLINK + where
    assert [one.sure for one in expressions_of(read(text, tmp_path))] == [True, True]
    assert [one.sure for one in expressions_of(read(f'{text}transform = "a.b:c"\n', tmp_path))] == [True, False]
    conf = '[spark.conf]\n"spark.sql.extensions" = "x.Y"\n\n[[uplink]]'
    assert not any(one.sure for one in expressions_of(read(text.replace("[[uplink]]", conf, 1), tmp_path)))
    bridge = read(text, tmp_path)
    assert not any(one.sure for one in expressions_of(bridge, {"SPARK_CONF_DIR": "/etc/spark"})), (
        "its defaults may bring some"
    )
    assert not any(one.sure for one in expressions_of(bridge, {"SPARK_HOME": "/opt/spark"}))
    driver = environment(bridge, tmp_path, {"PATH": "/usr/bin"})
    assert all(one.sure for one in expressions_of(bridge, driver)), (
        "the home that a bridge gives its driver adds nothing"
    )


def test_functions_of_a_package_are_not_refused_before_it_is_there(tmp_path: Path) -> None:
    conf = '[spark.conf]\n"spark.jars.packages" = "org.apache.spark:spark-avro_2.13:4.2.0"\n\n[[uplink]]'
    where = """where = "from_avro(payload, '{}') IS NOT NULL"\n"""
    assert checked(GOOD.replace("[[uplink]]", conf, 1) + where, tmp_path)[0] == 0


def test_a_setting_of_spark_that_can_not_be_is_one_line(tmp_path: Path) -> None:
    conf = '[spark.conf]\n"spark.sql.shuffle.partitions" = "many"\n\n[[uplink]]'
    code, out, err = checked(GOOD.replace("[[uplink]]", conf, 1) + 'where = "qos > 0"\n', tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("[spark.conf]: spark.sql.shuffle.partitions: ")
    assert err.count("\n") == 1
