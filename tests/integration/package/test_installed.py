"""What a person gets who installs the wheel: an empty environment, an empty home, a PATH of a few tools."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import NewTopic
from tests.helpers import lacking, present, produce_all, wait_until
from tests.integration.bridge.running import PATIENCE, in_kafka, kill_all, publish
from tests.integration.bridge.test_dlq import run_dlq
from towline import Client, Filter
from towline.bridge.runtime.status import collect_status
from towline.spark.java import spark_kafka_jars
from towline.spark.session import pyspark_version
from towline.version import release, version
from towline_prove.devstack import Kafka, Mosquitto

ROOT = Path(__file__).parents[3]
#: What a release is built of.
_SOURCES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
_TREES = ("docs", "examples", "src")
#: All that Spark's scripts and Towline run: no make, Maven, git, pip or other Python.
_TOOLS = ("bash", "cat", "chmod", "dirname", "env", "id", "java", "ls", "nice", "ps", "readlink", "sh", "stat", "uname")
#: Of a wheel: what a person is to have beside the code.
SHIPPED = {
    "towline/examples/bridge.toml",
    "towline/examples/hono.toml",
    "towline/examples/plain_pyspark.py",
    "towline/examples/monitoring/alerts.yml",
    "towline/examples/monitoring/dashboard.json",
    "towline/examples/monitoring/prometheus.yml",
    "towline/examples/production/mosquitto.conf",
    "towline/bridge/draft/template.toml",
    "towline/bridge/profiles/hono.toml",
    "towline/py.typed",
    f"towline-{version()}.dist-info/licenses/LICENSE",
}


def build(place: Path) -> tuple[Path, Path]:
    """Build both from a copy of the sources, with what this environment has; the wheel and the sdist."""
    tree = place / "tree"
    tree.mkdir()
    for name in _SOURCES:
        shutil.copy2(ROOT / name, tree)
    for name in _TREES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if (ROOT / ".git").exists():
        (tree / ".git").symlink_to(ROOT / ".git")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=place)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (place / "dist").glob("*.whl")
    (sdist,) = (place / "dist").glob("*.tar.gz")
    return wheel, sdist


@dataclass(frozen=True)
class Installation:
    """A virtual environment, and a home and a PATH of its own.

    Attributes:
        place: Of all three.
        python: What it is made with.
    """

    place: Path
    python: Path

    def make(self, *, pip: bool = False) -> Installation:
        self.home.mkdir(parents=True)
        self.tools.mkdir()
        for tool in _TOOLS:
            if (found := shutil.which(tool)) is not None:
                (self.tools / tool).symlink_to(Path(found).resolve() if tool == "java" else found)
        more = [] if pip else ["--without-pip"]
        subprocess.run([self.python, "-m", "venv", *more, self.place / "venv"], check=True, timeout=300)
        return self

    @property
    def home(self) -> Path:
        return self.place / "home"

    @property
    def tools(self) -> Path:
        return self.place / "tools"

    @property
    def program(self) -> str:
        return str(self.place / "venv" / "bin" / "towline")

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": f"{self.place / 'venv' / 'bin'}:{self.tools}", "LANG": "C.UTF-8"}

    def pip_install(self, *words: str | Path) -> None:
        """As a person does it, from the index that pip is told to use."""
        pip = [str(self.place / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", *map(str, words)]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=1800, env=environ())
        assert done.returncode == 0, done.stderr[-3000:]

    def put(self, wheel: Path) -> None:
        """Install a wheel alone."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.place / "venv" / "bin" / "python"), "install"]
        command = [*pip, "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
        subprocess.run(command, check=True, timeout=300, env=environ())

    def link(self, requirements: Sequence[str], extra: str = "") -> None:
        """Give it what these ask for, and no more: the very distributions that this environment has."""
        (site,) = (self.place / "venv" / "lib").glob("python3.*/site-packages")
        for one in _closure(map(Requirement, requirements), extra):
            for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(Path(str(one.locate_file(name))))

    def run(self, *words: str | Path, code: int | None = 0) -> str:
        """Run ``towline`` and return what it says, on either stream; None for a code that the surroundings decide."""
        command = [self.program, *map(str, words)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=600,
            env=self.environ,
            cwd=self.home,
        )
        assert code in {None, done.returncode}, (words, done.returncode, done.stdout[-3000:])
        return done.stdout


def environ() -> dict[str, str]:
    """This process's environment, without what names its sources, which pip takes for installed, and its PySpark."""
    own = ("PYTHONPATH", "PYSPARK_PYTHON", "SPARK_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def _closure(asked: Iterator[Requirement], extra: str, seen: set[str] | None = None) -> Iterator[Distribution]:
    seen = set() if seen is None else seen
    for one in asked:
        key = f"{one.name.lower()}[{','.join(sorted(one.extras))}]"
        if key in seen or (one.marker is not None and not one.marker.evaluate({"extra": extra})):
            continue
        seen.add(key)
        found = distribution(one.name)
        assert found.version in one.specifier, f"{one} is asked for, and {found.version} is here"
        yield found
        for each in one.extras or {""}:
            yield from _closure(map(Requirement, found.requires or ()), each, seen)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as files:
        return email.message_from_bytes(files.read(f"towline-{version()}.dist-info/METADATA"))


def test_wheel_and_sdist_hold_what_a_person_needs(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    names = set(zipfile.ZipFile(wheel).namelist())
    assert SHIPPED - names == set()
    files = (path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    examples = {path.relative_to(ROOT).as_posix() for path in files}
    wanted = {f"towline/{name}" for name in examples}
    assert {name for name in names if name.startswith("towline/examples/")} == wanted
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples", "docs"))]
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents | examples | {"LICENSE", "CHANGELOG.md", "README.md", "setup.py"} <= held
    said = metadata(wheel)
    assert (said["Version"], said["License-Expression"]) == (version(), "Apache-2.0")
    assert "confluent-kafka<4,>=2.13.2" in said.get_all("Requires-Dist", [])
    assert 'pyspark<4.4,>=4.2; extra == "spark"' in said.get_all("Requires-Dist", [])


def test_the_readme_of_an_index_page_has_no_link_that_leads_nowhere(built: tuple[Path, Path]) -> None:
    said = metadata(built[0])
    text = str(said.get_payload())
    assert said["Description-Content-Type"] == "text/markdown"
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not re.match("https?:", target)] == []
    assert "(`docs/spark.md`)" in text, "a link is its words and the path"
    assert "towline init --examples DIR" in text


@pytest.mark.broker
@pytest.mark.kafka
@pytest.mark.spark
def test_installed_from_its_wheel_alone_it_runs(
    built: tuple[Path, Path], tmp_path: Path, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    """What no requirement of the wheel brings is not there."""
    here = Installation(tmp_path / "installed", Path(sys.executable)).make()
    asked = metadata(built[0]).get_all("Requires-Dist", [])
    here.put(built[0])
    here.link(asked)
    example = the_example(here, mosquitto, kafka, topic("down"))
    assert here.run("run", example.file, code=2).endswith('Run: pip install "towline[spark]"   [TL-S20]\n')
    here.link(asked, extra="spark")
    example.carries_both_ways()
    seen = {one.name for one in here.home.iterdir() if not one.name.startswith(".")}
    assert seen == {"bridge.toml", "examples", "jars"}


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.parametrize("number", ["3.11", "3.12", "3.13"])
def test_installed_from_the_index_it_runs(
    number: str, built: tuple[Path, Path], tmp_path: Path, mosquitto: Mosquitto, own_kafka: Kafka
) -> None:
    """As the first line of the README says it, with all that pip finds for it."""
    here = Installation(tmp_path / "installed", a_python(number)).make(pip=True)
    here.pip_install(f"{built[0]}[spark]")
    own_kafka.create_topics({"down": 1})
    the_example(here, mosquitto, own_kafka, "down").carries_both_ways()


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.kafka
@pytest.mark.spark
def test_with_the_oldest_pyspark(
    built: tuple[Path, Path], tmp_path: Path, mosquitto: Mosquitto, own_kafka: Kafka
) -> None:
    """A bridge, then the tests of source and sinks, in an environment that has PySpark 4.2.0."""
    here = Installation(tmp_path / "installed", a_python("3.11")).make(pip=True)
    here.pip_install("--upgrade", "pip>=25.1")
    here.pip_install(f"{built[0]}[spark]", "pyspark==4.2.0")
    here.pip_install("--group", f"{ROOT / 'pyproject.toml'}:dev")
    own_kafka.create_topics({"down": 1})
    the_example(here, mosquitto, own_kafka, "down").carries_both_ways("4.2.0")
    python = str(here.place / "venv" / "bin" / "python")
    files = ("spark/test_source.py", "spark/test_sink.py", "kafka/test_exactly_once_spark.py")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/integration/{one}" for one in files)]
    done = subprocess.run(command, cwd=ROOT, env=environ(), capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:]


def a_python(number: str) -> Path:
    """A Python of a version, such as ``3.13``, that this machine has beside its first."""
    named = [*Path("~/.pyenv/versions").expanduser().glob(f"{number}.*/bin/python{number}")]
    named += [Path(one) for one in [shutil.which(f"python{number}")] if one is not None]
    code = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{number}')"
    found = [one for one in named if not subprocess.run([one, "-c", code], capture_output=True, check=False).returncode]
    if not found:
        lacking(f"there is no Python {number} here")
    return found[0]


@dataclass(frozen=True)
class Example:
    """The shipped example as it is written out, in places of this test, with a line down; its jars are a directory."""

    here: Installation
    file: Path
    broker: Mosquitto
    kafka: Kafka
    down: str

    def carries_both_ways(self, pyspark: str = str(pyspark_version())) -> None:
        here = self.here
        here.run("check", self.file)
        found = json.loads(here.run("doctor", "--json", self.file, code=None))
        assert [one["verdict"] for one in found["findings"] if one["code"] == "TL-D49"] == ["holds"]
        out = here.place / "out"
        with (
            Client(self.broker.uri, client_id="device", subscribe=Filter("down/#", 2)) as device,
            out.open("wb") as log,
        ):
            process = subprocess.Popen(
                [here.program, "run", self.file],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=here.environ,
                cwd=here.home,
            )
            try:
                self._carries(device, process)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
            finally:
                if process.poll() is None:  # else it has ended all that it started
                    kill_all(process)
        said = out.read_text()
        assert said.partition("\n")[0].endswith(f"towline {release()}")
        assert f"spark: {pyspark} is up" in said
        assert '"telemetry": received 4 = in Kafka 3 + dead-lettered 1 + waiting 0   adds up ✓' in said

    def _carries(self, device: Client, process: subprocess.Popen[bytes]) -> None:
        def lines() -> dict[str, Any]:
            assert process.poll() is None, (self.here.place / "out").read_text()
            found: dict[str, Any] = collect_status(self.file.parent / "state", ["telemetry", "down"])["lines"]
            return found

        def online() -> bool:
            return all((line["gateway"] or {}).get("state") == "online" for line in lines().values())

        def account(line: str) -> str:
            return str(lines()[line].get("sentence"))

        wait_until(online, PATIENCE, "both gateways")
        publish(self.broker, 0, 1, topic="event/t1/x0")
        publish(self.broker, 1, 1, topic="event/t2/x0")
        publish(self.broker, 2, 1, topic="telemetry/t1/d1/x")
        publish(self.broker, 0, 1, topic="telemetry/t1/d1/large", text="x" * 1_100_000)
        produce_all(self.kafka.bootstrap, self.down, [(b"valve", b"open", [])])
        adds_up = "received 4 = in Kafka 3 + dead-lettered 1 + waiting 0   adds up ✓"
        wait_until(lambda: account("telemetry") == adds_up, 2 * PATIENCE, adds_up)
        for topic, value in (("event.t1", b"m0"), ("event.t2", b"m1"), ("telemetry", b"m2")):
            assert [record[1] for record in in_kafka(self.kafka.bootstrap, topic)] == [value]
        answer = present(device.receive(PATIENCE))
        assert (answer.topic, answer.payload) == ("down/valve", b"open")
        _, out, _ = run_dlq("show", str(self.file))
        assert "1  too_large          line telemetry   in plant-7.dead-letters" in out
        assert "telemetry/t1/d1/large → telemetry  1,100,000 B" in out


def the_example(here: Installation, broker: Mosquitto, kafka: Kafka, down: str) -> Example:
    """What the commands of a first day make, and the jars beside it."""
    assert here.run("--version") == f"towline {release()}\n"
    here.run("init", here.home / "bridge.toml", "--broker", broker.uri, "--kafka", kafka.bootstrap)
    examples = here.home / "examples"
    here.run("init", "--examples", examples)
    text = (examples / "bridge.toml").read_text().replace("partitions = 6", "partitions = 1")
    for shipped, place in (
        ('"mqtt://localhost:1883"', broker.uri),
        ('"localhost:9092"', kafka.bootstrap),
        ('"~/.local/state/towline/plant-7"', "state"),
    ):
        assert shipped in text
        text = text.replace(shipped, f'"{place}"')
    text += '\n[spark]\nmaster = "local[2]"\nkafka_jars = ["../jars"]\n'
    text += f'[[downlink]]\nname = "down"\nfrom = "{down}"\ntopic = "down/{{key}}"\n'
    (examples / "bridge.toml").write_text(text)
    (here.home / "jars").mkdir()
    for jar in spark_kafka_jars():
        shutil.copy2(jar, here.home / "jars")
    return Example(here, examples / "bridge.toml", broker, kafka, down)
