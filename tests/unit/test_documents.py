"""What the documents claim: each error code has its paragraph, each command and file that is named exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from towline.bridge.config.tables import DownlinkSection, RouteSection, UplinkTable
from towline.cli import main
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.kafka.options import NAMES as SINK_OPTIONS
from towline.net.settings import WillSettings
from towline.net.tls import Tls
from towline.spark.options import SOURCE_OPTIONS

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'"(TL-[A-Z]\d{2,3})"')
EXPLANATIONS = tomllib.loads((ROOT / "src" / "towline" / "explanations.toml").read_text())


def raised() -> set[str]:
    return {code for path in (ROOT / "src").rglob("*.py") for code in CODE.findall(path.read_text())}


def test_the_page_of_errors_is_what_towline_explain_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "errors.py"), "--check"], check=True)


def test_every_code_is_explained() -> None:
    assert raised() - set(EXPLANATIONS) == set()


def test_every_explanation_has_a_code() -> None:
    # Warnings carry their code in text, not as an error.
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {code for code in EXPLANATIONS if code not in text} == set()
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [code for code in EXPLANATIONS if f"\n| {code} |" not in page] == []


def test_every_explanation_says_what_happened_what_is_at_stake_and_what_to_do() -> None:
    """No part is empty, or another one once more."""
    parts = {code: tuple(said) for code, said in EXPLANATIONS.items()}
    assert set(parts.values()) == {("happened", "stake", "do"), ("happened", "stake", "do", "stays")}
    assert {said["stays"] for said in EXPLANATIONS.values() if "stays" in said} == {True}
    texts = {code: {said[part] for part in parts[code][:3]} for code, said in EXPLANATIONS.items()}
    assert [code for code, said in texts.items() if len(said) < 3 or not all(map(str.strip, said))] == []


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert [name for name in (*SOURCE_OPTIONS, *SINK_OPTIONS) if f"`{name}`" not in page] == []


def test_the_tables_of_options_are_those_of_the_models() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "options.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_links_of_the_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_pages_name_commands_and_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for line in re.findall(r"(?:^\$ |^|`)towline ([a-z][^`#\n|>&]*)", page.read_text(), re.MULTILINE):
            words = line.replace("\\", "").split()
            if page.name == "publishers.md" and words[0] in {"publisher", "mark", "receipt"}:
                continue  # what a code is made of, no command
            called = tuple(word for word in words[:2] if word.isalpha() and word.islower())
            if called not in known:
                with pytest.raises(SystemExit) as ended:
                    main([*called, "--help"])
                assert ended.value.code == 0, f"{page.name}: {line}"
                known[called] = capsys.readouterr().out
            assert [word for word in words if word.startswith("--") and word not in known[called]] == [], page.name
    assert len(known) > 10


def test_the_bridge_file_of_the_quick_start_is_valid(tmp_path: Path) -> None:
    from towline.bridge.config.file import load  # noqa: PLC0415

    text, *_ = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configure.md").read_text(), re.DOTALL)
    file = tmp_path / "bridge.toml"
    file.write_text(text)
    assert load(file, {}).lines[0].name == "telemetry"


def test_the_readmes_numbers_are_those_of_the_recorded_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    lines = [json.loads(line) for line in (ROOT / "docs" / "proof" / "soak.jsonl").read_text().splitlines()]
    (revision,) = {line["revision"] for line in lines} & set(re.findall(r"`(\w+)`", readme))
    runs = [line for line in lines if line["revision"] == revision]
    doubled = {promise: sum(run["doubled"] for run in runs if run["guarantee"] == promise) for promise in Guarantee}
    assert sum(run["lost"] + run["late"] for run in runs) == doubled[Guarantee.EXACTLY_ONCE] == 0
    for number in (len(runs), sum(run["acked"] for run in runs), doubled[Guarantee.AT_LEAST_ONCE]):
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", readme), f"the README says nothing of {number:,}"


def test_nothing_names_this_machine() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")):
        assert str(ROOT) not in path.read_text(), path


def section(page: str, title: str) -> str:
    """Return the text of a section of a page, up to the next heading of its level."""
    _, _, text = (ROOT / "docs" / page).read_text().partition(f"\n## {title}\n")
    return text.partition("\n## ")[0]


def test_every_cell_of_what_may_be_changed_is_a_test() -> None:
    page = section("guarantees.md", "Changes to a line")
    rows = [
        row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| ") and "what happens" not in row
    ]
    assert rows
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
        assert named, row[0]
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{row[0]}: {file}::{test}"


def test_every_cell_of_the_situations_is_a_test() -> None:
    _, *situations = section("guarantees.md", "Situations").split("\n### ")
    assert len(situations) >= 20
    for text in situations:
        title, *lines = text.splitlines()
        rows = [row.strip("| ").split(" | ") for row in lines if row.startswith("| ") and "what happens" not in row]
        assert [row[0] for row in rows] == ["running", "stopped", "first start"], title
        for _, _, tests in rows:
            named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
            assert named, title
            for file, test in named:
                assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{title}: {file}::{test}"


def test_every_sentence_of_kafkas_page_is_a_test() -> None:
    page = section("guarantees.md", "Kafka's delivery semantics")
    rows = [row for row in page.splitlines() if row.startswith("| ") and "Kafka's page says" not in row]
    assert rows
    for row in rows:
        named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            text = (ROOT / "tests" / "integration" / (file or "bridge/test_delivery_semantics.py")).read_text()
            assert f"\ndef {test}(" in text, row


#: Options of Camel's component ``paho-mqtt5``.
CAMEL = re.findall(
    r"\w+",
    """
topic brokerUrl serverURIs clientId qos retained persistence filePersistenceDirectory keepAliveInterval receiveMaximum
cleanStart sessionExpiryInterval connectionTimeout automaticReconnect maxReconnectDelay willTopic willPayload willQos
willRetained willMqttProperties manualAcksEnabled userName password socketFactory sslClientProps
httpsHostnameVerificationEnabled sslHostnameVerifier customWebSocketHeaders executorServiceTimeout client configuration
autowiredEnabled bridgeErrorHandler lazyStartProducer exceptionHandler exchangePattern
""",
)


def camels_rows() -> list[list[str]]:
    """Return the cells of the rows that begin with a name of Camel's."""
    lines = section("coming-from.md", "Apache Camel").splitlines()
    return [line.split("|") for line in lines if line.startswith("| `")]


def test_every_option_of_camel_has_a_row() -> None:
    assert {name for row in camels_rows() for name in re.findall(r"`(\w+)`", row[1])} >= set(CAMEL)


def test_what_stands_for_camels_options_are_settings_of_ours() -> None:
    """Every word in backticks of the third column that looks like a setting is one."""
    models = (GatewaySettings, RouteSection, UplinkTable, WillSettings, DownlinkSection)
    known = {name for model in models for name in model.model_fields} | {one.name for one in fields(Tls)} | {"from"}
    rows = [row[3] for row in camels_rows() if len(row) == 7]
    assert rows
    named = {part for row in rows for word in re.findall(r"`([a-z_.]+)`", row) for part in word.split(".")}
    assert named - known <= {"websocket_headers", "subscribe", "gateway", "will", "tls"}
