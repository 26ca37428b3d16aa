"""The rules, the dashboard and the page beside them: each expression parses, and names only metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.alert_rules import EXAMPLES, RULES
from towline.monitor.table import METRICS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((EXAMPLES / "dashboard.json").read_text())

#: Exported names: a histogram has three.
NAMES = {
    name + end
    for name, metric in METRICS.items()
    for end in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def _expressions() -> dict[str, str]:
    made = {f"alert {rule.name}": rule.expression for rule in RULES}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            made[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            made[f"variable {one['name']}"] = re.sub(r"^label_values\((.*), \w+\)$", r"\1", one["query"]["query"])
    return made


EXPRESSIONS = _expressions()


def plain(expression: str) -> str:
    """As Prometheus gets it: Grafana puts its variables in before."""
    return re.sub(r"\$(bridge|line)\b", ".*", expression).replace("$__rate_interval", "1m")


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_names_only_metrics_that_there_are(where: str) -> None:
    named = set(re.findall(r"\btowline_\w+", EXPRESSIONS[where]))
    assert named <= NAMES
    assert named or "up{" in EXPRESSIONS[where] or "ALERTS{" in EXPRESSIONS[where]


def test_the_page_has_the_metrics_of_the_table() -> None:
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.text} |" for one in METRICS.values()]
    assert re.findall(r"^\| `towline_.*$", PAGE, re.MULTILINE) == rows


def test_the_page_explains_each_alert() -> None:
    """Fires when, what is at stake, what to do."""
    table = PAGE.split("\n## Alerts\n")[1].split("\n## ")[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)}
    assert list(rows) == [rule.name for rule in RULES]
