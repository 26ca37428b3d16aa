"""Which strategy keeps which guarantee."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from towline.kafka.delivery import AtLeastOnce, AtMostOnce, Delivery
from towline.kafka.exactly_once import BatchOrigin, ExactlyOnce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.kafka.columns import Columns
    from towline.kafka.options import SinkSettings

__all__ = ["delivery_for"]

_SIMPLE: Final[Mapping[str, type[Delivery]]] = MappingProxyType(
    {"at_least_once": AtLeastOnce, "at_most_once": AtMostOnce}
)


def delivery_for(settings: SinkSettings, columns: Columns, origin: BatchOrigin = BatchOrigin()) -> Delivery:  # noqa: B008 - frozen
    """The strategy of the sink's guarantee.

    Args:
        settings: The sink's settings.
        columns: The columns bound to the query's schema.
        origin: What the driver knows; only exactly_once asks.
    """
    simple = _SIMPLE.get(settings.guarantee)
    return ExactlyOnce(settings, columns, origin) if simple is None else simple(settings, columns)
