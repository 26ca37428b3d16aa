"""``towline explain``: what the code of an error means."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from towline.cli.screen import AsJson, print_result
from towline.errors import ConfigError, did_you_mean, explanations

#: ``TL-C12``, ``c12`` or ``[TL-C12]``.
_CODE = re.compile(r"\[?(?:TL-?)?([A-Z])0*(\d+)\]?", re.IGNORECASE)
#: A link of Markdown, and how it is shown.
_LINK, _PAGE = re.compile(r"\[([^\]]+)\]\(([^)]+)\)"), r"\1: docs/\2"


def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="At the end of an error or a warning; C12 will do.")],
    as_json: AsJson = False,
) -> None:
    """Say what happened, what is at stake and what to do. No network, no bridge file.

    Example:  towline explain TL-C12
    """
    rows = explanations()
    written = _CODE.fullmatch(code.strip())
    name = f"TL-{written[1].upper()}{written[2]:0>2}" if written else code
    if name not in rows:
        near = (one for one in rows if one.startswith(name[:4]))
        do = did_you_mean(name, near, "It stands at the end of an error's line, as TL-C12.")
        raise ConfigError("TL-C21", "towline explain", f'there is no code "{code}"', do)
    titles = {"happened": "what happened", "stake": "at stake", "do": "what to do"}
    texts = {part: rows[name][part] for part in titles}
    lines = [name, *(f"  {title:<15}{_LINK.sub(_PAGE, texts[part])}" for part, title in titles.items())]
    print_result({"code": name, **texts}, lines, as_json=as_json)
