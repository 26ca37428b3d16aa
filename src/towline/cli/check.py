"""``towline check``: is this bridge file right, and what would it do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.screen import BridgeFile, command_app, json_text, plain
from towline.text import printable

__all__ = ["app", "check"]

app = command_app()


@app.command(epilog="Example:  towline check bridge.toml && echo fine")
def check(
    file: BridgeFile = Path("bridge.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also every setting that broker and Kafka are told, and its source.")
    ] = False,
) -> None:
    """Validate a bridge file and print the plan.

    No network and no Spark session; a JVM where something is said in SQL. Exit code 2 and a line for each mistake.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.bridge.config.plan import plan_of, render  # noqa: PLC0415
    from towline.bridge.config.sqlcheck import examine  # noqa: PLC0415

    bridge = load(file)
    plan = plan_of(bridge)
    sql = examine(bridge, file)
    plan["sql"] = sql.verdict
    plan["warnings"] += sql.warnings
    if verbose:
        from towline.bridge.runtime.effective import effective, render_effective  # noqa: PLC0415

        plan["effective"] = effective(bridge)
        if not as_json:
            text = "\n".join(map(printable, render_effective(plan["effective"]))) + "\n"
            sys.stdout.write(plain(render(plan) + text))
            return
    sys.stdout.write(json_text(plan, indent=2) if as_json else plain(render(plan)))
