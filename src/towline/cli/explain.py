"""``towline explain``: what the code of an error means."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from towline.cli.screen import AsJson, command_app, json_text, lines_text
from towline.errors import ConfigError, did_you_mean, explanations

__all__ = ["app", "explain"]

app = command_app()

#: ``TL-C12``, ``c12`` or ``[TL-C12]``.
_CODE = re.compile(r"\[?(?:TL-?)?([A-Z])0*(\d+)\]?", re.IGNORECASE)
#: A link of Markdown, and how it is shown.
_LINK, _PAGE = re.compile(r"\[([^\]]+)\]\(([^)]+)\)"), r"\1: docs/\2"


@app.command(epilog="Example:  towline explain TL-C12")
def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="At the end of an error or a warning; C12 will do.")],
    as_json: AsJson = False,
) -> None:
    """Say what happened, what is at stake and what to do. No network, no bridge file."""
    rows = explanations()
    written = _CODE.fullmatch(code.strip())
    name = f"TL-{written[1].upper()}{written[2]:0>2}" if written else code
    if name not in rows:
        near = (one for one in rows if one.startswith(name[:4]))
        do = did_you_mean(name, near, "It stands at the end of an error's line, as TL-C12.")
        raise ConfigError("TL-C21", "towline explain", f'there is no code "{code}"', do)
    titles = {"happened": "what happened", "stake": "at stake", "do": "what to do"}
    texts = {part: rows[name][part] for part in titles}
    shown = [name, *(f"  {title:<15}{_LINK.sub(_PAGE, texts[part])}" for part, title in titles.items())]
    sys.stdout.write(json_text({"code": name, **texts}, indent=2) if as_json else lines_text(shown))
