"""``towline check`` validates a bridge file and prints the plan; ``towline schema`` prints its JSON Schema."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, json_text, load_bridge, terminal_text
from towline.errors import SetupError
from towline.text import printable

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge


def check(
    file: BridgeFile = Path("bridge.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also every setting of broker and Kafka, and its source.")
    ] = False,
    spark: Annotated[bool, typer.Option("--spark", help="Also check the SQL expressions with a local Spark.")] = False,
) -> None:
    """Validate a bridge file and print the plan.

    No network, and without --spark no Spark: then an error in SQL is reported when towline run starts the line. Exit
    code 2 and a line for each error.

    Example:  towline check bridge.toml && echo fine
    """
    from towline.bridge.runtime import sqlcheck  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.plan import bridge_plan, render  # noqa: PLC0415
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    bridge = load_bridge(file)
    plan = bridge_plan(bridge)
    try:
        check_pyspark()
    except SetupError as error:  # no error of the file: it may run on another machine
        plan["warnings"].append(str(error))
    if sqlcheck.has_sql(bridge):
        plan["sql"] = "checked by Spark" if spark else "checked by Spark when the line starts, or now with --spark"
    if spark:
        _check_sql(bridge, file)
    if verbose:
        from towline.bridge.runtime.effective import effective_settings, render_effective  # noqa: PLC0415 - loads PySpark

        plan["effective"] = effective_settings(bridge)
        if not as_json:
            text = "\n".join(map(printable, render_effective(plan["effective"]))) + "\n"
            sys.stdout.write(terminal_text(render(plan) + text))
            return
    sys.stdout.write(json_text(plan, indent=2) if as_json else terminal_text(render(plan)))


def _check_sql(bridge: Bridge, file: Path) -> None:
    """Check the SQL expressions of a file with a local Spark; raises TL-C74, TL-S20, TL-S21."""
    from towline.bridge.runtime import sqlcheck  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.session import check_java  # noqa: PLC0415
    from towline.errors import ConfigErrors  # noqa: PLC0415
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    check_pyspark()
    check_java(version=True)
    from towline.bridge.runtime.session import create_session  # noqa: PLC0415 - loads PySpark

    local_spark = bridge.spark.model_copy(update={"master": "local[1]", "ui": False})
    stderr_fd = os.dup(2)
    try:  # hide the JVM's standard error: PySpark logs each SQL error with its Java trace
        with Path(os.devnull).open("wb") as null_file:
            os.dup2(null_file.fileno(), 2)
        line_errors = sqlcheck.check_sql(bridge, create_session(bridge.model_copy(update={"spark": local_spark})), file)
    finally:
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)
    if line_errors:
        raise ConfigErrors(error for errors in line_errors.values() for error in errors.errors())


def schema() -> None:
    """Print the JSON Schema (2020-12) of the bridge file.

    An editor with Taplo (Even Better TOML) reads it where the file begins with the line

        #:schema ./bridge.schema.json

    Example:  towline schema > bridge.schema.json
    """
    from towline.bridge.config.schema import bridge_schema  # noqa: PLC0415 - loaded when it is called

    sys.stdout.write(json_text(bridge_schema(), indent=2))
