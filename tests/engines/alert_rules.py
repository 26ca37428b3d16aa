"""The alert rules of examples/monitoring: read, and tried on recorded series."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import lacking

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
_FILE = EXAMPLES / "alerts.yml"
#: Seconds between two samples, as in examples/monitoring/prometheus.yml.
_STEP = 15
#: Minutes that all is well, and that it is as it was recorded then.
_SOUND, _HURT = 20, 25


#: A scrape, two of them, or none.
Hurt: TypeAlias = str | tuple[str, str] | None


class Rule(NamedTuple):
    """One rule."""

    name: str
    expression: str


def _read() -> list[Rule]:
    (group,) = yaml.safe_load(_FILE.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"].keys() | rule["annotations"].keys() == {"severity", "summary", "description"}
    return [Rule(rule["alert"], rule["expr"]) for rule in group["rules"]]


RULES = _read()


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        lacking("promtool is not installed (Debian: apt install prometheus)")
    return found


def _series(text: str) -> dict[str, float]:
    """The samples of a scrape, by name and labels, with the labels that Prometheus adds."""
    read = text_string_to_metric_families(text)
    made = {}
    for sample in (sample for family in read for sample in family.samples):
        labels = {**sample.labels, "job": "towline", "instance": "127.0.0.1:9464"}
        inner = ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()))
        made[f"{sample.name}{{{inner}}}"] = sample.value
    return made


def firing(place: Path, sound: str, hurt: Mapping[str, Hurt]) -> dict[str, set[str]]:
    """Which alerts fire for each of `hurt`, 25 minutes after 20 of a `sound` scrape, as `promtool test rules` says.

    Of two scrapes the counters go on growing as they did in between; None is an endpoint that does not answer.
    """
    return {name: _firing(place / f"{name}.json", sound, text) for name, text in hurt.items()}


def _firing(file: Path, sound: str, hurt: Hurt) -> set[str]:
    first_scrape, last_scrape = hurt if isinstance(hurt, tuple) else (hurt, hurt)
    before, after = _series(sound), {} if last_scrape is None else _series(last_scrape)
    steps = {} if first_scrape is None else _series(first_scrape)
    steps = {name: value for name, value in steps.items() if re.match(r"\w+_(total|bucket|count|sum)\{", name)}
    up = 'up{instance="127.0.0.1:9464", job="towline"}'
    before, after = {**before, up: 1}, {**after, up: 0 if hurt is None else 1}
    first, second = (60 // _STEP * minutes for minutes in (_SOUND, _HURT))
    series = [
        {"series": name, "values": " ".join((_part(before.get(name), first), _part(after.get(name), second, step)))}
        for name in dict.fromkeys((*before, *after))
        for step in [steps.get(name)]
    ]
    asked = {  # the second: whatever fired meanwhile
        f"{_SOUND - 1}m": 'count by (alertname) (ALERTS{alertstate="firing"})',
        f"{_SOUND + _HURT - 1}m": f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{_HURT - 2}m]))',
    }
    nobody = [{"labels": "nobody", "value": 1}]  # so that promtool tells what it got instead
    content = {
        "rule_files": [str(_FILE)],
        "evaluation_interval": f"{_STEP}s",
        "tests": [
            {
                "interval": f"{_STEP}s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": expression, "eval_time": at, "exp_samples": nobody} for at, expression in asked.items()
                ],
            }
        ],
    }
    file.write_text(json.dumps(content))
    command = [promtool(), "test", "rules", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    said = run.stdout + run.stderr
    answers = said.split("got:")
    assert len(answers) == 1 + len(asked), said
    while_well, then = (set(re.findall(r'alertname=\\?"(\w+)', one.split("expr:")[0])) for one in answers[1:])
    assert not while_well, f"while all was well: {while_well}"
    return then


def _part(value: float | None, times: int, before: float | None = None) -> str:
    if value is None:
        return f"_x{times}"
    if not math.isfinite(value):
        return " ".join([str(value).replace("inf", "Inf").replace("nan", "NaN")] * times)
    step = f"+{value - before!r}" if before is not None and value > before > 0 else ""
    return f"{value!r}{step}x{times - 1}"
