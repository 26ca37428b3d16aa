"""The values of a bridge file: variables of the environment, sizes and paths of files, as what they stand for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from towline.bridge.config.document import Document, KeyPath, filled
from towline.bridge.config.mistakes import Mistakes

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
        document: The file; relative paths start from its directory.
        mistakes: Where mistakes are noted.

    Attributes:
        unset: Key paths whose variables are not set, so that their values stand in for others.
    """

    def __init__(self, document: Document, mistakes: Mistakes) -> None:
        self._directory, self._mistakes, self._environ = document.file.absolute().parent, mistakes, document.environ
        self.unset: set[KeyPath] = set()

    def read(self, value: Any, path: KeyPath = ()) -> Any:
        """A value, and all that is in it."""
        if isinstance(value, dict):
            return {key: self.read(item, (*path, *key.split("."))) for key, item in value.items()}
        if isinstance(value, list):
            return [self.read(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or _stays(path):
            return value
        text = filled(value, lambda name: self._variable(name, path))
        return text if path in self.unset else self._typed(text, path)

    def _variable(self, name: str, path: KeyPath) -> str:
        if name not in self._environ:
            do = f"Set it, or write $${{{name}}} for the text itself."
            self._mistakes.add("TL-C04", path, f"the environment variable {name} is not set", do)
            self.unset.add(path)
        return self._environ.get(name, "x")

    def _typed(self, text: str, path: KeyPath) -> Any:
        key = str(path[-1])
        if path[:2] == ("kafka", "settings"):  # a file of its client, or a directory of certificates
            name, do = ".".join(map(str, path[2:])), "Name it as from this file, or by its whole path."
            return self._there(text, path, name, do) if key == "location" and text != "probe" else text
        if len(path) < 2 or path[0] not in _OURS or not _OPEN.isdisjoint(path):
            return text
        if path[-2] in ("gateways", "kafka_jars"):
            return text if "://" in text or not text else str(self._at(text, path) or text)
        if "_bytes" in key:
            return self._size(text, path)
        if not key.endswith("_file"):
            return text
        do = next((do for end, do in _MISSING.items() if path[-len(end) :] == end), "")
        return self._there(text, path, key, do or "Write the secret into it, mode 0600.", file=True)

    def _size(self, text: str, path: KeyPath) -> int:
        """Bytes from ``"20 GB"`` (powers of 1,000) or ``"20 GiB"`` (powers of 1,024)."""
        if not (match := _SIZE.match(text)):
            do = 'Write bytes as a number, or as "20 GB" or "512 MiB".'
            self._mistakes.add("TL-C03", path, f'"{path[-1]}" must be a size', do)
            return 1 << 30
        unit = match[2].removesuffix("B")
        return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _UNITS[unit.removesuffix("i")])

    def _there(self, text: str, path: KeyPath, key: str, do: str, *, file: bool = False) -> str:
        """The path of what must be there, a ``file`` or a directory too [design section 10]."""
        place = self._at(text, path)
        if place is not None and not (place.is_file() or (place.is_dir() and not file)):
            self._mistakes.add("TL-C15", path, f"{key} {place} is not there", do)
        return str(place or text)

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
    key = ".".join(map(str, path[2:]))
    ends = (".pem", ".passphrase", ".extensions", "endpoint.url")
    secret = "password" in key or "secret" in key or key.endswith(ends)
    return path[:2] == ("kafka", "settings") and "." in key and secret
