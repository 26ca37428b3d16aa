"""What every table of a bridge file is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["NAME", "Section", "SettingError"]

#: Names of bridges and lines: they become file names, client ids and metric labels.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
    """A table of the file: unknown keys are mistakes, nothing changes afterwards, and no error quotes a value [I12]."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SettingError(ValueError):
    """A value that can't be, with a code of its own; for a validator of a table.

    Args:
        code: Such as ``TL-C61``.
        what: What is wrong.
        do: What to do, as a sentence.
    """

    def __init__(self, code: str, what: str, do: str) -> None:
        super().__init__(what)
        self.code, self.what, self.do = code, what, do
