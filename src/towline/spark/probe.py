"""What a task says of the Python that runs it. It travels as code: an executor may have nothing of Towline's."""

from __future__ import annotations

from typing import Any


def facts(names: tuple[str, ...], marks: tuple[str, ...], files: tuple[str, ...]) -> dict[str, Any]:
    """The host, its Python, which version it has of each distribution, and which files.

    Args:
        names: Of distributions, as PyPI has them, each with its module: ``confluent-kafka:confluent_kafka``.
        marks: Files of which the content is wanted, as far as they can be written too.
        files: Files that must be readable.

    Returns:
        ``host``, ``python``, ``versions`` ("" for one that is there without its version, None for one that is not or
        can't be loaded), ``faults`` (why one that is there can't be loaded), ``marks`` (contents) and ``absent`` (those
        of `files` that can't be read).
    """
    import os  # noqa: PLC0415 - the code travels without its module
    import socket  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from importlib import import_module, metadata  # noqa: PLC0415

    versions: dict[str, str | None] = {}
    faults: dict[str, str] = {}
    for name in names:
        distribution, _, module = name.partition(":")
        try:
            import_module(module or distribution)
        except ModuleNotFoundError:
            versions[distribution] = None
            continue
        except Exception as error:  # noqa: BLE001 - a library of the system is missing, for another libc, ...
            versions[distribution] = None
            faults[distribution] = f"{type(error).__name__}: {error}"
            continue
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[distribution] = ""
    contents: dict[str, str | None] = {}
    for mark in marks:
        try:
            with open(mark, "r+", encoding="utf-8") as file:  # noqa: PTH123 - one import less
                contents[mark] = file.read(4096)
        except OSError:
            contents[mark] = None
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "versions": versions,
        "faults": faults,
        "marks": contents,
        "absent": [file for file in files if not os.access(os.path.expanduser(file), os.R_OK)],  # noqa: PTH111
    }
