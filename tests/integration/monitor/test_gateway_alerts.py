"""Real gateways, hurt: what their endpoint shows then makes the alert fire that is meant, and no other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import NewMosquitto
from tests.engines.alert_rules import firing
from tests.integration.gateway.conftest import Gateway, NewGateway, publish
from tests.integration.monitor.looking import Scraped, looked_at
from towline import Client

if TYPE_CHECKING:
    from _typeshed import HasFileno

# `make test` has the rules in unit/monitor/test_alert_rules.py, on values of a status.
pytestmark = pytest.mark.long


def carried(gateway: Gateway, endpoint: Scraped) -> str:
    """A scrape while all is well: what came is committed, and the rates are known."""
    gateway.commit()
    return endpoint.until(
        lambda known: not known["messages_waiting"] and "outage_budget_intake_seconds" in known, what="all is well"
    )


def test_a_gateway_and_its_broker(tmp_path: Path, new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    broker = new_mosquitto()
    gateway = new_gateway(broker)
    gateway.connect()
    with looked_at(gateway, queue=10**9) as endpoint, looked_at(gateway, queue=3) as short:
        assert endpoint.verdict("readyz") == (200, [])
        publish(broker, range(20))
        gateway.until(journaled=20)
        sound = carried(gateway, endpoint)
        known: dict[str, str | None] = {"well": sound}
        known["queue"] = short.until(lambda now: now.get("outage_budget_broker_seconds", 1e9) < 300)
        publish(broker, range(5))
        known["waiting"] = endpoint.until(lambda now: now["messages_waiting"] == 5)
        gateway.commit()
        broker.stop()
        known["broker"] = endpoint.until(lambda now: not now["broker_connected"])
        status, (problem,) = endpoint.verdict("readyz")
        assert (status, problem["what"]) == (503, "no session with the broker")
        assert endpoint.verdict("healthz") == (200, [])
        broker.start()  # it keeps nothing on disk
        known["session"] = endpoint.until(lambda now: now["sessions_lost_total"] == 1 and now["broker_connected"] == 1)
        gateway.stop(signal.SIGKILL)
        known["killed"] = endpoint.until(lambda now: not now["gateway_up"])
        assert endpoint.verdict("readyz")[1][0]["what"] == "the gateway does not answer"
    assert firing(tmp_path, sound, {**known, "endpoint": None}) == {
        "well": set(),
        "queue": {"TowlineBrokerQueueShort"},
        "waiting": {"TowlineNothingCarried"},
        "broker": {"TowlineBrokerAway"},
        "session": {"TowlineSessionLost"},
        "killed": {"TowlineGatewayDown"},
        "endpoint": {"TowlineScrapeFails"},
    }


def test_a_journal_that_fills(tmp_path: Path, new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    broker = new_mosquitto()
    gateway = new_gateway(broker, journal={"max_bytes": 1 << 20, "min_free_bytes": 0, "segment_bytes": 256 << 10})
    gateway.connect()
    with looked_at(gateway) as endpoint:
        sound = carried(gateway, endpoint)
        with Client(broker.uri, client_id="device") as device:
            device.publish("t/1", b"x" * 300_000).wait(60)
            gateway.until(journaled=1)
            gateway.commit()
            soon = endpoint.until(
                lambda now: now["outage_budget_intake_seconds"] < 3600 and not now["messages_waiting"], what="a budget"
            )
            for _ in range(5):
                device.publish("t/1", b"x" * 300_000).wait(60)
            full = endpoint.until(lambda now: now["intake_held_back"] == 1, what="no room")
            assert endpoint.verdict("readyz")[1][0]["what"] == "nothing is read from the broker: journal full"
    assert firing(tmp_path, sound, {"soon": soon, "full": full}) == {
        "soon": {"TowlineSoonFull"},
        "full": {"TowlineSoonFull", "TowlineIntakeHeldBack", "TowlineNothingCarried"},
    }


def slowly() -> None:
    """A disk that is dying; the one thing here that is not real."""
    sync = os.fdatasync

    def slow(fd: int | HasFileno) -> None:
        time.sleep(0.6)
        sync(fd)

    os.fdatasync = slow


def test_a_slow_disk(tmp_path: Path, new_mosquitto: NewMosquitto, new_gateway: NewGateway) -> None:
    broker = new_mosquitto()
    gateway = new_gateway(broker)
    gateway.start(prepare=slowly)
    with looked_at(gateway) as endpoint:
        sound = endpoint.until(lambda now: bool(now.get("broker_connected")))
        scrapes = []
        for number in (1, 2):
            publish(broker, range(2))
            gateway.until(journaled=2 * number)
            gateway.commit()
            scrapes.append(endpoint.until(lambda now: now.get("messages_waiting") == 0))
    assert firing(tmp_path, sound, {"slow": (scrapes[0], scrapes[1])}) == {"slow": {"TowlineSlowDisk"}}
