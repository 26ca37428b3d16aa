"""Writes the tables of docs/options.md from the models that read the options.

    python scripts/options.py            write them
    python scripts/options.py --check    exit code 1 if the page says something else

A row is a field: its name on each face, its default, and what its docstring says; ``docs/PAGE.md#PART`` is a link.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from written import write_tables

from towline.bridge.config.schema import attribute_texts
from towline.bridge.config.tables import (
    DownlinkTable,
    GatewaySection,
    KafkaSection,
    MemberSection,
    MonitorSection,
    RouteSection,
    SparkSection,
    UplinkTable,
)
from towline.gateway.settings import GatewaySettings
from towline.kafka.options import _OPTIONS as KAFKA
from towline.kafka.options import SinkSettings
from towline.net.settings import MqttSettings
from towline.options import Option, parse_size
from towline.spark.link import ReadPlan
from towline.spark.options import _READ_OPTIONS as READING
from towline.spark.options import _WRITE_OPTIONS as PUBLISHING
from towline.spark.options import CONNECTION_OPTIONS, RECEIVER_OPTIONS, SENDER_OPTIONS, SinkOptions

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def field_of(model: type, path: tuple[str, ...]) -> tuple[Any, str]:
    """Default and meaning of a field, and of one in the models of fields."""
    name, *rest = path
    if issubclass(model, BaseModel):
        field = model.model_fields[name]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        kind = field.annotation
    else:
        entry = next(one for one in dataclasses.fields(model) if one.name == name)  # type: ignore[arg-type]
        default = entry.default if entry.default is not dataclasses.MISSING else None
        kind = inspect.get_annotations(model, eval_str=True)[name]
    if not rest:
        return default, attribute_texts(model)[name]
    inner = [kind, *getattr(kind, "__args__", ())]
    return field_of(next(one for one in inner if isinstance(one, type) and one is not type(None)), tuple(rest))


def shown(default: Any, option: Option) -> str:
    """A default as a user writes it; "" where the meaning says it."""
    own_words = isinstance(default, bool) and option.parse is not str
    if default is None or own_words or (isinstance(default, str | tuple) and not default):
        return ""
    if isinstance(default, bool | enum.Enum):
        return f"`{str(getattr(default, 'value', default)).lower()}`"
    if "bytes" in option.name.lower() and default and not default % (1 << 20):
        return f"{default >> 20} MiB"
    if option.name.endswith("Ms") and not option.path[-1].endswith("_ms"):
        default *= 1000
    return f"{default:.10g}" if isinstance(default, int | float) else f"`{default}`"


def markdown(text: str) -> str:
    """The words of a docstring as those of a page."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)

    def linked(link: re.Match[str]) -> str:
        page, part = f"{link[1]}.md", link[2] or ""
        return f"[{(part[1:] or link[1]).replace('-', ' ')}]({part if page == PAGE.name else page + part})"

    text = re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", linked, text)
    return text.replace("|", "\\|")


def rows(options: Iterable[Option], model: type, *, file: bool) -> Iterator[str]:
    """A row for each option; with ``file`` it begins with the key of a bridge file."""
    for option in options:
        default, meaning = field_of(model, option.path)
        cells = [f"`{'.'.join(option.path)}`"] if file else []
        yield "| " + " | ".join([*cells, f"`{option.name}`", shown(default, option), markdown(meaning)]) + " |"


#: Tables of a bridge file, by the names of their tables on the page.
FILE = {
    "uplink": ("[[uplink]]", UplinkTable),
    "member": ("[[uplink.member]]", MemberSection),
    "route": ("[[uplink.route]]", RouteSection),
    "downlink": ("[[downlink]]", DownlinkTable),
    "kafka-file": ("[kafka]", KafkaSection),
    "gateway-file": ("[gateway]", GatewaySection),
    "spark": ("[spark]", SparkSection),
    "monitor": ("[monitor]", MonitorSection),
}


def keys(model: type[BaseModel]) -> Iterator[str]:
    """A row for each key of a table; those of the tables in it are named where its text is."""
    meaning = attribute_texts(model)
    for name, field in model.model_fields.items():
        if name in ("route", "member"):
            continue
        option = Option("", (name,), parse=parse_size if "_bytes" in name else str)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        plain = default if isinstance(default, str | int | float | enum.Enum) else None
        cells = shown(plain, dataclasses.replace(option, name=name)), markdown(meaning[name])
        yield f"| `{field.alias or name}` | {' | '.join(cells)} |"


def tables() -> dict[str, str]:
    """Each table of the page, by its name."""
    every = (*CONNECTION_OPTIONS, *RECEIVER_OPTIONS)
    own = [one for one in every if one.path[0] in MqttSettings.model_fields]
    own.sort(key=lambda one: [*MqttSettings.model_fields].index(one.path[0]))
    own.sort(key=lambda one: one.path[0] not in {"brokers", "client_id"})
    found = {
        "connection": rows(own, GatewaySettings, file=True),
        "gateway": rows([one for one in every if one not in own], GatewaySettings, file=False),
        "reading": rows(READING, ReadPlan, file=False),
        "publishing": [*rows(PUBLISHING, SinkOptions, file=False), *rows(SENDER_OPTIONS, GatewaySettings, file=False)],
        "kafka": rows(KAFKA, SinkSettings, file=False),
    }
    heads = {name: ["option", "default", "meaning"] for name in found}
    found |= {name: keys(model) for name, (_, model) in FILE.items()}  # type: ignore[arg-type]
    heads |= {name: [f"key of `{table}`", "default", "meaning"] for name, (table, _) in FILE.items()}
    heads["connection"].insert(0, "key of `[mqtt]`")
    return {
        name: "\n".join([f"| {' | '.join(heads[name])} |", "|---" * len(heads[name]) + "|", *table])
        for name, table in found.items()
    }


if __name__ == "__main__":
    sys.exit(write_tables(PAGE, tables(), __file__, __doc__))
