"""``towline key``: what one publisher has to know, and no more."""

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
    """Print the key of one publisher, made of the line's: with it the publisher can speak for itself alone.

    Example:  towline key receipts.key 3fa9c2d41e77 > publisher.key
    """
    if not re.match(NAME, publisher):
        raise typer.BadParameter("not the id of a publisher", param_hint="PUBLISHER")
    made = ReceiptKeys.read(file).derived(publisher)
    if not made:
        raise ConfigError("TL-C86", str(file), "it holds no line's key", "Name the file that the gateway has.")
    typer.echo("\n".join(made))
