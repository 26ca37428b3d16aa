"""A gateway's service on the network, with certificates of its own authority."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from tests.unit.gateway.serving import Served, served
from towline.gateway.access import ClientAccess, ServerCertificate, TokenFile
from towline.gateway.front import CallAuthenticator, RemoteService
from towline.gateway.settings import ListenSettings
from towline.journal import Limits, Outbox
from towline.schema import OUTBOX_SCHEMA

TOKEN = "0123456789abcdef-the-token"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Pki:
    """An authority and the files that it signed."""

    directory: Path
    authority: trustme.CA

    @classmethod
    def made(cls, directory: Path) -> Pki:
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory, trustme.CA())
        made.authority.cert_pem.write_to_path(directory / "ca.pem")
        made.issue("server", "127.0.0.1")
        made.issue("client", "client")
        made.tokens(TOKEN)
        return made

    def issue(self, name: str, identity: str, **more: Any) -> None:
        issued = self.authority.issue_cert(identity, **more)
        (self.directory / f"{name}.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(self.directory / f"{name}.key")

    def tokens(self, *lines: str) -> None:
        file = self.directory / "token"
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o600)

    def settings(self, **more: Any) -> ListenSettings:
        files = {"cert_file": "server.pem", "key_file": "server.key", "token_file": "token"}
        given = {"address": "127.0.0.1:0"} | {setting: self.directory / name for setting, name in files.items()} | more
        return ListenSettings.model_validate(given)

    def access(self, **more: str) -> ClientAccess:
        given = {"token_file": str(self.directory / "token"), "ca_file": str(self.directory / "ca.pem")}
        return ClientAccess(**(given | more))

    @property
    def authority_text(self) -> str:
        return (self.directory / "ca.pem").read_text()


@dataclass(frozen=True, slots=True)
class Remote:
    """A served journal that is on the network too."""

    server: Served
    service: RemoteService
    pki: Pki

    @property
    def location(self) -> str:
        return str(self.service.status()["location"])


def listening(settings: ListenSettings, server: Served, name: str) -> RemoteService:
    """Let a served journal listen on the network."""
    door = CallAuthenticator(name, TokenFile(settings.token_file), server.service.tickets)
    return RemoteService(
        settings.location, ServerCertificate.read(settings.cert_file, settings.key_file), server.location, door
    )


@contextlib.contextmanager
def remote(directory: Path, *, name: str = "plant", outbox: bool = False, **settings: Any) -> Iterator[Remote]:
    """Serve a journal on the network while the block runs."""
    pki = Pki.made(directory / "pki")
    with served(directory / "state", name=name) as server, contextlib.ExitStack() as closing:
        if outbox:
            kept = Outbox.open(directory / "state" / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0))
            closing.callback(kept.close)
            server.service._outbox = kept
        service = listening(pki.settings(**settings), server, name)
        closing.callback(service.shutdown)
        yield Remote(server, service, pki)
