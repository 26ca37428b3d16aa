"""The errors of a publisher, and its words about what it leaves behind: one function each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from towline.delivery.outbound import Outcome
from towline.errors import ConfigError, JournalFull, PublisherError
from towline.text import counted

__all__ = [
    "closed",
    "died",
    "elsewhere",
    "foreign_key",
    "given_up",
    "left_behind",
    "left_on_disk",
    "not_sent",
    "not_taken",
    "outbox_full",
    "own_thread",
    "without_key",
    "without_receipts",
    "wrong",
]


def not_sent(where: str, number: int, outcome: Outcome) -> PublisherError:
    """The error of a message that the broker will not have."""
    if outcome is Outcome.EXPIRED:
        return PublisherError("TL-O05", where, f"message {number} expired before it was sent")
    return PublisherError("TL-O04", where, f"the broker refused message {number}", "It is kept aside; see the log.")


def closed(directory: Path) -> PublisherError:
    """The error of a call that comes too late."""
    return PublisherError("TL-O02", str(directory), "the publisher is closed", "Make a new one.")


def died(directory: Path, error: BaseException) -> PublisherError:
    """The error of a publisher that was ended by a fault."""
    first = next(iter(str(error).splitlines()), "").rstrip(". ")
    what = f"the publisher has ended: unexpected {type(error).__name__}{': ' if first else ''}{first}"
    do = "What is on disk is safe; make a new one, and report the fault in Towline."
    failure = PublisherError("TL-O09", str(directory), what, do)
    failure.__cause__ = error
    return failure


def elsewhere(directory: Path, pid: int) -> PublisherError:
    """The error of a process that has inherited a publisher."""
    what = f"this publisher belongs to the process that made it (pid {pid})"
    return PublisherError("TL-O08", str(directory), what, "Make one, with a directory of its own, after the fork.")


def foreign_key(file: str, publisher: str) -> ConfigError:
    """The error of keys that say nothing about this publisher."""
    what, do = f"it holds keys of other publishers, and this one is {publisher}", "Make one: towline key"
    return ConfigError("TL-C86", file, what, f"{do} LINE_KEY_FILE {publisher}")


def given_up(where: str, number: int, outcome: Outcome) -> PublisherError:
    """The error of a message that has no receipt and is not sent any more."""
    what = f"message {number} was {outcome.value} before its receipt came; whether it arrived is not known"
    return PublisherError("TL-O06", where, what)


def left_behind(directory: Path) -> PublisherError:
    """The error of a stage that this publisher will not see reached."""
    what, do = "the publisher was closed before", "The message stays on disk, and the next start sends it."
    return PublisherError("TL-O03", str(directory), what, do)


def left_on_disk(left: int, directory: Path, receipts: Mapping[str, int | bool] | None = None) -> str:
    """What becomes of messages that a publisher leaves behind.

    Args:
        left: How many.
        directory: Where they are.
        receipts: The account of receipts, where nothing but these is missing.
    """
    if receipts is None:
        return f"{counted(left)} not at the broker: kept in {directory}, and the next start sends what is there"
    return f"{counted(left)} without a receipt: kept in {directory}, and the next start asks again{_why(receipts)}"


def _why(receipts: Mapping[str, int | bool]) -> str:
    """Why no receipt has come at all, as far as this side can tell."""
    if receipts["watermark"]:
        return ""
    if receipts["not_believed"]:
        return ". Receipts came that this publisher's key did not sign: is it made of the line's key (towline key)?"
    return (
        ". No receipt has ever come: the line that takes these messages up needs `receipts`, with the same prefix and "
        "the key that this publisher's is made of, and has to reach Kafka"
    )


def not_taken(directory: Path, full: JournalFull | None) -> PublisherError:
    """The error of a message that found no room in time."""
    why = f"no room: {full.what}" if full else "the disk can't keep up"
    what = f"the message was not taken within its timeout ({why})"
    return PublisherError("TL-O30", str(directory), what, full.do if full else "Publish it again later.")


def outbox_full(directory: Path, error: JournalFull) -> PublisherError:
    """The error of a message that finds no room."""
    return PublisherError("TL-O01", str(directory), f"the outbox is full: {error.what}", error.do)


def own_thread(directory: Path) -> PublisherError:
    """The error of a wait on the thread that would have to end it."""
    what = "a callback waits on the publisher's own thread for what this thread has to do"
    return PublisherError("TL-O10", str(directory), what, "Publish with wait=False there, and wait on another thread.")


def without_key(publisher: str) -> ConfigError:
    """The error of receipts that anybody could write."""
    do = f"Give receipt_key_file, made with: towline key LINE_KEY_FILE {publisher}."
    return ConfigError("TL-C84", f"publisher {publisher}", "receipts need a key", do)


def without_receipts(where: str) -> ConfigError:
    """The error of a stage that can't be reached."""
    return ConfigError("TL-C52", where, "this publisher asks for no receipts", "Open it with receipts=True.")


def wrong(what: str) -> ConfigError:
    """The error of an argument that can't be."""
    return ConfigError("TL-C52", "Publisher", what, "Change it.")
