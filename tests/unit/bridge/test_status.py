"""What `towline status` advises."""

from __future__ import annotations

from towline.bridge.status import advice


def test_messages_that_were_not_taken_in_whole_are_told() -> None:
    gateway = {"packets_too_large": 1_200, "too_many_properties": 3}
    line = {
        "direction": "up",
        "gateway": gateway,
        "gateway_running": True,
        "query": "running",
        "gateway_error": None,
        "query_error": None,
        "account": None,
        "fallback": 0,
    }
    large, crowded = advice(line, running=True)
    assert large.startswith("larger than max_packet_bytes: 1,200 messages.")
    assert crowded.startswith("with more than 1,000 properties: 3 messages.")
    assert not list(advice({**line, "gateway": {}}, running=True))
