"""Errors as Spark is shown them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable

import pytest

from towline.bridge.config import tables
from towline.bridge.config.document import key_types
from towline.errors import (
    ConfigError,
    ProtocolViolation,
    TowlineError,
    _foreign_names,
    _normalized,
    did_you_mean,
    without_traceback,
)
from towline.gateway.settings import GatewaySettings, OutboxSettings
from towline.kafka.options import NAMES as KAFKA
from towline.net.endpoint import Tls
from towline.net.settings import WillSettings
from towline.spark.options import SINK_FORMAT, SOURCE_FORMAT
from towline.validation import SettingsModel

SECTIONS = [one for one in vars(tables).values() if isinstance(one, type) and issubclass(one, SettingsModel)]
KEYS = [key for kind in (GatewaySettings, OutboxSettings, WillSettings, Tls, *SECTIONS) for key in key_types(kind)]
MQTT = list(key_types(GatewaySettings))
SOURCE, SINK = SOURCE_FORMAT.names, SINK_FORMAT.names


@pytest.mark.parametrize(
    ("word", "choices", "hint"),
    [
        ("cleanSession", SOURCE, "Leave it out: a session is kept"),
        ("clean_session", MQTT, "Leave it out: a session is kept"),
        ("topic", SOURCE, "Give it in subscribe, with its QoS: telemetry/#:1."),
        ("topic", [*key_types(tables.UplinkTable), "route"], "Give it in [[uplink.route]]"),
        ("qos", SOURCE, "Give it behind each filter in subscribe"),
        ("maxOffsetsPerTrigger", SOURCE, 'Did you mean "maxMessagesPerTrigger"?'),
        ("max_offsets_per_trigger", key_types(tables.DownlinkTable), 'Did you mean "max_messages_per_trigger"?'),
        ("maxTriggerDelay", SOURCE, "In milliseconds: maxTriggerDelayMs."),
        ("trigger_interval_s", key_types(tables.UplinkTable), "An uplink rests by the rate of its messages"),
        ("startingTimestamp", SOURCE, "There is no start by time"),
        ("startingOffsets", SOURCE, 'Did you mean "startingOffset"?'),
        ("keepAliveInterval", MQTT, 'Did you mean "keep_alive_s"?'),
        ("serverURIs", SINK, 'Did you mean "broker"?'),
        ("bootstrap.servers", (*KAFKA, "kafka.bootstrap.servers"), 'Did you mean "kafka.bootstrap.servers"?'),
        ("tls_insecure_set", MQTT, "Certificates are verified"),
        ("abandonSesion", SOURCE, "All of them."),
        ("unknown_sesion", MQTT, "All of them."),
        ("client_id", SOURCE, 'Did you mean "clientId"?'),
    ],
)
def test_words_of_other_systems_are_asked_before_letters(word: str, choices: Iterable[str], hint: str) -> None:
    """By letters cleanSession was abandonSession, which gives up what waits, and topic was willTopic."""
    assert did_you_mean(word, choices, "All of them.").startswith(hint)


def test_the_table_of_foreign_words_speaks_of_options_that_exist() -> None:
    words, dangerous = _foreign_names()
    names = set(map(_normalized, (*SOURCE, *SINK, *KAFKA, *KEYS, "kafka.bootstrap.servers", "subscribe", "route")))
    assert dangerous <= names
    for word, meant in words.items():
        assert meant, word
        for ours, sentence in meant.items():
            assert ours == "*" or _normalized(ours) in names, (word, ours)
            assert _normalized(ours) not in dangerous, (word, ours)
            assert sentence.endswith(".") or (not sentence and ours != "*"), (word, ours)


@pytest.mark.parametrize("name", sorted(_foreign_names()[1]))
def test_what_gives_up_messages_or_a_check_is_never_suggested(name: str) -> None:
    choices = [*SOURCE, *SINK, *KAFKA, *KEYS]
    for place in range(len(name)):
        assert not {name} & set(
            map(_normalized, did_you_mean(name[:place] + name[place + 1 :], choices, "").split('"'))
        )


@without_traceback
def fails(error: Exception) -> None:
    raise error from OSError("the cause")


def test_our_errors_are_shown_without_frames_and_others_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark leaves out the frames where a variable is set; it must not outlive an error that was caught."""
    gc.collect()
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)  # an error of another test may live yet
    for error in (ConfigError("TL-C01", "here", "wrong"), ProtocolViolation("there", "worse")):
        with pytest.raises(TowlineError) as caught:
            fails(error)
        assert (caught.value, caught.value.__cause__) == (error, None)
        assert os.environ["SPARK_HIDE_TRACEBACK"]
    del error, caught
    gc.collect()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    with pytest.raises(RuntimeError):
        fails(RuntimeError("another's"))
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
