"""The site has every page and what these link to, and asks no other host for anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.pages import check, lay_out


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_link_to_a_file_or_a_directory_leads_to_a_page(tmp_path: Path) -> None:
    root = write(
        tmp_path / "root",
        **{
            "README.md": "[a](docs/a.md#part), [all](docs), [the web](https://example.com/x.py)",
            "docs/a.md": "# A\n[code](../src/code.py), [deploy](../examples/deploy), ![way](way.svg), [gone](gone.md)",
            "docs/way.svg": "<svg/>",
            "src/code.py": "text = '[no](link.md)'\n",
            "src/other.py": "",
            "examples/deploy/unit@.service": "[Unit]\n",
        },
    )
    pages = tmp_path / "pages"
    lay_out(root, pages)
    written = {str(path.relative_to(pages)): path.read_text() for path in pages.rglob("*") if path.is_file()}
    assert written["README.md"] == "[a](docs/a.md#part), [all](docs/README.md), [the web](https://example.com/x.py)"
    assert written["docs/a.md"].endswith(
        "[code](../src/code.py.md), [deploy](../examples/deploy/README.md), ![way](way.svg), [gone](gone.md)"
    )
    assert "~~~~~~ py\ntext = '[no](link.md)'\n~~~~~~\n" in written["src/code.py.md"]
    assert "- [unit@.service](unit@.service.md)\n" in written["examples/deploy/README.md"]
    assert set(written) == {
        *("README.md", "docs/README.md", "docs/a.md", "docs/way.svg", "src/code.py.md"),
        *("examples/deploy/README.md", "examples/deploy/unit@.service.md"),
    }


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "a.html: asks cdn.example for https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//f.example/x.css">', "a.html: asks f.example for //f.example/x.css"),
        ('<img srcset="b.png 2x">', "a.html: b.png is not there"),
        ('<a href="c/d.html">', "a.html: c/d.html leads nowhere"),
        ('<a href="c/#gone">', "a.html: c/#gone leads to a page without this anchor"),
        ('<a href="#gone">', "a.html: #gone leads to a page without this anchor"),
    ],
)
def test_what_is_missing_or_asked_of_another_host_is_named(tmp_path: Path, element: str, problem: str) -> None:
    whole = '<h1 id="top"></h1><a href="https://example.com/">, <a href="c/index.html#here">, <img src="data:,">'
    whole += '<a href="#top">'
    write(
        tmp_path,
        **{"a.html": whole, "c/index.html": '<i id="here"><a href="/a.html#top">', "x.css": "a{b:url(data:,)}"},
    )
    assert list(check(tmp_path)) == []
    write(tmp_path, **{"a.html": whole + element})
    assert list(check(tmp_path)) == [problem]


def test_a_style_sheet_asks_no_other_host(tmp_path: Path) -> None:
    write(tmp_path, **{"x.css": "@font-face{src:url('https://fonts.example/f.woff2')}"})
    assert list(check(tmp_path)) == ["x.css: asks fonts.example for https://fonts.example/f.woff2"]
