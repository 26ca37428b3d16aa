"""Reads ``[gateway]`` of a bridge file: its files have to be there and to go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from towline.bridge.config.gateways import GatewaySection
from towline.bridge.config.places import KeyPath
from towline.bridge.config.tables import Tables
from towline.errors import ConfigError
from towline.gateway.admission import TokenFile
from towline.gateway.certificates import ServerCertificate
from towline.gateway.listen import ListenSettings

__all__ = ["Listening", "listening"]

_PATH: Final = ("gateway",)
_SUBJECT: Final = "[gateway]"
_NEEDED: Final = ("cert_file", "key_file", "token_file")
#: What to do where a file is missing.
_MAKE: Final = {"token_file": "Make one: openssl rand -hex 32, mode 0600.", "key_file": "It is a private key in PEM."}


class Listening:
    """Where the lines of one file listen.

    Args:
        section: ``[gateway]``, its files resolved.
    """

    def __init__(self, section: GatewaySection) -> None:
        self._section = section

    def of(self, own: object) -> dict[str, object] | None:
        """The setting ``listen`` of a line's gateway; None for none.

        Args:
            own: The line's key ``listen``: an address, False for none, None for that of ``[gateway]``.
        """
        section = self._section
        address = section.listen if own is None else own
        if not isinstance(address, str) or not all(getattr(section, name) for name in _NEEDED):
            return None  # what is missing has been noted
        files = {name: getattr(section, name) for name in _NEEDED}
        return {"address": address, **files}


def listening(tables: Tables, table: Any, lines: Iterable[Any]) -> GatewaySection:
    """Read ``[gateway]``, and note what is wrong with its files.

    Args:
        tables: Reads and notes.
        table: As written.
        lines: Tables of the lines, as written: one may listen without an address here.
    """
    section = tables.model(GatewaySection, table, _PATH, _SUBJECT) or GatewaySection()
    files = {
        name: tables.there(getattr(section, name), (*_PATH, name), _SUBJECT, _MAKE.get(name, "It is a file in PEM."))
        for name in (*_NEEDED, "ca_file")
    }
    section = section.model_copy(update=files)
    listens = section.listen is not None or any(isinstance(_own(line), str) for line in lines)
    missing = [name for name in _NEEDED if getattr(section, name) is None]
    if listens and missing:
        what = f"what listens on a network has TLS and a token, and {' and '.join(missing)} is missing"
        tables.mistakes.add("TL-C02", (*_PATH, "listen"), _SUBJECT, what, "Add it to [gateway], or remove listen.")
    else:
        _judge(tables, section, listens=listens)
    return section


def _judge(tables: Tables, section: GatewaySection, *, listens: bool) -> None:
    """Note what is in the files and can't be."""
    if any(file is not None and not file.is_file() for file in _files(section).values()):
        return  # noted
    try:
        if section.token_file is not None:
            TokenFile(section.token_file)
        if listens:
            files = {name: file for name, file in _files(section).items() if name != "ca_file"}
            ServerCertificate.read(ListenSettings.model_validate({"address": "localhost:0", **files}))
    except ConfigError as error:
        key = next((name for name in _files(section) if error.where.startswith(name)), "token_file")
        path: KeyPath = (*_PATH, key)
        tables.mistakes.add(error.code, path, _SUBJECT, f"{key}: {error.what}", error.do)


def _files(section: GatewaySection) -> dict[str, Path | None]:
    return {name: getattr(section, name) for name in (*_NEEDED, "ca_file")}


def _own(line: object) -> object:
    return line.get("listen") if isinstance(line, Mapping) else None
