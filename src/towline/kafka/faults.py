"""Kafka's errors, told for the person who has to act; the one place where librdkafka's codes get their meaning."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka

from towline.errors import KafkaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: What the binding raises when Kafka fails: a fatal error that meets a pending delivery report comes out as
#: SystemError with the KafkaException as its cause (confluent-kafka 2.16).
FOREIGN: Final = (confluent_kafka.KafkaException, SystemError)


class Meaning(Enum):
    """What an error of librdkafka's says about its cause: its codes, by name, as an older binding may lack one."""

    #: This user has no right to the topic.
    DENIED = frozenset({"CLUSTER_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"})
    #: A newer producer has the transactional id, or this one slept past its transaction.
    FENCED = frozenset({"INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED", "_FENCED"})
    #: A topic is being made, or changes its leader, or has lost it: the same look-up may be answered a moment later.
    PASSING = frozenset(
        {
            *("FENCED_LEADER_EPOCH", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "OFFSET_NOT_AVAILABLE"),
            *("UNKNOWN_LEADER_EPOCH", "UNKNOWN_TOPIC_OR_PART", "_DESTROY_BROKER", "_TIMED_OUT", "_UNKNOWN_PARTITION"),
        }
    )
    #: The record is to blame.
    RECORD = frozenset({"INVALID_RECORD", "INVALID_TIMESTAMP"})
    #: The request is too large, as one record of it may be.
    SIZE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
    #: The time was up.
    TIMEOUT = frozenset(
        {"REQUEST_TIMED_OUT", "_MSG_TIMED_OUT", "_PURGE_INFLIGHT", "_PURGE_QUEUE", "_TIMED_OUT", "_TIMED_OUT_QUEUE"}
    )
    #: `produce` names no error where an earlier one was fatal, or asks for an abort.
    UNNAMED = frozenset({"_FATAL", "_STATE"})


def means(error: Any, *meanings: Meaning) -> bool:
    """Whether an error has one of these meanings; takes what was raised, an error value, or librdkafka's name of it."""
    name = error if isinstance(error, str) else name_of(error)
    return any(name in meaning.value for meaning in meanings)


#: Codes a person can act on.
_ADVICE: Final[Mapping[str, str]] = {
    "MSG_SIZE_TOO_LARGE": "Raise the topic's max.message.bytes and kafka.message.max.bytes, or send less.",
    "INVALID_TIMESTAMP": "Correct the column timestamp, or the topic's message.timestamp.after.max.ms.",
    "TOPIC_AUTHORIZATION_FAILED": "Give this user the right to write to the topic.",
    "CLUSTER_AUTHORIZATION_FAILED": "Give this user the right IdempotentWrite on the cluster.",
    "INVALID_RECORD": "A compacted topic takes no record without a key, and a broker may have rules of its own.",
    "INVALID_TRANSACTION_TIMEOUT": "Lower kafka.transaction.timeout.ms; transaction.max.timeout.ms caps it.",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "Give this user Write and Describe on the sink's transactional ids.",
    "NOT_ENOUGH_REPLICAS": "Too few replicas of the topic are in sync (min.insync.replicas).",
    "_UNKNOWN_TOPIC": "The topic was deleted, or this user may not see it.",
    "UNKNOWN_TOPIC_OR_PART": "The topic was deleted, or this user may not see it.",
}


#: What becomes of the rows of a batch that fails.
KEPT: Final = (
    "Its batch is not committed; the rows stay where Spark read them and are written again when the query restarts."
)


def advice(name: str) -> str:
    """What to do about a code of librdkafka's, and what becomes of the rows meanwhile."""
    return f"{_ADVICE.get(name, '')} {KEPT}".strip()


def reason(error: Any) -> str:
    """Kafka's own words for an error, in one line; takes what was raised, or an error value."""
    error = _clients(error)
    text = error.str() if isinstance(error, confluent_kafka.KafkaError) else str(error)
    for noise in ("Local: ", "Broker: ", "Failed to create producer: "):
        text = text.removeprefix(noise)
    line = " ".join(text.split()).rstrip(".")
    return line[:1].lower() + line[1:] if line[1:2].islower() else line


def _clients(error: Any) -> Any:
    """The client's own error in what was raised."""
    if isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error.args[0] if isinstance(error, confluent_kafka.KafkaException) else error


