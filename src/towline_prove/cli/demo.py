"""``towline demo``: the promise shown on this machine, with real brokers, in about a minute."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from towline.cli.screen import is_live, plain

if TYPE_CHECKING:
    from towline_prove.account import RunAccount
    from towline_prove.demo import Moment

__all__ = ["demo"]


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
    from towline.guarantee import Guarantee  # noqa: PLC0415
    from towline_prove.devstack.spark import start_quickly  # noqa: PLC0415 - loaded when it is called

    receipts = scene == "receipts"
    if scene not in ("kills", "receipts"):
        raise typer.BadParameter("choose from kills, receipts", param_hint="SCENE")
    guarantee = guarantee or ("exactly_once" if receipts else "at_least_once")
    if guarantee not in list(Guarantee) or (receipts and guarantee == Guarantee.AT_MOST_ONCE):
        allowed = list(Guarantee)[1:] if receipts else list(Guarantee)
        raise typer.BadParameter(f"choose from {', '.join(allowed)}", param_hint="--guarantee")
    # Ended by a signal, everything that was started still ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start_quickly()
    if not (_receipts if receipts else _kills)(guarantee, messages, devices, rate, keep, kills=kills):
        raise typer.Exit(1)


def _kills(
    guarantee: str, messages: int | None, devices: int, rate: float | None, keep: Path | None, *, kills: bool
) -> bool:
    from towline_prove.demo import Demo  # noqa: PLC0415

    began = time.monotonic()
    with _Screen() as stage:
        account = Demo(stage, guarantee, messages or 20_000, rate or 1000, keep, devices, kills).run()
    _tell(account, devices, time.monotonic() - began)
    return account.ok


def _receipts(
    guarantee: str, messages: int | None, _devices: int, rate: float | None, keep: Path | None, *, kills: bool
) -> bool:
    from towline_prove.receipts import ReceiptsDemo  # noqa: PLC0415

    if not kills:
        raise typer.BadParameter("receipts are shown by kills", param_hint="--no-kills")
    began = time.monotonic()
    with _Screen() as stage:
        account = ReceiptsDemo(stage, guarantee, messages or 5_000, rate or 500, keep).run()
    lost = account.offered - account.in_kafka
    _say("account", f"offered {account.offered:,} = in Kafka {account.in_kafka:,} + lost {lost:,}")
    _say("", f"doubled {account.doubled:,} ({account.guarantee})")
    _say("", f"sent again by the publisher {account.sent_again:,}   repeats dropped by the gateway {account.dropped:,}")
    _say("done" if account.ok else "failed", f"{time.monotonic() - began:.0f} s")
    return account.ok


def _tell(account: RunAccount, devices: int, seconds: float) -> None:
    verdict = account.verdict
    late = sum(bool(tally.late) for tally in verdict.devices.values())
    _say(
        "account",
        f"offered {verdict.attempted:,} = in Kafka {verdict.delivered:,} + lost {verdict.lost:,}"
        + (f" + never confirmed {verdict.missing:,}" if verdict.missing else ""),
    )
    _say("", f"doubled {verdict.doubled:,} ({account.guarantee})   out of order {late} of {devices} devices")
    if account.gateway is not None:
        gateway = account.gateway
        _say(
            "",
            f"received {gateway.received:,} ≥ journaled {gateway.journaled:,} ≥ committed {gateway.committed:,}   "
            f"waiting {gateway.waiting:,}",
        )
    for problem in account.problems():
        _say("✗ broken", problem)
    for story in verdict.stories if not account.ok else []:
        _say("", str(story))
    _say("done" if account.ok else "failed", f"{seconds:.0f} s")
    if account.ok:
        typer.echo("Next: towline init   your own brokers, in five questions")


def _say(title: str, text: str) -> None:
    sign = "▸ " if title and not title.startswith("✗") else "  "
    typer.echo(plain(f"{sign}{title:<18}{text}" if not title.startswith("✗") else f"{title:<20}{text}"))


class _Screen:
    """One growing table on a terminal; plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._began = time.monotonic()
        self._reported_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            sys.stdout.write(plain(f"  {_figures(moment, self._reported_at - self._began)}\n"))
            sys.stdout.flush()


def _row(moment: Moment, total: int, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "  in Kafka",
        ProgressBar(total=total, completed=min(moment.in_kafka, total), width=24),
        _figures(moment, seconds),
    )
    return table


def _figures(moment: Moment, seconds: float) -> str:
    rate = moment.in_kafka / seconds if seconds > 0 else 0.0
    return (
        f"offered {moment.offered:,}   acknowledged {moment.acknowledged:,}   journaled {moment.journaled:,}   "
        f"in Kafka {moment.in_kafka:,}   {rate:,.0f} msg/s"
    )
