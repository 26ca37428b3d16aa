"""Any bytes against the decoder of one protocol version, with coverage as the guide (atheris, libFuzzer)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from mqtt5 import ConnAckPacket, PublishPacket, PubRelPacket, QoS, SubscribePacket, TopicFilter

#: Target → protocol level.
LEVELS: Final = {"codec5": 5, "codec311": 4, "codec31": 3}
_MAX_PACKET: Final = 1 << 16
#: Of a PUBLISH beyond this only a stub is kept.
_SMALL_LIMIT: Final = 133
_LONGEST_INPUT: Final = 1024


def check(data: bytes, version: int) -> None:
    """Raise unless the decoder keeps its promises for these bytes."""
    import tests.engines.mqtt3  # noqa: F401, PLC0415  # imported once atheris watches imports
    from towline.mqtt.codec import Decoder  # noqa: PLC0415
    from towline.mqtt.truncated import TruncatedMessage  # noqa: PLC0415

    for limit in (_SMALL_LIMIT, _MAX_PACKET):
        whole = _check_cuts(data, version, limit)
    for packet in whole or ():
        if not isinstance(packet, TruncatedMessage):
            _check_writing(packet, version)
    assert not Decoder._codec_panicked, "the codec panicked"


def _check_cuts(data: bytes, version: int, limit: int) -> list[Any] | None:
    whole, held = _read([data], version, limit)
    at = data[-1] % (len(data) + 1) if data else 0
    pieces, held_in_pieces = _read([data[:at], data[at:]], version, limit)
    bytewise, held_bytewise = _read([data[i : i + 1] for i in range(len(data))], version, limit)
    assert (whole is None) == (pieces is None) == (bytewise is None), f"cut at {at}: {whole!r} / {pieces!r}"
    if whole is not None:
        assert repr(whole) == repr(pieces) == repr(bytewise), f"cut at {at}: {whole!r} / {pieces!r}"
        assert held == held_in_pieces == held_bytewise
    return whole


def _read(pieces: list[bytes], version: int, limit: int = _MAX_PACKET) -> tuple[list[Any] | None, int]:
    """Packets and the bytes kept for the next; None for malformed."""
    from towline.mqtt.checks import MalformedPacket  # noqa: PLC0415
    from towline.mqtt.codec import AckRun, Decoder, PublishRun  # noqa: PLC0415

    decoder = Decoder(limit, version)
    packets: list[Any] = []
    try:
        for piece in pieces:
            for item in decoder.feed(piece):
                packets += item.packets if isinstance(item, PublishRun | AckRun) else [item]
    except MalformedPacket:
        return None, 0
    return packets, decoder._buffered_bytes


def _check_writing(packet: Any, version: int) -> None:
    from towline.mqtt.codec import encode  # noqa: PLC0415
    from towline.mqtt.codec3 import CONNACK_CODES  # noqa: PLC0415

    if version < LEVELS["codec5"] and isinstance(packet, ConnAckPacket) and packet.reason_code not in CONNACK_CODES:
        return  # a server of MQTT 5 may say so, and 3.x has no word for it
    data = encode(packet, version)
    again, held = _read([data], version)
    assert again is not None, f"we refuse what we wrote: {data.hex(' ')}"
    assert len(again) == 1, data.hex(" ")
    assert not held
    assert repr(again[0]) == repr(packet), f"{packet!r} became {again[0]!r}"
    assert encode(again[0], version) == data


def corpus(version: int) -> Iterator[bytes]:
    """Bytes to begin with: what the client vectors send and expect, and a few packets of ours."""
    from tests.unit.mqtt.test_vectors import CASES  # noqa: PLC0415
    from towline.mqtt.codec import encode  # noqa: PLC0415

    for case in CASES.values():
        if version in {case.version, 3}:
            yield from (data for _, data in case.messages)
    topic = PublishPacket("a/ä", b"payload", qos=QoS(2), packet_id=7, duplicate=True)
    for packet in (topic, PubRelPacket(7), SubscribePacket(9, [TopicFilter("a/+", retain_as_published=False)])):
        yield encode(packet, version) * 2


def run(target: str, folder: Path, options: list[str]) -> None:
    """Fuzz until libFuzzer's options say stop; a finding ends the process with 77 and lies in `folder`."""
    atheris: Any = import_module("atheris")  # of the group "fuzz"; nothing else needs it

    version = LEVELS[target]
    seeds = folder / target
    seeds.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["towline.mqtt"]):
        from towline.mqtt import codec  # noqa: F401, PLC0415
    for index, data in enumerate(corpus(version)):
        (seeds / f"seed-{index:04}").write_bytes(data[:_LONGEST_INPUT])

    def one_input(data: bytes) -> None:
        check(data, version)

    fixed = [f"-max_len={_LONGEST_INPUT}", f"-artifact_prefix={folder}/{target}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *fixed, *options, str(seeds)], one_input)
    atheris.Fuzz()
