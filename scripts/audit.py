"""Ask the package index whether what is installed here has known vulnerabilities; `make check` does.

``pip-audit`` asks the vulnerability data of the index (the JSON API of PyPI) and nothing else. A mirror may not have
them: then it says that nothing was asked, and fails nobody.
"""

# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["judge", "main"]

_COMMAND = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--format=json", "--progress-spinner=off"]
#: Seconds for all packages.
_PATIENCE_S = 120


def judge(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """What a report of ``pip-audit --format=json`` says.

    Returns:
        The exit code, 1 for a known vulnerability, and lines for a person.
    """
    packages = [one for one in report["dependencies"] if "editable" not in one.get("skip_reason", "")]
    asked = [one for one in packages if "skip_reason" not in one]
    if not asked:
        return 0, [f"audit: not asked: the index here has no vulnerability data ({len(packages)} packages)"]
    lines = []
    for one in asked:
        for hole in one["vulns"]:
            mended = ", ".join(hole["fix_versions"]) or "no version yet"
            lines.append(f"audit: {one['name']} {one['version']}: {hole['id']}, mended in {mended}")
    left = f", {len(packages) - len(asked)} of them not known to the index" if len(asked) < len(packages) else ""
    return (1, lines) if lines else (0, [f"audit: {len(packages)} packages, no known vulnerability{left}"])


def main() -> int:
    """Ask, and say what was answered."""
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        code, lines = judge(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        code, lines = 0, [f"audit: not asked: no answer within {_PATIENCE_S} s"]
    except ValueError:  # the service can't be reached, or pip-audit is not installed
        code, lines = 0, [f"audit: not asked: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"]
    sys.stdout.write("\n".join([*lines, ""]))
    return code


if __name__ == "__main__":
    sys.exit(main())
