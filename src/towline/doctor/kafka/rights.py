"""What this user may do: as Kafka itself says (KIP-430), or as it answered when it was tried. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.flaws import Flaw, rows_of
from towline.doctor.kafka.seen import OK
from towline.doctor.kafka.topics import DENIED

if TYPE_CHECKING:
    from towline.doctor.kafka.seen import LookedAt

__all__ = ["RULES"]

_RIGHTS: Final = DoctorQuestion("TL-D39", "rights")
_ACL: Final = "kafka-acls.sh --bootstrap-server SERVERS --add --allow-principal User:THIS"
_PREFIXED: Final = "--resource-pattern-type prefixed --transactional-id"
_IDS: Final = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
#: Broker settings that other rows judge.
_READ: Final = "transaction.max.timeout.ms, transactional.id.expiration.ms, transaction.partition.verification.enable"


def rights(look: LookedAt) -> Iterator[Finding]:
    """TL-D39: one row for each right that is missing or not known."""
    found = [*_on_topics(look)]
    yield from rows_of(_RIGHTS, found)
    others = [*_on_the_rest(look)]
    yield from others
    if not found and not others and look.of():
        yield _RIGHTS.answer(Standing.HOLDS, f"this user may do all that the lines need with {len(look.of())} topics")


def _on_topics(look: LookedAt) -> Iterator[tuple[str, Flaw]]:
    kafka = look.kafka
    acl = _ACL.replace("SERVERS", kafka.servers)
    for name in dict.fromkeys(one.name for one in look.wanted):
        uses = look.uses(name)
        seen = kafka.topics.get(name)
        if seen is not None and seen.planned:
            outcome, _ = kafka.may_create.get(name, (OK, ""))
            if outcome in DENIED:
                mend = f"{acl} --operation Create --topic TOPIC; or make it by hand."
                yield name, Flaw(Standing.BROKEN, "Create is not granted, and it is missing", "never", mend)
            continue
        needed = sorted({right for one in uses for right in one.rights})
        operations = " ".join(f"--operation {right.title()}" for right in needed)
        if name in kafka.hidden:
            if any(one.must for one in uses):
                mend = f"{acl} {operations} --operation DescribeConfigs --topic TOPIC"
                yield name, Flaw(Standing.BROKEN, "this user may not even see it (Describe)", "never", mend)
        elif seen is not None and seen.allowed is not None:
            lacking = [right for right in needed if right not in seen.allowed]
            if lacking:
                words = " and ".join(right.title() for right in lacking)
                until = "never: the line stops at its first batch"
                yield name, Flaw(Standing.BROKEN, f"{words} not granted", until, f"{acl} {operations} --topic TOPIC")
            elif seen.config is None:
                mend = f"{acl} --operation DescribeConfigs --topic TOPIC"
                fact = "DescribeConfigs not granted: its limits can't be read, by doctor and by the line"
                yield name, Flaw(Standing.UNKNOWN, fact, "", mend)


def _on_the_rest(look: LookedAt) -> Iterator[Finding]:
    kafka = look.kafka
    acl = _ACL.replace("SERVERS", kafka.servers)
    refused = [one for one in look.writers if kafka.transactions.get(one.probe_id, (OK, ""))[0] == _IDS]
    for one in refused:
        yield _RIGHTS.answer(
            Standing.WARNS,
            f"transactional id {one.probe_id} is refused, which a right for the prefix {one.prefix} would cover",
            until="never, unless each id is granted by its full name",
            mend=f"{acl} --operation Write --operation Describe {_PREFIXED} {one.prefix}",
            line=one.line,
        )
    if not kafka.settings and kafka.brokers:
        yield _RIGHTS.answer(
            Standing.UNKNOWN,
            f"DescribeConfigs on the cluster is not granted: {_READ} can't be read",
            mend=f"{acl} --operation DescribeConfigs --cluster, for the user that runs doctor.",
        )


RULES: Final = (rights,)
