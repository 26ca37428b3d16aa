"""``towline kafka marker`` against a real Kafka: it shows what a sink wrote, and a reset lets another query go on."""

from __future__ import annotations

import json

import pytest

from tests.conftest import NewTopic
from tests.integration.kafka.writing import QUERY, counted, exactly_once
from towline.cli import main
from towline.sinks import Task
from towline_prove.devstack import Kafka


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as end:
        main(["kafka", "marker", *arguments])
    said = capsys.readouterr()
    return end.value.code, said.out + said.err


def test_show_and_reset(kafka: Kafka, topic: NewTopic, capsys: pytest.CaptureFixture[str]) -> None:
    name = topic()
    place = ("--kafka", kafka.bootstrap, "--sink", name)
    assert run(capsys, "show", *place) == (1, f"no marker in towline.{name}.markers\n")
    sink = exactly_once(kafka.bootstrap, topic=name, sinkId=name)
    sink.deliver(Task(0, batch=0, query=QUERY), counted(0, 10))
    code, out = run(capsys, "show", *place, "--json")
    marker = json.loads(out)["markers"]["0"]
    assert (code, marker["batch"], marker["rows"], marker["writer"]) == (0, 0, 10, QUERY)

    code, out = run(capsys, "reset", *place, "--to-batch", "7")
    assert code == 1
    assert "Nothing was changed" in out
    assert json.loads(run(capsys, "show", *place, "--json")[1])["markers"]["0"] == marker

    code, out = run(capsys, "reset", *place, "--to-batch", "7", "--yes")
    assert code == 0
    assert out.splitlines()[-1].split()[:3] == ["0", "1", "7"]
    assert sink.deliver(Task(0, batch=8, query="another"), counted(10, 20)).rows == 10

    assert run(capsys, "reset", *place, "--remove", "--yes")[0] == 0
    assert run(capsys, "show", *place)[0] == 1
