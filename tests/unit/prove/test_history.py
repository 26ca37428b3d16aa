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
    number_ranges,
    read_history,
)


def test_claims_read_back(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    with HistoryWriter(path, {"run": "r1", "messages": 10}) as history:
        history.add_claim(SenderClaim.ATTEMPTED, 0, 0, 10)
        history.add_claims(SenderClaim.ACKED, 0, [0, 1, 2, 5, 4])
        history.add_claim(SenderClaim.REFUSED, 0, 7)
        history.add_claim(SenderClaim.ATTEMPTED, 3, 0, 2)
        history.add_claim(SenderClaim.RESENT, 3, 1)
    claims = read_history(path)
    assert claims.run == "r1"
    assert claims.count(SenderClaim.ATTEMPTED) == 12
    assert claims.count(SenderClaim.ACKED) == 5
    assert claims.count(SenderClaim.REFUSED) == 1
    assert claims.flags_of(0, 5) == SenderClaim.ATTEMPTED | SenderClaim.ACKED
    assert claims.flags_of(0, 6) == SenderClaim.ATTEMPTED
    assert claims.flags_of(3, 1) == SenderClaim.ATTEMPTED | SenderClaim.RESENT
    assert claims.flags_of(0, 10) == SenderClaim(0)
    assert claims.flags_of(9, 0) == SenderClaim(0)


def test_nothing_is_on_disk_before_the_flush_and_all_of_it_after(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    with HistoryWriter(path, {}) as history:
        history.add_claim(SenderClaim.ATTEMPTED, 1, 0, 5)
        assert read_history(path).count(SenderClaim.ATTEMPTED) == 0
        history.flush()
        assert read_history(path).count(SenderClaim.ATTEMPTED) == 5


def test_a_history_cut_at_any_byte_still_tells_its_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    with HistoryWriter(path, {"run": "r"}) as history:
        for number in range(4):
            history.add_claim(SenderClaim.ATTEMPTED, 0, number)
    data = path.read_bytes()
    head = data.index(b"\n") + 1
    record = (len(data) - head) // 4
    for end in range(head, len(data) + 1):
        path.write_bytes(data[:end])
        assert read_history(path).count(SenderClaim.ATTEMPTED) == (end - head) // record


def test_a_history_is_read_on_while_it_is_written(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "h", {"run": "r"}) as writer:
        history = Claims(tmp_path / "h")
        for number in range(3):
            writer.add_claim(SenderClaim.ATTEMPTED, 0, number)
            writer.flush()
            assert history.read_file().count(SenderClaim.ATTEMPTED) == number + 1
    whole = (tmp_path / "h").read_bytes()
    (tmp_path / "torn").write_bytes(whole[:-5])
    torn = Claims(tmp_path / "torn")
    assert torn.read_file().count(SenderClaim.ATTEMPTED) == 2
    (tmp_path / "torn").write_bytes(whole)
    assert torn.read_file().count(SenderClaim.ATTEMPTED) == 3, "its end has come meanwhile"


def test_a_history_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "claims"
    path.touch()
    with pytest.raises(ConfigError, match="TL-C81"):
        HistoryWriter(path, {})


def test_a_history_without_its_whole_first_line_claims_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history"
    with HistoryWriter(path, {"run": "r"}) as writer:
        writer.add_claim(SenderClaim.ATTEMPTED, 0, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:5])
    claims = Claims(path)
    assert (claims.read_file().run, claims.count(SenderClaim.ATTEMPTED)) == ("", 0)
    path.write_bytes(whole)
    assert (claims.read_file().run, claims.count(SenderClaim.ATTEMPTED)) == ("r", 1), "it has come meanwhile"


@pytest.mark.parametrize("content", [None, b"no json\n"])
def test_what_is_no_history_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "claims"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"TL-C82"):
        read_history(path)


@given(st.lists(st.integers(0, 50)))
def test_ranges_say_the_same_in_the_same_order(numbers: list[int]) -> None:
    assert [number for first, count in number_ranges(numbers) for number in range(first, first + count)] == numbers


@given(st.lists(st.tuples(st.sampled_from(list(SenderClaim)), st.integers(0, 30), st.integers(1, 9)), max_size=20))
def test_claims_add_up_like_sets(records: list[tuple[SenderClaim, int, int]]) -> None:
    claims = Claims()
    model: dict[SenderClaim, set[int]] = {claim: set() for claim in SenderClaim}
    for claim, first, length in records:
        claims.add(claim, 0, first, length)
        model[claim] |= set(range(first, first + length))
    for claim, numbers in model.items():
        assert claims.count(claim) == len(numbers)
        assert {number for number in range(60) if claims.flags_of(0, number) & claim} == numbers


# Numbered payloads


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
