"""A bridge file that promises what a sound set-up keeps, and what a person gets wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from towline.bridge.config.file import load
from towline.doctor.inputs import Inputs
from towline.doctor.table import Finding, Verdict

#: One exactly-once line up, one down; ``NAME`` makes topics of their own for each test.
SOUND = """
name = "NAME"
state_dir = "STATE"
spark = { master = "local[2]" }

[mqtt]
brokers = ["mqtt://127.0.0.1:1883"]

[kafka]
bootstrap_servers = "SERVERS"
create_topics = { partitions = 2 }

[[uplink]]
name = "up"
guarantee = "exactly_once"

[[uplink.route]]
from = "devices/{device}/#"
topic = "NAME.records"
key = "{device}"

[[downlink]]
name = "down"
from = "NAME.commands"
topic = "devices/{key}/commands"
"""

_WELL = (Verdict.HOLDS, Verdict.LIMITED)


def bridge_case(
    directory: Path, name: str, servers: str, change: Callable[[str], str] = str, state: Path | None = None
) -> Inputs:
    """An examination of a sound bridge, or of what `change` makes of its text."""
    text = change(SOUND).replace("NAME", name).replace("SERVERS", servers)
    file = directory / "bridge.toml"
    file.write_text(text.replace("STATE", str(state or directory / "state")))
    return Inputs(load(file))


def complaints(found: Iterable[Finding]) -> dict[str, Verdict]:
    """Codes of rows that are not well, with the worst verdict of each."""
    told: dict[str, Verdict] = {}
    for one in found:
        if one.verdict not in _WELL:
            assert one.remedy
            told[one.code] = max(told.get(one.code, one.verdict), one.verdict, key=list(Verdict).index)
    return told
