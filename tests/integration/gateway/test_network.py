"""A gateway on a network, and who has no business there: intake goes on, and the log stays short."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import flight

from tests.helpers import wait_until
from tests.integration.conftest import NewGateway, publish
from tests.unit.gateway.remote import Pki
from towline.gateway.client import GatewayClient
from towline.gateway.process import EXIT_CONFIG
from towline_prove.devstack import Mosquitto

CALLS = 10_000


def knock(location: str, authority: bytes, calls: int) -> int:
    """Call with a wrong token; how often it was refused."""
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer a-wrong-token-of-some-length")])
    refused = 0
    with flight.connect(location, tls_root_certs=authority) as stranger:
        for _ in range(calls):
            try:
                list(stranger.do_action(flight.Action("status", b""), options))
            except flight.FlightUnauthenticatedError:
                refused += 1
    return refused


def test_ten_thousand_calls_with_a_wrong_token_do_not_stop_intake(
    broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path
) -> None:
    pki = Pki.made(tmp_path / "pki")
    gateway = new_gateway(broker, listen=pki.settings())
    gateway.start()
    location = wait_until(lambda: gateway.status().get("listen", {}).get("location"), what="a gateway that listens")
    authority = (pki.directory / "ca.pem").read_bytes()
    with flight.connect(location) as stranger, pytest.raises(flight.FlightUnavailableError):
        list(stranger.do_action(flight.Action("status", b"")))  # no trust in the certificate: this leaves no line
    with ThreadPoolExecutor(4) as pool:
        strangers = [pool.submit(knock, location, authority, CALLS // 4) for _ in range(4)]
        publish(broker, range(3000))
        gateway.until(journaled=3000)
        with GatewayClient(location, pki.access()) as client:
            assert client.status()["journaled"] == 3000  # who has the token is answered meanwhile
        assert sum(one.result(120) for one in strangers) == CALLS
    wait_until(lambda: gateway.status()["listen"]["refused"] == CALLS, what="the count")
    assert sorted(gateway.seen()) == list(range(3000))


def test_a_gateway_that_cannot_listen_says_why_and_does_not_start(
    broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path
) -> None:
    pki = Pki.made(tmp_path / "pki")
    wrong = new_gateway(broker, "wrong", listen=pki.settings(key_file=pki.directory / "client.key"))
    assert "no matching PEM in cert_file and key_file" in wrong.fail(EXIT_CONFIG)
