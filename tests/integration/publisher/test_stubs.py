"""What was not taken in whole, on the way of receipts: there and back."""

from __future__ import annotations

from pathlib import Path

from tests.integration.gateway.conftest import Gateway, new_gateway
from tests.integration.publisher.test_receipts import Committer, broker, gateway, rows_of, spark, write_key
from towline import Client, Publisher
from towline_prove.devstack import Mosquitto

__all__ = ["broker", "gateway", "new_gateway", "spark"]

CROWD = [("k", "v")] * 1_001


def test_a_stub_has_its_receipt_and_none_is_no_receipt(
    gateway: Gateway,  # pytest's way
    broker: Mosquitto,
    spark: Committer,
    tmp_path: Path,
) -> None:
    with Publisher(
        broker.uri, state_dir=tmp_path / "p", receipts=True, receipt_key_file=write_key(tmp_path)
    ) as publisher:
        with Client(broker.uri, client_id="device") as client:
            ours = publisher.status()["client_id"].replace("towline-", "towline/receipts/")
            client.publish(ours, b"{}", user_properties=CROWD).wait(60)
        large = publisher.publish("t/1", "large", user_properties=CROWD)
        publisher.publish("t/1", "small").end_to_end.result(60)
        large.end_to_end.result(60)
        assert publisher.flush(10) == 0
        assert publisher.status()["receipts"]["sent_again"] == 0
    assert spark.on.is_set()
    first, second = rows_of(gateway)
    assert (first["payload"], second["payload"]) == (None, b"small")
    assert [pair["key"] for pair in first["user_properties"]] == [
        "towline-reason",
        "towline-size",
        "towline-sha256",
        "towline-properties",
    ]
