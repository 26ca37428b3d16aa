"""Whether tests notice: small faults in the rooms that keep the promises, one at a time, against their unit tests.

    python scripts/mutants.py                     150 mutants of this tree, drawn with the seed 20261125
    python scripts/mutants.py --count 20 --json mutants.json
    python scripts/mutants.py --tree ../older     of another tree

A place in the code is drawn, and one of Cosmic Ray's operators that fit there. The tests of the room that run the
statement, as coverage shows it, run until one fails; where an import runs it, those that run anything of its module.
All happens in copies of the tree. `make mutants` brings what it needs (dependency group ``mutants``).
"""
# ruff: noqa: INP001, T201  a script, no package

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import coverage
import pytest

SEED = 20261125
ROOMS = ("mqtt", "journal", "delivery", "kafka")
#: Where a test run reads which tests to run, in this order.
SELECTED = "MUTANTS_SELECTED"
#: Where a test run writes which test runs which line.
MAP = "MUTANTS_MAP"
#: A mutant may cost this much CPU, beside four times what its tests cost without it.
CPU_SECONDS = 60
WALL_SECONDS = 900
#: Parts of a program that no operator changes; and where a star stands for no product, but between parameters.
_BARREN = {"name", "string", "fstring_string", "fstring_start", "fstring_end", "newline", "endmarker"}
_HEADS = {"parameters", "lambdef"}


@dataclass(frozen=True)
class Place:
    """Where a mutant is: a position in a file, and what fits there by name and occurrence."""

    file: str
    line: int
    column: int
    operators: tuple[tuple[str, int], ...]


@dataclass
class Mutant:
    """A fault, and what became of it."""

    room: str
    file: str
    line: int
    operator: str
    before: str = ""
    after: str = ""
    tests: int = 0
    fate: str = ""
    killer: str = ""
    seconds: float = 0.0


# -- in the process of the tests -------------------------------------------------------------------------------------

