"""Gateways of the tests of gateways, looked at through an endpoint."""

from __future__ import annotations

from tests.integration.gateway.conftest import new_gateway

__all__ = ["new_gateway"]
