"""A standalone master that nobody can reach is told before Spark looks for it a minute long."""

from __future__ import annotations

import socket

import pytest

from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.session import check_master
from towline.errors import SetupError


def test_a_master_that_does_not_answer_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SetupError) as caught:
        check_master(f"spark://127.0.0.1:{port}")
    found = failure_reason(caught.value, "spark")
    assert found.text == (
        f"spark: no master answers at 127.0.0.1:{port} (connection refused). "
        "Start it, or correct --master, or master in [spark].   [TL-S34]"
    )
    assert not found.permanent, "it is tried again: a master may be started later"


def test_one_master_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead, socket.create_server(("127.0.0.1", 0)) as server:
        gone, there = dead.getsockname()[1], server.getsockname()[1]
        dead.close()
        check_master(f"spark://127.0.0.1:{gone},127.0.0.1:{there}")


@pytest.mark.parametrize("master", ["local[*]", "yarn", "local-cluster[2,1,512]"])
def test_another_kind_of_master_is_left_to_spark(master: str) -> None:
    check_master(master)
