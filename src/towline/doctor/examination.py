"""All examiners, one after the other; one that fails is a row and not the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from towline.doctor.broker.examiner import examine_broker
from towline.doctor.case import Case, Examiner
from towline.doctor.clock import examine as clock
from towline.doctor.disk import examine as disk
from towline.doctor.findings import Finding, Standing
from towline.doctor.kafka.examiner import examine as kafka
from towline.doctor.memory import examine as memory
from towline.errors import TowlineError

__all__ = ["EXAMINERS", "examine"]

#: What is examined, in the order in which a person is told of it.
EXAMINERS: Final[Mapping[str, Examiner]] = {
    "broker": examine_broker,
    "Kafka": kafka,
    "disk": disk,
    "clock": clock,
    "memory": memory,
}


def examine(case: Case, examiners: Mapping[str, Examiner] = EXAMINERS) -> Iterator[tuple[str, list[Finding]]]:
    """Let each examiner look.

    Yields:
        The examiner's name, and what it found.
    """
    for name, look in examiners.items():
        found: list[Finding] = []
        try:
            found.extend(look(case))
        except TowlineError as error:
            found.append(_failed(name, error))
        yield name, found


def _failed(name: str, error: TowlineError) -> Finding:
    return Finding(
        code="TL-D01",
        promise=name,
        verdict=Standing.UNKNOWN,
        because=str(error),
        mend="Mend that, and ask again.",
    )
