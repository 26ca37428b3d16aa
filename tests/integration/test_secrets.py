"""What is logged of a fault that nobody foresaw holds no secret, in any process: a traceback has no locals [I12]."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import towline
from tests.unit.bridge.test_config import GOOD, read
from towline import ClientSettings, Publisher
from towline.bridge.runtime.child_supervisors import unexpected_error
from towline.bridge.runtime.session import create_session
from towline.errors import without_traceback

SECRET = "s3cret-of-the-plant"  # noqa: S105

#: The frame that fails has the secret, as every frame that opens a connection.
PLANTED = """
import os, sys
from pathlib import Path
{imports}
def fail(*_, **__):
    password = Path(os.environ["SECRET_FILE"]).read_bytes()
    raise RuntimeError(f"planted, {{len(password)}} bytes")
{broken} = fail
sys.exit(main({arguments}))
"""


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    return tmp_path / "secret"


@pytest.fixture
def fault(secret_file: Path) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        password = secret_file.read_bytes()
        raise RuntimeError(f"planted, {len(password)} bytes")

    return fail


def logged(secret_file: Path, imports: str, broken: str, told: object = None, arguments: str = "", **more: str) -> str:
    """Everything that a process says which ends by the planted fault."""
    program = PLANTED.format(imports=imports, broken=broken, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(told) + "\n",
        env={**os.environ, "SECRET_FILE": str(secret_file), "PYTHONUNBUFFERED": "1", **more},
        cwd=secret_file.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


def is_plain(text: str) -> bool:
    """Whether the fault is told, with its frames, and nothing of what they hold."""
    assert "Traceback (most recent call last)" in text
    assert f"planted, {len(SECRET)} bytes" in text
    return SECRET not in text and "locals" not in text


@pytest.mark.parametrize(("module", "broken"), [("process", "Pump"), ("front", "_serve")])
def test_a_gateway_and_its_network_process(secret_file: Path, module: str, broken: str) -> None:
    imports = f"from towline.gateway import {module}\nfrom towline.gateway.{module} import main"
    settings = {"name": "telemetry", "brokers": ["mqtt://127.0.0.1:1"], "subscriptions": [{"pattern": "t"}]}
    told = {**settings, "state_dir": "state", "username": "u", "password_file": str(secret_file)}
    assert is_plain(logged(secret_file, imports, f"{module}.{broken}", told, TOWLINE_LOG_FORMAT="text"))


def test_a_command(secret_file: Path) -> None:
    """The output that a fault's line asks for."""
    imports = "from towline.bridge.config import file\nfrom towline.cli import main"
    said = logged(secret_file, imports, "file.load", arguments='["check", "x.toml"]', TOWLINE_DEBUG="1")
    assert is_plain(said)


def test_the_driver_and_what_it_is_told(secret_file: Path) -> None:
    """A bridge that it does not understand is quoted in no error."""
    pytest.importorskip("pyspark")
    bridge = read(GOOD, secret_file.parent).model_dump(mode="json", by_alias=True)
    imports = "from towline.bridge.runtime import driver\nfrom towline.bridge.runtime.driver import main"
    said = logged(secret_file, imports, "driver.find_modules", bridge | {"name": [SECRET]})
    assert SECRET not in said
    assert "ValidationError" in said


def test_a_part_of_the_bridge(
    fault: Callable[..., NoReturn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOWLINE_DEBUG", "1")
    with pytest.raises(RuntimeError) as caught:
        fault()
    told = str(unexpected_error("kafka", caught.value))
    assert is_plain(capsys.readouterr().err + told)


def test_a_publisher_in_an_application(
    fault: Callable[..., NoReturn], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ClientSettings(username="u", password=SECRET)
    assert SECRET not in repr(settings)
    with Publisher("mqtt://127.0.0.1:1", state_dir=tmp_path / "outbox", settings=settings) as publisher:
        publisher.publish("t", b"x").at_broker.add_done_callback(fault)
        publisher.close(timeout=0)
    assert is_plain("\n".join(map(logging.Formatter().format, caplog.records)))


def test_a_task_of_spark(fault: Callable[..., NoReturn], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark can be told to show locals (``…tracebackWithLocals.enabled``): not those of our frames."""
    util = pytest.importorskip("pyspark.util")
    monkeypatch.setenv("SPARK_TRACEBACK_WITH_LOCALS", "1")
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)  # an error of another test may live yet
    told = io.BytesIO()
    try:
        without_traceback(fault)()
    except RuntimeError as error:
        util.handle_worker_exception(error, told)
    assert is_plain(told.getvalue().decode(errors="replace"))


def test_what_the_jvm_is_started_with_names_no_secret_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line is for every user of the machine; what `spark.redaction.regex` hides is told afterwards."""
    pyspark = pytest.importorskip("pyspark")
    for name in ("_gateway", "_jvm"):  # of a session that other tests had
        monkeypatch.setattr(pyspark.SparkContext, name, None)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    commands = []

    def started(command: list[str], **_: object) -> NoReturn:
        commands.append(command)
        raise InterruptedError

    monkeypatch.setattr("pyspark.java_gateway.Popen", started)
    conf = f'[spark.conf]\n"spark.hadoop.fs.s3a.secret.key" = "{SECRET}"\n"spark.a.b" = "c"\n'
    before = os.umask(0)
    try:
        with pytest.raises(InterruptedError):
            create_session(read(GOOD.replace("[[uplink]]", conf + "[[uplink]]"), tmp_path))
    finally:
        os.umask(before)
    assert "spark.a.b=c" in commands[0]
    assert SECRET not in str(commands)


def test_no_field_that_holds_a_secret_is_in_the_text_of_its_object() -> None:
    """What is printed, logged or told by an error may be any object."""
    names = re.compile("(password|token|secret)$")
    shown: set[str] = set()
    for module in pkgutil.walk_packages(towline.__path__, "towline."):
        if module.name.endswith("__main__"):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            made = isinstance(kind, type) and hasattr(kind.__repr__, "__wrapped__")  # as dataclass makes it
            if made and dataclasses.is_dataclass(kind):
                shown |= {
                    f"{module.name}: {one.name}: {one.type}"
                    for one in dataclasses.fields(kind)
                    if one.repr and names.search(one.name) and one.type not in {"int", "bool", "MessageToken"}
                }
    assert shown == set()
