"""A changed client id is another session: what the broker holds for the old one is given up only when asked."""

from __future__ import annotations

import signal

from tests.integration.conftest import NewGateway, payloads, publish
from towline.gateway.process import EXIT_CONFIG
from towline.journal import Journal
from towline.schema import NO_ROWS, ROW_SCHEMA
from towline_prove.devstack import Mosquitto


def test_a_changed_client_id_is_refused_until_the_old_session_is_given_up(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    """What waits in the session of the former id would stay at the broker for ever.

    [MQTT-3.1.3-2], [MQTT-3.1.3-2 of 3.1.1]: with another id the session of before is not ours.
    """
    first = new_gateway(mosquitto, client_id="plant-7").connect()
    first.stop()
    publish(mosquitto, range(5))

    changed = new_gateway(mosquitto, client_id="plant-8")
    line = changed.fail(EXIT_CONFIG)
    assert 'that of client id \\"plant-7\\", and client_id is \\"plant-8\\" now' in line
    assert 'abandon_session (option abandonSession) = \\"plant-7\\"' in line
    assert "TL-M23" in line
    assert "TL-M23" in new_gateway(mosquitto, client_id="plant-8", abandon_session="plant-6").fail()

    first.start()  # the one way out: set it back
    first.until(journaled=5)
    first.stop()
    publish(mosquitto, range(5, 8))
    other = new_gateway(mosquitto, client_id="plant-8", abandon_session="plant-7")  # the other one
    other.connect()
    publish(mosquitto, range(8, 10))
    other.until(journaled=7)
    other.stop()
    assert payloads(other) == [0, 1, 2, 3, 4, 8, 9], "what waited for the former id was given up"
    new_gateway(mosquitto, client_id="plant-8").connect()


def test_packet_ids_of_a_session_that_is_given_up_mean_nothing_to_the_next(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    """The next session uses them for other messages; a repeat of one would be taken for one of the former's [I3]."""
    gateway = new_gateway(mosquitto, client_id="plant-8", abandon_session="plant-7", unknown_session="adopt")
    with Journal.open(gateway.settings.inbox_dir, schema=ROW_SCHEMA) as journal:
        record = {"client_id": "plant-7", "established": True, "subscriptions": {}, "servers": []}
        journal.set_session(record)
        journal.append(NO_ROWS, held_ids={1: (0, 7), 2: (0, 8)})
    gateway.connect(qos2_held=0)
    gateway.stop(signal.SIGKILL)
    with Journal.open(gateway.settings.inbox_dir, schema=ROW_SCHEMA) as journal:
        assert journal.held_ids == {}
