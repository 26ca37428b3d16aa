"""A factory as ``authenticator`` names it: the SCRAM of the example."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples" / "mqtt_scram.py"


def scram(user: str | None, password: bytes | None) -> Any:
    spec = importlib.util.spec_from_file_location("mqtt_scram", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ScramSha256(user or "", password or b"")
