"""All gateways of one stream: who answers, who is away, and what waits at each; lives in the runner only.

Each gateway is asked on a thread of its own, because a long poll holds its call: the first answer with rows wakes the
reader, the others' polls go on and are still good for the next call while their gateway's place is the same. What an
answer means is decided on the reader's thread alone. A gateway that is away holds back nobody's rows but its own. One
gateway is a list of one.

Only what passes by itself, or by a file that a person changes, is done without. A journal that is not the checkpoint's,
or another reader's lease, stops a query: to go on would be to forget rows silently.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import REFUSALS
from towline.gateway.client import interruptible
from towline.gateway.endpoint import GatewayEndpoint
from towline.spark.link import PATIENCE_S
from towline.spark.offsets import JournalPlace
from towline.spark.readplan import signed
from towline.threads import guarded_thread, later
from towline.timing import Backoff

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient, Lease, Window
    from towline.spark.link import GatewayPlace
    from towline.spark.readplan import JournalRange, ReadPlan, Slice

#: Where the errors of the list stand.
LIST: Final = 'format("mqtt") option "gateways"'
#: Pause before a gateway that is away is asked again, in seconds.
_PAUSE_S: Final = 0.25
#: The same for one that refuses: each try is counted there, and a file has to be changed first.
_REFUSED_PAUSE_S: Final = 5.0
#: A refusal is logged again after so many seconds: nobody but a person ends it.
_REMIND_S: Final = 60.0
#: How long a new reader waits for the one before it to end, in seconds: a stopped query's process needs a moment.
TAKEOVER_S = 5.0
#: A poll that has been unanswered for so long, in seconds, is at a gateway without rows: one that has some answers at
#: once. So much may a batch wait for the gateways beside the first that answered.
GRACE_S: Final = 0.02
#: How long a new query waits for the other gateways once one has answered, and a query that starts again for the first,
#: in seconds.
MEET_S: Final = 5.0

_LOG = logging.getLogger("towline.spark")
_T = TypeVar("_T")


def is_refusal(error: BaseException | None) -> bool:
    """Whether a gateway and this query do not let each other in, by token or certificate."""
    return isinstance(error, GatewayError) and error.code in REFUSALS


def is_absence(error: BaseException | None) -> bool:
    """Whether an error holds back the rows of that gateway only: it refuses, or may be being started again."""
    return isinstance(error, (GatewayUnreachable, JournalFailed)) or is_refusal(error)


@dataclass(frozen=True, slots=True)
class Question:
    """What a poll asks: commit up to ``safe``, and tell what lies beyond ``here`` within the limits of a batch."""

    here: JournalPlace
    safe: int
    max_rows: int | None = None
    max_bytes: int | None = None


def has_news(question: Question | None, window: Window | None) -> bool:
    """Whether an answer has rows, or is the lease that was asked for."""
    return question is None or (window is not None and window.end > question.here.offset)


class _Poll(NamedTuple):
    """A question on its way, None for the lease alone; since when on `time.monotonic`."""

    question: Question | None
    answer: futures.Future[Window | None]
    began: float


@dataclass(slots=True)
class Absence:
    """Why a source does without a gateway: it refuses the query, or does not answer.

    Attributes:
        error: What the gateway, or the way to it, said last.
        since: In seconds since 1970.
        again_at: When it is asked again, on `time.monotonic`.
        logged_at: When the log said it last, on the same clock.
    """

    error: TowlineError
    since: float
    again_at: float
    logged_at: float

    @property
    def refused(self) -> bool:
        """Whether only a person ends it."""
        return is_refusal(self.error)


class SourceGateway:
    """One gateway of a source: the connection to it, the lease of its reader, and whether it is there.

    Args:
        place: Where the gateway is.
        plan: What the reader was told.
        meet: Called with this and the gateway's name and id of its journal before a lease is taken; what it raises
            keeps the lease from being taken.

    Attributes:
        name: Its name; set with the first answer, and the same afterwards.
        journal: Id of its journal; set with the name.
        entry: Where the rows begin that a query without a place there gets; None until it was met, which gave a lease.
        absence: None while it is there.
        tip: Offset after the newest row it told of.
        reached: Where the planned batch ends in its journal; None before the first.
        poll: What it was asked last; None when the answer was taken.
    """

    def __init__(
        self, place: GatewayPlace, plan: ReadPlan, meet: Callable[[SourceGateway, str, str], None] | None = None
    ) -> None:
        self.place = place
        self.name = self.journal = ""
        self.entry: JournalPlace | None = None
        self.absence: Absence | None = None
        self.tip = 0
        self.reached: int | None = None
        self.poll: _Poll | None = None
        self._plan = plan
        self._meet = meet
        #: The connection with its lease; None before the first, and after one was given up.
        self._held: tuple[GatewayClient, Lease] | None = None
        #: A second lease would take the first one over: one thread at a time takes one, and none after `release`.
        self._opening = threading.Lock()
        self._released = threading.Event()
        self._keeping = guarded_thread(self._keep, "keep-gateway", again_s=1.0)

    @property
    def called(self) -> str:
        """What a person calls it: its name, as far as it ever answered, and its place."""
        return f"{self.name} ({self.place.text})" if self.name else self.place.text

    @property
    def is_there(self) -> bool:
        """Whether it was met, and not missed since."""
        return self.entry is not None and self.absence is None

    def ask(self, question: Question | None, timeout_s: float) -> None:
        """Begin a poll, unless one is on its way, or the gateway is away and its rest not over.

        Args:
            question: As `wait`; None for the lease alone.
            timeout_s: As `wait`.
        """
        now = time.monotonic()
        if self.poll is None and (self.absence is None or now >= self.absence.again_at):
            call = partial(self.wait, question, timeout_s) if question else partial(self._call, lambda *_: None)
            self.poll = _Poll(question, later(call, f"gateway {self.name}"), now)

    def wait(self, question: Question, timeout_s: float) -> Window:
        """Connect, and start the gateway where that is ours to do; take the lease, ask, and wait for rows.

        Args:
            question: What is asked.
            timeout_s: Longest wait, in seconds.

        Raises:
            Fenced: TL-G03 when another living reader has the lease, TL-G04 when the gateway serves another journal; as
                `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        here = question.here

        def ask(client: GatewayClient, lease: Lease, timeout_s: float = timeout_s) -> Window:
            if here.journal != lease.journal:
                raise foreign(here, lease.journal)
            try:
                window = client.wait(
                    lease,
                    here.offset,
                    timeout_s=timeout_s,
                    max_rows=question.max_rows,
                    max_bytes=question.max_bytes,
                    safe=question.safe,
                    incarnation=here.incarnation,
                    sized=question.max_bytes is not None,
                )
            except Fenced as error:
                status = client.status() if error.code == "TL-G07" else {}
                if not status or status["incarnation"] == lease.opening:
                    raise
                self._drop(client)  # not taken over: the gateway was started again and knows no leases
                return self.wait(question, timeout_s)
            if self.place.remote and timeout_s and has_news(question, window):
                return ask(client, lease, 0.0)  # the token that let the poll in may be refused since
            return window

        return self._call(ask)

    def slices(self, rows: JournalRange, sizes: Sequence[int]) -> list[Slice]:
        """A range of its journal as tasks get it, in parts of these sizes. Raises as `wait`."""

        def sign(client: GatewayClient, lease: Lease) -> list[Slice]:
            if lease.journal != rows.end.journal:
                raise foreign(rows.end, lease.journal)
            return signed(client, rows.slices(self.place, sizes))

        return self._call(sign)

    def report(self) -> dict[str, Any]:
        """What it says of itself within a second, and why it is away; plain values."""
        status: Mapping[str, Any] = {}
        if self.absence is None and (held := self._held):
            with contextlib.suppress(GatewayError):  # the next poll tells it better
                status = held[0].status(timeout_s=1.0)
        report = {key: value for key, value in status.items() if isinstance(value, bool | int | float | str)}
        if trouble := (status.get("last_error") or {}).get("text"):
            report["last_error"] = trouble
        if absence := self.absence:
            error, refused = absence.error, absence.refused
            report["away_since"] = datetime.fromtimestamp(absence.since, UTC).isoformat(timespec="seconds")
            report["last_error"] = f"{error.what}. {error.do}" if refused else error.what
            report |= {"refused": True} if refused else {}
        reached = self.tip if self.reached is None else self.reached
        return {**report, "tip": self.tip, "queued": max(0, self.tip - reached)}

    def release(self) -> None:
        """Give the lease back and close; never commits anything. No other one is taken."""
        self._released.set()
        if held := self._held:
            client, lease = held
            with contextlib.suppress(GatewayError):
                client.release(lease)
            self._drop(client)

    # -- the connection ------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[GatewayClient, Lease], _T]) -> _T:
        """Call with the lease, while signals are handled; a connection that may be what is wrong is not used again."""

        def attempt() -> _T:
            with self._opening:
                client, lease = self._held or self._taken()
            try:
                return call(client, lease)
            except TowlineError as error:
                if is_absence(error):  # the next connection is made with the files as they are then
                    self._drop(client)
                raise

        return interruptible(attempt)

    def _taken(self) -> tuple[GatewayClient, Lease]:
        gone = GatewayUnreachable("TL-G01", self.place.text, "no gateway answers", "It is asked again.")
        if self._released.is_set():
            raise gone
        client = self.place.connect()
        if self.place.settings and not self._keeping.is_alive():
            self._keeping.start()
        try:
            if self._meet:
                status = client.status()
                self._meet(self, str(status["name"]), str(status["journal"]))
            lease = client.open(self._plan.consumer, patience_s=TAKEOVER_S)
            self._held = client, lease
            begin = self._plan.beginning(lease.name, lease.first, lease.tip, lease.committed, "committed")
            entry = JournalPlace(lease.name, lease.journal, begin, client.extent(begin).incarnation, self.place.text)
        except BaseException:
            self._held = None
            client.close()
            raise
        self.tip, self.entry = max(self.tip, lease.tip), entry
        if self._released.is_set():  # while it was being taken
            self.release()
            raise gone
        return client, lease

    def _keep(self) -> None:
        """Start the gateway again when it has ended, also while a batch runs and nobody asks for it."""
        pauses = Backoff(first=0.5, most=10.0)
        while not self._released.wait(pauses.next()):
            endpoint = GatewayEndpoint.read(Path(self.place.state_dir))
            if endpoint is None or endpoint.process.gone():
                with contextlib.suppress(TowlineError):  # the next poll tells it
                    self.place.connect().close()
            else:
                pauses.reset()

    def _drop(self, client: GatewayClient) -> None:
        """Forget a connection, unless a newer one is there; the next call makes a new one."""
        if self._held is not None and self._held[0] is client:
            self._held = None
            client.close()


def foreign(here: JournalPlace, journal: str) -> Fenced:
    """TL-G04: the checkpoint's journal is not the one that the gateway serves."""
    return Fenced(
        "TL-G04",
        here.gateway,
        f"the checkpoint belongs to journal {here.journal} (offset {here.offset}), this gateway serves journal "
        f"{journal}",
        "Bring back the state directory of that journal, or start the query with a new checkpoint directory and get "
        "what waits here; rows that only the other journal held stay there.",
    )


class SourceGateways:
    """The gateways that a stream reads.

    Args:
        plan: What the reader was told.

    Attributes:
        all: Those of the list.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._meeting = threading.Lock()
        self.all = tuple(SourceGateway(place, plan, self._meet) for place in plan.places)
        #: Gateways that were taken out of the list, and are asked whether they may go; by place.
        self._former: dict[str, SourceGateway] = {}

    def meet(self, needed: SourceGateway | None = None) -> None:
        """Take the leases of at least one gateway, and of whoever answers soon; or wait for the one that is needed.

        Raises:
            ConfigError: TL-G50, two of them are one.
            Fenced: TL-G03 when another living reader has a lease.
            GatewayError: TL-G40, TL-G44 or TL-G46, none of them lets us in.
            GatewayUnreachable: None answers within `PATIENCE_S` seconds.
        """
        wanted = (needed,) if needed else self.all
        self.ask(dict.fromkeys(wanted), PATIENCE_S, MEET_S)
        if not any(gateway.is_there for gateway in wanted):
            absence = next((gateway.absence.error for gateway in wanted if gateway.absence), None)
            silence = GatewayUnreachable("TL-G01", wanted[0].place.text, "no gateway answers", "Is it running?")
            raise absence or silence

    def _meet(self, gateway: SourceGateway, name: str, journal: str) -> None:
        """Refuse a gateway that another one of the list is already, before it takes that one's lease."""
        with self._meeting:
            for other in self.all:
                if other is not gateway and (other.name == name or other.journal == journal):
                    same = f'have the same name "{name}"' if other.name == name else f"serve one journal, {journal}"
                    what = f"{other.place.text} and {gateway.place.text} {same}"
                    do = "Name each gateway once, and give each a name of its own: it stands in the checkpoint."
                    raise ConfigError("TL-G50", LIST, what, do)
            gateway.name, gateway.journal = name, journal

    def ask(
        self, questions: Mapping[SourceGateway, Question | None], patience_s: float, grace_s: float | None = None
    ) -> dict[SourceGateway, Window]:
        """Commit at each gateway and wait until one has news: rows, or a lease where there was none.

        Each is asked on a thread, again and again. A poll with the same question that is on its way from the call
        before is waited for. One that has ended is asked again, whatever it found: its gateway may have gone since, and
        the batch with it.

        Args:
            questions: What each is asked; None for its lease alone. Where no lease is asked for, those that were never
                met are looked for beside.
            patience_s: Longest wait, in seconds; 0 until each that has a question and is not away has answered.
            grace_s: Longest time for the answers of those beside the news, in seconds since each was asked; None for
                `GRACE_S`.

        Returns:
            The answers that have come.

        Raises:
            TowlineError: What a gateway said, unless it is an absence.
        """
        unmet = [gateway for gateway in self.all if gateway.entry is None and None not in questions.values()]
        if len(unmet) == len(self.all):
            patience_s = max(patience_s, MEET_S)
        asked: dict[SourceGateway, Question | None] = {**dict.fromkeys(unmet), **questions}
        answers: dict[SourceGateway, Window | None] = {}
        grace_s = GRACE_S if grace_s is None else grace_s
        deadline = time.monotonic() + (patience_s if patience_s > 0 else PATIENCE_S + 30)
        self._heard(asked)
        for gateway, question in asked.items():
            if gateway.poll and gateway.poll.question != question:
                gateway.poll = None
        while True:
            timeout_s = min(patience_s, max(0.0, deadline - time.monotonic()))
            for gateway in asked.keys() - answers.keys():
                gateway.ask(asked[gateway], timeout_s)
            windows = self._heard(asked)
            answers |= {one: windows[one] for one in windows if patience_s <= 0 or has_news(asked[one], windows[one])}
            now = time.monotonic()
            pending = [gateway.poll for gateway in questions if gateway.poll and not gateway.absence]
            if any(has_news(asked[gateway], window) for gateway, window in answers.items()):
                over = all(now - poll.began >= grace_s for poll in pending)
            else:
                over = patience_s <= 0 and not pending
            if over or now >= deadline:
                return {gateway: window for gateway, window in answers.items() if window is not None}
            # Not only an answer ends a wait: polls grow older than the grace, and who was away is asked again.
            rests = [one.absence.again_at - now for one in asked if one.absence and not one.poll]
            pause = max(0.0, min(deadline - now, GRACE_S if answers else 1.0, *rests))
            if polls := [gateway.poll.answer for gateway in asked if gateway.poll]:
                futures.wait(polls, pause, futures.FIRST_COMPLETED)
            else:
                time.sleep(pause)

    def _heard(self, asked: Iterable[SourceGateway]) -> dict[SourceGateway, Window | None]:
        """The answers that have come; what is wrong is raised, that two are one before whatever else they say."""
        windows: dict[SourceGateway, Window | None] = {}
        errors: list[BaseException] = []
        for gateway in asked:
            if gateway.poll is None or not gateway.poll.answer.done():
                continue
            answer, gateway.poll = gateway.poll.answer, None
            error = answer.exception()
            if is_absence(error):
                self.miss(gateway, error)
            elif error is not None:
                errors.append(error)
            else:
                self._welcome(gateway)
                windows[gateway] = window = answer.result()
                gateway.tip = window.tip if window else gateway.tip
        refusals = [gateway.absence.error for gateway in self.all if gateway.absence and gateway.absence.refused]
        if len(refusals) == len(self.all):  # only a person can help then
            why = "; ".join(
                f"{gateway.called}: {error.what}" for gateway, error in zip(self.all, refusals, strict=True)
            )
            what = f"no gateway of the list lets this query in ({why})"
            raise GatewayError(refusals[0].code, LIST, what, refusals[0].do) if len(refusals) > 1 else refusals[0]
        for error in sorted(errors, key=lambda error: getattr(error, "code", "") != "TL-G50"):
            raise error
        return windows

    # -- who is away -----------------------------------------------------------------------------------------------

    def miss(self, gateway: SourceGateway, error: BaseException | None) -> None:
        """Do without a gateway for now, and say so: silence once, a refusal each minute; later it is asked again."""
        assert isinstance(error, TowlineError)
        now, before, refused = time.monotonic(), gateway.absence, is_refusal(error)
        since, logged_at = (before.since, before.logged_at) if before else (time.time(), now)
        if before is None or before.refused is not refused or (refused and now - logged_at >= _REMIND_S):
            logged_at = now
            how, code, do = ("held back", error.code, f". {error.do}") if refused else ("away", "TL-G54", "")
            others = ", the others' go on" if len(self.all) > 1 else ""
            what = "gateway %s is %s: %s; its messages wait there%s%s   [%s]"
            _LOG.warning(what, gateway.called, how, error.what, others, do, code)
        gateway.absence = Absence(error, since, now + (_REFUSED_PAUSE_S if refused else _PAUSE_S), logged_at)

    def _welcome(self, gateway: SourceGateway) -> None:
        if gateway.absence is not None:
            since = datetime.fromtimestamp(gateway.absence.since).astimezone()
            _LOG.warning("gateway %s is back; it was away since %s", gateway.called, f"{since:%H:%M:%S}")
            gateway.absence = None

    # -- former gateways -------------------------------------------------------------------------------------------

    def former(self, place: GatewayPlace) -> SourceGateway:
        """A gateway that is not in the list, to be asked the same way."""
        return self._former.setdefault(place.text, SourceGateway(place, self._plan))

    def let_go(self, gateway: SourceGateway) -> None:
        """Give the lease of a former gateway back."""
        self._former.pop(gateway.place.text, None)
        gateway.release()

    def release(self) -> None:
        """Give all leases back; commits nothing. One that is away has none, and is asked for none any more."""
        for gateway in (*self.all, *self._former.values()):
            gateway.release()
