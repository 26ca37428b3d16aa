"""What a task says of the Python that runs it. It travels as code: an executor may have nothing of Towline's."""

from __future__ import annotations

from typing import Any

__all__ = ["facts"]


def facts(names: tuple[str, ...], places: tuple[str, ...]) -> dict[str, Any]:
    """The host, its Python, and which version it has of each distribution.

    Args:
        names: Of distributions, as PyPI has them, with the module that each brings, as ``confluent-kafka:confluent_kafka``.
        places: Files of which the content is wanted, as far as they are there.

    Returns:
        ``host``, ``python``, ``versions`` ("" for one that is there without its version, None for one that is not or
        can't be loaded), ``faults`` (why one that is there can't be loaded) and ``found`` (contents).
    """
    import socket  # noqa: PLC0415 - the code travels without its module
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
    found = {}
    for place in places:
        try:
            with open(place, encoding="utf-8") as file:  # noqa: PTH123 - one import less
                found[place] = file.read(4096)
        except OSError:
            found[place] = None
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "host": socket.gethostname(),
        "python": python,
        "program": sys.executable,
        "versions": versions,
        "faults": faults,
        "found": found,
    }
