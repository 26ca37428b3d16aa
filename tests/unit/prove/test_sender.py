"""The sender against the rules of MQTT 5, without a socket."""

from __future__ import annotations

import mqtt5
import pytest
from mqtt5 import ConnAckPacket, PubAckPacket, PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket

from tests.helpers import read_all
from towline_prove.history import decode_message
from towline_prove.load import LoadPlan, NumberedSender, devices_of_publisher, message_share


def make(*, total: int = 10, qos: int = 1, window: int = 1000, devices: int = 3) -> NumberedSender:
    plan = LoadPlan(
        run="r", publishers=1, devices=devices, messages=total, qos=qos, size=150, topic="t/{device}/x", window=window
    )
    return NumberedSender(plan, 0)


def publishes(data: bytes) -> list[PublishPacket]:
    return [packet for packet in read_all(data) if isinstance(packet, PublishPacket)]


def numbers(packets: list[PublishPacket]) -> list[int]:
    return [message.number for packet in packets if (message := decode_message(packet.payload))]


def test_messages_go_round_the_devices_in_order() -> None:
    data, first, count = make(total=7).encode_burst(100)
    packets = publishes(data)
    assert (first, count) == (0, 7)
    assert numbers(packets) == list(range(7))
    assert [packet.topic for packet in packets] == [f"t/d{n % 3}/x" for n in range(7)]
    assert len({packet.packet_id for packet in packets}) == 7


@pytest.mark.parametrize(("publishers", "devices"), [(8, 50), (1, 1), (3, 3), (7, 100)])
def test_every_device_has_one_author(publishers: int, devices: int) -> None:
    authors = [device for p in range(publishers) for device in devices_of_publisher(p, publishers, devices)]
    assert len(authors) == len(set(authors)) == devices


@pytest.mark.parametrize("messages", [1, 7, 8, 100_003])
def test_the_shares_add_up(messages: int) -> None:
    assert sum(message_share(p, 8, messages) for p in range(8)) == messages


def test_the_servers_receive_maximum_is_kept() -> None:
    """[MQTT-3.3.4-7]."""
    sender = make(total=100)
    sender.resume(ConnAckPacket(receive_max=4))
    data, _, count = sender.encode_burst(100)
    assert count == 4
    assert sender.encode_burst(100)[2] == 0
    ids = [packet.packet_id for packet in publishes(data)]
    answers = sender.feed(b"".join(PubAckPacket(packet_id).write() for packet_id in ids[:2] if packet_id))
    assert answers.acked_numbers == [0, 1]
    assert sender.encode_burst(100)[2] == 2


def test_a_resumed_session_gets_the_same_ids_again_with_dup_in_order() -> None:
    """[MQTT-4.4.0-1], [MQTT-4.6.0-1]."""
    sender = make(total=6)
    first = publishes(sender.encode_burst(6)[0])
    sender.feed(PubAckPacket(first[2].packet_id or 0).write())
    data, again = sender.resume(ConnAckPacket(session_present=True))
    second = publishes(data)
    assert again == [0, 1, 3, 4, 5] == numbers(second)
    assert [packet.packet_id for packet in second] == [p.packet_id for p in first if p is not first[2]]
    assert all(packet.duplicate for packet in second)


def test_a_lost_session_gets_the_unfinished_as_new_messages() -> None:
    """[MQTT-3.2.2-5]: no state of the old session goes on, so no DUP."""
    sender = make(total=3, qos=2)
    first = publishes(sender.encode_burst(3)[0])
    sender.feed(PubRecPacket(first[0].packet_id or 0).write())
    data, again = sender.resume(ConnAckPacket(session_present=False))
    assert again == [0, 1, 2]
    assert not any(packet.duplicate for packet in publishes(data))


def test_qos_2_is_released_once_and_never_published_again_after_pubrec() -> None:
    """[MQTT-4.3.3-4], [MQTT-4.3.3-6]."""
    sender = make(total=2, qos=2)
    first, second = publishes(sender.encode_burst(2)[0])
    answers = sender.feed(PubRecPacket(first.packet_id or 0).write())
    assert not answers.acked_numbers
    assert read_all(bytes(answers.reply_bytes)) == read_all(PubRelPacket(first.packet_id or 0).write())
    resumed, again = sender.resume(ConnAckPacket(session_present=True))
    assert again == [1]
    assert [type(packet) for packet in read_all(resumed)] == [PubRelPacket, PublishPacket]
    assert sender.feed(PubCompPacket(first.packet_id or 0).write()).acked_numbers == [0]
    assert len(sender._unacked_messages) == 1
    assert second.packet_id != first.packet_id


def test_a_refused_message_is_not_acknowledged() -> None:
    sender = make(total=2)
    ids = [packet.packet_id or 0 for packet in publishes(sender.encode_burst(2)[0])]
    answers = sender.feed(
        PubAckPacket(ids[0], reason_code=mqtt5.PubAckReasonCode.QUOTA_EXCEEDED).write() + PubAckPacket(ids[1]).write()
    )
    assert (answers.refused_numbers, answers.acked_numbers) == ([0], [1])
    assert sender.is_done


def test_nobody_listening_is_no_refusal() -> None:
    sender = make(total=1)
    packet_id = publishes(sender.encode_burst(1)[0])[0].packet_id or 0
    code = mqtt5.PubAckReasonCode.NO_MATCHING_SUBSCRIBERS
    assert sender.feed(PubAckPacket(packet_id, reason_code=code).write()).acked_numbers == [0]


def test_qos_0_has_no_window() -> None:
    sender = make(total=5000, qos=0, window=1)
    assert sender.encode_burst(5000)[2] == 5000
    assert sender.is_done


def test_packet_ids_wrap_round_and_skip_those_in_use() -> None:
    """[MQTT-2.2.1-3]."""
    sender = make(total=70_000, window=2)
    held = publishes(sender.encode_burst(1)[0])[0].packet_id
    seen = set()
    for _ in range(66_000):
        packet_id = publishes(sender.encode_burst(1)[0])[0].packet_id or 0
        assert packet_id != held
        seen.add(packet_id)
        sender.feed(PubAckPacket(packet_id).write())
    assert seen == set(range(1, 65_536)) - {held}


def test_a_disconnect_of_the_server_is_reported() -> None:
    code = mqtt5.DisconnectReasonCode.SERVER_SHUTTING_DOWN
    assert make().feed(mqtt5.DisconnectPacket(reason_code=code).write()).disconnect_reason == 0x8B
