"""A line whose inbox is in Kafka, while no gateway of this machine has it: what Kafka itself tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from towline.errors import TowlineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.bridge.config.model import Line

__all__ = ["OWNER", "advice_on", "render_owner", "status_in_kafka"]

#: Key of a status that Kafka has told: who has the inbox. There is none in what a gateway says of itself.
OWNER: Final = "owner"


def status_in_kafka(line: Line) -> dict[str, Any] | None:
    """What a gateway's status says that stands in Kafka too; None where Kafka tells nothing now.

    Rows and counters are those of the last transaction, and ``owner`` says who wrote it. What is in memory only, such
    as the state of the session, the owner alone knows.
    """
    from towline.bridge.config.model import CONSUMER  # noqa: PLC0415 - as the next one
    from towline.bridge.uplink.landed import place_of  # noqa: PLC0415 - loads librdkafka
    from towline.landing.lookup import word_of  # noqa: PLC0415

    place = place_of(line)
    try:
        word = word_of(place, CONSUMER)
    except TowlineError:
        return None
    if word is None:
        return None
    sign = word.sign
    left_out = sum(word.ledger.get(name, 0) for name in ("deduplicated", "of_other_members"))
    return {
        **word.ledger,
        "guarantee": line.guarantee.value,
        "received": word.end + left_out,
        "journaled": word.end,
        "end": word.end,
        "first": word.first,
        "committed": word.committed,
        "waiting": word.end - word.committed,
        "oldest": word.received_at,
        "inbox": place.where,
        OWNER: {
            "who": None if sign is None else sign.who,
            "epoch": word.epoch,
            "lives": word.lives,
            "online": word.lives and sign is not None and sign.online,
        },
    }


def render_owner(status: Mapping[str, Any]) -> list[str]:
    """Who has the inbox, and where it is, for ``towline status``."""
    owner = status[OWNER]
    how = ("online" if owner["online"] else "not online") if owner["lives"] else "it says nothing now"
    offsets = f"offsets {status['first']:,} to {status['end']:,}"
    return [
        f"  owner     {owner['who'] or 'nobody has said that it is'}   epoch {owner['epoch']}   {how}",
        f"  journal   {status['inbox']}   {offsets}   waiting {status['waiting']:,}   (as Kafka tells; not the owner)",
    ]


def advice_on(status: Mapping[str, Any], *, query: bool) -> Iterator[str]:
    """What to do where nobody has the inbox, or nobody reads it here.

    Args:
        status: Of `status_in_kafka`.
        query: Whether the line's query runs here.
    """
    if not status[OWNER]["lives"]:
        yield "no gateway has its inbox in Kafka: nothing is received; the broker keeps what it can. Start one."
    if not query:
        yield "no query runs here: only where towline run has the line is it known how many messages are in Kafka."
