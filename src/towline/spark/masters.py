"""Where Spark runs, by the name of its master: in one process of this machine, or in executors elsewhere. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

__all__ = ["addresses", "brings_a_secret", "is_cluster", "shares_files", "stays_here"]

#: ``local``, ``local[4]``, ``local[*,3]``: driver and executor are one process (`SparkMasterRegex`).
_ONE_PROCESS: Final = re.compile(r"local(\[[^\[\]]*\])?")
#: Executors that are children of the driver, on its machine: Spark's own imitation of a cluster.
_CHILDREN: Final = re.compile(r"local-cluster\[.*\]")
_STANDALONE: Final = re.compile(r"spark://(.+)")


def is_cluster(master: str) -> bool:
    """Whether tasks run in other processes than the driver's, as a rule on other machines with other files."""
    return _ONE_PROCESS.fullmatch(master) is None


def shares_files(master: str) -> bool:
    """Whether executors see this machine's files and sockets, as those of ``local-cluster`` do."""
    return not is_cluster(master) or _CHILDREN.fullmatch(master) is not None


def stays_here(master: str) -> bool:
    """Whether driver and executors reach each other on loopback, so that nobody else has to reach them."""
    found = _STANDALONE.fullmatch(master)
    if found is None:
        return shares_files(master)
    return all(_is_loopback(address) for address in found[1].split(","))


def addresses(master: str) -> list[tuple[str, int]]:
    """Host and port of each standalone master; none for another kind, or where Spark would not understand them."""
    found = _STANDALONE.fullmatch(master)
    parts = [one.rpartition(":") for one in found[1].split(",")] if found else []
    if not all(host and port.isdecimal() for host, _, port in parts):
        return []
    return [(host.strip("[]"), int(port)) for host, _, port in parts]


def brings_a_secret(master: str) -> bool:
    """Whether Spark makes the secret of ``spark.authenticate`` by itself (`SecurityManager.initializeAuth`)."""
    return not is_cluster(master) or master == "yarn"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
