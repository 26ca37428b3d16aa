"""The five questions of ``towline init``, and the bridge file that their answers make.

The judge of an answer is the reader of bridge files: what an answer makes is read, and its first mistake is told.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from towline.bridge.config.file import parse
from towline.bridge.config.mistakes import ConfigMistakes
from towline.bridge.config.patterns import Pattern
from towline.bridge.draft.document import Draft, DraftBroker, DraftLine, DraftRoute, render
from towline.errors import ConfigError
from towline.guarantee import Guarantee

__all__ = [
    "QUESTIONS",
    "InitAnswers",
    "InitQuestion",
    "Judge",
    "answered",
    "default_name",
    "draft_of",
    "legal_name",
    "mistake_in",
    "routes_of",
]

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
#: Leaves room for the name of a line in a client id.
_LONGEST: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class InitAnswers:
    """What is asked.

    Attributes:
        broker: URIs, with commas between.
        topics: Topic filters, with commas between.
        kafka: Bootstrap servers.
        topic: Kafka topic, a template over the wildcards of each filter.
        guarantee: A word of `Guarantee`.
    """

    broker: str = "mqtt://localhost:1883"
    topics: str = "telemetry/{device}/#"
    kafka: str = "localhost:9092"
    topic: str = "telemetry"
    guarantee: str = Guarantee.AT_LEAST_ONCE.value


@dataclass(frozen=True, slots=True)
class InitQuestion:
    """One of them.

    Attributes:
        key: Of `InitAnswers`.
        words: As it is asked.
    """

    key: str
    words: str

    @property
    def option(self) -> str:
        """The option that answers it."""
        return f"--{self.key}"


#: In the order in which they are asked.
QUESTIONS: Final = (
    InitQuestion("broker", "MQTT broker"),
    InitQuestion("topics", "MQTT topics"),
    InitQuestion("kafka", "Kafka bootstrap servers"),
    InitQuestion("topic", "Kafka topic"),
    InitQuestion("guarantee", f"Guarantee ({', '.join(Guarantee)})"),
)


def legal_name(text: str, otherwise: str) -> str:
    """A name of a bridge or line that is like a text."""
    name = _NOT_IN_A_NAME.sub("-", text).strip("-._")[:_LONGEST].rstrip("-._")
    return name or otherwise


def default_name() -> str:
    """Of the bridge: this machine's, since two bridges with one name would end each other's sessions at a broker."""
    return legal_name(socket.gethostname().partition(".")[0], "bridge")


def draft_of(answers: InitAnswers, *, name: str, state_dir: str, broker: DraftBroker | None = None) -> Draft:
    """The file that these answers make.

    Args:
        answers: Whatever was said.
        name: Of the bridge.
        state_dir: Of the bridge.
        broker: In place of what was answered, with all that is known of it.
    """
    broker = broker or DraftBroker(uris=_listed(answers.broker))
    line = DraftLine(
        name=legal_name(re.sub(r"[.\-_]?\{[^{}]*\}", "", answers.topic), "telemetry"),
        routes=routes_of(_listed(answers.topics), answers.topic),
        broker=broker,
    )
    return Draft(name=name, state_dir=state_dir, kafka=answers.kafka, guarantee=answers.guarantee, lines=(line,))


def routes_of(filters: tuple[str, ...], topic: str) -> tuple[DraftRoute, ...]:
    """A route for each filter; its key is made of the named wildcards, or is the whole topic."""
    return tuple(DraftRoute(source=one, topic=topic, key=_key(one)) for one in filters)


def _key(source: str) -> str:
    try:
        names = Pattern.parse(source).names
    except ValueError:
        names = {}
    return "/".join(f"{{{name}}}" for name in names) or "{mqtt.topic}"


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for one in text.split(",") if (part := one.strip())) or (text,)


def mistake_in(draft: Draft, file: Path) -> ConfigError | None:
    """The first mistake that reading the file would find; None if it is right.

    Args:
        draft: What is to be written.
        file: Where.
    """
    try:
        parse(render(draft.without_secrets(), file), file, os.environ)
    except ConfigMistakes as found:
        return found.mistakes[0]
    except ConfigError as found:
        return found
    return None


#: Says what is wrong with an answer; None if nothing is.
Judge: TypeAlias = Callable[[str], ConfigError | None]
#: Asks a person a question, with its default, until the answer is right.
Ask: TypeAlias = Callable[[InitQuestion, str, Judge], str]


def answered(
    said: Mapping[str, str | None],
    made: Callable[[InitAnswers], Draft],
    file: Path,
    ask: Ask | None,
    known: frozenset[str] = frozenset(),
) -> InitAnswers:
    """All answers: those of options, of a person where there is one, and defaults.

    Args:
        said: What the options say, by question; None for nothing.
        made: The draft of answers.
        file: Where it is to be written.
        ask: Asks a person; None where there is nobody.
        known: Questions that something else has answered.

    Raises:
        ConfigError: TL-C163, an option says what can't be, or answers what is known.
    """
    answers = InitAnswers()
    if (mistake := mistake_in(made(answers), file)) is not None:
        raise ConfigError("TL-C163", "towline init", mistake.what, mistake.do)
    for question in QUESTIONS:
        given = said[question.key]
        if question.key in known:
            if given is not None:
                do = "Leave out the option, or --from."
                raise ConfigError("TL-C163", question.option, "the file that --from names says this", do)
            continue
        judge = partial(_judged, answers, question.key, made, file)
        if given is None and ask is not None:
            given = ask(question, getattr(answers, question.key), judge)
        elif given is not None and (mistake := judge(given)) is not None:
            raise ConfigError("TL-C163", question.option, mistake.what, mistake.do)
        answers = answers if given is None else replace(answers, **{question.key: given})
    return answers


def _judged(
    answers: InitAnswers, key: str, made: Callable[[InitAnswers], Draft], file: Path, text: str
) -> ConfigError | None:
    return mistake_in(made(replace(answers, **{key: text})), file)
