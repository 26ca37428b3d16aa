"""A payload and a whole message, for a person and for a program: dead letters and refused messages alike."""

from __future__ import annotations

import base64

import pytest

from towline.cli.screen import header_values, message_lines, payload_values

MIB = 1 << 20


def shown(data: bytes | None, size: int | None = None) -> list[str]:
    """The lines of a payload, without the width of their label."""
    label, *rows = message_lines({"payload": payload_values(data, size)})
    return [label.removeprefix("payload").strip(), *rows]


@pytest.mark.parametrize(
    ("data", "text", "is_json"),
    [
        (b'{"a": 1}', '{"a": 1}', True),
        ("21,5 °C".encode(), "21,5 °C", False),
        (b"\xff\x00", None, False),
        (b"cut \xc3", None, False),
        (b"", "", False),
        (b"[" * 100_000, "[" * 100_000, False),
        (b'{"a": NaN}', '{"a": NaN}', False),
        (b"1" * 5000, "1" * 5000, False),  # Python takes no longer number
    ],
)
def test_a_payload_is_text_where_it_is_utf_8(data: bytes, text: str | None, is_json: bool) -> None:
    assert payload_values(data) == {
        "bytes": len(data),
        "text": text,
        "base64": base64.b64encode(data).decode(),
        "is_json": is_json,
        "truncated": False,
    }


def test_null_is_not_empty() -> None:
    assert payload_values(None) == {"bytes": 0, "text": None, "base64": None, "is_json": False, "truncated": False}
    assert (shown(None), shown(b"")) == (["none"], ["0 B", "  "])
    headers = header_values([("a", None), ("b", b""), ("c", b"\xff")])
    assert headers == [("a", None, None), ("b", "", ""), ("c", None, "/w==")]
    assert [line.split(maxsplit=1)[1] for line in message_lines({"headers": headers})] == ["a = ", "b = ", "c = /w=="]


def test_json_has_a_mebibyte_of_a_payload_and_no_half_character() -> None:
    long = b"x" * (MIB - 1) + "é".encode()
    values = payload_values(long)
    assert (values["bytes"], values["truncated"], values["text"]) == (MIB + 1, True, "x" * (MIB - 1))
    assert len(base64.b64decode(values["base64"])) == MIB
    assert payload_values(long[:MIB], MIB + 1) == values, "of a part that is all there is here"
    assert payload_values(long[:MIB])["text"] is None, "of a whole one it is not UTF-8"


def test_json_is_indented_for_a_person_and_says_what_was_sent() -> None:
    assert shown(b'{"a":[1,{}],"b":"x y"}') == [
        "22 B",
        *("  " + row for row in ("{", '  "a": [', "    1,", "    {}", "  ],", '  "b": "x y"', "}")),
    ]
    for exact in ('{"v": 21.50}', '{"a": 1, "a": 2}', '{"v": 1e400}', '"\\u00e9"'):
        assert shown(exact.encode())[1:] == [f"  {exact}"], "Python would write another one"
    assert shown(b"[" * 400 + b"]" * 400)[0] == "800 B"


def test_a_long_payload_is_cut_on_the_screen() -> None:
    assert shown(bytes(range(256)) * 256)[:2] == [
        "65,536 B, the first 4,096",
        "  000000  00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f",
    ]
    assert len(shown(bytes(range(256)) * 256)) == 1 + 4096 // 16
    label, row = shown(b"[" + b"1," * 50_000 + b"1]")
    assert (label, len(row)) == ("100,003 B, the first 65,536", 65_538)
    assert shown(b"ab", 3_000_000) == ["3,000,000 B, the first 2", "  ab"]
