"""``towline demo``: the promise shown on this machine, with real brokers, in about a minute.

It is a run of `towline_prove.scenario` with an audience: nothing is simulated and no number is made up.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from towline.cli.screen import is_live, plain
from towline_prove.stage import Moment, Stage

if TYPE_CHECKING:
    from towline_prove.scenario import Run, Scenario

_GUARANTEES: Final = ("at_most_once", "at_least_once", "exactly_once")


def demo(
    scene: Annotated[
        str, typer.Argument(help="kills, or receipts: a broker that loses its store.", metavar="[kills|receipts]")
    ] = "kills",
    *,
    guarantee: Annotated[
        str | None,
        typer.Option(help="at_most_once, at_least_once or exactly_once (default at_least_once; receipts: the last)."),
    ] = None,
    messages: Annotated[
        int | None, typer.Option(min=100, max=1_000_000, help="Numbered messages (default 20000; receipts: 5000).")
    ] = None,
    devices: Annotated[int, typer.Option(min=8, max=1000, help="Publishing devices.")] = 50,
    rate: Annotated[float | None, typer.Option(min=1, help="Messages a second (default 1000; receipts: 500).")] = None,
    kills: Annotated[bool, typer.Option(help="Kill the gateway and Spark on the way.")] = True,
    keep: Annotated[Path | None, typer.Option(help="Keep logs, configuration and data in this directory.")] = None,
) -> None:
    """Start real brokers and a bridge, publish numbered messages, kill -9 on the way, and show the account.

    With receipts, Mosquitto keeps nothing on disk and is killed with messages in its memory while the bridge is down,
    and the publisher is killed in the middle: every message is in Kafka once.

    Example: towline demo --messages 50000 --keep /tmp/demo
    """
    from towline_prove.devstack.spark import start_quickly  # noqa: PLC0415 - loaded when it is called
    from towline_prove.processes import Role  # noqa: PLC0415
    from towline_prove.scenario import RECEIPTS, Scenario, Strike  # noqa: PLC0415

    receipts = scene == "receipts"
    if scene not in ("kills", "receipts"):
        raise typer.BadParameter("choose from kills, receipts", param_hint="SCENE")
    allowed = _GUARANTEES[receipts:]
    guarantee = guarantee or ("exactly_once" if receipts else "at_least_once")
    if guarantee not in allowed:
        raise typer.BadParameter(f"choose from {', '.join(allowed)}", param_hint="--guarantee")
    if receipts and not kills:
        raise typer.BadParameter("receipts are shown by kills", param_hint="--no-kills")
    shown = RECEIPTS if receipts else (Strike(Role.GATEWAY, 0.3), Strike(Role.JVM, 0.65))
    scenario = Scenario(
        guarantee=guarantee,
        runs=1,
        strikes=shown if kills else (),
        messages=messages or (5_000 if receipts else 20_000),
        rate=rate or (500 if receipts else 1000),
        devices=devices,
        own_limits=receipts,
        receipts=receipts,
    )
    # Ended by a signal, everything that was started still ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start_quickly()
    if not _shown(scenario, keep):
        raise typer.Exit(1)


def _shown(scenario: Scenario, keep: Path | None) -> bool:
    """Run it and tell its account; whether the promise was kept."""
    from towline_prove.scenario import prove  # noqa: PLC0415

    began = time.monotonic()
    with contextlib.closing(_Screen()) as screen:
        (run,) = prove(scenario, keep, screen)
    _tell(run)
    _say("done" if run.ok else "failed", f"{time.monotonic() - began:.0f} s")
    if run.ok:
        typer.echo("Next: towline init   your own brokers, in five questions")
    return run.ok


def _tell(run: Run) -> None:
    account = run.account
    assert account is not None
    verdict = account.verdict
    missing = f" + never confirmed {verdict.missing:,}" if verdict.missing else ""
    _say("account", f"offered {verdict.attempted:,} = in Kafka {verdict.delivered:,} + lost {verdict.lost:,}{missing}")
    order = f"   out of order {verdict.disordered} of {len(verdict.devices)} devices" if account.ordered else ""
    _say("", f"doubled {verdict.doubled:,} ({account.guarantee}){order}")
    if run.scenario.receipts:
        again, dropped = run.repeats
        _say("", f"sent again by the publisher {again:,}   repeats dropped by the gateway {dropped:,}")
    if account.gateway is not None:
        gateway = account.gateway
        watermarks = (
            f"received {gateway.received:,} ≥ journaled {gateway.journaled:,} ≥ committed {gateway.committed:,}"
        )
        _say("", f"{watermarks}   waiting {gateway.waiting:,}")
    for problem in run.problems():
        _say("✗ broken", problem)
    for story in verdict.stories if not run.ok else []:
        _say("", str(story))


def _say(title: str, text: str) -> None:
    sign = "▸ " if title and not title.startswith("✗") else "  "
    typer.echo(plain(f"{sign}{title:<18}{text}" if not title.startswith("✗") else f"{title:<20}{text}"))


class _Screen(Stage):
    """One growing table on a terminal; plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._began = time.monotonic()
        self._reported_at = 0.0

    def close(self) -> None:
        """Nothing moves any more."""
        if self._live is not None:
            self._live.stop()

    def step(self, title: str, text: str) -> None:
        """One line about something that was done."""
        _say(title, text)
        self._began = time.monotonic()

    def fault(self, text: str) -> None:
        """One line above the moving ones."""
        line = plain(f"  ✗ {text}")
        if self._live is not None:
            self._live.console.print(line, style="yellow", markup=False, highlight=False)
        else:
            typer.echo(line)

    def show(self, moment: Moment, total: int) -> None:
        """Redraw, or on a pipe say a line every few seconds."""
        if is_live():
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=8, transient=False)
                self._live.start()
            self._live.update(_row(moment, total, time.monotonic() - self._began))
        elif time.monotonic() - self._reported_at > 3:
            self._reported_at = time.monotonic()
            typer.echo(plain(f"  {_figures(moment, self._reported_at - self._began)}"))


def _row(moment: Moment, total: int, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total, completed=min(moment.in_kafka, total), width=24)
    table.add_row("  in Kafka", bar, _figures(moment, seconds))
    return table


def _figures(moment: Moment, seconds: float) -> str:
    rate = moment.in_kafka / seconds if seconds > 0 else 0.0
    return (
        f"offered {moment.offered:,}   acknowledged {moment.acknowledged:,}   journaled {moment.journaled:,}   "
        f"in Kafka {moment.in_kafka:,}   {rate:,.0f} msg/s"
    )
