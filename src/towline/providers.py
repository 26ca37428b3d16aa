"""Credentials from a function of the user's, named ``module:function``: a token or password that is short-lived.

The function is imported and called where a connection is opened, anew for each credential, in the process that opens
it; its module has to be importable there (installed, or on ``PYTHONPATH``). What it returns is the secret, and what it
raises may quote one: neither ever stands in an error [I12].
"""

from __future__ import annotations

import importlib
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from towline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_provider", "credential"]

T = TypeVar("T")

_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_provider(name: str, where: str) -> None:
    """Check the form of a provider's name; nothing is imported.

    Args:
        name: As the user wrote it.
        where: Whom an error is about, such as ``[kafka] token_provider``.

    Raises:
        ConfigError: TL-C179, it is not ``module:function``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("TL-C179", where, f'"{name}" is not module:function', "Name a function of a Python module.")


def credential(name: str, where: str, read: Callable[[Any], T], form: str, *arguments: object) -> T:
    """Ask a provider for a credential.

    Args:
        name: ``module:function``.
        where: Whom an error is about.
        read: Makes the credential of what the function returned; raises whatever it likes for another form.
        form: What the function has to return, in words.
        arguments: What the function is called with.

    Raises:
        ConfigError: TL-C179: it can't be imported, raised, or returned something else. It may do better a moment later.
    """
    check_provider(name, where)
    module, _, function = name.partition(":")
    doing = "can't be imported"
    try:
        call = getattr(importlib.import_module(module), function)
        doing = "failed"
        given = call(*arguments)
        doing = f"returned {type(given).__name__} and not {form}"
        return read(given)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        lacking = f" {error.name}" if isinstance(error, ImportError) and error.name else ""
        what = f'"{name}" {doing} ({type(error).__name__}{lacking}, {Path(at.filename).name} line {at.lineno})'
        do = f"Is its module installed, or in PYTHONPATH? Call {function} by hand, as the same user."
        raise ConfigError("TL-C179", where, what, do) from None
