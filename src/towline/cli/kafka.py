"""``towline kafka marker``: shows and resets the markers of an exactly-once sink in Kafka."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import AsJson, command_app, print_lines, print_result
from towline.text import count_text

if TYPE_CHECKING:
    from towline.kafka.markers import Marker
    from towline.kafka.options import SinkSettings

app = command_app(no_args_is_help=True, help="Show and repair state in Kafka.")
marker_app = command_app(no_args_is_help=True, help='The markers of format("kafka_transactional"), one per partition.')
app.add_typer(marker_app, name="marker")

Servers = Annotated[str, typer.Option("--kafka", help="HOST:PORT of Kafka, with commas between.")]
Sink = Annotated[str, typer.Option("--sink", help="The sinkId; the query's id if the query names none.")]
Prefix = Annotated[str, typer.Option(help="The sink's transactionalIdPrefix.")]
Options = Annotated[
    list[str] | None, typer.Option("-X", help="librdkafka option NAME=VALUE; secrets as NAME.file=PATH.")
]


@marker_app.command(epilog="Example:  towline kafka marker show --kafka k1:9092 --sink telemetry")
def show(
    servers: Servers,
    sink: Sink,
    prefix: Prefix = "towline",
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show the last batch each partition of a sink has in Kafka. Exit code 1 if there is no marker."""
    from towline.kafka.markerstore import MarkerStore  # noqa: PLC0415 - loaded when it is called

    store = MarkerStore(_settings(servers, prefix, options), sink)
    markers = {p: marker for p, marker in store.read_markers().items() if marker is not None}
    _print(store.topic, markers, as_json=as_json)
    if not markers:
        raise typer.Exit(1)


@marker_app.command(epilog="Example:  towline kafka marker reset --kafka k1:9092 --sink telemetry --to-batch 41 --yes")
def reset(
    servers: Servers,
    sink: Sink,
    to_batch: Annotated[int, typer.Option(help="Last batch that counts as written; -1: none.", min=-1)],
    parallelism: Annotated[
        int | None, typer.Option(help="Partitions of the sink from now on.", min=1, show_default="as they were")
    ] = None,
    prefix: Prefix = "towline",
    options: Options = None,
    is_confirmed: Annotated[
        bool, typer.Option("--yes", help="Do it; without this only print what it would do.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Set the markers of a sink by hand, after an error TL-K10 to TL-K18. Stop the query first.

    The query then continues with the batch after --to-batch, whatever is in Kafka: rows that are there already are
    duplicated, rows that are not there and lie before it are lost.
    """
    from towline.kafka.markerstore import MarkerStore  # noqa: PLC0415 - loaded when it is called

    if parallelism is None:  # as many partitions as the sink wrote last; a damaged marker is not read if it is given
        markers = MarkerStore(_settings(servers, prefix, options), sink).read_markers().values()
        parallelism = max((m.parallelism for m in markers if m is not None), default=1)
    settings = _settings(servers, prefix, options, parallelism)
    if not is_confirmed:
        text = f"This would make batch {to_batch} the last one written of sink {sink}"
        print_lines([f"{text} ({count_text(parallelism, 'partition')}).", _PREVIEW_REMARK])
        raise typer.Exit(1)
    _print(settings.marker_topic_of(sink), MarkerStore(settings, sink).reset(to_batch), as_json=as_json)


def _settings(servers: str, prefix: str, pairs: list[str] | None, parallelism: int = 1) -> SinkSettings:
    from towline.kafka.options import SinkSettings  # noqa: PLC0415 - loaded when it is called

    options = {f"kafka.{name}": value for name, _, value in (pair.partition("=") for pair in pairs or ())}
    options |= {"kafka.bootstrap.servers": servers, "transactionalIdPrefix": prefix, "deliveryTimeout": "15"}
    options["parallelism"] = str(parallelism)
    return SinkSettings.parse(options)


def _print(topic: str, markers: dict[int, Marker], *, as_json: bool) -> None:
    lines = [topic, _ROW.format("partition", "of", "batch", "rows", "dead", "rows so far", "query")]
    for p, m in markers.items():
        writer = m.writer or "any (set by hand)"
        cells = (p, m.parallelism, m.batch, f"{m.rows:,}", f"{m.dead_lettered:,}", f"{m.total_rows:,}", writer)
        lines.append(_ROW.format(*map(str, cells)))
    result = {"topic": topic, "markers": {str(p): json.loads(m.to_json()) for p, m in markers.items()}}
    print_result(result, lines if markers else [f"no marker in {topic}"], as_json=as_json)


_PREVIEW_REMARK = (
    "The query goes on behind it: rows that Kafka has of later batches are doubled, and batches up to it that Kafka "
    "has not are lost. A query that still runs is fenced and stops. Nothing was changed: add --yes to do it."
)
_ROW = "{:>9} {:>3} {:>8} {:>10} {:>6} {:>14}  {}"
