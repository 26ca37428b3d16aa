"""Mapping and offsets that a downlink starts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.noted import planned
from tests.unit.bridge.test_downlink_file import GOOD, read
from towline.bridge.config.model import Bridge
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.identity import Identity
from towline.errors import ConfigError

READ = {"commands": {"0": 12}}


def mapping_of(bridge: Bridge) -> str:
    line = bridge.downlinks[0]
    return DownlinkQuery(bridge, line)._line_of_next_batch(Identity.of_line(bridge, line))[1]


def test_an_unfinished_batch_is_finished_with_its_settings(tmp_path: Path) -> None:
    """All that decides about its rows is as it was, and what is to be done about a loss as the file says it now."""
    bridge = read(GOOD + 'where = "old"\nparallelism = 2\ndead_letter_topic = "dead"\n', tmp_path)
    (before,) = bridge.downlinks
    planned(before.checkpoint, 0, READ, done=False)
    Identity("commands", "plant-7.commands", query="q", mapping=mapping_of(bridge)).save(before.gateway.state_dir)
    new = GOOD + 'where = "new"\nguarantee = "exactly_once"\non_data_loss = "go_on"\n'
    bridge = read(new.replace('guarantee = "at_least_once"\n', ""), tmp_path)
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    former = query.query_to_start()
    assert (former.line.where, former.line.guarantee, former.line.parallelism) == ("old", before.guarantee, 2)
    assert (former.line.dead_letter_topic, former.line.on_data_loss) == ("dead", "go_on")
    assert former._trigger() == {"once": True}, "and then the file counts"
    planned(before.checkpoint, 0, READ)
    assert query.query_to_start().line == query.line
    assert query.query_to_start()._trigger() != {"once": True}


def test_an_unfinished_batch_with_refused_settings_needs_a_reset(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    (line,) = bridge.downlinks
    mapping = json.dumps(json.loads(mapping_of(bridge)) | {"where": "'{key}' = 'a'"})
    Identity("commands", "plant-7.commands", query="q", mapping=mapping).save(line.gateway.state_dir)
    planned(line.checkpoint, 0, READ, done=False)
    query = DownlinkQuery(bridge, line)
    with pytest.raises(ConfigError, match=r"towline reset .*TL-C210"):
        query.query_to_start()
    planned(line.checkpoint, 0, READ)
    assert query.query_to_start().line == line


@pytest.mark.parametrize(
    ("setting", "same"),
    [
        *((text, True) for text in ('on_data_loss = "go_on"', "trigger_interval_s = 3", 'confirm = "broker"')),
        *((text, True) for text in ('starting_offsets = "latest"', 'name = "orders"')),
        *((text, False) for text in ("parallelism = 2", 'where = "true"', "qos = 2", 'from = "others"')),
    ],
)
def test_the_settings_of_the_mapping(tmp_path: Path, setting: str, same: bool) -> None:
    head, _, table = GOOD.partition("[[downlink]]")
    key = setting.partition(" ")[0]
    rest = head + "[[downlink]]" + "".join(f"{row}\n" for row in table.split("\n") if not row.startswith(f"{key} ="))
    bridge, before = read(rest + setting, tmp_path), mapping_of(read(GOOD, tmp_path))
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    assert (query._line_of_last_batch(before) == query.line) is same


@pytest.mark.parametrize(
    ("status", "limit"),
    [
        ({"state": "online", "broker_max_packet_bytes": 900}, 900),
        ({"state": "online", "broker_max_packet_bytes": None}, 0),
        ({"state": "offline", "broker_max_packet_bytes": None}, 500),
    ],
)
def test_the_largest_packet_is_the_brokers_or_the_last_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], limit: int
) -> None:
    monkeypatch.setattr("towline.bridge.downlink.query.wait_for_answers", lambda *_, **__: [status])
    bridge = read(GOOD, tmp_path)
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    assert query._packet_limit(Identity("commands", "plant-7.commands", packet_limit=500)) == limit
