"""The forms of a stack: kept in its directory, told without a secret, and never mixed up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline_prove.cli.devstack import _login_lines, _requested_form, _submit_lines
from towline_prove.devstack import Stack, spark
from towline_prove.devstack.kafka import KafkaCluster
from towline_prove.devstack.secured import SecuredKafka
from towline_prove.devstack.stack import StackForm


@pytest.fixture(autouse=True)
def _openssl() -> None:
    if shutil.which("openssl") is None or shutil.which("mosquitto_passwd", path="/usr/bin:/usr/local/bin") is None:
        lacking("openssl or mosquitto_passwd")


def test_a_directory_keeps_its_form(tmp_path: Path) -> None:
    assert isinstance(Stack(tmp_path, form=StackForm(brokers=3)).kafka, KafkaCluster)
    again = Stack(tmp_path)
    assert [server.label for server in again.servers] == ["mosquitto", "kafka-1", "kafka-2", "kafka-3"]
    with pytest.raises(SetupError, match=r"has a stack of another form \(3 brokers of Kafka\)\. Name .*\[TL-S23\]"):
        Stack(tmp_path, form=StackForm(secure=True))


def test_three_brokers_with_passwords_are_not_offered() -> None:
    assert (_requested_form(None, secure=None), _requested_form(3, secure=None)) == (None, StackForm(brokers=3))
    with pytest.raises(SetupError, match=r"--secure: is for one broker of Kafka"):
        _requested_form(3, secure=True)


def test_how_to_log_in_shows_no_secret(tmp_path: Path) -> None:
    stack = Stack(tmp_path, form=StackForm(secure=True))
    kafka = stack.kafka
    assert isinstance(kafka, SecuredKafka)
    words = "\n".join(_login_lines(stack))
    secrets = [kafka.password_file, kafka.connection_string_file, tmp_path / "mosquitto" / "secrets" / "password"]
    for file in secrets:
        assert str(file) in words
        assert file.read_text() not in words
        assert file.stat().st_mode & 0o77 == 0
    assert Stack(tmp_path).kafka.client["sasl.password"] == kafka.client["sasl.password"], "made once"


def test_a_stack_with_spark_says_where_everything_is_without_a_secret(tmp_path: Path) -> None:
    assert _requested_form(None, secure=None, workers=2) == StackForm(spark_workers=2)
    stack = Stack(tmp_path, form=StackForm(spark_workers=2))
    assert [one.label for one in stack.servers[2:]] == ["spark-master", "spark-worker-1", "spark-worker-2"]
    assert stack.spark is not None
    assert [one.host for one in stack.spark.servers] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    stack.spark.prepare()
    stack.spark.describe()
    variables = stack.variables()
    assert variables["STACK_GATEWAY_1"] == Stack(tmp_path).variables()["STACK_GATEWAY_1"], "addresses are kept"
    assert variables["STACK_SPARK"] == stack.spark.master.address
    assert len({variables["STACK_GATEWAY_1"], variables["STACK_GATEWAY_2"]}) == 2
    words = "\n".join([*_submit_lines(stack), *variables.values()])
    for file in (stack.spark.secret_file, stack.spark.properties_file, tmp_path / "gateway" / "token"):
        assert file.stat().st_mode & 0o77 == 0
        assert file.read_text().strip() not in words
    with pytest.raises(SetupError, match=r"\(1 broker of Kafka, 2 workers of Spark\)"):
        Stack(tmp_path, form=StackForm(spark_workers=2, bare=True))


def test_where_nobody_may_mount_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_UNSHARE_COMMANDS", (("false",), ("no-such-program",)))
    spark._unshare.cache_clear()
    try:
        with pytest.raises(SetupError, match=r"unshare --mount: this user gets no mount namespaces.*\[TL-S30\]$"):
            spark.enclose_command(["true"], tmp_path, ())
    finally:
        spark._unshare.cache_clear()
