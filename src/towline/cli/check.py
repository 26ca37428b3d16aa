"""``towline check`` validates a bridge file and prints the plan; ``towline schema`` prints its JSON Schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, json_text, load_bridge, print_lines, terminal_text
from towline.errors import SetupError


def check(
    file: BridgeFile = Path("bridge.toml"),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also every setting of broker and Kafka, and its source.")
    ] = False,
) -> None:
    """Validate a bridge file and print the plan.

    No network and no Spark: an error in SQL is reported when towline run starts the line, and by towline reload. Exit
    code 2 and a line for each error.

    Example:  towline check bridge.toml && echo fine
    """
    from towline.bridge.runtime.plan import plan_text  # noqa: PLC0415 - loaded when it is called
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    bridge, remarks = load_bridge(file), list[str]()
    try:
        check_pyspark()
    except SetupError as error:  # no error of the file: it may run on another machine
        remarks.append(str(error))
    sys.stdout.write(terminal_text(plan_text(bridge, remarks)))
    if verbose:
        from towline.bridge.runtime.effective import settings_lines  # noqa: PLC0415 - loads PySpark

        print_lines(settings_lines(bridge))


def schema() -> None:
    """Print the JSON Schema (2020-12) of the bridge file.

    An editor with Taplo (Even Better TOML) reads it where the file begins with the line

        #:schema ./bridge.schema.json

    Example:  towline schema > bridge.schema.json
    """
    from towline.bridge.config.schema import bridge_schema  # noqa: PLC0415 - loaded when it is called

    sys.stdout.write(json_text(bridge_schema(), indent=2))
