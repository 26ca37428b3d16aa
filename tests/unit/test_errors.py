"""Errors as Spark is shown them."""

from __future__ import annotations

import gc
import os

import pytest

from towline.errors import ConfigError, ProtocolViolation, TowlineError, one_line


@one_line
def fails(error: Exception) -> None:
    raise error from OSError("the cause")


def test_our_errors_are_shown_without_frames_and_others_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark leaves out the frames where a variable is set; it must not outlive an error that was caught."""
    gc.collect()
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)  # an error of another test may live yet
    for error in (ConfigError("TL-C01", "here", "wrong"), ProtocolViolation("there", "worse")):
        with pytest.raises(TowlineError) as caught:
            fails(error)
        assert (caught.value, caught.value.__cause__) == (error, None)
        assert os.environ["SPARK_HIDE_TRACEBACK"]
    del error, caught
    gc.collect()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    with pytest.raises(RuntimeError):
        fails(RuntimeError("another's"))
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