_coverage: coverage.Coverage | None = None
_passed: dict[str, float] = {}
if MAP in os.environ:  # before anything of the product is imported: conftest files come before any hook
    _coverage = coverage.Coverage(data_file=None, source=[str(Path.cwd() / "src" / "towline")], messages=False)
    _coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "couldnt-parse"])
    _coverage.start()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those that were asked for, in the order in which they were."""
    if SELECTED in os.environ:
        order = {name: n for n, name in enumerate(json.loads(Path(os.environ[SELECTED]).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What runs from now on, runs for this test."""
    if _coverage is not None:
        _coverage.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test took that has passed."""
    if report.when == "call" and report.passed:
        _passed[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    """Write the map: by file and line, the tests that run it."""
    if _coverage is None:
        return
    _coverage.stop()
    data = _coverage.get_data()
    lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
    Path(os.environ[MAP]).write_text(json.dumps({"passed": _passed, "lines": lines}))


# -- drawing ---------------------------------------------------------------------------------------------------------


def room_of(file: str) -> str:
    """The room of a file under ``src/towline``."""
    first = Path(file).parts[2]
    return first if first in ROOMS else "guarantee"


def files_of(tree: Path) -> list[str]:
    """What is mutated, in order."""
    found = [path for room in ROOMS for path in (tree / "src" / "towline" / room).rglob("*.py")]
    return sorted(path.relative_to(tree).as_posix() for path in [*found, tree / "src" / "towline" / "guarantee.py"])


def places_in(tree: Path, file: str) -> list[Place]:
    """Everywhere in a file where an operator fits, but in annotations, which nobody runs."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415 - the tests' process has no use for them
    from cosmic_ray.operators.provider import OperatorProvider  # noqa: PLC0415

    source = (tree / file).read_text()
    annotated = {line_column for node in ast.walk(ast.parse(source)) for line_column in _annotation(node)}
    provider = OperatorProvider()
    nodes = [node for node in ast_nodes(get_ast(source)) if node.type not in _BARREN]
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in sorted(provider):
        kind = provider[name]
        if kind.arguments():
            continue  # they want names of variables
        operator = kind()
        positions = [(position, node) for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, ((start, _), node) in enumerate(positions):
            if start not in annotated and node.parent.type not in _HEADS:
                found[start].append((name, occurrence))
    return [Place(file, *start, tuple(fitting)) for start, fitting in sorted(found.items())]


def _annotation(node: ast.AST) -> Iterator[tuple[int, int]]:
    """The positions that annotations of a node cover."""
    for name in ("annotation", "returns"):
        one = getattr(node, name, None)
        if isinstance(one, ast.expr):
            for line in range(one.lineno, (one.end_lineno or one.lineno) + 1):
                begin = one.col_offset if line == one.lineno else 0
                end = (one.end_col_offset or 0) if line == one.end_lineno else 200
                yield from ((line, column) for column in range(begin, end))


def mutated(tree: Path, place: Place, draw: random.Random) -> tuple[Mutant, str] | None:
    """A mutant of a place, and the text of its file; None where no operator makes a program of it."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
    from cosmic_ray.operators.provider import OperatorProvider  # noqa: PLC0415

    source = (tree / place.file).read_text()
    for name, occurrence in draw.sample(place.operators, len(place.operators)):
        try:
            text = mutate_code(source, OperatorProvider()[name](), occurrence)
            same = text is None or ast.dump(ast.parse(text)) == ast.dump(ast.parse(source))
        except (SyntaxError, AttributeError):  # Cosmic Ray finds no name to replace in `except (One, *OTHERS)`
            continue
        if same:
            continue
        old, new = source.splitlines(), text.splitlines()
        differing = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), place.line - 1)
        mutant = Mutant(room_of(place.file), place.file, place.line, name.removeprefix("core/"))
        mutant.before, mutant.after = old[differing].strip(), new[differing].strip()
        return mutant, text
    return None


def drawn(tree: Path, count: int, seed: int) -> list[tuple[Mutant, str]]:
    """So many mutants, the same ones for the same tree and seed."""
    draw = random.Random(seed)  # noqa: S311 - nobody guesses it
    places = [place for file in files_of(tree) for place in places_in(tree, file)]
    found: list[tuple[Mutant, str]] = []
    for place in draw.sample(places, len(places)):
        if len(found) == count:
            break
        one = mutated(tree, place, draw)
        if one is not None:
            found.append(one)
    return found


# -- running ---------------------------------------------------------------------------------------------------------


class Tests:
    """The unit tests of a room, which line each of them runs, and how long it takes.

    Args:
        tree: A copy that the tests run in.
        room: Whose.
    """

    def __init__(self, tree: Path, room: str) -> None:
        folder = tree / "tests" / "unit" / room
        if folder.is_dir():
            self.where = [folder.relative_to(tree).as_posix()]
        else:
            tests = sorted((tree / "tests" / "unit").rglob("test_*.py"))
            self.where = [
                path.relative_to(tree).as_posix()
                for path in tests
                if re.search(rf"\btowline\.{room}\b", path.read_text())
            ]
        out = tree / f"{room}.map.json"
        ended = run(tree, [*self.where], {MAP: str(out)}, WALL_SECONDS * 4)
        if not out.exists():
            sys.exit(f"the tests of {room} did not run:\n{ended.stdout[-3000:]}")
        read: dict[str, Any] = json.loads(out.read_text())
        self.seconds: dict[str, float] = read["passed"]
        self._lines: dict[str, dict[int, set[str]]] = {}
        for path, lines in read["lines"].items():
            file = Path(path).relative_to(tree).as_posix()
            self._lines[file] = {int(line): set(tests) for line, tests in lines.items()}

    def of(self, mutant: Mutant, source: str) -> list[str]:
        """Those that run what the mutant changes, the nearest file first; empty if none does."""
        lines = self._lines.get(mutant.file, {})
        run_by = set().union(*(lines.get(line, set()) for line in _statement(source, mutant.line)))
        if "" in run_by:  # an import runs it: all that runs anything of its module may notice
            run_by = set().union(*lines.values())
        chosen = [name for name in run_by if name in self.seconds]
        cost: dict[str, float] = defaultdict(float)
        for name in chosen:
            cost[name.split("::")[0]] += self.seconds[name]
        stem = Path(mutant.file).stem.strip("_")

        def nearness(name: str) -> tuple[bool, float, str, float]:
            file = name.split("::", maxsplit=1)[0]
            return (stem not in file, cost[file], file, self.seconds[name])

        return sorted(chosen, key=nearness)


def _statement(source: str, line: int) -> range:
    """The lines of the innermost statement around a line; of one with a body, its head."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if first <= line <= max(first, last):
                best = range(first, max(first, last) + 1)
    return best


def run(
    tree: Path, arguments: list[str], variables: dict[str, str], wall_s: float, cpu_s: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a copy of the tree.

    Raises:
        TimeoutExpired: It took longer than `wall_s`.
    """
    path = [tree / "src", Path(__file__).parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "mutants", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0", "--no-header", "--tb=line"]
    if MAP in variables:  # of all tests; and it leaves them compiled, for the runs behind it
        command.remove("-x")
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
    limit = (lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))) if cpu_s is not None else None
    return subprocess.run(
        [*command, *arguments],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=wall_s,
        preexec_fn=limit,
    )


def judge(tree: Path, mutant: Mutant, text: str, tests: list[str], cost_s: float) -> None:
    """Put the fault into the copy, run the tests, take it out, and note what became of it."""
    mutant.tests = len(tests)
    if not tests:
        mutant.fate = "survived: no test runs it"
        return
    file = tree / mutant.file
    before, times = file.read_text(), file.stat()
    selected = tree / "selected.json"
    selected.write_text(json.dumps(tests))
    begun = time.monotonic()
    file.write_text(text)
    try:
        files = list(dict.fromkeys(name.split("::")[0] for name in tests))
        variables = {SELECTED: str(selected), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = run(tree, files, variables, WALL_SECONDS, CPU_SECONDS + int(4 * cost_s))
        if ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(ended.stdout + ended.stderr)
        mutant.fate = "survived" if ended.returncode == 0 else "killed"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
        mutant.killer = failed[1] if failed else ""
    except subprocess.TimeoutExpired:
        mutant.fate = "killed"
        mutant.killer = f"took longer than {WALL_SECONDS} s"
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    mutant.seconds = round(time.monotonic() - begun, 1)


def copy_of(tree: Path, place: Path) -> Path:
    """What git knows of the tree, as it is now."""
    listed = subprocess.run(["git", "-C", str(tree), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (tree / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, place / name)
    return place


def report(mutants: list[Mutant], file: Path | None) -> None:
    """Print the shares by room and what survived; as JSON too."""
    judged = [one for one in mutants if one.fate]
    for room in (*ROOMS, "guarantee", ""):
        of = [one for one in judged if one.room.startswith(room)]
        killed = sum(one.fate == "killed" for one in of)
        print(f"{room or 'together':<10} {killed:>4} of {len(of):>4} killed   {killed / max(1, len(of)):.1%}")
    for one in judged:
        if one.fate != "killed":
            print(f"{one.file}:{one.line} {one.operator}: {one.fate}\n  - {one.before}\n  + {one.after}")
    if file is not None:
        file.write_text(json.dumps([asdict(one) for one in mutants], indent=1) + "\n")


def main() -> None:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many mutants (150)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the draw ({SEED})")
    parser.add_argument("--processes", type=int, default=2, help="test runs at a time (2)")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the tree, in git (this one)")
    parser.add_argument("--json", type=Path, help="where the result goes too, after each mutant")
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        first = copy_of(given.tree.resolve(), Path(place) / "0")
        found = drawn(first, given.count, given.seed)
        rooms = sorted({mutant.room for mutant, _ in found})
        tests = {room: Tests(first, room) for room in rooms}
        copies: Queue[Path] = Queue()
        copies.put(first)
        for number in range(1, given.processes):
            copies.put(Path(shutil.copytree(first, Path(place) / str(number))))
        writing = threading.Lock()
        mutants = [mutant for mutant, _ in found]

        def one(mutant: Mutant, text: str) -> None:
            copy = copies.get()
            try:
                chosen = tests[mutant.room].of(mutant, (copy / mutant.file).read_text())
                judge(copy, mutant, text, chosen, sum(map(tests[mutant.room].seconds.__getitem__, chosen)))
            finally:
                copies.put(copy)
            with writing:
                done = sum(bool(one.fate) for one in mutants)
                print(f"{done:>4}  {mutant.file}:{mutant.line}  {mutant.fate}  {mutant.seconds:.0f} s", flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps([asdict(one) for one in mutants], indent=1) + "\n")

        with ThreadPoolExecutor(given.processes) as pool:
            for future in [pool.submit(one, mutant, text) for mutant, text in found]:
                future.result()
    report(mutants, given.json)
    print(f"seed {given.seed}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
