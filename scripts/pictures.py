"""Draws what docs/proof has recorded: docs/pictures/kills.svg, tests.svg and benchmarks.svg.

    python scripts/pictures.py              write them
    python scripts/pictures.py --check      exit code 1 if one is not what the records say

Only what was recorded is drawn, and of the benchmarks only runs of full size.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

__all__ = ["PICTURES", "benchmarks", "kills", "main", "tests"]

ROOT: Final = Path(__file__).resolve().parent.parent
PROOF: Final = ROOT / "docs" / "proof"
TARGET: Final = ROOT / "docs" / "pictures"

Run = Mapping[str, Any]

_WIDTH: Final = 940
_ROW: Final = 22
#: The newest days of a picture.
_DAYS: Final = 10
_COSTS: Final = ("nothing lost, nothing doubled", "doubled, as at_least_once may", "lost, or a promise broken")
_STYLE: Final = """<style>
svg{--ink:#1f2328;--soft:#59636e;--line:#d0d7de;--paper:#fff;--good:#0b7a3b;--more:#a04000;--bad:#c21f2b;--peer:#8c959f}
@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--soft:#9da7b3;--line:#3d444d;--paper:#14171c;--good:#4cc77c;--more:#f0a35e;\
--bad:#ff7b72;--peer:#6e7681}}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--ink)}
.s{fill:var(--soft);font-size:12px}.b{font-weight:600}.e{text-anchor:end}.paper{fill:var(--paper)}
path{fill:none;stroke-width:8;stroke-linecap:round}.good{stroke:var(--good)}.more{stroke:var(--more)}.bad{stroke:var(--bad)}
.line{stroke:var(--line);stroke-width:1}.spread{stroke:var(--ink);stroke-width:1}
rect.good{fill:var(--good);stroke:none}rect.bad{fill:var(--bad);stroke:none}rect.peer{fill:var(--peer)}
</style>"""


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y - 11:g}" width="{width:.1f}" height="14"/>'


def _dots(places: Iterable[tuple[float, float]], kind: str) -> str:
    return f'<path class="{kind}" d="{"".join(f"M{x:g} {y:g}h0" for x, y in places)}"/>'


def _picture(title: str, description: str, height: float, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(description)}</desc>',
        _STYLE,
        f'<rect class="paper" width="{_WIDTH}" height="{height:g}" rx="8"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def kills(runs: Sequence[Run]) -> str:
    """A dot for each run of `soak` that killed a process, by guarantee, process and day."""
    days = sorted({run["day"] for run in runs})[-_DAYS:]
    runs = [run for run in runs if run["day"] in days and (run.get("role") or run.get("kills"))]
    killed = [run.get("role") or run["struck"][0]["what"] for run in runs]
    columns, x = {}, 160.0
    for day in days:
        columns[day] = x
        cells = [(run["guarantee"], role) for run, role in zip(runs, killed, strict=True) if run["day"] == day]
        x += max(map(cells.count, cells), default=0) * 12 + 24
    parts, told, y = [], [], 30.0
    dots: dict[str, list[tuple[float, float]]] = {"good": [], "more": [], "bad": []}
    for guarantee in ("exactly_once", "at_least_once"):
        own = [(run, role) for run, role in zip(runs, killed, strict=True) if run["guarantee"] == guarantee]
        count = sum(len(run.get("struck", [run])) for run, _ in own)
        told.append(f"{guarantee}: {count} kills, {_sum(own, 'acked')} messages, {_cost(own)}")
        parts.append(_text(20, y, told[-1], "b"))
        for role in dict.fromkeys(killed):
            y += _ROW
            of_role = [(run, role) for run, other in own if other == role]
            parts += [_text(20, y, f"kill -9 of {role}"), f'<path class="line" d="M150 {y + 7:g}H{_WIDTH - 20}"/>']
            parts.append(_text(_WIDTH - 20, y, _cost(of_role), "s e"))
            for day, column in columns.items():
                for number, run in enumerate(run for run, _ in of_role if run["day"] == day):
                    kind = "bad" if run["lost"] or not run["ok"] else "more" if run["doubled"] else "good"
                    dots[kind].append((column + number * 12, y - 4))
        y += _ROW
        parts += [_text(column - 4, y, day[5:], "s") for day, column in columns.items()]
        y += _ROW * 1.5
    parts += [_dots(places, kind) for kind, places in dots.items() if places]
    for x, kind, text in zip((24, 264, 504), dots, _COSTS, strict=True):
        parts += [_dots([(x, y - 4)], kind), _text(x + 12, y, text, "s")]
    return _picture("Recorded kills, and what they cost", ". ".join(told), y + 20, parts)


def _sum(runs: Iterable[tuple[Run, str]], name: str) -> str:
    return f"{sum(run[name] for run, _ in runs):,}"


def _cost(runs: Sequence[tuple[Run, str]]) -> str:
    return f"lost {_sum(runs, 'lost')}, doubled {_sum(runs, 'doubled')}"


def tests(runs: Sequence[Run]) -> str:
    """Recorded runs of long tests a day: those that passed, and the others."""
    days = sorted({run["day"] for run in runs})[-_DAYS:]
    counts = {day: [sum(run["day"] == day and run["ok"] is ok for run in runs) for ok in (True, False)] for day in days}
    scale = 560 / max(map(sum, counts.values()))
    parts, told = [], []
    for number, (day, (passed, failed)) in enumerate(counts.items()):
        y = 30 + number * _ROW
        told.append(f"{day}: {passed} passed" + (f", {failed} did not" if failed else ""))
        parts += [
            _text(20, y, day),
            _bar(120, y, passed * scale, "good"),
            _bar(120 + passed * scale, y, failed * scale, "bad"),
        ]
        parts.append(_text(128 + (passed + failed) * scale, y, told[-1].partition(": ")[2], "s"))
    return _picture("Recorded runs of the long tests", ". ".join(told), 34 + len(days) * _ROW, parts)


def benchmarks(runs: Sequence[Run]) -> str:
    """The newest full run of each benchmark: the median of each subject, with its least and most."""
    newest = {run["program"]: run for run in runs if not run["quick"]}
    parts, told, y = [], [], 30.0
    for program, run in newest.items():
        name = program.removeprefix("benchmark ")
        told.append(f"{name}, {run['unit']}: {run['day']}, {run['revision']}, {run['cores']} cores")
        parts.append(_text(20, y, told[-1], "b"))
        scale = 420 / max(max(values) for values in run["figures"].values())
        for subject, values in run["figures"].items():
            y += _ROW
            middle, least, most = statistics.median(values), min(values), max(values)
            parts += [
                _text(20, y, subject),
                _bar(320, y, middle * scale, "good" if subject.startswith("Towline") else "peer"),
            ]
            if least < most:
                parts.append(
                    f'<path class="spread" d="M{320 + least * scale:.1f} {y - 4:g}H{320 + most * scale:.1f}"/>'
                )
            figure = f"{middle:,.0f}" if middle >= 100 else f"{middle:.1f}"
            spread = f" ({least:.1f} to {most:.1f})" if least < most else ""
            parts.append(_text(328 + most * scale, y, f"{figure}{spread}", "s"))
        y += _ROW * 1.8
    return _picture("Towline and others, measured in one run", ". ".join(told), y, parts)


#: Picture → its records, and what draws it.
PICTURES: Final[Mapping[str, tuple[str, Callable[[Sequence[Run]], str]]]] = {
    "kills.svg": ("soak.jsonl", kills),
    "tests.svg": ("tests.jsonl", tests),
    "benchmarks.svg": ("benchmarks.jsonl", benchmarks),
}


def main(arguments: list[str]) -> int:
    """Draw those that have records, or compare."""
    wrong = []
    for name, (records, draw) in PICTURES.items():
        if not (PROOF / records).exists():
            continue
        text = draw([json.loads(line) for line in (PROOF / records).read_text().splitlines()])
        if "--check" not in arguments:
            (TARGET / name).write_text(text)
        elif not (TARGET / name).exists() or (TARGET / name).read_text() != text:
            wrong.append(f"{name} is not what {records} says: run python scripts/pictures.py\n")
    sys.stderr.write("".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
