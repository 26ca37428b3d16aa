"""The gateway process against a real Mosquitto: what it keeps, refuses, survives and says."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from mqtt5 import ConnectPacket

from tests.conftest import NewMosquitto
from tests.helpers import commit, wait_until
from tests.integration.conftest import Gateway, NewGateway, payloads, publish
from tests.integration.gateway.test_outbox import save
from towline import Client, ClientSettings, Publisher
from towline.gateway.process import EXIT_CONFIG
from towline_prove.devstack import Mosquitto


@pytest.mark.parametrize(("protocol", "rounds"), [("5", 5), ("3.1.1", 1), ("3.1", 1)])
@pytest.mark.parametrize("qos", [1, 2])
def test_kills_lose_nothing_and_qos_2_repeats_nothing(
    broker: Mosquitto, new_gateway: NewGateway, protocol: str, rounds: int, qos: int
) -> None:
    """[I3]: exactly once into the journal, whatever moment the gateway is killed at; in older versions of MQTT too."""
    gateway = new_gateway(broker, qos=qos, protocol=protocol).connect(protocol=protocol)
    sent = range(rounds * 400)
    for begin in sent[::400]:
        publish(broker, range(begin, begin + 200), qos=qos)
        gateway.stop(signal.SIGKILL)
        publish(broker, range(begin + 200, begin + 400), qos=qos)
        gateway.start()
    wait_until(lambda: len(set(gateway.seen())) == len(sent), what="all of them")
    seen = gateway.seen()
    assert list(dict.fromkeys(seen)) == list(sent), "the first of each in order"
    if qos == 2:
        assert len(seen) == len(sent)
        status = gateway.until(qos2_held=0)
        assert status["received"] == status["journaled"] + status["deduplicated"]
        assert status["packet_ids_reused"] == 0


def test_of_a_killed_broker_comes_what_it_had_handed_on_or_saved(
    new_mosquitto: NewMosquitto, new_gateway: NewGateway
) -> None:
    """What Mosquitto has acknowledged, and neither handed on nor saved, is lost in Mosquitto: nobody else had it."""
    broker = new_mosquitto(persistence="true", autosave_interval="1000000", max_queued_messages="0")  # saves if told to
    gateway = new_gateway(broker).connect()
    handed_on, saved, unsaved = (range(start, start + 20) for start in (100_000, 200_000, 300_000))
    publish(broker, handed_on)
    gateway.until(journaled=20)
    gateway.stop(signal.SIGKILL)
    publish(broker, saved)
    save(broker)
    publish(broker, unsaved)
    broker.kill()
    store = (Path(broker.directory) / "mosquitto.db").read_bytes()
    assert [number for number in (*saved, *unsaved) if b"%d" % number in store] == list(saved)
    broker.start()
    gateway.connect(sessions_lost=0)
    after = range(400_000, 400_020)
    publish(broker, after)
    wait_until(lambda: set(after) <= set(gateway.seen()), what="what came last")
    assert list(dict.fromkeys(gateway.seen())) == [*handed_on, *saved, *after]


def test_a_session_the_broker_lost_is_counted_and_shown(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto).connect()
    mosquitto.restart()
    status = gateway.until(sessions_lost=1, state="online")
    assert "between the last connection and now" in status["session_lost"]["text"]
    publish(mosquitto, range(3))
    gateway.until(journaled=3)
    stored = time.time()
    gateway.stop(signal.SIGKILL)
    gateway.start()
    assert gateway.status()["sessions_lost"] == 1, "the count outlives the process"
    mosquitto.restart()
    lost = gateway.until(sessions_lost=2, state="online")["session_lost"]
    assert stored - 60 < lost["since"] <= stored <= lost["at"]
    assert "when the last message was stored, and now may be missing" in lost["text"]


def test_a_lost_journal_with_a_surviving_session_is_a_question(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    """[MQTT-3.2.2-4]."""
    first = new_gateway(mosquitto).connect()
    first.stop()
    publish(mosquitto, range(5))
    second = new_gateway(mosquitto, client_id="plant-7", name="other")
    assert "TL-M20" in second.fail()
    assert "TL-M20" in second.fail(), "asked again, not adopted by starting twice"
    adopting = new_gateway(mosquitto, client_id="plant-7", name="other", unknown_session="adopt")
    adopting.start()
    adopting.until(journaled=5)


def test_the_broker_list_is_tried_in_turn(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = taken.getsockname()[1]
        new_gateway(f"mqtt://127.0.0.1:{nobody},{mosquitto.uri}").connect(broker=mosquitto.uri)


def test_an_unreachable_broker_is_told_and_tried_until_it_is_there(broker: Mosquitto, new_gateway: NewGateway) -> None:
    broker.stop()
    gateway = new_gateway(broker)
    gateway.start()
    error = wait_until(lambda: gateway.status()["last_error"])
    assert error["text"].startswith("plant-7 at mqtt://127.0.0.1:"), "a bridge has several lines"
    assert "no connection (connection refused). Is the broker up, and the port right?   [TL-M01]" in error["text"]
    assert gateway.status()["broker"] == broker.uri, "the one that was tried"
    broker.start()
    gateway.until(state="online")
    assert gateway.status()["last_error"] is None


@pytest.fixture
def guarded(new_mosquitto: NewMosquitto, tmp_path: Path) -> Mosquitto:
    """A broker that asks for a password, and lets plant-7 read only t/allowed."""
    passwords, rights = tmp_path / "passwords", tmp_path / "rights"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(passwords), "user", "s3cret"], check=True, capture_output=True)
    rights.write_text("user user\ntopic read t/#\n")
    for file in (passwords, rights):
        file.chmod(0o644)
    return new_mosquitto(allow_anonymous="false", password_file=str(passwords), acl_file=str(rights))


def test_a_wrong_password_ends_with_one_line_and_no_secret(
    guarded: Mosquitto, new_gateway: NewGateway, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wr0ng-pass\n")
    gateway = new_gateway(guarded, username="user", password_file=secret)
    line = gateway.fail()
    assert "not authorized (0x87)" in line
    assert "Check username and password_file" in line
    assert "wr0ng-pass" not in gateway.log.read_text()
    assert "Traceback" not in gateway.log.read_text()
    assert (gateway.settings.state_dir / "gateway-error.json").exists()


#: What `provided` gives.
PROVIDED = {"password": "s3cret"}


def provided() -> str:
    """A token_provider."""
    return PROVIDED["password"]


def test_a_password_is_read_at_each_connection(guarded: Mosquitto, new_gateway: NewGateway, tmp_path: Path) -> None:
    """Rotated at the broker first, then in the file, which is missing and half-written for a moment."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    gateway = new_gateway(guarded, username="user", reconnect_max_delay_s=0.5, password_file=secret).connect()
    settings = ClientSettings(username="user", reconnect_max_delay_s=0.5)
    provider = settings.model_copy(update={"token_provider": f"{__name__}:provided"})
    with (
        Client(guarded.uri, client_id="c", settings=settings.model_copy(update={"password_file": secret})) as client,
        Publisher(guarded.uri, state_dir=tmp_path / "p", settings=provider) as publisher,
    ):
        wait_until(lambda: publisher.status()["online"], what="the publisher")
        users = str(tmp_path / "passwords")
        subprocess.run(["mosquitto_passwd", "-b", users, "user", "n3w"], check=True, capture_output=True)
        guarded.stop()
        guarded.start()

        def told(words: str) -> None:
            wait_until(lambda: words in str(gateway.status()["last_error"]), what=words)
            wait_until(lambda: words in str(client.last_error), what=words)

        told("[TL-M08]")
        secret.write_text("")
        told("password_file is empty: is it being written?")
        secret.unlink()
        told("password_file can't be read (no such file or directory)")
        PROVIDED.update(password="n3w")
        secret.write_text("n3w\n")
        gateway.until(state="online")
        wait_until(lambda: client.online and publisher.status()["online"], what="all of them")
    assert "s3cret" not in gateway.log.read_text()
    assert "n3w" not in gateway.log.read_text()


