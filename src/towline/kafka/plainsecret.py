"""A secret that stands in plain text in the options of a query, as Spark's own Kafka sink takes it from its users."""

from __future__ import annotations

from typing import Final, Self

__all__ = ["PlainSecret"]

_HIDDEN: Final = "<secret>"


class PlainSecret(str):
    """A value that travels with the sink's settings and is never shown: it prints as ``<secret>``.

    Attributes:
        option: The setting it stands in, as it is written.
    """

    __slots__ = ("option",)

    option: str

    def __new__(cls, value: str, option: str) -> Self:
        """Take a secret from an option."""
        made = super().__new__(cls, value)
        made.option = option
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """What pickle makes it of again."""
        return self.reveal(), self.option

    def __repr__(self) -> str:
        return _HIDDEN

    def __str__(self) -> str:
        return _HIDDEN

    def __format__(self, spec: str) -> str:
        return format(_HIDDEN, spec)

    def reveal(self) -> str:
        """The secret, for the client that opens a connection; the result must never be shown."""
        return "".join([*self])
