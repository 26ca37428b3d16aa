"""Transactions of exactly-once lines and of journals in Kafka: time-outs, ids, what is left open. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.flaws import days
from towline.doctor.kafka.seen import OK
from towline.text import counted

if TYPE_CHECKING:
    from towline.doctor.kafka.seen import LookedAt

__all__ = ["RULES"]

_BEGINS: Final = DoctorQuestion("TL-D31", "transactions")
_LONGEST: Final = "transaction.max.timeout.ms"
_REFUSED_CLOCK: Final = "INVALID_TRANSACTION_TIMEOUT"
_DENIED: Final = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
_EXPIRY: Final = "transactional.id.expiration.ms"
_VERIFIED: Final = "transaction.partition.verification.enable"
#: Kafka's own expiry is a week; below a day a machine that stood still over a night is a stranger.
_SHORT_EXPIRY_MS: Final = 86_400_000


def clocks(look: LookedAt) -> Iterator[Finding]:
    """TL-D31: whether a transaction can begin, tried with the time-out of each writer."""
    if not look.writers:
        return
    most = look.kafka.least(_LONGEST)
    asked = max(one.clock_ms for one in look.writers)
    tried = [(one, look.kafka.transactions[one.probe_id]) for one in look.writers if _tried(look, one.probe_id)]
    failed = [(one, outcome) for one, outcome in tried if outcome[0] not in (OK, _DENIED)]
    fact = f"transaction.timeout.ms = {asked:,}"
    fact += "" if most is None else f", {_LONGEST} = {most:,} of the brokers"
    if (most is not None and most < asked) or any(outcome[0] == _REFUSED_CLOCK for _, outcome in failed):
        yield _BEGINS.answer(
            Standing.BROKEN,
            fact,
            until="never: Kafka refuses to begin a transaction",
            mend=f"Raise {_LONGEST} of the brokers, or lower transaction.timeout.ms in [kafka] settings.",
        )
        return
    for writer, (name, words) in failed:
        until = "never: the line writes nothing" if name else ""
        because = f"a transaction of {writer.probe_id} could not begin: {words}"
        mend = "Is a broker down, or Kafka busy? Mend that, and ask again."
        yield _BEGINS.answer(Standing.BROKEN, because, until=until, mend=mend, line=writer.line)
    if tried and not failed:
        begun = sum(outcome[0] == OK for _, outcome in tried)
        if begun:
            yield _BEGINS.answer(Standing.HOLDS, f"{counted(begun, 'writer')} began a transaction; {fact}")


def _tried(look: LookedAt, probe_id: str) -> bool:
    return probe_id in look.kafka.transactions


def expiry(look: LookedAt) -> Iterator[Finding]:
    """TL-D40: how long Kafka remembers a writer that writes nothing.

    A line may stand still for longer: each batch begins with `init_transactions`, which makes a forgotten id anew. But
    then nothing tells an older copy of the writer that woke up from a new one, except that it has no transaction open.
    """
    kept = look.kafka.least(_EXPIRY)
    if not look.writers or kept is None:
        return
    short = kept < _SHORT_EXPIRY_MS
    yield Finding(
        code="TL-D40",
        promise="older writers fenced",
        verdict=Standing.WARNS if short else Standing.LIMITED,
        because=f"{_EXPIRY} = {kept:,} of the brokers; a line may stand still for longer",
        until=f"an older copy of a line was frozen for {days(kept)} and writes again",
        mend=f"Raise {_EXPIRY} of the brokers to 604800000, seven days." if short else "",
    )


def verified(look: LookedAt) -> Iterator[Finding]:
    """TL-D41: whether Kafka lets a late request into a transaction that is over (KIP-890).

    librdkafka speaks the protocol before KIP-890: of the two ways to close the hole it has the brokers' check, and
    Towline's new producer for each transaction (ADR 7).
    """
    kafka = look.kafka
    if not look.writers or not kafka.settings:
        return
    found = kafka.texts(_VERIFIED)
    absent = any(_VERIFIED not in one for one in kafka.settings.values())
    fact = f"{_VERIFIED} = {'false' if 'false' in found else 'true'} of the brokers"
    if absent:
        fact = f"the brokers have no {_VERIFIED}: they are older than Kafka 3.6"
    well = found == {"true"} and not absent
    yield Finding(
        code="TL-D41",
        promise="late requests kept out",
        verdict=Standing.HOLDS if well else Standing.WARNS,
        because=fact,
        until="" if well else "a request of a killed writer comes late: its transaction stays open, and readers wait",
        mend="" if well else f"Set {_VERIFIED} = true, with Kafka 3.6 or newer.",
    )


RULES: Final = (clocks, expiry, verified)
