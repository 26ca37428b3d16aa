"""Reason codes that decide what is done have the numbers of the standard, which a foreign codec knows."""

from __future__ import annotations

from mqtt5 import ConnAckReasonCode, PubAckReasonCode

from towline.mqtt import reasons


def test_named_codes_are_those_of_the_standard() -> None:
    assert int(PubAckReasonCode.PACKET_ID_IN_USE) == reasons.ID_IN_USE
    assert int(PubAckReasonCode.QUOTA_EXCEEDED) == reasons.QUOTA_EXCEEDED
    assert int(ConnAckReasonCode.QUALITY_NOT_SUPPORTED) == reasons.QOS_NOT_SUPPORTED
    assert int(ConnAckReasonCode.USE_ANOTHER_SERVER) == reasons.USE_ANOTHER
    assert int(ConnAckReasonCode.SERVER_MOVED) == reasons.MOVED
