"""Credentials from a file, or from a user's function ``module:function`` for short-lived ones.

A file is read for each credential, so that a renewed one is used. A function is imported and called in the process
that opens the connection; its module must be importable there (installed, or on ``PYTHONPATH``). Its return value is a
secret, and its exceptions may quote one: neither ever appears in an error [I12].
"""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from towline import files
from towline.errors import ConfigError

T = TypeVar("T")

#: Bytes of a file that are read at most: it may be one without an end, as /dev/zero.
_MAX_FILE_BYTES: Final = 1 << 20
#: Rights of those who are neither the owner of a file nor of its group.
_OTHER_USERS_MODE: Final = 0o007
_PROVIDER_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_provider(name: str, location: str) -> None:
    """Check the form of a provider's name, without importing it.

    Raises:
        ConfigError: TL-C179 at `location`, the name is not ``module:function``.
    """
    if not _PROVIDER_NAME.fullmatch(name):
        remedy = "Name a function of a Python module."
        raise ConfigError("TL-C179", location, f'"{name}" is not module:function', remedy)


def call_provider(name: str, location: str, parse: Callable[[Any], T], expected_form: str, *arguments: object) -> T:
    """Call a provider and return its credential.

    Args:
        name: ``module:function``.
        location: Subject of an error text.
        parse: Converts the return value to the credential; raises any exception for an invalid one.
        expected_form: Form of the return value, in words.
        arguments: Arguments of the function.

    Raises:
        ConfigError: TL-C179, the import or the call failed, or the return value is invalid. A retry may succeed.
    """
    check_provider(name, location)
    module, _, function = name.partition(":")
    failure = "can't be imported"
    try:
        provider = getattr(importlib.import_module(module), function)
        failure = "failed"
        credential_value = provider(*arguments)
        failure = f"returned {type(credential_value).__name__} and not {expected_form}"
        return parse(credential_value)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        missing_module = f" {error.name}" if isinstance(error, ImportError) and error.name else ""
        source = f"{Path(frame.filename).name} line {frame.lineno}"
        problem = f'"{name}" {failure} ({type(error).__name__}{missing_module}, {source})'
        remedy = f"Is its module installed, or in PYTHONPATH? Call {function} by hand, as the same user."
        raise ConfigError("TL-C179", location, problem, remedy) from None


#: What a person does about the secret of a connection to a broker.
_CHECK_FILE: Final = "Check its name, rights and content: it is read at each connection."


def read_secret(
    setting: str,
    path: str | Path,
    parse: Callable[[bytes], T],
    code: str = "TL-C31",
    remedy: str = _CHECK_FILE,
    *,
    private: bool = False,
) -> T:
    """Read the secret in a file.

    Args:
        setting: Setting that names the file, or the content's name.
        path: The file.
        parse: Converts the content, without its last line end; its ValueError names the problem and quotes nothing
            [I12].
        code: Error code.
        remedy: Remedy of the error.
        private: Fail if other users of this machine may read or write the file.

    Raises:
        ConfigError: The file is unreadable, empty, larger than 1 MiB, or has invalid content.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content, mode = file.read(_MAX_FILE_BYTES + 1), os.fstat(file.fileno()).st_mode
        if private and mode & _OTHER_USERS_MODE:
            problem, remedy = f"{setting}: every user of this machine may read or write it", "chmod 600 it."
        elif len(content) > _MAX_FILE_BYTES:
            problem = f"{setting} is larger than 1 MiB"
        elif content := content.rstrip(b"\r\n"):
            return parse(content)
        else:
            problem = f"{setting} is empty: is it being written?"
    except OSError as error:
        problem = f"{setting} can't be read ({files.os_error_text(error)})"
    except ValueError as error:  # UnicodeDecodeError is one, and would quote it
        problem = f"{setting}: {'it is no text in UTF-8' if isinstance(error, UnicodeError) else error}"
    raise ConfigError(code, str(path), problem, remedy)