def test_a_missing_password_file_is_a_config_error(
    mosquitto: Mosquitto, new_gateway: NewGateway, tmp_path: Path
) -> None:
    gateway = new_gateway(mosquitto, username="user", password_file=tmp_path / "nothing")
    assert "password_file can't be read (no such file or directory)" in gateway.fail(EXIT_CONFIG)


def test_a_client_id_taken_over_twice_stops_the_line(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    """The first rival made the session anew, and left one: Session Present says nothing of our filters then."""
    gateway = new_gateway(mosquitto)
    gateway.start()
    rivals: list[socket.socket] = []
    for expiry_s in (3600, 0):
        wait_until(lambda: gateway.log.read_text().count('"online"') > len(rivals))
        if rivals:
            with Client(mosquitto.uri, client_id="device") as client:
                client.publish("t/1", b"").result(60)
            gateway.until(journaled=1)
        rival = socket.create_connection(("127.0.0.1", mosquitto.port))
        rivals.append(rival)
        rival.sendall(ConnectPacket("plant-7", clean_start=True, session_expiry_interval=expiry_s).write())
        assert rival.recv(100)
        wait_until(lambda: gateway.log.read_text().count("TL-M21") >= len(rivals))
    for rival in rivals:
        rival.close()
    assert gateway.process.wait(60) == 1
    assert "took over the client id" in gateway.log.read_text().splitlines()[-1]


def test_after_a_takeover_the_brokers_disk_is_not_blamed(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto).connect()
    rival = socket.create_connection(("127.0.0.1", mosquitto.port))
    rival.sendall(ConnectPacket("plant-7", clean_start=True).write())
    lost = gateway.until(sessions_lost=1, state="online")["session_lost"]
    assert lost["do"].startswith("Another client took over the client id")
    rival.close()


def test_a_full_journal_holds_back_and_loses_nothing(broker: Mosquitto, new_gateway: NewGateway) -> None:
    """[I7]: back-pressure, visible, with the keep alive going on."""
    gateway = new_gateway(
        broker, keep_alive_s=5, journal={"max_bytes": 1 << 20, "min_free_bytes": 0, "segment_bytes": 256 << 10}
    )
    gateway.connect()
    with Client(broker.uri, client_id="device") as client:
        for result in [client.publish("t/1", b"%d " % number + bytes(2000)) for number in range(2000)]:
            result.result(60)
    full = gateway.until(held_back="journal full")
    assert 0 < full["journaled"] < 2000
    assert "TL-J02" in full["last_error"]["text"]
    # Longer than 1.5 keep alives: the connection must live on pings alone.
    connected = full["connected_since"]
    wait_until(lambda: gateway.status()["last_error"]["at"] > full["last_error"]["at"] + 8)
    assert gateway.status()["connected_since"] == connected
    seen: list[int] = []

    def drain() -> bool:
        status = gateway.status()
        for batch in gateway.client.read(status["journal"], len(seen), status["end"]):
            seen.extend(int(payload.split()[0]) for payload in batch.column("payload").to_pylist())
        commit(gateway.client, "test", len(seen))
        return len(seen) >= 2000

    wait_until(drain, 60)
    assert seen == list(range(2000))
    assert gateway.status()["last_error"] is None, "there is room again"


def test_nothing_is_readable_by_others(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    state = new_gateway(mosquitto).connect().settings.state_dir
    assert [str(file) for file in (state, *state.rglob("*")) if file.stat().st_mode & 0o077] == []


def test_changed_subscriptions_are_taken_over_by_difference(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto, subscriptions=[{"pattern": "t/#", "qos": 1}, {"pattern": "old", "qos": 1}])
    gateway.connect()
    gateway.stop()
    changed = new_gateway(mosquitto, subscriptions=[{"pattern": "t/#", "qos": 1}, {"pattern": "new", "qos": 1}])
    changed.connect()
    publish(mosquitto, range(1), "old")
    publish(mosquitto, range(1, 2), "new")
    publish(mosquitto, range(2, 3), "t/x")
    changed.until(journaled=2)
    changed.stop()
    assert payloads(changed) == [1, 2]


def test_a_session_with_filters_that_cant_pass_into_others_is_refused(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    def exactly(*filters: str, repeatable: tuple[str, ...] = ()) -> Gateway:
        wanted = [{"pattern": one, "qos": 2} for one in filters]
        return new_gateway(mosquitto, guarantee="exactly_once", subscriptions=wanted, repeatable=repeatable)

    first = exactly("a/+/c", "k").connect()
    first.stop()
    line = exactly("a/b/+", "k").fail()
    assert '\\"a/b/+\\" has topics of \\"a/+/c\\", which the session has and which is removed' in line
    assert "[TL-C170]" in line
    for filters in (("k",), ("a/b/+", "k")):  # the way that is told
        again = exactly(*filters).connect()
        again.stop()
    exactly("a/+/c", "k", repeatable=("a/+/c",)).connect()
