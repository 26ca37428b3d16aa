"""The 1,343 client vectors of Eclipse Mosquitto as pure bytes, packet by packet, in one chunk and cut anywhere."""

from __future__ import annotations

import pytest

from tests.fuzz.codec import check
from tests.helpers import lacking
from tests.unit.mqtt.vectors import FOLDER, Case, load, play, play_in_one_chunk

CASES = load()

_NOT_FOUND = "the case wants PUBREL with reason 0; section 3.6.2.1 has 0x92 for a packet id that is not known"
_NO_CODES = "an UNSUBACK without a reason code for each topic filter [MQTT-3.11.3-1, -2]"
_UNKNOWN_CODE = "an UNSUBACK with a reason code that does not exist [MQTT-3.11.3-2]"
_TINY = "a Maximum Packet Size of 1, in which no acknowledgement fits [MQTT-3.2.2-15]"

#: Case → the statement that the case itself breaks, or that lets us answer more precisely.
DEVIATIONS: dict[str, str] = {
    "CONNACK/v5.0 CONNACK/20 long": "a byte after the properties; CONNACK has no payload (section 3.2.3)",
    "CONNACK/v5.0 CONNACK ALLOWED PROPERTIES VALID/20 with authentication-method (UTF-8 string)": (
        "an Authentication Method though CONNECT had none [MQTT-4.12.0-6]"
    ),
    **{f"PUBREC/v5.0 PUBREC unsolicited/50 {name}": _NOT_FOUND for name in ("len=2", "len=3", "len=4 ok")},
    **{f"UNSUBACK/v5.0 UNSUBACK/B0{name}": _NO_CODES for name in ("", " with property")},
    "UNSUBACK/v5.0 UNSUBACK/B0 reason code 0xFF unknown": _UNKNOWN_CODE,
    "UNSUBACK/v5.0 UNSUBACK unsolicited/B0 reason code 0xFF unknown": _UNKNOWN_CODE,
    **{
        f"CONNACK/v5.0 CONNACK ALLOWED PROPERTIES VALID/20 with maximum-packet-size (four byte integer){suffix}": _TINY
        for suffix in ("", " #2")
    },
}


def _parameters() -> list[object]:
    if not CASES:
        return [pytest.param(None, id="no vectors")]
    return [
        pytest.param(
            case, id=name, marks=[pytest.mark.xfail(reason=DEVIATIONS[name], strict=True)] if name in DEVIATIONS else []
        )
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize("case", _parameters())
def test_vector(case: Case | None) -> None:
    if case is None:
        lacking(f"the client vectors are not at {FOLDER}")
    check(b"".join(data for kind, data in case.messages if kind == "send"), case.version)
    play(case)
    if not case.command and all(kind == "send" for kind, _ in case.messages):
        play_in_one_chunk(case)


def test_every_deviation_names_a_case() -> None:
    if CASES:
        assert len(CASES) == 1343
        assert set(DEVIATIONS) <= set(CASES)
