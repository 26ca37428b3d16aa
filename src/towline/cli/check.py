"""``towline check`` validates a bridge file and prints the plan; ``towline schema`` prints its JSON Schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, json_text, load_bridge, terminal_text
from towline.errors import SetupError
from towline.text import printable


def check(
    file: BridgeFile = Path("bridge.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also every setting of broker and Kafka, and its source.")
    ] = False,
) -> None:
    """Validate a bridge file and print the plan.

    No network and no Spark: an error in SQL is reported when towline run starts the line, and by towline reload. Exit
    code 2 and a line for each error.

    Example:  towline check bridge.toml && echo fine
    """
    from towline.bridge.runtime.plan import bridge_plan, render  # noqa: PLC0415 - loaded when it is called
    from towline.spark.session import check_pyspark  # noqa: PLC0415

    bridge = load_bridge(file)
    plan = bridge_plan(bridge)
    try:
        check_pyspark()
    except SetupError as error:  # no error of the file: it may run on another machine
        plan["warnings"].append(str(error))
    if verbose:
        from towline.bridge.runtime.effective import effective_settings, render_effective  # noqa: PLC0415 - loads PySpark

        plan["effective"] = effective_settings(bridge)
        if not as_json:
            text = "\n".join(map(printable, render_effective(plan["effective"]))) + "\n"
            sys.stdout.write(terminal_text(render(plan) + text))
            return
    sys.stdout.write(json_text(plan, indent=2) if as_json else terminal_text(render(plan)))


def schema() -> None:
    """Print the JSON Schema (2020-12) of the bridge file.

    An editor with Taplo (Even Better TOML) reads it where the file begins with the line

        #:schema ./bridge.schema.json

    Example:  towline schema > bridge.schema.json
    """
    from towline.bridge.config.schema import bridge_schema  # noqa: PLC0415 - loaded when it is called

    sys.stdout.write(json_text(bridge_schema(), indent=2))
