"""What the documents claim: each error code has its paragraph, each command and file that is named exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

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


def test_every_page_is_in_the_navigation_of_the_site_as_the_readme_groups_it() -> None:
    groups = re.findall(r"^- ([A-Z][\w ]+): ((?:.+\n(?:  .+\n)*))", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {
        title: [
            f"{target}/README.md" if (ROOT / target).is_dir() else target
            for target in re.findall(r"\]\((.+?)\)", links)
        ]
        for title, links in groups
    }
    _, *sections = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert {
        t: [page for entry in entries for page in entry.values()] for s in sections for t, entries in s.items()
    } == named
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("docs/adr/0")} - {
        page for s in named.values() for page in s
    } == set()


def test_every_decision_is_listed_with_its_title() -> None:
    page = (ROOT / "docs" / "adr" / "README.md").read_text()
    decisions = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = {path.name: path.read_text().partition("\n")[0].removeprefix("# ") for path in decisions}
    assert re.findall(r"^- \[(.+)\]\((.+)\)$", page, re.MULTILINE) == [(t, name) for name, t in titles.items()]


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


#: Pages with sessions (``console``), and the tests that type them into a terminal.
TYPED = {
    "README.md": "integration/bridge/test_first_session.py",
    "docs/configure.md": "integration/bridge/test_first_session.py",
    "docs/operate.md": "integration/bridge/test_first_session.py",
    "docs/publishers.md": "integration/gateway/test_launch.py",
}
BLOCKS = [
    (str(page.relative_to(ROOT)), language, textwrap.dedent(text))
    for page in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
    for language, text in re.findall(r"^ *```(.*)\n((?:(?! *```).*\n)*) *```$", page.read_text(), re.MULTILINE)
]
COMMANDS = [(page, text) for page, language, text in BLOCKS if language == "sh"]


def test_every_block_says_what_it_is() -> None:
    """``console`` is typed by a test, ``sh`` are commands, ``text`` is output, ``py`` is no Python that a test runs."""
    languages = {"console", "sh", "text", "toml", "python", "py", "java", "json"}
    assert [(page, text) for page, language, text in BLOCKS if language not in languages] == []


def test_every_session_is_typed_by_a_test() -> None:
    assert {page for page, language, _ in BLOCKS if language == "console"} == set(TYPED)
    for page, test in TYPED.items():
        assert f'"{Path(page).name}"' in (text := (ROOT / "tests" / test).read_text()) or f'"{page}"' in text


def test_commands_are_those_of_a_shell_and_nothing_else() -> None:
    for page, text in COMMANDS:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), f"{page}: {text}"
        assert not re.search(r"^\$ ", text, re.MULTILINE), f"{page}: what a test does not type has no prompt"


@pytest.mark.parametrize("command", ["towline schema", "towline key"])
def test_commands_that_need_no_server_do_what_they_say(command: str, tmp_path: Path) -> None:
    (text,) = [text for _, text in COMMANDS if command in text]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", text], cwd=tmp_path, env=environ, check=True)
    written = {name for line in text.splitlines() for name in re.findall(r"> (\S+)", line)}
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} == written != set()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_and_speaks_for_itself(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 12_000
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314  our own
    assert all(part in text for part in ("<title ", "<desc ", "prefers-color-scheme:dark"))
    assert [url for url in re.findall(r"https?://[^\"]+", text) if url != "http://www.w3.org/2000/svg"] == []


def test_the_picture_of_the_files_names_those_that_the_code_makes() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "towline").rglob("*.py"))
    picture = (ROOT / "docs" / "pictures" / "files.svg").read_text()
    names = re.findall(r'<text class="f[^>]*>([a-z.-][a-z_.-]+)/?<', picture)
    assert len(names) > 20
    assert [name for name in names if f'"{name}"' not in source and name != "state_dir"] == []


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
