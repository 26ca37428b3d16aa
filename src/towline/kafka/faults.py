"""Classification of Kafka's errors: the only module that reads librdkafka's error codes."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka

from towline.errors import KafkaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: What the binding raises when Kafka fails: a fatal error that meets a pending delivery report comes out as
#: SystemError with the KafkaException as its cause, an admin request without an answer as the TimeoutError of its
#: future (confluent-kafka 2.16).
CLIENT_ERRORS: Final = (confluent_kafka.KafkaException, SystemError, TimeoutError)


class ErrorKind(Enum):
    """Kind of an error of librdkafka: a set of its error codes, by name, as an older binding may lack one."""

    #: This user has no right to the topic.
    ACCESS_RIGHTS = frozenset({"CLUSTER_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"})
    #: A newer producer has the transactional id, or this one outlived its transaction.
    FENCED = frozenset({"INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED", "_FENCED"})
    #: A topic is being created, or changes its leader, or has none: the same request may succeed a moment later.
    TRANSIENT = frozenset(
        {
            *("FENCED_LEADER_EPOCH", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "OFFSET_NOT_AVAILABLE"),
            *("UNKNOWN_LEADER_EPOCH", "UNKNOWN_TOPIC_OR_PART", "_DESTROY_BROKER", "_TIMED_OUT", "_UNKNOWN_PARTITION"),
        }
    )
    #: The record itself is invalid.
    INVALID_RECORD = frozenset({"INVALID_RECORD", "INVALID_TIMESTAMP"})
    #: The request is too large, as one record of it may be.
    TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
    #: A time-out.
    TIMEOUT = frozenset(
        {"REQUEST_TIMED_OUT", "_MSG_TIMED_OUT", "_PURGE_INFLIGHT", "_PURGE_QUEUE", "_TIMED_OUT", "_TIMED_OUT_QUEUE"}
    )
    #: `produce` after an earlier error, fatal or abortable, which it does not name.
    UNSPECIFIED = frozenset({"_FATAL", "_STATE"})


def is_kind(error: Any, *kinds: ErrorKind) -> bool:
    """Return whether an error is of one of these kinds; takes an exception, an error value or an error name."""
    name = error if isinstance(error, str) else error_name(error)
    return any(name in kind.value for kind in kinds)


#: Remedies by error code.
_REMEDIES: Final[Mapping[str, str]] = {
    "MSG_SIZE_TOO_LARGE": "Raise the topic's max.message.bytes and kafka.message.max.bytes, or send less.",
    "INVALID_TIMESTAMP": "Correct the column timestamp, or the topic's message.timestamp.after.max.ms.",
    "TOPIC_AUTHORIZATION_FAILED": "Give this user the right to write to the topic.",
    "CLUSTER_AUTHORIZATION_FAILED": "Give this user the right IdempotentWrite on the cluster.",
    "INVALID_RECORD": "A compacted topic takes no record without a key, and a broker may have rules of its own.",
    "INVALID_TRANSACTION_TIMEOUT": "Lower deliveryTimeout; transaction.max.timeout.ms of the brokers caps it.",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "Give this user Write and Describe on the sink's transactional ids.",
    "NOT_ENOUGH_REPLICAS": "Too few replicas of the topic are in sync (min.insync.replicas).",
    "_UNKNOWN_TOPIC": "The topic was deleted, or this user may not see it.",
    "UNKNOWN_TOPIC_OR_PART": "The topic was deleted, or this user may not see it.",
}


#: Consequence of a failed batch.
NOT_COMMITTED: Final = (
    "Its batch is not committed; the rows stay where Spark read them and are written again when the query restarts."
)


def remedy_for(name: str) -> str:
    """Return the remedy of an error code of librdkafka; adds that the batch is not committed."""
    return f"{_REMEDIES.get(name, '')} {NOT_COMMITTED}".strip()


def error_text(error: Any) -> str:
    """Return the text of an error of librdkafka in one line; takes an exception or an error value."""
    error = _client_error(error)
    text = error.str() if isinstance(error, confluent_kafka.KafkaError) else str(error)
    for prefix in ("Local: ", "Broker: ", "Failed to create producer: "):
        text = text.removeprefix(prefix)
    line = " ".join(text.split()).rstrip(".")
    return line[:1].lower() + line[1:] if line[1:2].islower() else line


def _client_error(error: Any) -> Any:
    """Return the error value of an exception of the client."""
    if isinstance(error, TimeoutError):
        return confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT, "no answer in time")  # noqa: SLF001
    if isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error.args[0] if isinstance(error, confluent_kafka.KafkaException) else error


def error_name(error: Any) -> str:
    """Return librdkafka's name of an error, such as ``_MSG_TIMED_OUT``; empty for other errors."""
    error = _client_error(error)
    return str(error.name()) if isinstance(error, confluent_kafka.KafkaError) else ""


