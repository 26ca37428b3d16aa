"""``towline key``: prints the receipt key of one publisher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from towline.delivery.receipts.mark import NAME, ReceiptKeys
from towline.errors import ConfigError


def key(
    file: Annotated[Path, typer.Argument(help="The line's keys, as its gateway has them.")],
    publisher: Annotated[str, typer.Argument(help="The publisher's id, which its first start without a key tells.")],
) -> None:
    """Print the receipt key of one publisher, derived from the line's key; it is valid for this publisher only.

    Example:  towline key receipts.key 3fa9c2d41e77 > publisher.key
    """
    if not re.match(NAME, publisher):
        raise typer.BadParameter("not the id of a publisher", param_hint="PUBLISHER")
    derived_keys = ReceiptKeys.read_file(file).derive_key_lines(publisher)
    if not derived_keys:
        raise ConfigError("TL-C86", str(file), "it holds no line's key", "Name the file that the gateway has.")
    typer.echo("\n".join(derived_keys))
