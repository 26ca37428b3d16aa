"""Marks, receipts and keys: what was written comes back, and is believed as it was written alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivery.receipts.marks import KEYS, mark
from towline import files
from towline.delivery.receipts.mark import Content, Mark, ReceiptKeys, parse_mark, strip_mark
from towline.delivery.receipts.payload import ReceiptPayload
from towline.errors import ConfigError


@given(
    st.text("Az09._-", min_size=1, max_size=63).map("p".__add__),
    st.integers(0, 10**10 - 1),
    st.integers(0, 10**17),
    st.integers(0, 10**17),
    st.sampled_from(["", "0", "f" * 16]),
    st.sampled_from(["", "0123abcd"]),
    st.sampled_from(["", "0123abcd" * 4]),
)
def test_a_mark_comes_back_as_it_was_written(
    publisher: str, epoch: int, low: int, more: int, nonce: str, opening: str, code: str
) -> None:
    made = Mark(publisher, epoch, low + more, low, nonce, opening, code)
    properties = [("a", "1"), *made.properties(), ("a", "2")]
    assert parse_mark(properties) == made
    assert strip_mark(properties) == [("a", "1"), ("a", "2")]


@pytest.mark.parametrize(
    "properties",
    [
        [],
        [("towline-id", "p")],
        [("towline-n", "1.2.0")],
        [("towline-id", "p/#"), ("towline-n", "1.2.0")],
        [("towline-id", "p\n"), ("towline-n", "1.2.0")],
        [("towline-id", "p"), ("towline-n", "1.2")],
        [("towline-id", "p"), ("towline-n", "1.2.3")],  # below its own low
        [("towline-id", "p"), ("towline-n", "1.-2.0")],
        [("towline-id", "p"), ("towline-n", "1.٢.0")],
        [("towline-id", "p"), ("towline-n", "1.2.0?ABC")],
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-auth", "x")],
        [("towline-id", "p"), ("towline-id", "p"), ("towline-n", "1.2.0")],  # each once, or which one counts?
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-n", "1.3.0")],
        [("towline-id", "p"), ("towline-n", "1.2.0"), ("towline-auth", "a."), ("towline-auth", "b.")],
    ],
)
def test_what_is_no_mark(properties: list[tuple[str, str]]) -> None:
    assert parse_mark(properties) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *[{name: value} for name in ("epoch", "watermark") for value in (-1, 1.0, True, "1", None)],
        *[{name: value} for name in ("publisher", "nonces") for value in (1, None, ["p"])],
        *[{"journaled": value} for value in ([[0, -1]], [[0]], [[0, 1, 2]], [["0", 1]], 7, None)],
        *[{"incarnations": value} for value in ([[0, 1]], [[-1, "a"]], [["0", "a"]], [[0]], None)],
        {"nonces": "a" * (16 << 10)},
    ],
)
def test_what_is_no_receipt(wrong: dict[str, Any]) -> None:
    fields = {"publisher": "p", "epoch": 1, "watermark": 2, "nonces": "ab", "incarnations": [[0, "a"]]}
    sound = ReceiptPayload.decode(json.dumps(fields).encode())
    assert sound == ReceiptPayload("p", 1, 2, "ab", incarnations=((0, "a"),))
    assert ReceiptPayload.decode(json.dumps(fields | wrong).encode()) is None
    for payload in (b"[]", b"\xff", b"[" * 10_000, b"7"):
        assert ReceiptPayload.decode(payload) is None


def test_a_receipt_says_some_ranges_and_stays_short_enough_to_be_read() -> None:
    """What is left out is sent again, and dropped."""
    ranges = tuple((10**17 + 10 * n, 10**17 + 10 * n + 1) for n in range(200))
    incarnations = tuple((10**17 + n, "f" * 16) for n in range(128))
    payload = ReceiptPayload("p" * 64, 10**9, 10**17, journaled=ranges, incarnations=incarnations).encode(KEYS)
    told = ReceiptPayload.decode(payload)
    assert told is not None
    assert (told.journaled, told.incarnations) == (ranges[:64], incarnations)
    assert ReceiptPayload.verify_payload(KEYS, "p" * 64, payload)
    assert not ReceiptPayload.verify_payload(KEYS, "p" * 64, payload.rjust(17 << 10))


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3)), max_size=3), st.binary(max_size=9))
def test_no_two_messages_make_the_same_text(pairs: list[tuple[str, str]], payload: bytes) -> None:
    said = {
        b"".join(mark(0).signed_parts(Content("t", payload[at:], user_properties=(*pairs, ("", "x" * at)))))
        for at in range(10)
    }
    assert len(said) == 10


def test_a_receipt_is_verified_as_it_was_written(tmp_path: Path) -> None:
    told = ReceiptPayload("p", 3, 17, incarnations=((0, "a1"),))
    payload = told.encode(KEYS)
    assert ReceiptPayload.decode(payload) == told
    assert ReceiptPayload.verify_payload(KEYS, "p", payload)
    newer = ReceiptKeys([("", bytes(32)), ("", bytes(range(32)))])  # while the key is being changed
    assert ReceiptPayload.verify_payload(newer, "p", payload)
    assert ReceiptPayload.verify_payload(KEYS, "p", told.encode(newer))
    file = tmp_path / "own"
    files.replace(file, "\n".join(KEYS.derive_key_lines("p")))
    assert ReceiptPayload.verify_payload(ReceiptKeys.read_file(file), "p", payload)
    assert not ReceiptKeys.read_file(file).has_key_for("q")
    assert not ReceiptPayload.verify_payload(KEYS, "q", payload)
    assert not ReceiptPayload.verify_payload(KEYS, "p", told.encode(ReceiptKeys([("", bytes([1] * 32))])))
    assert not ReceiptPayload.verify_payload(KEYS, "p", payload.replace(b"17", b"18"))
    assert not ReceiptPayload.verify_payload(KEYS, "p", payload[:-1] + b',"watermark":99}')


@pytest.mark.parametrize(
    ("text", "mode"), [("0" * 64, 0o604), ("0" * 63, 0o600), ("", 0o600), ("x y", 0o600), ("\xff", 0o600)]
)
def test_a_file_of_keys_is_private_and_holds_keys(tmp_path: Path, text: str, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="TL-C85") as told:
        ReceiptKeys.read_file(file)
    assert "0" * 63 not in str(told.value)
    with pytest.raises(ConfigError, match="TL-C85"):
        ReceiptKeys.read_file(tmp_path / "none")
