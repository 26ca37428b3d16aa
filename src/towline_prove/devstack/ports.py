"""Free ports on loopback, outside the range from which the kernel takes the ports of outgoing connections.

A broker that is killed and started again must find its port free. In the outgoing range a client that tries to
reconnect meanwhile may be given that very number, and may then even connect to itself (TCP's simultaneous open).
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST_PORT, HIGHEST_PORT = 15_000, 65_535
#: A range smaller than this is too crowded to pick from at random.
MIN_RANGE_SIZE = 1_000

_random = random.SystemRandom()


def free_port() -> int:
    """Return a port on loopback that is free now; another process may take it first, so be ready to ask again."""
    candidates = _candidates()
    for _ in range(100):
        port = _random.choice(candidates)
        if is_free(port):
            return port
    with socket.socket() as probe:  # the kernel's choice
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        # As brokers do: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def _candidates() -> range:
    low, high = _outgoing_range()
    lower_range, upper_range = range(LOWEST_PORT, low), range(high + 1, HIGHEST_PORT + 1)
    largest_range = max(lower_range, upper_range, key=len)
    return largest_range if len(largest_range) >= MIN_RANGE_SIZE else range(LOWEST_PORT, HIGHEST_PORT + 1)


def _outgoing_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:
        return 32_768, 60_999  # Linux's default
    return int(low), int(high)
