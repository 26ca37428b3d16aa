"""Which version of MQTT is tried, and when it is left for good."""

from __future__ import annotations

import pytest

from towline.errors import BrokerRefused, Unreachable
from towline.mqtt.events import Close, Filter, SessionConfig
from towline.mqtt.versions import LEVELS_OF_SETTING, VersionNegotiation

SILENT = Close(Unreachable("TL-M03", "w", "no CONNACK within 10 s", "Trying again."), no_connack=True)
REFUSED = Close(
    BrokerRefused("TL-M08", "w", "unsupported protocol version", "Set it."), fatal=True, version_refused=True
)
ANSWERED = Close(None, reconnect_at_once=True, version_confirmed=True)
CONFIG = SessionConfig("plant-7", "w")


def judged(versions: VersionNegotiation, *ends: Close, config: SessionConfig = CONFIG) -> list[int]:
    """The level after each end."""
    levels = []
    for end in ends:
        versions.decide_close(end, config)
        levels.append(versions.level)
    return levels


def test_a_broker_that_ends_the_connection_at_version_5_is_left_with_an_older_one_for_good() -> None:
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    assert (judged(versions, SILENT), versions.level_is_guess) == ([4], True)
    assert (judged(versions, ANSWERED, SILENT), versions.level_is_guess) == ([5, 4], False)
    versions.confirm_level()
    assert judged(versions, SILENT, SILENT) == [4, 4], "from now on silence is an outage"


def test_an_outage_in_the_midst_of_it_begins_with_version_5_again() -> None:
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    assert judged(versions, SILENT, SILENT) == [4, 3]
    versions.connection_failed()
    assert (versions.level, versions.level_is_guess) == (5, False)
    assert judged(versions, SILENT, ANSWERED) == [4, 5]
    versions.connection_failed()
    assert judged(versions, SILENT) == [4]
    assert versions.level_is_guess, "what was seen before the outage counts no more"


def test_a_round_without_any_answer_tells_what_was_tried_and_begins_again() -> None:
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    for _ in range(2):
        judged(versions, SILENT, SILENT)
        told = versions.decide_close(SILENT, CONFIG)
        assert isinstance(told.error, Unreachable)
        assert "MQTT 5, MQTT 3.1.1, MQTT 3.1 were tried" in str(told.error)
        assert not told.reconnect_at_once
        assert versions.level == 5


def test_a_refusal_after_silence_is_not_final() -> None:
    """A broker of version 5 alone that was restarting at the first try."""
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    judged(versions, SILENT, REFUSED)
    told = versions.decide_close(REFUSED, CONFIG)
    assert not told.fatal
    assert versions.level == 5


def test_a_refusal_by_word_is_final() -> None:
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    assert judged(versions, REFUSED) == [4]
    assert not versions.level_is_guess
    judged(versions, REFUSED)
    told = versions.decide_close(REFUSED, CONFIG)
    assert told.fatal
    assert "It supports none of MQTT 5, MQTT 3.1.1, MQTT 3.1" in str(told.error)


@pytest.mark.parametrize(
    ("setting", "advice"), [("5", "Set it."), ("3.1.1", 'protocol = "5", or "auto"'), ("3.1", '"5"')]
)
def test_a_refusal_of_the_one_version_given_names_the_others(setting: str, advice: str) -> None:
    """MQTT 5 section 3.1.2.2: a server of version 5 alone says 0x84 to 3.1.1, too."""
    told = VersionNegotiation(LEVELS_OF_SETTING[setting]).decide_close(REFUSED, CONFIG)
    assert told.fatal
    assert advice in str(told.error)


def test_a_setting_that_only_version_5_can_say_is_named_instead_of_lost() -> None:
    config = SessionConfig("plant-7", "w", filters=(Filter("$share/g/t/#", 1),))
    versions = VersionNegotiation(LEVELS_OF_SETTING["auto"])
    silent, refused = (
        versions.decide_close(SILENT, config),
        VersionNegotiation(LEVELS_OF_SETTING["auto"]).decide_close(REFUSED, config),
    )
    assert "MQTT 3.1.1 can't be used: a shared subscription ($share) needs MQTT 5" in str(silent.error)
    assert not silent.fatal
    assert "MQTT 3.1.1 can't be used: a shared subscription ($share) needs MQTT 5" in str(refused.error)
    assert "Change that setting" in str(refused.error)
    assert refused.fatal


def test_one_version_given_is_one_version_tried_and_the_way_out_is_told() -> None:
    versions = VersionNegotiation(LEVELS_OF_SETTING["5"])
    told = versions.decide_close(SILENT, CONFIG)
    assert versions.level == 5
    assert 'protocol = "auto" finds out' in str(told.error)
