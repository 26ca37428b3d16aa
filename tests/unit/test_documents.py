"""What the documents claim: each error code has its paragraph, each command and file that is named exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from towline.cli import main
from towline.guarantee import Guarantee
from towline.kafka.options import NAMES as SINK_OPTIONS
from towline.spark.options import SOURCE_FORMAT

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'"(TL-[A-Z]\d{2,3})"')
EXPLANATIONS = tomllib.loads((ROOT / "src" / "towline" / "explanations.toml").read_text())


def raised() -> set[str]:
    return {code for path in (ROOT / "src").rglob("*.py") for code in CODE.findall(path.read_text())}


@pytest.mark.parametrize("script", ["errors.py", "options.py"])
def test_a_page_says_what_it_is_written_from(script: str) -> None:
    """That of the errors what `towline explain` says, that of the options what their models do."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], check=True)


def test_every_code_is_explained() -> None:
    assert raised() - set(EXPLANATIONS) == set()


def test_every_explanation_has_a_code() -> None:
    # Warnings carry their code in text, not as an error.
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {code for code in EXPLANATIONS if code not in text} == set()
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [code for code in EXPLANATIONS if f"\n| {code} |" not in page] == []


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert [name for name in (*SOURCE_FORMAT.names, *SINK_OPTIONS) if f"`{name}`" not in page] == []


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


@pytest.mark.parametrize("title", ["Changes to a line", "Situations", "Kafka's delivery semantics"])
def test_every_row_of_the_guarantees_names_its_test(title: str) -> None:
    lines = section("guarantees.md", title).splitlines()
    rows = [row for row, below in pairwise(lines) if row.startswith("| ") and not below.startswith("|---")]
    assert len(rows) > 5
    for row in rows:
        tests = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", row)
        assert tests, row
        for file, test in tests:
            path = file or "bridge/test_delivery_semantics.py"
            folder = ROOT / "tests" / ("" if path.startswith(("unit/", "integration/")) else "integration")
            assert f"\ndef {test}(" in (folder / path).read_text(), f"{row}: {path}::{test}"


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


def test_every_option_of_camel_has_a_row() -> None:
    cells = re.findall(r"^\| (`[^|]+)", section("coming-from.md", "Apache Camel"), re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} >= set(CAMEL)


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = sorted(path.name for path in (ROOT / "src" / "towline").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_in_the_picture(room: str) -> None:
    assert re.search(rf"^  {room}/ ", ARCHITECTURE, re.MULTILINE)


def test_what_is_named_in_the_picture_is_there() -> None:
    floor = re.search(r"^  (guarantee .*?)  +the ground floor", ARCHITECTURE, re.MULTILINE)
    assert floor is not None
    absent = [name for name in floor[1].split() if not (ROOT / "src" / "towline" / f"{name}.py").exists()]
    assert absent == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py|src/\w+|tests/)`", ARCHITECTURE))))
def test_a_place_for_something_new_is_there(path: str) -> None:
    assert (ROOT / "src" / "towline" / path).exists() or (ROOT / path).exists()
