"""The values of a bridge file: variables of the environment, sizes and paths of files, as what they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from towline.bridge.config.mistakes import Mistakes
from towline.bridge.config.places import REFERENCE, KeyPath, names_variable

_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?i?B)\s*$")
_UNITS: Final = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
#: Tables whose keys are the user's, or another program's.
_OPEN: Final = frozenset({"fields", "headers", "settings", "conf"})
#: Tables whose keys are ours: in those of a profile's parameters nothing is a size or a file.
_OURS: Final = frozenset({"mqtt", "kafka", "gateway", "monitor", "spark", "uplink", "downlink"})
#: What to do where a file is missing, by the end of its key's path; it holds a secret where nothing is said.
_MISSING: Final[dict[KeyPath, str]] = {
    ("gateway", "key_file"): "It is a private key in PEM.",
    ("token_file",): "Make one: openssl rand -hex 32, mode 0600.",
    **{(key,): "It is a file in PEM." for key in ("ca_file", "cert_file")},
}


class FileValues:
    """Reads the values of one file.

    Args:
        directory: Of the file, which relative paths start from.
        mistakes: Where mistakes are noted.
        environ: For ``${NAME}``.

    Attributes:
        unset: Key paths whose variables are not set, so that their values stand in for others.
    """

    def __init__(self, directory: Path, mistakes: Mistakes, environ: Mapping[str, str]) -> None:
        self._directory, self._mistakes, self._environ = directory, mistakes, environ
        self.unset: set[KeyPath] = set()

    def read(self, value: Any, path: KeyPath = ()) -> Any:
        """A value, and all that is in it."""
        if isinstance(value, dict):
            return {key: self.read(item, (*path, *key.split("."))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.read(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or _stays(path):
            return value
        text = REFERENCE.sub(lambda reference: self._variable(reference, path), value)
        if names_variable(value):
            self._mistakes.hide(path, text, value)
        return text if path in self.unset else self._typed(text, path)

    def _variable(self, reference: re.Match[str], path: KeyPath) -> str:
        name = reference[2]
        if reference[1]:
            return reference[0][1:]
        if name not in self._environ:
            what = f"the environment variable {name} is not set"
            do = f"Set it, or write $${{{name}}} for the text itself."
            self._mistakes.add("TL-C04", path, what, do)
            self.unset.add(path)
            return "x"
        return self._environ[name]

    def _typed(self, text: str, path: KeyPath) -> Any:
        key = str(path[-1])
        if path[:2] == ("kafka", "settings"):
            return self._location(text, path) if key == "location" and text != "probe" else text
        if len(path) < 2 or path[0] not in _OURS or not _OPEN.isdisjoint(path):
            return text
        if path[-2] in ("gateways", "kafka_jars"):
            return text if "://" in text or not text else str(self._at(text, path) or text)
        if "_bytes" in key:
            return self._size(text, path)
        return self._file(text, path) if key.endswith("_file") else text

    def _size(self, text: str, path: KeyPath) -> int:
        """Bytes from ``"20 GB"`` (powers of 1,000) or ``"20 GiB"`` (powers of 1,024)."""
        if not (match := _SIZE.match(text)):
            do = 'Write bytes as a number, or as "20 GB" or "512 MiB".'
            self._mistakes.add("TL-C03", path, f'"{path[-1]}" must be a size', do)
            return 1 << 30
        unit = match[2].removesuffix("B")
        return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _UNITS[unit.removesuffix("i")])

    def _file(self, text: str, path: KeyPath) -> str:
        """The path of a file, which must be there [design section 10]."""
        do = next((do for end, do in _MISSING.items() if path[-len(end) :] == end), None)
        return self._there(text, path, str(path[-1]), do or "Write the secret into it, mode 0600.")

    def _location(self, text: str, path: KeyPath) -> str:
        """A file of Kafka's client, or a directory of certificates, as from this file."""
        key, do = ".".join(map(str, path[2:])), "Name it as from this file, or by its whole path."
        return self._there(text, path, key, do, directory=True)

    def _there(self, text: str, path: KeyPath, key: str, do: str, *, directory: bool = False) -> str:
        file = self._at(text, path)
        if file is not None and not (file.is_file() or (directory and file.is_dir())):
            self._mistakes.add("TL-C15", path, f"{key} {file} is not there", do)
        return str(file or text)

    def _at(self, text: str, path: KeyPath) -> Path | None:
        """A path as from the file, or from a user's home; None where that is not known, which is noted."""
        try:
            return self._directory / Path(text).expanduser()
        except RuntimeError:
            what = f'"{text}" names the home of a user who is not known here'
            self._mistakes.add("TL-C15", path, what, "Correct the path, or write it whole.")
            return None


def _stays(path: KeyPath) -> bool:
    """Whether a reference is left for the process that connects: a secret of Kafka's client never travels [I12]."""
    return path[:2] == ("kafka", "settings") and "." in (key := ".".join(map(str, path[2:]))) and _secret(key)


def _secret(key: str) -> bool:
    return "password" in key or "secret" in key or key.endswith((".pem", ".passphrase", ".extensions", "endpoint.url"))
