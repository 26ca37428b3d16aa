"""Run in a network namespace of its own: print the seconds until a line into nothing is given up.

With the argument ``writes`` something is sent into it, with ``waits`` nothing ever is.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import time

from towline import ClientSettings
from towline.net.connecting import connect
from towline.net.endpoint import Endpoint

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40


def loopback(flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def main() -> None:
    loopback(IFF_UP | IFF_RUNNING)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("mqtt", "127.0.0.1", server.getsockname()[1])
        transport = connect(endpoint, ClientSettings(), keep_alive_s=2)
        peer, _ = server.accept()
        loopback(0)
        began = time.monotonic()
        if sys.argv[1] == "writes":
            transport.write(b"\xc0\x00")
        while transport.read() is None and time.monotonic() < began + 30:
            time.sleep(0.01)
        print(time.monotonic() - began)  # noqa: T201
        peer.close()


main()
