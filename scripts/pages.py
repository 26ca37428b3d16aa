"""Builds the pages as a site: `make site` writes it into site/, without a network.

The pages keep their paths in the repository, so a link holds there and here. A file that a page links to and that is no
page becomes one with its text, a directory one with a list of its files. A link that leads nowhere ends it with exit
code 1, and so does a page that asks another host for anything.

    python -m http.server -d site       to read it; from a directory, without a server, all but the search works
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["check", "lay_out", "main"]

ROOT: Final = Path(__file__).resolve().parent.parent
#: `docs_dir` and `site_dir` of zensical.toml.
PAGES: Final = ROOT / "build" / "pages"
SITE: Final = ROOT / "site"
#: A local target in Markdown, without its anchor.
_LINK: Final = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")
#: What a style sheet asks for.
_STYLE: Final = re.compile(r"url\(\s*['\"]?([^'\")]+)")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FILE: Final = "---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n~~~~~~ {language}\n{text}~~~~~~\n"


def lay_out(root: Path, target: Path) -> int:
    """Copy the pages of a repository, and make pages of what they link to.

    Args:
        root: The repository: its ``*.md``, all pages below ``docs``, and what these link to.
        target: A directory that is emptied first.

    Returns:
        The number of files written.
    """
    shutil.rmtree(target, ignore_errors=True)
    waiting = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    written: set[Path] = set()
    while waiting:
        source = waiting.pop()
        page = _page_of(source)
        if page in written:
            continue
        written.add(page)
        copy = target / page.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in {".svg", ".png"}:
            shutil.copy(source, copy)
            continue
        parts = []
        text, end = _text_of(source, root), 0
        for link in _LINK.finditer(text) if source.is_dir() or source.suffix == ".md" else ():
            linked = Path(os.path.normpath(page.parent / link[0]))
            if linked.exists():  # else the builder names it
                waiting.append(linked)
                parts += [text[end : link.start()], os.path.relpath(_page_of(linked), page.parent)]
                end = link.end()
        copy.write_text("".join([*parts, text[end:]]))
    return len(written)


def _page_of(path: Path) -> Path:
    """Where the page of a file or directory stands."""
    if path.is_dir():
        return path / "README.md"
    return path if path.suffix in {".md", ".svg", ".png"} else path.with_name(f"{path.name}.md")


def _text_of(path: Path, root: Path) -> str:
    """A page's Markdown."""
    name = path.relative_to(root)
    if not path.is_dir():
        text = path.read_text()
        language = path.suffix.removeprefix(".") or "text"
        return text if path.suffix == ".md" else _FILE.format(path=name, language=language, text=text)
    if (path / "README.md").exists():
        return (path / "README.md").read_text()
    files = sorted(file.name for file in path.iterdir() if file.is_file())
    return f"# `{name}`\n\n" + "".join(f"- [{file}]({file})\n" for file in files)


class _Page(HTMLParser):
    """What a built page asks for, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        for name, value in attrs:
            if value is None:
                continue
            if name in {"id", "name"}:
                self.anchors.add(value)
            elif name == "href" and tag != "link":
                self.links.append(value)
            elif name in {"href", "src", "poster", "data"}:
                self.asked.append(value)
            elif name == "srcset":
                self.asked += [part.split()[0] for part in value.split(",")]


def check(site: Path) -> Iterator[str]:
    """What is wrong with a built site.

    Yields:
        A line for each file that is asked of another host, and for each file, link and anchor that is not there.
    """
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    asked = {path: page.asked for path, page in pages.items()}
    asked |= {path: _STYLE.findall(path.read_text()) for path in sorted(site.rglob("*.css"))}
    for path, urls in asked.items():
        for url in urls:
            parts = urlsplit(url)
            if parts.netloc:
                yield f"{path.relative_to(site)}: asks {parts.netloc} for {url}"
            elif not parts.scheme and parts.path and not _target(path, parts.path, site).is_file():
                yield f"{path.relative_to(site)}: {url} is not there"
    for path, page in pages.items():
        for url in page.links:
            parts = urlsplit(url)
            target = _target(path, parts.path, site)
            if parts.scheme or parts.netloc:
                continue
            if not target.is_file():
                yield f"{path.relative_to(site)}: {url} leads nowhere"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {url} leads to a page without this anchor"


def _target(page: Path, path: str, site: Path) -> Path:
    """The file that a local URL of a page names."""
    if not path:
        return page
    base = site if path.startswith("/") else page.parent
    target = Path(os.path.normpath(base / unquote(path).lstrip("/")))
    return target / "index.html" if target.is_dir() else target


def main() -> int:
    """Lay out, build, check."""
    lay_out(ROOT, PAGES)
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = _COLOUR.sub("", done.stdout + done.stderr)
        sys.stderr.write(said.partition("Traceback")[0] if "found\n" in said else said)
        return 1
    problems = list(check(SITE))
    sys.stderr.write("".join(f"site: {problem}\n" for problem in problems))
    if not problems:
        sys.stdout.write(f"site: {len(list(SITE.rglob('*.html')))} pages: python -m http.server -d {SITE.name}\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
