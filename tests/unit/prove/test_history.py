"""Claims on disk, readable after a kill at any byte; payloads, of which every byte counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline_prove.history import (
    MIN_SIZE,
    Claims,
    HistoryWriter,
    NumberedMessage,
    SenderClaim,
    decode_message,
    encoder,
    read_history,
)


def test_a_history_cut_at_any_byte_tells_its_whole_records_and_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    with HistoryWriter(path, {"run": "r"}) as history:
        for number in range(4):
            history.add_claim(SenderClaim.ATTEMPTED, 0, number)
            assert read_history(path).count(SenderClaim.ATTEMPTED) == number, "on disk with the flush"
            history.flush()
    data = path.read_bytes()
    head = data.index(b"\n") + 1
    record = (len(data) - head) // 4
    for end in range(len(data)):
        path.write_bytes(data[:end])
        cut = Claims(path)
        assert cut.read_file().count(SenderClaim.ATTEMPTED) == max(0, end - head) // record
        path.write_bytes(data)
        assert (cut.read_file().run, cut.count(SenderClaim.ATTEMPTED)) == ("r", 4), "its end has come meanwhile"


def test_what_is_no_history_or_is_one_already_is_one_clear_line(tmp_path: Path) -> None:
    for content in (None, b"no json\n"):
        if content is not None:
            (tmp_path / "claims").write_bytes(content)
        with pytest.raises(ConfigError, match="TL-C82"):
            read_history(tmp_path / "claims")
    with pytest.raises(ConfigError, match="TL-C81"):
        HistoryWriter(tmp_path / "claims", {})


@given(st.lists(st.tuples(st.sampled_from(list(SenderClaim)), st.lists(st.integers(0, 30))), max_size=20))
def test_claims_add_up_like_sets(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[SenderClaim, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("h") / "claims"
    model: dict[SenderClaim, set[int]] = {claim: set() for claim in SenderClaim}
    with HistoryWriter(path, {}) as history:
        for claim, numbers in records:
            history.add_claims(claim, 3, numbers)
            model[claim] |= set(numbers)
    claims = read_history(path)
    for claim, expected in model.items():
        assert claims.count(claim) == len(expected)
        assert {number for number in range(60) if claims.flags_of(3, number) & claim} == expected
    assert claims.flags_of(0, 0) == SenderClaim(0)


@given(
    st.integers(0, 999),
    st.integers(0, 10**8),
    st.from_regex(r"d[0-9]{1,4}", fullmatch=True),
    st.integers(0, 2**63),
    st.integers(MIN_SIZE, 2000),
)
def test_a_payload_reads_back_as_it_was_made(publisher: int, number: int, device: str, sent_ns: int, size: int) -> None:
    payload = encoder("run-1", publisher, size)(number, device, sent_ns)
    assert decode_message(payload) == NumberedMessage("run-1", publisher, number, device, sent_ns, len(payload))
    assert len(payload) >= size
    assert len(payload) == size or b"xx" not in payload


def test_a_payload_with_any_other_byte_or_length_is_not_a_message() -> None:
    payload = encoder("r", 1, 150)(7, "d01", 5)
    assert decode_message(payload) is not None
    for change in (b"", b"y", b'"', b"\0", b"xx"):
        assert decode_message(payload[:120] + change + payload[121:]) is None
        assert decode_message(payload[:-1] + change) is None
    assert all(decode_message(payload[:end]) is None for end in range(len(payload)))
    assert not any(map(decode_message, (None, b"{}", b"12", '{"r":"ä"}'.encode(), b"\xff" * 150)))
