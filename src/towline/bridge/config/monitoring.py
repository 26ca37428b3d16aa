"""``[monitor]`` of a bridge file: where its metrics are served, and what it has to be told for them."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field, field_validator

from towline.bridge.config.section import Section

__all__ = ["MonitorSection", "read_address"]

#: ``HOST:PORT``, or a port of the loopback address; an address of IP version 6 in brackets.
_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):)?(?P<port>[0-9]{1,5})")
_LOOPBACK: Final = "127.0.0.1"


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; without a host it is the loopback address.

    Raises:
        ValueError: It is neither; the message says what is wanted.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if not found or int(found["port"]) > 0xFFFF:
        raise ValueError('it is no address to listen on; write it as "127.0.0.1:9464"')
    return (found["host"] or _LOOPBACK).strip("[]"), int(found["port"])


class MonitorSection(Section):
    """The table as written.

    Attributes:
        listen: ``HOST:PORT`` of the endpoint with metrics and health; None for none. There is neither TLS nor a
            password: another address than loopback is for a network on which everybody may read them.
        broker_queue_messages: Most messages that the broker keeps for one client while it is away, such as Mosquitto's
            ``max_queued_messages``; for the metric of that outage budget. None where it has no limit or is not known.
    """

    listen: str | None = None
    broker_queue_messages: Annotated[int, Field(ge=1)] | None = None

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None:
            read_address(value)
        return value
