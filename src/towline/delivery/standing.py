"""What became of an outbox's messages, told twice: by their numbers, and by the answers that were counted.

The outbox knows a message as done by its number; answers of the broker are counters of its ledger. Both stand in the
same frames [I11], and neither is made of the other: their difference is a message that is done and that no broker has
taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from towline.delivery.refused import REPLAYED

if TYPE_CHECKING:
    from towline.journal import Outbox

__all__ = ["ACKNOWLEDGED", "LEFT", "TAKEN_BACK", "standing"]

#: Counters of the ledger: answers of the broker (PUBACK, PUBCOMP), messages of QoS 0 that left, and those of either
#: that were refused all the same.
ACKNOWLEDGED: Final = "acknowledged"
LEFT: Final = "sent"
TAKEN_BACK: Final = "taken_back"
#: One that is asked for while a message is being done may have one half of it: looked at again, so often.
_LOOKS: Final = 5


def standing(outbox: Outbox) -> dict[str, int]:
    """Both, from any thread: ``delivered`` by the numbers, ``acknowledged``, ``sent`` ... by the answers."""
    for _ in range(_LOOKS):
        seen = _look(outbox)
        if seen["delivered"] == seen["acknowledged"] + seen["sent"] - seen["taken_back"]:
            break
    return seen


def _look(outbox: Outbox) -> dict[str, int]:
    ledger = outbox.ledger
    replayed = ledger.get(REPLAYED, 0)  # accepted a second time, and refused no more
    expired, refused = ledger.get("expired", 0), ledger.get("refused", 0) - replayed
    waiting, incomplete, dropped = outbox.waiting, outbox.incomplete, outbox.dropped
    accepted = outbox.end - incomplete - dropped - replayed
    return {
        "accepted": accepted,
        "waiting": waiting,
        "delivered": accepted - waiting - expired - refused,
        **{name: ledger.get(name, 0) for name in (ACKNOWLEDGED, LEFT, TAKEN_BACK)},
        "expired": expired,
        "refused": refused,
        "replayed": replayed,
        "incomplete": incomplete,
        "dropped": dropped,
    }
