from __future__ import annotations

import socket
from pathlib import Path

import pytest

from towline_prove.devstack import process as ports
from towline_prove.devstack.process import LOOPBACK, free_port


def test_free_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low - ports.LOWEST_PORT < ports.MIN_RANGE_SIZE and ports.HIGHEST_PORT - high < ports.MIN_RANGE_SIZE:
        pytest.skip("this machine gives nearly every port to outgoing connections")
    for _ in range(50):
        assert not low <= free_port() <= high


@pytest.mark.parametrize(
    ("outgoing", "candidates"),
    [
        ((32_768, 60_999), range(15_000, 32_768)),
        ((20_000, 50_000), range(50_001, 65_536)),
        ((1_024, 65_535), range(15_000, 65_536)),  # nothing left outside: better any port than none
    ],
)
def test_the_larger_side_is_used(monkeypatch: pytest.MonkeyPatch, outgoing: tuple[int, int], candidates: range) -> None:
    monkeypatch.setattr(ports, "_outgoing_range", lambda: outgoing)
    assert ports._candidates() == candidates


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_candidates", lambda: range(taken, taken + 1))
        assert free_port() != taken  # after a hundred tries the kernel is asked
