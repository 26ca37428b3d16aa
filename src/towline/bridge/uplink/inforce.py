"""Which routes a message goes by when a line's routes change: the rules, and the file that remembers what they need.

1. A batch that was begun is finished by the routes it was begun with, whatever the file says by then. Kafka may have
   all of it, or a part: by other routes it would be there a second time, in another topic.
2. All other messages go by the routes that are in force when a batch takes them.
3. A message that no route takes any more goes by the route that was there for it. It was received for that one: it
   waits in the journal, or the broker had it in its queue when the filter was unsubscribed [MQTT-3.10.4-3]. Such a
   route is *retired*: it comes after all others, so it never takes a message from one of them.

`routes.json` in the line's state directory has the routes of the last start of its query, so that a kill between two
steps changes nothing of this. What is here is pure, but for reading and writing that file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import ValidationError

from towline import files
from towline.bridge.config.model import Line
from towline.bridge.config.subscriptions import covers
from towline.bridge.config.tables import Dedupe, RouteSection, Section
from towline.bridge.patterns import Pattern
from towline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUTES_FILE: Final = "routes.json"
#: A retired route is kept for so long at least, in seconds: what a broker had queued has come by then.
KEPT_S: Final = 86400.0


class RetiredRoute(Section):
    """A route that the file does not have any more.

    Attributes:
        route: As it was written, with the line's dedupe where it had none of its own.
        at: When it was retired, in seconds since 1970.
    """

    route: RouteSection
    at: float


class KeptRoutes(Section):
    """What a line makes its records by.

    Attributes:
        routes: Those of the file, as written.
        dedupe: How repeats are recognised on routes that do not say it themselves.
        dead_letter_topic: Of the line.
        dead_letter_topics: Of all lines of the bridge.
        retired: Those that take what none of these takes, the newest first.
    """

    routes: tuple[RouteSection, ...]
    dedupe: Dedupe | None = None
    dead_letter_topic: str | None = None
    dead_letter_topics: tuple[str, ...] = ()
    retired: tuple[RetiredRoute, ...] = ()

    @classmethod
    def of(cls, line: Line, former: KeptRoutes | None = None, now: float = 0.0, oldest: float | None = None) -> Self:
        """What is in force from now on.

        Args:
            line: As the file says it.
            former: What was in force before; None at the first start.
            now: Seconds since 1970.
            oldest: When the oldest message came that waits; None where none does.
        """
        before = [RetiredRoute(route=one, at=now) for one in former.folded] if former else []
        before += former.retired if former else ()
        since = min(now, now if oldest is None else oldest) - KEPT_S
        return cls(
            routes=line.route,
            dedupe=line.dedupe,
            dead_letter_topic=line.dead_letter_topic,
            dead_letter_topics=line.dead_letter_topics,
            retired=tuple(_uncovered(line.route, (one for one in before if one.at >= since))),
        )

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """What was in force when the line's query started last; None for a line that never did.

        Raises:
            ConfigError: TL-C171, the file is not one of ours.
        """
        file = state_dir / ROUTES_FILE
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            what = f"what the line's routes were can't be read ({type(error).__name__})"
            do = "Restore the file. Removed, a batch that was begun is finished by the routes of the bridge file."
            raise ConfigError("TL-C171", str(file), what, do) from error

    def save(self, state_dir: Path) -> None:
        """Write it, durably and for this user alone."""
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = self.model_dump_json(by_alias=True, exclude_defaults=True, indent=1)
        files.replace_durably(state_dir / ROUTES_FILE, text + "\n")

    @property
    def folded(self) -> tuple[RouteSection, ...]:
        """The routes of the file, each with the dedupe that counts for it."""
        return tuple(one.model_copy(update={"dedupe": one.dedupe or self.dedupe}) for one in self.routes)

    @property
    def all(self) -> tuple[RouteSection, ...]:
        """Every route, in the order in which they are asked."""
        return (*(self.folded if self.retired else self.routes), *(one.route for one in self.retired))

    def applied(self, line: Line) -> Line:
        """A line that makes its records by these routes; its subscriptions are still those of the file."""
        return line.model_copy(
            update={
                "route": self.all,
                "dedupe": None if self.retired else self.dedupe,
                "dead_letter_topic": self.dead_letter_topic,
                "dead_letter_topics": self.dead_letter_topics,
            }
        )

    def finishes(self, line: Line) -> bool:
        """Whether a batch that was begun by these routes has to be finished by them before a line goes on.

        Not where it recognises repeats and the other does not, or the other way round: the checkpoint is another one
        then, and `towline.bridge.lines.recovery` says what becomes of the batch.
        """
        mine = self.applied(line)
        return mine != line and (mine.within is None) == (line.within is None)


def _uncovered(routes: Sequence[RouteSection], retired: Iterable[RetiredRoute]) -> list[RetiredRoute]:
    """Those that may still get a message: a topic that an earlier one takes whole never comes to a later one."""
    patterns = [Pattern.parse(one.from_) for one in routes]
    kept = []
    for one in retired:
        pattern = Pattern.parse(one.route.from_)
        if not any(covers(above, pattern) for above in patterns):
            patterns.append(pattern)
            kept.append(one)
    return kept
