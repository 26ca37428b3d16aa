"""What a publisher says: its log and its errors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from towline.delivery.outbound import Outcome
from towline.delivery.receipts.mark import MARK_BYTES
from towline.errors import ConfigError, JournalFull, PublisherError
from towline.mqtt.rules import NO_QOS_2, message_problem
from towline.net.transport import Endpoint
from towline.text import counted, printable

__all__ = [
    "LOG",
    "Log",
    "check_settings",
    "closed",
    "died",
    "elsewhere",
    "endpoints_of",
    "fields_of",
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


#: The application's own logging: a library does not choose where its words go.
LOG: Final = "towline.publisher"


class Log:
    """Says it there."""

    def info(self, event: str, **facts: object) -> None:
        """Say it at level INFO."""
        logging.getLogger(LOG).info("%s%s", event, _told(facts))

    def warning(self, event: str, **facts: object) -> None:
        """Say it at level WARNING."""
        logging.getLogger(LOG).warning("%s%s", event, _told(facts))


def _told(facts: Mapping[str, object]) -> str:
    return "".join(f" {name}={printable(str(value))}" for name, value in facts.items())


def not_sent(where: str, number: int, outcome: Outcome) -> PublisherError:
    """The error of a message that the broker will not have."""
    if outcome is Outcome.EXPIRED:
        return PublisherError("TL-O05", where, f"message {number} expired before it was sent")
    return PublisherError("TL-O04", where, f"the broker refused message {number}", "It is kept aside; see the log.")


def fields_of(
    topic: str,
    payload: bytes | str,
    qos: int,
    *,
    several_sessions: bool = False,
    retain: bool,
    payload_is_utf8: bool | None,
    user_properties: Iterable[tuple[str, str]],
    message_expiry_seconds: int | None,
    **texts: str | bytes | None,
) -> dict[str, Any]:
    """The columns of a message's row.

    Raises:
        ConfigError: TL-C52, MQTT has no way to say it, with the marks of receipts, which it may get in a later life.
    """
    if qos == 2 and several_sessions:
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", *NO_QOS_2)
    pairs = tuple(user_properties or ())
    said: dict[str, Any] = {**texts, "user_properties": pairs, "expiry_s": message_expiry_seconds}
    if problem := message_problem(topic, payload, qos, MARK_BYTES, **said):
        what = f"MQTT has no way to say it: {problem}"
        raise ConfigError("TL-C52", f"message to {str(topic)[:80]!r}", what, "Change it.")
    return {
        "topic": topic,
        "payload": payload.encode() if isinstance(payload, str) else bytes(payload),
        "qos": int(qos),
        "retain": bool(retain),
        "payload_is_utf8": None if payload_is_utf8 is None else bool(payload_is_utf8),
        "user_properties": [{"key": key, "value": value} for key, value in pairs] if pairs else None,
        "message_expiry_seconds": message_expiry_seconds,
        **texts,
    }


#: Settings for which None stands for no limit.
_UNLIMITED: Final = ("max_bytes", "max_age_s")
#: Setting → its type, least and most.
_SETTINGS: Final[Mapping[str, tuple[type, float, float]]] = {
    "keep_alive_s": (int, 0, 0xFFFF),
    "session_expiry_s": (int, 0, 0xFFFFFFFF),
    "min_free_bytes": (int, 0, 1 << 62),
    "max_bytes": (int, 1, 1 << 62),
    "max_age_s": (float, 0, 1e12),
    "receipt_patience_s": (float, 0.001, 1e9),
}


def check_settings(client_id: str, **settings: Any) -> None:
    """Refuse what can't be, before the directory is touched.

    Raises:
        ConfigError: TL-C52.
    """
    if problem := message_problem("t", b"", 0, client_id=client_id):
        raise wrong(problem)
    for name, value in settings.items():
        kind, low, high = _SETTINGS[name]
        if value is None and name in _UNLIMITED:
            continue
        number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if not (number and low <= value <= high):
            raise wrong(f"{name} is {value!r}, and goes from {low:,} to {high:,}")


def closed(directory: Path) -> PublisherError:
    """The error of a call that comes too late."""
    return PublisherError("TL-O02", str(directory), "the publisher is closed", "Make a new one.")


def died(directory: Path, error: BaseException) -> PublisherError:
    """The error of a publisher that was ended by a fault."""
    first = next(iter(str(error).splitlines()), "").rstrip(". ")
    what = f"the publisher has ended: unexpected {type(error).__name__}{': ' if first else ''}{first}"
    do = "What is on disk is safe; make a new one, and report the fault in Towline."
    made = PublisherError("TL-O09", str(directory), what, do)
    made.__cause__ = error
    return made


def elsewhere(directory: Path, pid: int) -> PublisherError:
    """The error of a process that has inherited a publisher."""
    what = f"this publisher belongs to the process that made it (pid {pid})"
    return PublisherError("TL-O08", str(directory), what, "Make one, with a directory of its own, after the fork.")


def endpoints_of(brokers: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """The brokers, as the transport takes them.

    Raises:
        ConfigError: TL-C52.
    """
    uris = (brokers,) if isinstance(brokers, str) else tuple(brokers)
    if not uris:
        raise wrong("no broker is named")
    try:
        return tuple(Endpoint.parse(uri) for uri in uris)
    except ValueError as error:
        raise wrong(str(error)) from None


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
    do = (
        f"Give receipt_key_file, made with: towline key LINE_KEY_FILE {publisher}. Where every client of the "
        "broker is trusted: receipt_trust_all_clients=True."
    )
    return ConfigError(
        "TL-C84", f"publisher {publisher}", "receipts need either a key or trust in all clients of the broker", do
    )


def without_receipts(where: str) -> ConfigError:
    """The error of a stage that can't be reached."""
    return ConfigError("TL-C52", where, "this publisher asks for no receipts", "Open it with receipts=True.")


def wrong(what: str) -> ConfigError:
    """The error of an argument that can't be."""
    return ConfigError("TL-C52", "Publisher", what, "Change it.")
