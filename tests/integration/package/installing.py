"""The wheel and the sdist as a release has them, and environments that have nothing but what they ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
#: What a release is built of.
_SOURCES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
_TREES = ("docs", "examples", "src")
#: All that Spark's scripts and Towline run: no make, Maven, git, pip or other Python.
_TOOLS = ("bash", "cat", "chmod", "dirname", "env", "id", "java", "ls", "nice", "ps", "readlink", "sh", "stat", "uname")


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


def pythons(number: str) -> list[Path]:
    """Pythons of a version, such as ``3.13``, that this machine has beside its first."""
    named = [*Path("~/.pyenv/versions").expanduser().glob(f"{number}.*/bin/python{number}")]
    named += [Path(one) for one in [shutil.which(f"python{number}")] if one is not None]
    code = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{number}')"
    return [one for one in named if subprocess.run([one, "-c", code], capture_output=True, check=False).returncode == 0]


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
