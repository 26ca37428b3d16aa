"""One MQTT client for each of several parts of a batch: as many outboxes, each with a gateway and an id of its own.

What a client publishes comes in the order of its outbox; between clients there is none. A part of Spark's always goes
to the same outbox, so that a batch that is run again meets what the outbox knows of it [I10]. For the same reason the
number stays as it was for a state directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import ConfigError
from towline.spark.gateway_options import WHERE
from towline.spark.link import GatewayPlace

if TYPE_CHECKING:
    from towline.spark.sink_options import SinkOptions

__all__ = ["places_of"]

#: In the state directory: how many clients it has.
_FILE: Final = "clients.json"


def places_of(parsed: SinkOptions) -> tuple[GatewayPlace, ...]:
    """Where the gateways of the clients are, in their order; for one client the state directory itself.

    Raises:
        ConfigError: TL-C28, the state directory has another number of clients.
    """
    if parsed.place.settings:
        _keep_number(Path(parsed.place.state_dir), parsed.clients)
    if parsed.clients == 1:
        return (parsed.place,)
    return tuple(_numbered(parsed.place, number) for number in range(parsed.clients))


def _numbered(place: GatewayPlace, number: int) -> GatewayPlace:
    """As Jet's sink names its clients: the id and a number."""
    settings = json.loads(place.settings)
    directory = str(Path(place.state_dir) / str(number))
    settings["client_id"] = f"{settings['client_id'] or settings['name']}-{number}"
    settings["name"] = f"{settings['name']}-{number}"
    settings["state_dir"] = directory
    settings["outbox"]["number"] = number
    return GatewayPlace(directory, "", json.dumps(settings))


def _keep_number(directory: Path, clients: int) -> None:
    file = directory / _FILE
    if file.exists():
        known = int(json.loads(file.read_text(encoding="utf-8"))["clients"])
    elif (directory / "outbox").exists():
        known = 1
    elif numbered := [one for one in directory.glob("[0-9]*") if (one / "outbox").exists()]:
        known = len(numbered)  # the file is gone, and what each client has is not
    else:
        known = clients
        if clients > 1:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(file, json.dumps({"clients": clients}))
    if known != clients:
        what = f"the state directory {directory} has {known}, and a batch that is run again has to meet what each has"
        do = "Set it back; for another number take a new stateDir and a new checkpoint, when all is delivered."
        raise ConfigError("TL-C28", f'{WHERE} option "clients" = "{clients}"', what, do)
