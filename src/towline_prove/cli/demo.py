"""``towline demo``: shows the delivery guarantee on this machine, with real brokers, in about a minute.

It is a run of `towline_prove.scenario` with a display: nothing is simulated and no number is invented.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from towline.cli.screen import is_terminal, load_bridge, terminal_text
from towline.cli.ui import open_page
from towline_prove.evidence import RunDisplay, RunProgress

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
    ui: Annotated[bool, typer.Option("--ui", help="Show it on the page of the bridge, too, until Ctrl-C.")] = False,
) -> None:
    """Start real brokers and a bridge, publish numbered messages, kill -9 on the way, and show the account.

    With receipts, Mosquitto keeps nothing on disk and is killed with messages in its memory while the bridge is down,
    and the publisher is killed in the middle: every message is in Kafka once.

    Example: towline demo --messages 50000 --keep /tmp/demo
    """
    from towline_prove.devstack.spark import enable_fast_start  # noqa: PLC0415 - loaded when it is called
    from towline_prove.processes import Role  # noqa: PLC0415
    from towline_prove.scenario import RECEIPT_FAULTS, Fault, Scenario  # noqa: PLC0415

    receipts = scene == "receipts"
    if scene not in ("kills", "receipts"):
        raise typer.BadParameter("choose from kills, receipts", param_hint="SCENE")
    allowed_guarantees = _GUARANTEES[receipts:]
    guarantee = guarantee or ("exactly_once" if receipts else "at_least_once")
    if guarantee not in allowed_guarantees:
        raise typer.BadParameter(f"choose from {', '.join(allowed_guarantees)}", param_hint="--guarantee")
    if receipts and not kills:
        raise typer.BadParameter("receipts are shown by kills", param_hint="--no-kills")
    faults = RECEIPT_FAULTS if receipts else (Fault(Role.GATEWAY, 0.3), Fault(Role.JVM, 0.65))
    scenario = Scenario(
        guarantee=guarantee,
        runs=1,
        faults=faults if kills else (),
        messages=messages or (5_000 if receipts else 20_000),
        rate=rate or (500 if receipts else 1000),
        devices=devices,
        own_limits=receipts,
        receipts=receipts,
    )
    # Ended by a signal, everything that was started still ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    enable_fast_start()
    if not _run_demo(scenario, keep, with_page=ui):
        raise typer.Exit(1)


def _run_demo(scenario: Scenario, keep: Path | None, *, with_page: bool) -> bool:
    """Run the scenario and print its account; return whether the promise was kept."""
    from towline_prove.scenario import prove  # noqa: PLC0415

    began_at = time.monotonic()
    with contextlib.closing(_TerminalDisplay(with_page=with_page)) as display:
        for run in prove(scenario, keep, display):
            display.close_table()
            _print_account(run)
            _print_line("done" if run.ok else "failed", f"{time.monotonic() - began_at:.0f} s")
            display.wait_on_page()
    if run.ok and not with_page:
        typer.echo("Next: towline init        your own brokers, in five questions")
        typer.echo("      towline demo --ui   the same on a page, the kills as bands")
    return run.ok


def _print_account(run: Run) -> None:
    account = run.account
    assert account is not None
    verdict = account.verdict
    missing = f" + never confirmed {verdict.missing:,}" if verdict.missing else ""
    total = f"offered {verdict.attempted:,} = in Kafka {verdict.delivered:,} + lost {verdict.lost:,}{missing}"
    _print_line("account", total)
    order = f"   out of order {verdict.disordered} of {len(verdict.device_partitions)} devices"
    order = order if account.ordered else ""
    _print_line("", f"doubled {verdict.doubled:,} ({account.guarantee}){order}")
    if run.scenario.receipts:
        resent, dropped = run.repeats
        _print_line("", f"sent again by the publisher {resent:,}   repeats dropped by the gateway {dropped:,}")
    if account.gateway is not None:
        gateway = account.gateway
        watermarks = (
            f"received {gateway.received:,} ≥ journaled {gateway.journaled:,} ≥ committed {gateway.committed:,}"
        )
        _print_line("", f"{watermarks}   waiting {gateway.uncommitted:,}")
    for problem in run.problems():
        _print_line("✗ broken", problem)
    for story in verdict.stories if not run.ok else []:
        _print_line("", str(story))


def _print_line(title: str, text: str) -> None:
    prefix = "▸ " if title and not title.startswith("✗") else "  "
    typer.echo(terminal_text(f"{prefix}{title:<18}{text}" if not title.startswith("✗") else f"{title:<20}{text}"))


class _TerminalDisplay(RunDisplay):
    """Display as one growing table on a terminal, as plain lines elsewhere."""

    def __init__(self, *, with_page: bool = False) -> None:
        self._with_page, self._page = with_page, contextlib.ExitStack()
        self._console = Console()
        self._live: Live | None = None
        self._step_began_at = time.monotonic()
        self._reported_at = 0.0

    def close(self) -> None:
        """Stop the live table and the page."""
        self.close_table()
        self._page.close()

    def close_table(self) -> None:
        """Stop the live table."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_bridge(self, file: Path) -> None:
        """Serve the page of the bridge, print its link, and open it where there is a browser."""
        if self._with_page:
            link = self._page.enter_context(open_page(load_bridge(file), "127.0.0.1:0"))
            _print_line("page", link)
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                webbrowser.open(link)  # not one that would take the terminal

    def wait_on_page(self) -> None:
        """Wait until Ctrl-C while the page is open; the bridge goes on."""
        if self._with_page:
            _print_line("page", "stays until Ctrl-C, with brokers and bridge")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()

    def step(self, title: str, text: str) -> None:
        """Print one line about a finished step."""
        _print_line(title, text)
        self._step_began_at = time.monotonic()

    def fault(self, text: str) -> None:
        """Print one line above the live table."""
        line = terminal_text(f"  ✗ {text}")
        if self._live is not None:
            self._live.console.print(line, style="yellow", markup=False, highlight=False)
        else:
            typer.echo(line)

    def show_progress(self, progress: RunProgress, total: int) -> None:
        """Redraw the table, or print a line every few seconds on a pipe."""
        if is_terminal():
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=8, transient=False)
                self._live.start()
            self._live.update(_progress_row(progress, total, time.monotonic() - self._step_began_at))
        elif time.monotonic() - self._reported_at > 3:
            self._reported_at = time.monotonic()
            typer.echo(terminal_text(f"  {_progress_text(progress, self._reported_at - self._step_began_at)}"))


def _progress_row(progress: RunProgress, total: int, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total, completed=min(progress.kafka_count, total), width=24)
    table.add_row("  in Kafka", bar, _progress_text(progress, seconds))
    return table


def _progress_text(run: RunProgress, seconds: float) -> str:
    rate = run.kafka_count / seconds if seconds > 0 else 0.0
    return (
        f"offered {run.offered_count:,}   acknowledged {run.acked_count:,}   journaled {run.journal_count:,}   "
        f"in Kafka {run.kafka_count:,}   {rate:,.0f} msg/s"
    )