_AUTHENTICATION: Final = "authentication failed:"


class LastConnectionError:
    """Most informative connection error of a client, as librdkafka retries connections and raises nothing.

    An authentication error wins, "all brokers down" yields to any other; else the newest error counts.
    """

    def __init__(self) -> None:
        self.reason = ""

    def on_error(self, error: Any) -> None:
        """Record a connection error; the client's ``error_cb``."""
        if error_name(error) == "_ALL_BROKERS_DOWN":
            self.reason = self.reason or "no broker is up"
        elif not self.reason.startswith(_AUTHENTICATION):
            text = error_text(error).partition(" (after ")[0].replace("/bootstrap:", ":")
            self.reason = f"{_AUTHENTICATION} {text}" if error_name(error) == "_AUTHENTICATION" else text


#: Codes of a Kafka that did not answer; the others need a correction.
NO_ANSWER_CODES: Final = frozenset({"TL-K01", "TL-K02"})


def fatal_client_error(servers: str, error: BaseException) -> KafkaError:
    """Return TL-K07 for a fatal error of the client."""
    return KafkaError("TL-K07", servers, f"Kafka's client failed: {error_text(error)}", NOT_COMMITTED)


def unreachable_error(servers: str, waited_s: float, reason: str, *, rows: bool = False) -> KafkaError:
    """Return TL-K01: Kafka did not answer.

    Args:
        servers: The bootstrap servers.
        waited_s: Seconds waited, which may be less than the time-out.
        reason: Error text of the client.
        rows: Whether rows were to be written; none of them was sent.
    """
    remedy = "Check the bootstrap servers, the network and, if Kafka asks for them, user and password."
    problem = f"Kafka did not answer{f' for {waited_s:.0f} s' if waited_s >= 0.5 else ''}: {reason}"
    return KafkaError("TL-K01", servers, problem, f"Is it up and reachable? {NOT_COMMITTED}" if rows else remedy)


def missing_topics_error(servers: str, topics: Iterable[str]) -> KafkaError:
    """Return TL-K04 for topics that do not exist; they are never created by a typo."""
    names = sorted(topics)
    shown = ", ".join(f'"{name}"' for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    problem = f"topic {shown} does not exist, or this user may not see it"
    # A message may have chosen the name, and a person may copy the command.
    remedy = f"Create it: kafka-topics.sh --bootstrap-server {servers} --create --topic {shlex.quote(names[0])}"
    return KafkaError("TL-K04", servers, problem, f"{remedy} --partitions N --replication-factor N.")


def bad_record_error(servers: str, topic: str | None, reason: str, detail: str) -> KafkaError:
    """Return TL-K04, TL-K05 or TL-K06 for a record that can't be sent, by its `deadletters.Reason`."""
    if reason == "topic_missing" and topic is not None:
        return missing_topics_error(servers, [topic])
    is_too_large = reason == "too_large"
    correction = _REMEDIES["MSG_SIZE_TOO_LARGE"] if is_too_large else "Correct it."
    problem = f'a record for topic "{topic}" can not be written: {detail}'
    remedy = f"{correction} A deadLetterTopic, but for at_most_once, keeps every byte of such records. {NOT_COMMITTED}"
    return KafkaError("TL-K05" if is_too_large else "TL-K06", servers, problem, remedy)


class TransactionVerdict(Enum):
    """Next step after an error in a transaction (KIP-360, librdkafka's INTRODUCTION.md, "Error handling")."""

    RETRY = "retry"  #: Repeat the call.
    ABORT = "abort"  #: Abort the transaction; the batch may be written again.
    #: A newer producer has the same transactional id, or this one outlived its transaction: stop, and never fence it.
    FENCED = "fenced"
    DISCARD = "discard"  #: The outcome is unknown: close the producer, create a new one, read the marker.


def transaction_verdict(error: BaseException) -> TransactionVerdict:
    """Return the next step after an error of a transactional call; DISCARD for an unknown error."""
    if is_kind(error, ErrorKind.FENCED):
        return TransactionVerdict.FENCED
    if not isinstance(error, confluent_kafka.KafkaException):
        return TransactionVerdict.DISCARD  # SystemError: a fatal error met a pending delivery report
    kafka_error = error.args[0]
    if kafka_error.fatal():
        return TransactionVerdict.DISCARD
    if kafka_error.txn_requires_abort():
        return TransactionVerdict.ABORT
    return TransactionVerdict.RETRY if kafka_error.retriable() else TransactionVerdict.DISCARD
