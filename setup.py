"""What pyproject.toml can't say of a build: the revision, the examples, and a README without relative links."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
#: Where `towline.version` and `towline init --examples` look, in the package.
REVISION, EXAMPLES = Path("towline/revision.txt"), Path("towline/examples")
NOTE = """
Paths such as `docs/kafka.md` are in the source distribution: `pip download --no-deps --no-binary towline towline`.
`towline init --examples DIR` writes out those below `examples`.
"""


def revision() -> str:
    """Of the checkout; of an unpacked sdist what its own build noted."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""
    noted = ROOT / "src" / REVISION
    return noted.read_text(encoding="ascii").strip() if noted.exists() else ""


def note_revision(tree: Path) -> None:
    """Write it into a tree of packages."""
    (tree / REVISION).unlink(missing_ok=True)  # a hard link to the source's, perhaps
    (tree / REVISION).write_text(f"{revision() or 'unknown'}\n", encoding="ascii")


def readme() -> str:
    """README.md with each relative link as its text and the path: on an index page it would lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def told(link: re.Match[str]) -> str:
        words, path = " ".join(link[1].split()), link[2].partition("#")[0]
        return words if not path or path in words else f"{words} (`{path}`)"

    text = re.sub(r"\[([^\]]+)\]\((?![a-z]+:)([^)\s]*)\)", told, text)
    head, below = text.split("\n", 1)
    return f"{head}\n{NOTE}{below}"


class BuildPackage(build_py):
    """Adds the revision and the examples; a development installation has them in its checkout."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            tree = Path(self.build_lib)
            note_revision(tree)
            shutil.rmtree(tree / EXAMPLES, ignore_errors=True)
            shutil.copytree(ROOT / "examples", tree / EXAMPLES, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


class SourceDistribution(sdist):
    """Adds the revision."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Build."""
        super().make_release_tree(base_dir, files)
        note_revision(Path(base_dir) / "src")


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPackage, "sdist": SourceDistribution},
)