def name_of(error: Any) -> str:
    """The client's name of an error, such as ``_MSG_TIMED_OUT``; empty for what is no Kafka error."""
    error = _clients(error)
    return str(error.name()) if isinstance(error, confluent_kafka.KafkaError) else ""


_AUTHENTICATION: Final = "authentication failed:"


class LastWord:
    """The best explanation of Kafka's silence, from the errors of its connections, which librdkafka retries.

    Authentication says most, "all brokers down" least; else the newest counts.
    """

    def __init__(self) -> None:
        self.why = ""

    def note(self, error: Any) -> None:
        """Take an error, as ``error_cb``."""
        if name_of(error) == "_ALL_BROKERS_DOWN":
            self.why = self.why or "no broker is up"
        elif not self.why.startswith(_AUTHENTICATION):
            text = reason(error).partition(" (after ")[0].replace("/bootstrap:", ":")
            self.why = f"{_AUTHENTICATION} {text}" if name_of(error) == "_AUTHENTICATION" else text


#: Codes that mean nobody answered, as against a mistake somebody must mend.
SILENCE: Final = frozenset({"TL-K01", "TL-K02"})


def gave_up(servers: str, problem: BaseException) -> KafkaError:
    """TL-K07: a fatal error of the client."""
    return KafkaError("TL-K07", servers, f"Kafka's client gave up: {reason(problem)}", KEPT)


def unreachable(servers: str, seconds: float, why: str, *, rows: bool = False) -> KafkaError:
    """TL-K01: Kafka did not answer.

    Args:
        servers: The bootstrap servers.
        seconds: How long it was waited for, which may be less than it might have been.
        why: The client's word.
        rows: It was to take rows, of which none was sent.
    """
    do = "Check the bootstrap servers, the network and, if Kafka asks for them, user and password."
    what = f"Kafka did not answer{f' for {seconds:.0f} s' if seconds >= 0.5 else ''}: {why}"
    return KafkaError("TL-K01", servers, what, f"Is it up and reachable? {KEPT}" if rows else do)


def missing(servers: str, topics: Iterable[str]) -> KafkaError:
    """TL-K04: topics that are not in the cluster's list, which is never extended by a typo."""
    names = sorted(topics)
    shown = ", ".join(f'"{name}"' for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    what = f"topic {shown} does not exist, or this user may not see it"
    # A message may have chosen the name, and a person may copy the command.
    do = f"Create it: kafka-topics.sh --bootstrap-server {servers} --create --topic {shlex.quote(names[0])}"
    return KafkaError("TL-K04", servers, what, f"{do} --partitions N --replication-factor N.")


def unfit(servers: str, topic: str | None, why: str, detail: str) -> KafkaError:
    """A record that can't be sent, by a `deadletters.Reason`: TL-K04 its topic is missing, TL-K05 too large, TL-K06."""
    if why == "topic_missing" and topic is not None:
        return missing(servers, [topic])
    large = why == "too_large"
    mend = _ADVICE["MSG_SIZE_TOO_LARGE"] if large else "Correct it."
    what = f'a record for topic "{topic}" can not be written: {detail}'
    do = f"{mend} A deadLetterTopic, which at_most_once does without, keeps every byte of such records. {KEPT}"
    return KafkaError("TL-K05" if large else "TL-K06", servers, what, do)


class TransactionVerdict(Enum):
    """What an error within a transaction asks for (KIP-360, librdkafka's INTRODUCTION.md, "Error handling")."""

    #: The same call again.
    AGAIN = "again"
    #: Abort the transaction; the batch may be written anew.
    ABORT = "abort"
    #: A newer producer has the same transactional id, or this one slept past its transaction: stop, never fight.
    FENCED = "fenced"
    #: Nothing certain is known: throw the producer away, make a new one, read the marker.
    DISCARD = "discard"


def verdict(problem: BaseException) -> TransactionVerdict:
    """What to do after an error of a transactional call; what can't be classified is indefinite."""
    if means(problem, Meaning.FENCED):
        return TransactionVerdict.FENCED
    if not isinstance(problem, confluent_kafka.KafkaException):
        return TransactionVerdict.DISCARD  # SystemError: a fatal error met a pending delivery report
    error = problem.args[0]
    if error.fatal():
        return TransactionVerdict.DISCARD
    if error.txn_requires_abort():
        return TransactionVerdict.ABORT
    return TransactionVerdict.AGAIN if error.retriable() else TransactionVerdict.DISCARD
