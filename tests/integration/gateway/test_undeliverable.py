"""What a real Mosquitto ends the connection at, or MQTT has no way to say, is set aside and stops nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import Ear, Gateway, NewGateway, outbox
from towline.cli import main
from towline.delivery.outrows import rows_from_messages
from towline.mqtt.reasons import CONNECTION_CUT
from towline.schema import MESSAGE_SCHEMA


def refused(gateway: Gateway) -> list[tuple[int, int]]:
    return [(row["number"], row["reason"]) for row in gateway.client.refused_messages("page", 0)["rows"]]


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_message_at_which_the_broker_cuts_is_set_aside_and_the_others_arrive(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear], qos: int
) -> None:
    broker = new_mosquitto()
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    messages: list[dict[str, Any]] = [{"topic": f"d/{n % 3}", "payload": b"%d" % n, "qos": qos} for n in range(60)]
    messages[20]["topic"] = "tab\there"
    messages[41]["user_properties"] = [{"key": "k", "value": "line\nfeed"}]
    stored = client.send("q/0", 0, rows_from_messages(messages))
    assert client.wait_delivered(stored.end, timeout_s=60)
    assert refused(gateway) == [(20, CONNECTION_CUT), (41, CONNECTION_CUT)]
    account = outbox(gateway)
    assert (account["delivered"], account["refused"]) == (58, 2)
    wait_until(lambda: len(set(ear.payloads)) == 58, what="all innocent messages")
    if qos == 2:
        assert len(ear.payloads) == 58
    codes = [json.loads(line).get("code") for line in gateway.log.read_text().splitlines()]
    assert codes.count("TL-M47") == 2
    assert codes.count("TL-M05") <= 12


def test_no_value_of_a_row_ends_the_gateway(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway, ears: list[Ear]
) -> None:
    """The rows are on disk before the broker is there, so that the gateway meets them at its start."""
    broker = new_mosquitto()
    ears.append(ear := Ear(broker))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    gateway.until(state="online")
    broker.stop()
    longest = 2**63 - 1
    rows = [
        rows_from_messages([{"topic": "d", "payload": b"forever", "qos": 2, "message_expiry_seconds": longest}]),
        rows_from_messages([{"topic": "d", "payload": b"bad qos", "qos": 77}]),
        rows_from_messages([{"topic": "t" * 70_000, "payload": b"long", "qos": 1}]),
        not_utf8("topic"),
        not_utf8("content_type"),
        rows_from_messages([{"topic": "d", "payload": b"last", "qos": 1, "message_expiry_seconds": 2**32}]),
    ]
    stored = client.send("q/0", 0, pa.concat_batches(rows))
    gateway.stop(signal.SIGKILL)
    broker.start()
    client = gateway.start()
    assert client.wait_delivered(stored.end, timeout_s=60)
    assert refused(gateway) == [(1, 0x9B), (2, 0x90), (3, 0x90), (4, 0x99)]
    account = outbox(gateway)
    assert (account["delivered"], account["refused"]) == (2, 4)
    del ear


def not_utf8(column: str) -> pa.RecordBatch:
    """A row whose text is no UTF-8, as Spark makes them from bytes that are cast to a string."""
    row = rows_from_messages([{"topic": "d", "payload": b"x", "qos": 1}])
    broken = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    at = MESSAGE_SCHEMA.names.index(column)
    return pa.RecordBatch.from_arrays([*row.columns[:at], broken, *row.columns[at + 1 :]], schema=MESSAGE_SCHEMA)


def test_a_wrong_acl_overnight_is_replayed_once(
    new_mosquitto: NewMosquitto,
    new_gateway: NewGateway,
    ears: list[Ear],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asked twice, with a kill -9 in between: each message arrives once."""
    acl = tmp_path / "acl"
    acl.write_text("topic read #\n")
    broker = new_mosquitto(acl_file=str(acl))
    gateway = new_gateway(broker, subscriptions=[], outbox={})
    client = gateway.start()
    rows = rows_from_messages([{"topic": "d", "payload": b"%d" % n, "qos": 2} for n in range(300)])
    stored = client.send("q/0", 0, rows)
    assert client.wait_delivered(stored.end, timeout_s=60)
    assert outbox(gateway)["refused"] == 300
    broker.stop()
    acl.write_text("topic readwrite #\n")
    end = client.refused_messages("page", 0)["end"]
    assert client.refused_messages("replay", 100) == {"moved": 100, "next": 100, "end": end}
    gateway.stop(signal.SIGKILL)
    broker.start()
    ears.append(ear := Ear(broker))
    gateway.start()
    with pytest.raises(SystemExit) as ended:
        main(["refused", "replay", str(gateway.settings.state_dir), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"replay": {"plant-7": 200}}
    wait_until(lambda: len(set(ear.payloads)) == 300, what="all messages")
    account = outbox(gateway)
    assert (account["accepted"], account["refused"], account["replayed"]) == (300, 0, 300)
    assert len(ear.payloads) == 300


def test_a_message_over_a_limit_that_3_1_1_has_no_word_for_is_set_aside_with_the_likely_limit(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway
) -> None:
    gateway = new_gateway(new_mosquitto(max_packet_size="2000"), subscriptions=[], outbox={}, protocol="3.1.1")
    client = gateway.start()
    messages = [{"topic": "d", "payload": bytes(size), "qos": 1} for size in (10, 1500, 5000, 20, 30)]
    stored = client.send("q/0", 0, rows_from_messages(messages))
    assert client.wait_delivered(stored.end, timeout_s=60)
    assert refused(gateway) == [(2, CONNECTION_CUT)]
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    (found,) = [line for line in lines if line.get("code") == "TL-M47"]
    assert found["bytes"] == 5001
    assert found["larger_than_any_taken"] == 1501
