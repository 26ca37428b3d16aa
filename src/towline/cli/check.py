"""``towline check``: is this bridge file right, and what would it do. ``towline schema``: what it may say."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import BridgeFile, json_text, load_bridge, plain
from towline.errors import SetupError
from towline.text import printable

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge


def check(
    file: BridgeFile = Path("bridge.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also every setting that broker and Kafka are told, and its source.")
    ] = False,
    spark: Annotated[
        bool, typer.Option("--spark", help="Also start a local Spark and have it judge what is said in SQL.")
    ] = False,
) -> None:
    """Validate a bridge file and print the plan.

    No network, and without --spark no Spark: then a mistake in SQL is told when towline run starts the line. Exit code
    2 and a line for each mistake.

    Example:  towline check bridge.toml && echo fine
    """
    from towline.bridge.runtime import sqlcheck  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.plan import plan_of, render  # noqa: PLC0415
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    bridge = load_bridge(file)
    plan = plan_of(bridge)
    try:
        check_pyspark()
    except SetupError as error:  # no mistake in the file: it may be checked elsewhere than it runs
        plan["warnings"].append(str(error))
    if sqlcheck.says_sql(bridge):
        plan["sql"] = "judged by Spark" if spark else "judged by Spark when the line starts, or now with --spark"
    if spark:
        _judge(bridge, file)
    if verbose:
        from towline.bridge.runtime.effective import effective, render_effective  # noqa: PLC0415 - loads PySpark

        plan["effective"] = effective(bridge)
        if not as_json:
            text = "\n".join(map(printable, render_effective(plan["effective"]))) + "\n"
            sys.stdout.write(plain(render(plan) + text))
            return
    sys.stdout.write(json_text(plan, indent=2) if as_json else plain(render(plan)))


def _judge(bridge: Bridge, file: Path) -> None:
    """Have a local Spark judge what is said in SQL: TL-C74; TL-S20, TL-S21."""
    from towline.bridge.runtime import sqlcheck  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.runtime.session import check_java  # noqa: PLC0415
    from towline.errors import ConfigErrors  # noqa: PLC0415
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    check_pyspark()
    check_java(version=True)
    from towline.bridge.runtime.session import session  # noqa: PLC0415 - loads PySpark

    local = bridge.spark.model_copy(update={"master": "local[1]", "ui": False})
    own = os.dup(2)
    try:  # of Spark's JVM, and of PySpark, which logs each mistake with its Java trace
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        wrong = sqlcheck.judge(bridge, session(bridge.model_copy(update={"spark": local})), file)
    finally:
        os.dup2(own, 2)
        os.close(own)
    if wrong:
        raise ConfigErrors(error for one in wrong.values() for error in one.found())


def schema() -> None:
    """Print the JSON Schema (2020-12) of the bridge file.

    An editor with Taplo (Even Better TOML) reads it where the file begins with the line

        #:schema ./bridge.schema.json

    Example:  towline schema > bridge.schema.json
    """
    from towline.bridge.config.schema import bridge_schema  # noqa: PLC0415 - loaded when it is called

    sys.stdout.write(json_text(bridge_schema(), indent=2))
