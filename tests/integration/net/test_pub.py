"""``towline pub`` against a real broker, and against one that takes, drops, or says nothing."""

from __future__ import annotations

import pytest
from mqtt5 import DisconnectPacket, PubAckPacket, PubAckReasonCode, PublishPacket

from tests.integration.net.scripted import Line, Scripted
from towline import Client
from towline.cli import main, pub
from towline_prove.devstack import Mosquitto


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["pub", *arguments])
    return int(end.value.code or 0)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_message_arrives(mosquitto: Mosquitto, capsys: pytest.CaptureFixture[str], qos: int) -> None:
    with Client(mosquitto.uri, client_id="ear", subscribe="t/#") as ear:
        assert run(mosquitto.uri, "t/{n}", "x{n}", "--count", "50", "--qos", str(qos), "--property", "a=b") == 0
        messages = [ear.receive(10) for _ in range(50)]
    assert [(m.topic, m.payload, m.user_properties) for m in messages if m] == [
        (f"t/{n}", b"x%d" % n, (("a", "b"),)) for n in range(50)
    ]
    assert f"50 of 50 messages {'acknowledged by' if qos else 'sent to'} {mosquitto.uri}" in capsys.readouterr().out


def test_what_the_broker_drops_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(line: Line) -> None:
        line.welcome()
        packet_id = line.expect(PublishPacket).packet_id
        line.send(PubAckPacket(packet_id or 0, reason_code=PubAckReasonCode.NOT_AUTHORIZED))
        line.expect(DisconnectPacket)

    with Scripted(refuse) as broker:
        assert run(broker.uri, "t") == 1
    told = capsys.readouterr()
    assert "0 of 1 message" in told.out
    assert "1 refused: the message was dropped: not authorized (0x87)" in told.err


def test_no_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pub, "_ANSWER_TIMEOUT_S", 0.2)

    def keep_quiet(line: Line) -> None:
        line.welcome()
        line.expect(PublishPacket)
        line.expect(DisconnectPacket)

    with Scripted(keep_quiet) as broker:
        assert run(broker.uri, "t") != 0
        assert "no acknowledgement for 0.2 s, 1 message without an answer" in capsys.readouterr().err
