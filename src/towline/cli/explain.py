"""``towline explain``: explains the code of an error."""

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
    """Explain an error code: cause, consequence and remedy. No network, no bridge file.

    Example:  towline explain TL-C12
    """
    rows = explanations()
    match = _CODE.fullmatch(code.strip())
    name = f"TL-{match[1].upper()}{match[2]:0>2}" if match else code
    if name not in rows:
        similar_codes = (known_code for known_code in rows if known_code.startswith(name[:4]))
        remedy = did_you_mean(name, similar_codes, "It stands at the end of an error's line, as TL-C12.")
        raise ConfigError("TL-C21", "towline explain", f'there is no code "{code}"', remedy)
    titles = {"happened": "what happened", "stake": "at stake", "do": "what to do"}
    texts = {part: rows[name][part] for part in titles}
    lines = [name, *(f"  {title:<15}{_LINK.sub(_PAGE, texts[part])}" for part, title in titles.items())]
    print_result({"code": name, **texts}, lines, as_json=as_json)
