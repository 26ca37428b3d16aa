"""What every table of a bridge file is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["NAME", "Section"]

#: Names of bridges and lines: they become file names, client ids and metric labels.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
    """A table of the file: unknown keys are mistakes, nothing changes afterwards, and no error quotes a value [I12]."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
