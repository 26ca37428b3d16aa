"""The gateway to carry messages."""

from __future__ import annotations

from tests.integration.gateway.conftest import new_gateway

__all__ = ["new_gateway"]
