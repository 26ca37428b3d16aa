"""What the fuzzers assert of the decoders, on their starting corpus and on all that they have found."""

from __future__ import annotations

from typing import Final

import pytest

from tests.fuzz.codec import LEVELS, check, corpus

FINDINGS: Final[dict[str, tuple[int, str]]] = {
    # Refused in one piece, waited for byte by byte [MQTT-1.5.5-1].
    "a Remaining Length longer than needed": (5, "31 e0 00 00 00 00 00 00 03 00 23 16")
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_was_found_once_does_not_come_again(name: str) -> None:
    version, data = FINDINGS[name]
    check(bytes.fromhex(data), version)


@pytest.mark.parametrize("version", LEVELS.values())
def test_the_corpus_keeps_what_the_fuzzers_assert(version: int) -> None:
    seeds = list(corpus(version))
    assert seeds
    for data in seeds:
        check(data, version)
        check(data[: len(data) // 2], version)
