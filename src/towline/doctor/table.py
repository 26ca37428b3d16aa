"""Checks, findings, and their report for people and scripts. Pure: no network, disk or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from towline.errors import TowlineError
from towline.text import printable

_F = TypeVar("_F")
_T = TypeVar("_T")


class Verdict(StrEnum):
    """Verdict on a promise, from best to worst."""

    HOLDS = "holds"
    LIMITED = "limited"  # holds up to a distant limit
    UNKNOWN = "unknown"  # not measurable: no right, no answer [I19]
    WARNS = "warns"  # holds up to a near limit, or depends on luck
    BROKEN = "broken"


HOLDS, LIMITED, UNKNOWN, WARNS, BROKEN = Verdict
_SEVERITY: Final = {verdict: severity for severity, verdict in enumerate(Verdict)}
_SATISFIED: Final = frozenset({Verdict.HOLDS, Verdict.LIMITED})
_SYMBOLS: Final = dict(zip(Verdict, "✓✓?!✗", strict=True))
#: Exit code by verdict; 2 is an error in the bridge file, as in every command.
_EXIT_CODES: Final = dict(zip(Verdict, (0, 0, 3, 3, 1), strict=True))
_LABELS: Final = ("holds until", "because", "what to do")
_RETRY_REMEDY: Final = "Fix it, and run doctor again."
_BUG_REMEDY: Final = "Report this bug with this row; the other rows are valid."


@dataclass(frozen=True)
class Finding:
    """Finding of a check.

    Attributes:
        verdict: Verdict on the promise.
        evidence: Measured or read fact, with number, unit and name of the setting.
        limit: Time or event that ends the promise: "1,000 messages, 5 s at 200 msg/s"; empty if there is none.
        remedy: Action to take; empty if none is needed.
        line: Name of the line; empty for the whole bridge.
        promise: Promise in two or three words; empty for the promise of the check.
        code: Code of the check, which names a paragraph of docs/errors.md; set by `run_checks`.
    """

    verdict: Verdict
    evidence: str
    limit: str = ""
    remedy: str = ""
    line: str = ""
    promise: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        assert self.evidence, "a row without a fact proves nothing"
        assert self.remedy or self.verdict in _SATISFIED, "a row that is not satisfied has a remedy"


@dataclass(frozen=True)
class Check(Generic[_F]):
    """One check: the code of its findings, the promise, and the rule that derives findings from facts."""

    code: str
    promise: str
    rule: Callable[[_F], Iterable[Finding]]


class ProbeSkipped(Exception):
    """A fact that is not probed, because a probe would do harm or got no answer; with reason and remedy."""

    def __init__(self, reason: str, remedy: str = _RETRY_REMEDY) -> None:
        super().__init__(reason)
        self.remedy = remedy


class fact(Generic[_T]):  # noqa: N801 - used like property and cached_property
    """Cached property for a probed fact; an error is cached and raised again, too."""

    def __init__(self, probe: Callable[[Any], _T]) -> None:
        self._probe = probe
        self.__doc__ = probe.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _owner_type: type | None = None) -> _T:
        probe_results = vars(owner)
        if (error := probe_results.get(f"no {self._name}")) is not None:
            raise error
        try:
            probe_results[self._name] = value = self._probe(owner)
        except Exception as error:
            probe_results[f"no {self._name}"] = error
            raise
        return value


def run_checks(checks: Iterable[Check[_F]], facts: _F, line: str = "") -> Iterator[Finding]:
    """Yield the findings of all checks; an exception of a rule becomes a finding.

    Args:
        checks: Checks to evaluate.
        facts: Argument of the rules.
        line: Line of findings that name none.
    """
    for check in checks:
        findings: list[Finding] = []
        try:
            findings.extend(check.rule(facts))  # findings before an exception are kept
        except ProbeSkipped as error:
            findings.append(Finding(Verdict.UNKNOWN, f"not probed: {error}", remedy=error.remedy))
        except Exception as error:  # noqa: BLE001 - the other checks still run
            detail = f"{type(error).__name__}: {error}"
            remedy = _RETRY_REMEDY if isinstance(error, OSError) else _BUG_REMEDY
            if isinstance(error, TowlineError):
                detail, remedy = f"{error.location}: {error.problem} ({error.code})", error.remedy or _RETRY_REMEDY
            findings.append(Finding(Verdict.UNKNOWN, f"check failed: {detail}", remedy=remedy))
        for finding in findings:
            evidence, limit, remedy = map(printable, (finding.evidence, finding.limit, finding.remedy))
            promise, line_name = finding.promise or check.promise, finding.line or line
            yield Finding(finding.verdict, evidence, limit, remedy, line_name, promise, check.code)


def _sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by verdict, worst first, then by code and line."""
    return sorted(findings, key=lambda finding: (-_SEVERITY[finding.verdict], finding.code, finding.line))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the worst finding; no findings at all count as unknown.

    Returns:
        0 all promises hold, 1 one is broken, 3 one has a near limit or is unknown.
    """
    verdicts = (finding.verdict for finding in findings)
    return _EXIT_CODES[max(verdicts, key=_SEVERITY.__getitem__, default=Verdict.UNKNOWN)]


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the report as JSON values: ``findings`` (worst first), ``worst`` verdict and ``exit_code``."""
    rows = _sort_findings(findings)
    worst = rows[0].verdict if rows else Verdict.UNKNOWN
    return {"findings": [asdict(finding) for finding in rows], "worst": worst.value, "exit_code": exit_code(rows)}


