"""A gateway with its inbox in Kafka, killed at each of its sends: to the broker of MQTT, and to Kafka."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.engines.crash import CrashBench
from towline.gateway.settings import GatewaySettings, LandingSettings
from towline.landing.opening import open_journal
from towline.landing.place import LandingPlace
from towline.schema import ROW_SCHEMA
from towline_prove.devstack import Kafka
from towline_prove.history import read_history
from towline_prove.referee import Verdict, judge
from towline_prove.subject import arrivals_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.usefixtures("ptrace")]


class LandedBench(CrashBench):
    """The bench of the disk, with journals in one Kafka."""

    kafka: Kafka

    def _settings(self, directory: Path) -> GatewaySettings:
        landing = LandingSettings(client=self.kafka.client, create=True)
        return super()._settings(directory).model_copy(update={"landing": landing})

    def _judge(self, settings: GatewaySettings, directory: Path) -> tuple[Verdict, str]:
        place = LandingPlace(self.kafka.client, settings.name)
        with open_journal(place, schema=ROW_SCHEMA) as journal:
            rows = [one for batch in journal.read(journal.first, journal.end) for one in arrivals_in(batch)]
        return judge(read_history(directory / "claims"), rows), ""


@pytest.mark.parametrize(("call", "least"), [("sendto", 4), ("sendmsg", 20)])
def test_no_send_loses_or_doubles_anything(
    new_mosquitto: NewMosquitto,
    kafka: Kafka,
    tmp_path: Path,
    call: str,
    least: int,
    record_property: Callable[[str, object], None],
) -> None:
    bench = LandedBench(new_mosquitto(max_queued_messages="0"), tmp_path, qos=2)
    bench.kafka = kafka
    points = list(bench.every(call, "KILL"))
    record_property("points", len(points) - 1)
    bad = [str(point) for point in points if not point.ok]
    assert not bad, "\n".join(bad)
    assert sum(point.fired for point in points) >= least
