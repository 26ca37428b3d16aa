"""Journals and gateways in Kafka, each under a name of its own."""

from __future__ import annotations

import itertools
from typing import Protocol

import pytest

from tests.integration.gateway.conftest import new_gateway  # noqa: F401 - a fixture
from towline.landing.place import LandingPlace
from towline_prove.devstack import Kafka

_numbers = itertools.count(1)


class NewPlace(Protocol):
    def __call__(self, hint: str = "journal") -> LandingPlace: ...


@pytest.fixture
def new_place(kafka: Kafka) -> NewPlace:
    """Where a journal may lie that no other test uses."""

    def make(hint: str = "journal") -> LandingPlace:
        return LandingPlace(kafka.client, f"{hint}-{next(_numbers)}")

    return make
