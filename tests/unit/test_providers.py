"""Credential providers: each way in which a user's function can fail, and that none of it shows a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.errors import ConfigError
from towline.providers import call_provider, check_provider, read_secret

SECRET = "s3cr3t"  # noqa: S105 - planted
MODULE = f"""
count = 0

def token(text):
    global count
    count += 1
    return f"{{text}}-{{count}}"

def fails():
    raise RuntimeError("https://login?secret={SECRET}")

def odd():
    return ["{SECRET}"]
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "provider_of_tests.py").write_text(MODULE)
    (tmp_path / "raising_provider_of_tests.py").write_text(f"raise OSError('{SECRET}')")
    monkeypatch.syspath_prepend(tmp_path)


def text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


def test_a_provider_is_called_for_each_credential() -> None:
    asked = [call_provider("provider_of_tests:token", "[kafka]", text, "text", "t") for _ in range(2)]
    assert asked == ["t-1", "t-2"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("provider_of_tests:fails", "failed (RuntimeError, provider_of_tests.py line 10)"),
        ("provider_of_tests:odd", "returned list and not text"),
        ("provider_of_tests:nothing", "can't be imported (AttributeError, providers.py line "),
        ("no_such_module:token", "can't be imported (ModuleNotFoundError no_such_module, "),
        ("raising_provider_of_tests:token", "can't be imported (OSError, raising_provider_of_tests.py line 1)"),
        ("provider_of_tests.token", "is not module:function"),
    ],
)
def test_what_a_provider_can_do_wrong_is_said_without_its_secret(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call_provider(name, "[kafka] token_provider", text, "text", *(["x"] if name.endswith("token") else []))
    assert caught.value.code == "TL-C179"
    assert said in caught.value.problem
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("name", ["", "module", "a:b:c", "a b:c", "../a:b", "os:system;x", "1a:b"])
def test_a_providers_name_is_checked_without_importing_anything(name: str) -> None:
    with pytest.raises(ConfigError, match="TL-C179"):
        check_provider(name, "[kafka]")


def test_a_secret_is_the_file_without_the_end_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b" p w \r\n")
    assert read_secret("key_file", tmp_path / "key", bytes) == b" p w "
