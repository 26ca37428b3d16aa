"""``[hono]``: what Hono's device registry would know, and where devices publish."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from towline.bridge.config.section import Section

__all__ = ["HonoDevice", "HonoLimits", "HonoSettings", "HonoTenant", "Mount"]


def _id(kind: str, more: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(f"[a-zA-Z0-9._{more}-]+", value):
            raise ValueError(f'"{value}" is no {kind} id; write letters, digits and {", ".join(f"._-{more}")}')
        return value

    return AfterValidator(check)


#: Ids as Hono's device registry takes them by default (``DEFAULT_TENANT_ID_PATTERN``, ``DEFAULT_DEVICE_ID_PATTERN``).
TenantId: TypeAlias = Annotated[str, _id("tenant", "")]
DeviceId: TypeAlias = Annotated[str, _id("device", ":=")]
Seconds: TypeAlias = Annotated[int, Field(ge=0)]


def _free(defaults: dict[str, str | bool | int | float]) -> dict[str, str | bool | int | float]:
    for name, value in defaults.items():
        if name in _MADE or name.startswith(("mqtt.", "towline.")):
            raise ValueError(f'"{name}" is a header that the profile makes; remove it')
        if name.startswith("ttl") and (isinstance(value, bool | str | float) or value < 0):
            raise ValueError(f'"{name}" is a time in whole seconds; write a number')
    return defaults


#: Header → value; strings go out as they are, anything else as JSON.
Defaults: TypeAlias = Annotated[dict[str, str | bool | int | float], AfterValidator(_free)]

#: Headers that a message has or the profile makes: no default stands for them.
_MADE: Final = frozenset(
    {
        "correlation-id",
        "creation-time",
        "device_id",
        "orig_adapter",
        "orig_address",
        "qos",
        "status",
        "tenant_id",
        "ttd",
        "x-opt-retain",
    }
)
_MOUNT_LEVELS: Final = "write {tenant}, {device}, {device}@{tenant} or a name without wildcard"
_MOUNT: Final = re.compile(r"^(?:\{(?:tenant|device)\}|\{device\}@\{tenant\}|[^{}+#/]+)$")


class HonoDevice(Section):
    """What is said of one device.

    Attributes:
        defaults: Headers of its messages that the message itself does not give, such as ``content-type`` and ``ttl``.
    """

    defaults: Defaults = Field(default_factory=dict)


class HonoLimits(Section):
    """A tenant's ``resource-limits``: the longest time to live in seconds, and that of messages which give none."""

    max_ttl: Seconds | None = Field(default=None, alias="max-ttl")
    max_ttl_telemetry_qos0: Seconds | None = Field(default=None, alias="max-ttl-telemetry-qos0")
    max_ttl_telemetry_qos1: Seconds | None = Field(default=None, alias="max-ttl-telemetry-qos1")
    max_ttl_command_response: Seconds | None = Field(default=None, alias="max-ttl-command-response")


class HonoTenant(Section):
    """What is said of one tenant, in the words of Hono's device registry.

    Attributes:
        defaults: As of a device, which goes before it.
        limits: ``resource-limits``.
        devices: Devices with defaults of their own; others need not be named.
        gateways: Clients that may publish for other devices of the tenant, where a mount says who publishes.
    """

    defaults: Defaults = Field(default_factory=dict)
    limits: HonoLimits = Field(default_factory=HonoLimits, alias="resource-limits")
    devices: dict[DeviceId, HonoDevice] = Field(default_factory=dict)
    gateways: tuple[DeviceId, ...] = ()


class Mount:
    """The levels that a broker puts before the topics of an authenticated client, such as ``{device}@{tenant}``.

    Args:
        text: Levels with slashes between them.
    """

    def __init__(self, text: str) -> None:
        self.levels: tuple[str, ...] = tuple(text.strip("/").split("/")) if text else ()

    @property
    def filter(self) -> str:
        """The same as the beginning of a topic filter."""
        return "".join(f"{'+' if '{' in level else level}/" for level in self.levels)

    def level_of(self, name: str) -> tuple[int, bool] | None:
        """Where ``tenant`` or ``device`` stands: the level, and whether both stand there; None for nowhere."""
        for position, level in enumerate(self.levels):
            if f"{{{name}}}" in level:
                return position, "@" in level
        return None


class HonoSettings(Section):
    """``[hono]``.

    Attributes:
        tenants: Those that may send and be sent to; none for all whose Kafka topics are there.
        tenant: Of topics that name none.
        device: Of topics that name none.
        mount: Levels by which the broker says which client it was, before every topic (see `Mount`); "" for none.
        topic_names: Whether commands and errors go out under the long names of endpoints (``command``, ``req``,
            ``error``) or the short ones (``c``, ``q``, ``e``). What devices publish may have either.
        command_ids: Which ids stand in the topic of a command, as the devices' filters say them: ``both`` for
            ``command/TENANT/DEVICE/req/#``, ``device`` for ``command//DEVICE/req/#``, ``none`` for ``command///req/#``.
            Without a word: ``both``, with a mount ``none``. A gateway (header ``via``) always sees the device's.
        adapter: The header ``orig_adapter``.
    """

    tenants: dict[TenantId, HonoTenant] = Field(default_factory=dict)
    tenant: TenantId | None = None
    device: DeviceId | None = None
    mount: str = ""
    topic_names: Literal["long", "short"] = "long"
    command_ids: Literal["both", "device", "none"] | None = None
    adapter: str = Field(default="hono-mqtt", min_length=1)

    @field_validator("mount")
    @classmethod
    def _levels(cls, value: str) -> str:
        wrong = next((level for level in Mount(value).levels if not _MOUNT.match(level)), None)
        if wrong is not None:
            raise ValueError(f'"{wrong}" is no level of a mount; {_MOUNT_LEVELS}')
        return value
