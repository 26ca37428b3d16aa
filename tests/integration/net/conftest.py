"""Certificates made for one test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme


class Authority:
    """A certificate authority whose files lie in one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._ca = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, days: tuple[int, int] = (-30, 30)) -> tuple[Path, Path]:
        """Certificate and key for these names, valid from and to so many days from now."""
        now = datetime.now(UTC)
        begin, end = (now + timedelta(days=n) for n in days)
        made = self._ca.issue_cert(*names, common_name=names[0], not_before=begin, not_after=end)
        count = len(list(self._directory.iterdir()))
        cert_file, key_file = self._directory / f"{count}.pem", self._directory / f"{count}.key"
        for number, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(cert_file, append=number > 0)
        made.private_key_pem.write_to_path(key_file)
        return cert_file, key_file

    def listener(self, *names: str, days: tuple[int, int] = (-30, 30)) -> dict[str, str]:
        """Settings of a Mosquitto listener that shows such a certificate."""
        cert_file, key_file = self.issue(*names, days=days)
        return {"certfile": str(cert_file), "keyfile": str(key_file)}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority that brokers and clients of this test may trust."""
    return Authority(tmp_path / "authority")
