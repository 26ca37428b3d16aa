"""Payloads: every byte counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline_prove.history import MIN_SIZE, NumberedMessage, decode_message, encoder


@given(
    publisher=st.integers(0, 999),
    number=st.integers(0, 10**8),
    device=st.from_regex(r"d[0-9]{1,4}", fullmatch=True),
    sent_ns=st.integers(0, 2**63),
    size=st.integers(MIN_SIZE, 2000),
)
def test_a_payload_reads_back_as_it_was_made(publisher: int, number: int, device: str, sent_ns: int, size: int) -> None:
    payload = encoder("run-1", publisher, size)(number, device, sent_ns)
    assert decode_message(payload) == NumberedMessage("run-1", publisher, number, device, sent_ns, len(payload))
    assert len(payload) >= size
    assert len(payload) == size or b"xx" not in payload


@pytest.mark.parametrize("change", [b"", b"y", b'"', b"\0", b"xx"])
def test_a_changed_byte_is_not_a_message(change: bytes) -> None:
    payload = encoder("r", 1, 150)(7, "d01", 5)
    assert decode_message(payload) is not None
    assert decode_message(payload[:120] + change + payload[121:]) is None
    assert decode_message(payload[:-1] + change) is None


@pytest.mark.parametrize("payload", [None, b"", b"{}", b"12", '{"r":"ä"}'.encode(), b"\xff" * 150])
def test_foreign_payloads_are_not_messages(payload: bytes | None) -> None:
    assert decode_message(payload) is None


def test_a_payload_cut_anywhere_is_not_a_message() -> None:
    payload = encoder("r", 1, 150)(7, "d01", 5)
    assert all(decode_message(payload[:end]) is None for end in range(len(payload)))