def report_lines(findings: Iterable[Finding], load: Iterable[str], *, verbose: bool = False) -> Iterator[str]:
    """Yield the report for a person: the worst finding as a headline, findings with the worst last, a summary.

    Args:
        findings: All findings.
        load: Lines about the load.
        verbose: Show satisfied promises too.
    """
    merged_findings = _merge_findings(_sort_findings(findings))
    if merged_findings and merged_findings[0].verdict not in _SATISFIED:
        yield f"{_title(merged_findings[0])}: {merged_findings[0].evidence}{_code_suffix(merged_findings[0])}"
    yield from load
    for finding in reversed(merged_findings):
        if verbose or finding.verdict not in _SATISFIED:
            yield ""
            yield _title(finding)
            remedy_text = f"{finding.remedy}{_code_suffix(finding)}" if finding.remedy else ""
            for label, text in zip(_LABELS, (finding.limit, finding.evidence, remedy_text), strict=True):
                if text:
                    yield f"  {label:<13}{text}"
    yield ""
    yield _summary(findings, verbose=verbose)


def _merge_findings(findings: list[Finding]) -> list[Finding]:
    """Merge findings that differ only in their promise, such as all findings of one failed probe."""
    merged_by_key: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.verdict, finding.evidence, finding.limit, finding.remedy, finding.line)
        merged = merged_by_key.setdefault(key, finding)
        if finding.promise not in merged.promise.split(", "):
            merged_by_key[key] = replace(merged, code="", promise=f"{merged.promise}, {finding.promise}")
    return list(merged_by_key.values())


def _title(finding: Finding) -> str:
    return f"{_SYMBOLS[finding.verdict]} {finding.promise}{f' ({finding.line})' if finding.line else ''}"


def _code_suffix(finding: Finding) -> str:
    return f"   [{finding.code}]" if finding.code else ""


def _summary(findings: Iterable[Finding], *, verbose: bool) -> str:
    verdicts = [finding.verdict for finding in findings]
    verdict_names = {Verdict.BROKEN: "broken", Verdict.WARNS: "near a limit", Verdict.UNKNOWN: "unknown"}
    counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in verdict_names.items() if verdict in verdicts]
    if satisfied_count := sum(verdict in _SATISFIED for verdict in verdicts):
        counts.append(f"{satisfied_count} kept{'' if verbose else ' (-v)'}")
    return ", ".join(counts) or "nothing was examined"


# -- formats --


def bytes_text(size_bytes: float) -> str:
    """Format bytes in a suitable unit: ``1.5 MB``, ``29 GB``."""
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    unit = next((name for name, unit_bytes in units.items() if abs(size_bytes) < 1000 * unit_bytes), "TB")
    value = size_bytes / units[unit]
    return f"{value:,.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def names_text(names: Iterable[str]) -> str:
    """Format names as ``a, b, c and 4 more``."""
    sorted_names = sorted(set(names))
    hidden_count = len(sorted_names) - 3
    shown_names = ", ".join(sorted_names[:3])
    return f"{shown_names} and {hidden_count} more" if hidden_count > 0 else shown_names
