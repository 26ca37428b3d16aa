"""Reads tables of a bridge file as models and notes every mistake; what the file and its lines have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, create_model

from towline.bridge.config.mistakes import UNKNOWN, Mistakes
from towline.bridge.config.places import KeyPath
from towline.bridge.config.section import Section
from towline.bridge.config.services import GatewaySection, KafkaSection, SparkSection
from towline.gateway.settings import GatewaySettings

__all__ = ["MQTT_KEYS", "Head", "Tables"]

_M = TypeVar("_M", bound=BaseModel)

#: What the bridge decides about a gateway from elsewhere in the file.
_NOT_MQTT = {
    "checkpoint",
    "name",
    "state_dir",
    "subscriptions",
    "guarantee",
    "listen",
    "ack_after",
    "journal",
    "outbox",
    "owner_pid",
    "drain_s",
    "receipts",
    "repeatable",
    "share",
    "linger_after_silence_ms",
}
#: Settings of a gateway that [mqtt] may say.
MQTT_KEYS: dict[str, Any] = {name: (Any, None) for name in GatewaySettings.model_fields if name not in _NOT_MQTT}
#: What [uplink.mqtt] may set: all the rest of `GatewaySettings`. Its values are judged with the line's others.
_LineMqtt = create_model("_LineMqtt", __base__=Section, **MQTT_KEYS)
#: What [mqtt] may set.
_CommonMqtt = create_model("_CommonMqtt", __base__=_LineMqtt, client_id_prefix=(Any, None))


@dataclass(frozen=True, slots=True)
class Head:
    """The other sections of the file, for its lines.

    Attributes:
        bridge: Name of the bridge.
        state_dir: Of the bridge.
        mqtt: The keys of [mqtt].
        kafka: Where records go; None where the table has mistakes.
        spark: The Spark session.
        gateway: Where gateways listen on a network, its files resolved.
    """

    bridge: str
    state_dir: Path
    mqtt: dict[str, Any]
    kafka: KafkaSection | None
    spark: SparkSection
    gateway: GatewaySection

    @property
    def dead_letters(self) -> str:
        """The topic of dead letters where a line names none."""
        return f"{self.bridge}.dead-letters"


class Tables:
    """Reads tables of one file.

    Args:
        directory: Of the file, which relative paths start from.
        mistakes: Where mistakes are noted.
    """

    def __init__(self, directory: Path, mistakes: Mistakes) -> None:
        self.directory = directory
        self.mistakes = mistakes

    def model(self, kind: type[_M], table: Any, path: KeyPath, subject: str, apart: tuple[str, ...] = ()) -> _M | None:
        """Read a table as a model, or note why not.

        A table whose only mistakes are unknown keys is read without them, so that its other mistakes are found too.

        Args:
            kind: The model.
            table: As written.
            path: Where it is.
            subject: The table or line in words.
            apart: Keys that are read as tables of their own.
        """
        own = {k: v for k, v in table.items() if k not in apart} if isinstance(table, dict) else table
        try:
            return kind.model_validate(own)
        except ValidationError as error:
            details = error.errors()
        self.mistakes.add_details(details, kind, path, subject, also=apart)
        unknown = {one["loc"][0] for one in details if one["type"] in UNKNOWN and len(one["loc"]) == 1}
        if len(unknown) < len(details):
            return None
        return kind.model_validate({key: value for key, value in own.items() if key not in unknown})

    def mqtt(self, table: Any, path: KeyPath, subject: str) -> dict[str, Any]:
        """The known keys of [mqtt] or [uplink.mqtt], paths resolved; their values are judged with the line."""
        section = self.model(_CommonMqtt if path == ("mqtt",) else _LineMqtt, table, path, subject)
        if section is None:
            return {}
        keys = section.model_fields_set
        values = {key: self._file(value, (*path, key), subject) for key, value in table.items() if key in keys}
        if isinstance(tls := values.get("tls"), dict):
            values["tls"] = {key: self._file(value, (*path, "tls", key), subject) for key, value in tls.items()}
        return values

    def _file(self, value: Any, path: KeyPath, subject: str) -> Any:
        if str(path[-1]).endswith("_file") and isinstance(value, str):
            return self.secret_file(Path(value), path, subject)
        return value

    def secret_file(self, file: Path | None, path: KeyPath, subject: str) -> Path | None:
        """The file, resolved; it must be there [design section 10]."""
        return self.there(file, path, subject, "Write the secret into it, mode 0600.")

    def there(self, file: Path | None, path: KeyPath, subject: str, do: str) -> Path | None:
        """A file, resolved; it must be there, or `do` says what to do."""
        if file is None:
            return None
        file = self.directory / file.expanduser()
        if not file.is_file():
            self.mistakes.add("TL-C15", path, subject, f"{path[-1]} {file} is not there", do)
        return file
