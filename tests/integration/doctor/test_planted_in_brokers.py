"""Faults planted in real brokers: each is found by the row that is about it, and a sound broker by none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import require
from tests.integration.conftest import KEEPING
from tests.integration.doctor.brokers import examined, wrong
from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from tests.unit.doctor.recorded import BROKEN, UNKNOWN, WARNS
from towline.doctor.table import Finding, Verdict, exit_code
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.devstack.secured import certificates

pytestmark = pytest.mark.broker

#: Rows that can't be asked where no probe is let through, or nobody is met.
PROBED = {"TL-D03", "TL-D05", "TL-D11", "TL-D12", "TL-D13"}
UNMET = PROBED | {"TL-D04", "TL-D09", "TL-D10", "TL-D17"}


@dataclass(frozen=True)
class Planted:
    """A fault: settings beside `KEEPING`, and of the bridge; its row, and those that can't be asked then."""

    code: str
    settings: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict = BROKEN
    told: str = ""
    lines: str = UP
    mqtt: str = ""
    conf: bool = True
    probes: int = 60
    unknown: frozenset[str] | set[str] = frozenset()


PLANTED = {
    "default-queue": Planted(
        "TL-D05",
        {"max_queued_messages": "1000", "persistence": "false"},
        WARNS,
        "1,000 messages, 5 s at 200 msg/s",
        conf=False,
        probes=1100,
    ),
    "expiry-of-the-broker": Planted("TL-D04", {"persistent_client_expiration": "2h"}, WARNS, "down for 2 h"),
    "no-persistence": Planted("TL-D07", {"persistence": "false"}, BROKEN, "persistence is false"),
    "no-qos-2": Planted("TL-D09", {"max_qos": "1"}, BROKEN, "Maximum QoS 1", DOWN.replace("at_least", "exactly")),
    "probes-forbidden": Planted(
        "TL-D11", {"acl_file": "topic read telemetry/#\n"}, UNKNOWN, "not probed: ", unknown=PROBED
    ),
    "small-packets": Planted("TL-D17", {"max_packet_size": "9000"}, WARNS, "more than 9,000 bytes", DOWN),
    "tls-port": Planted("TL-D02", {"certfile": ""}, BROKEN, "That is mqtts://127.0.0.1:", unknown=UNMET),
    "wrong-password": Planted("TL-D02", {"password_file": ""}, BROKEN, "not authorized", unknown=UNMET),
    "nobody-there": Planted("TL-D02", {"port": "nobody"}, BROKEN, "TL-M01", unknown=UNMET),
}

SOUND = {
    "exactly-once": Planted("", lines=UP_2 + DOWN),
    "without-the-file": Planted("", lines=UP + DOWN, conf=False),
    "older-protocol": Planted("", {"max_inflight_messages": "20"}, lines=UP + DOWN, mqtt='protocol = "3.1.1"'),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What is found at each of them; they mostly wait, so all at once."""
    require(find_mosquitto)
    root = tmp_path_factory.mktemp("planted")
    cases = PLANTED | SOUND
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=6) as threads:
        warnings.simplefilter("ignore", MosquittoTooOld)
        asked = {name: threads.submit(_answer, root / name, case) for name, case in cases.items()}
        return {name: one.result() for name, one in asked.items()}


def _answer(directory: Path, case: Planted) -> list[Finding]:
    directory.mkdir()
    with contextlib.ExitStack() as running:
        settings = KEEPING | dict(case.settings)
        where = settings.pop("port", "")
        for name in ("acl_file", "password_file"):
            if name in settings:
                (directory / name).write_text(settings[name], encoding="utf-8")
                settings[name] = str(directory / name)
        if "certfile" in settings:
            made = certificates(directory / "tls")
            settings |= {"certfile": str(made.server), "keyfile": str(made.server_key)}
        broker = running.enter_context(Mosquitto(directory / "mosquitto", settings=settings))
        uri = broker.uri.replace("mqtts:", "mqtt:")
        if where == "nobody":
            broker.stop()
        bridge = bridge_of(directory, uri, case.lines, case.mqtt)
        return examined(bridge, broker if case.conf else None, probes=case.probes)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_its_row_and_by_no_other(answers: dict[str, list[Finding]], name: str) -> None:
    case, found = PLANTED[name], answers[name]
    assert wrong(found) == {(case.code, case.verdict), *((code, UNKNOWN) for code in case.unknown)}
    row = next(one for one in found if (one.code, one.verdict) == (case.code, case.verdict))
    assert case.told in f"{row.limit} | {row.evidence} | {row.remedy}"


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_at_a_sound_broker(answers: dict[str, list[Finding]], name: str) -> None:
    found = answers[name]
    assert wrong(found) == set()
    assert exit_code(found) == 0
    assert {"TL-D02", "TL-D03", "TL-D07", "TL-D11"} <= {one.code for one in found}
