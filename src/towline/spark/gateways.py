"""All gateways of one stream: who answers, who is away, and what waits at each; lives in the runner only.

Each gateway is asked on a thread of its own, because a long poll holds its call: the first answer with rows wakes the
reader, the others' polls go on and are still good for the next call while their gateway's place is the same. Where
one gateway is the whole source, it is waited for as long as `PATIENCE_S`; of several, one that is away holds back
nobody's rows but its own.

Only what passes by itself, or by a file that a person changes, is done without. A journal that is not the checkpoint's,
or another reader's lease, stops a query: to go on would be to forget rows silently.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from towline.backoff import Backoff
from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import REFUSALS
from towline.gateway.client import interruptible
from towline.gateway.endpoint import GatewayEndpoint
from towline.spark.link import PATIENCE_S
from towline.threads import Condition, guarded_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from towline.gateway.client import GatewayClient, Lease, Window
    from towline.spark.link import GatewayPlace
    from towline.spark.offsets import JournalPlace

__all__ = ["Question", "SourceGateway", "SourceGateways", "foreign", "is_absence", "is_refusal"]

#: What a gateway says, or does not say, while it is being started again.
_SILENT: Final = (GatewayUnreachable, JournalFailed)
#: Pause before a gateway that is away is asked again, in seconds.
_PAUSE_S: Final = 0.25
#: The same for one that refuses: each try is counted there, and a file has to be changed first.
_REFUSED_PAUSE_S: Final = 5.0
#: A refusal is told again after so many seconds: nobody but a person ends it.
_REMIND_S: Final = 60.0

_LOG = logging.getLogger("towline.spark")


def is_silence(error: BaseException | None) -> bool:
    """Whether an error passes by itself: the gateway may be being started again."""
    return isinstance(error, _SILENT)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a gateway and this query do not let each other in, by token or certificate."""
    return isinstance(error, GatewayError) and error.code in REFUSALS


def is_absence(error: BaseException | None) -> bool:
    """Whether an error of one of several gateways holds back that gateway's rows only."""
    return is_silence(error) or is_refusal(error)


@dataclass(slots=True)
class Absence:
    """Since when a gateway is done without, and why.

    Attributes:
        since: Seconds since 1970.
        error: What it, or the way to it, said last: silence or a refusal.
        told_at: When a person was told last, on `time.monotonic`.
    """

    since: float
    error: TowlineError
    told_at: float = float("-inf")

    @classmethod
    def after(cls, before: Absence | None, error: TowlineError) -> Self:
        """The same absence with another error, or a new one; what is of another kind is told anew."""
        if before is None:
            return cls(time.time(), error)
        same = before.refused is is_refusal(error)
        return cls(before.since, error, before.told_at if same else float("-inf"))

    @property
    def refused(self) -> bool:
        """Whether only a person can end it."""
        return is_refusal(self.error)

    @property
    def why(self) -> str:
        """In words; of a refusal what to do about it, too."""
        return f"{self.error.what}. {self.error.do}" if self.refused else self.error.what

    @property
    def pause_s(self) -> float:
        """How long to wait before it is asked again."""
        return _REFUSED_PAUSE_S if self.refused else _PAUSE_S

    def tell(self, name: str) -> None:
        """Say it once, and a refusal once a minute."""
        now = time.monotonic()
        if now - self.told_at < (_REMIND_S if self.refused else float("inf")):
            return
        self.told_at = now
        if self.refused:
            what = "gateway %s is held back: %s; its messages wait there, the others' go on. %s   [%s]"
            _LOG.warning(what, name, self.error.what, self.error.do, self.error.code)
        else:
            what = "gateway %s is away: %s; its messages wait there, the others' go on   [TL-G54]"
            _LOG.warning(what, name, self.error.what)

    def over(self, name: str) -> None:
        """Say that the gateway is back."""
        since = datetime.fromtimestamp(self.since).astimezone()
        _LOG.warning("gateway %s is back; it was away since %s", name, f"{since:%H:%M:%S}")


def nobody_lets_in(absences: Sequence[tuple[str, Absence | None]]) -> GatewayError | None:
    """The error where each of a source's gateways refuses: only a person can help then; None otherwise.

    Args:
        absences: What each is called, and whether it is done without.
    """
    refusals = [(name, absence) for name, absence in absences if absence is not None and absence.refused]
    if not refusals or len(refusals) < len(absences):
        return None
    first = refusals[0][1].error
    why = "; ".join(f"{name}: {absence.error.what}" for name, absence in refusals)
    where = 'format("mqtt") option "gateways"'
    return GatewayError(first.code, where, f"no gateway of the list lets this query in ({why})", first.do)


#: How long a new reader waits for the one before it to end, in seconds: a stopped query's process needs a moment.
TAKEOVER_S = 5.0


class GatewayHold:
    """A lease on a consumer of one gateway.

    Args:
        place: Where the gateway is.
        consumer: Name under which rows are committed.
        met: Called with the gateway's name and the id of its journal before a lease is taken; what it raises keeps the
            lease from being taken.
    """

    def __init__(self, place: GatewayPlace, consumer: str, met: Callable[[str, str], None] | None = None) -> None:
        self.place = place
        self._consumer = consumer
        self._met = met
        self._client: GatewayClient | None = None
        self._lease: Lease | None = None
        #: A second lease would take the first one over: one thread at a time takes one, and none after `release`.
        self._opening = threading.Lock()
        self._released = threading.Event()
        self._keeping = guarded_thread(self._keep, "keep-gateway", again_s=1.0)

    def lease(self) -> Lease:
        """The lease; connects, and starts the gateway where that is ours to do, at the first call.

        Raises:
            Fenced: TL-G03 when another living reader has it.
            GatewayUnreachable: No gateway answers.
        """
        with self._opening:
            if self._released.is_set():
                raise self._gone()
            if self._lease is None:
                client = self._client = self._client or self.place.connect()
                if self.place.settings and not self._keeping.is_alive():
                    self._keeping.start()
                with self._renewed_after(client):
                    if self._met:
                        status = client.status()
                        self._met(str(status["name"]), str(status["journal"]))
                    lease = self._lease = client.open(self._consumer, patience_s=TAKEOVER_S)
                if self._released.is_set():  # while it was being taken
                    self.release()
                    raise self._gone()
                return lease
            return self._lease

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

    def wait(
        self,
        here: JournalPlace,
        safe: int,
        *,
        timeout_s: float,
        max_rows: int | None,
        max_bytes: int | None,
    ) -> Window:
        """Commit up to ``safe`` and wait for more than ``here``; arguments are those of `GatewayClient.wait`.

        Args:
            here: End of the last batch in the commit log.
            safe: Up to where that is durable.
            timeout_s: Longest wait, in seconds.
            max_rows: Most rows.
            max_bytes: Most bytes; then the window has a size.

        Raises:
            Fenced: TL-G04 when the gateway serves another journal; as `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        lease = self.lease()
        if here.journal != lease.journal:
            raise foreign(here, lease.journal)
        client = self._connected()
        try:
            with self._renewed_after(client):
                return client.wait(
                    lease,
                    here.offset,
                    timeout_s=timeout_s,
                    max_rows=max_rows,
                    max_bytes=max_bytes,
                    safe=safe,
                    incarnation=here.incarnation,
                    sized=max_bytes is not None,
                )
        except Fenced as error:
            if error.code == "TL-G07" and not _gave(client.status(), lease):
                self.drop(client)  # not taken over: the gateway was started again and knows no leases
                raise GatewayUnreachable(error.code, error.where, error.what, error.do) from error
            raise

    def incarnation(self, offset: int) -> str:
        """Which opening of the journal wrote the row below ``offset``.

        Raises:
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        self.lease()
        client = self._connected()
        with self._renewed_after(client):
            return client.incarnation(offset)

    def tickets(self, journal: str, ranges: Sequence[tuple[int, int]], incarnations: Sequence[str]) -> list[str]:
        """What lets workers in to read ranges of a gateway on a network; "" for each of a local one.

        Raises:
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        self.lease()
        client = self._connected()
        with self._renewed_after(client):
            return self.place.tickets(client, journal, ranges, incarnations)

    def status(self) -> dict[str, Any]:
        """The account of the gateway; empty while there is no connection.

        Raises:
            GatewayError: It gave none within a second.
        """
        client = self._client
        return client.status(timeout_s=1.0) if client else {}

    def drop(self, client: GatewayClient | None) -> None:
        """Forget a connection, unless a newer one is there; the next call makes a new one."""
        if client is not None and self._client is client:
            self._client, self._lease = None, None
            client.close()

    def release(self) -> None:
        """Give the lease back and close; never commits anything. No other one is taken."""
        self._released.set()
        client, lease = self._client, self._lease
        with contextlib.suppress(GatewayError):
            if client and lease:
                client.release(lease)
        self.drop(client)

    @contextlib.contextmanager
    def _renewed_after(self, client: GatewayClient) -> Iterator[None]:
        """Forget a connection that may be what is wrong: the next one is made with the files as they are then."""
        try:
            yield
        except TowlineError as error:
            if is_absence(error):
                self.drop(client)
            raise

    def _connected(self) -> GatewayClient:
        client = self._client
        if client is None:  # another thread has found it gone
            raise self._gone()
        return client

    def _gone(self) -> GatewayUnreachable:
        return GatewayUnreachable("TL-G01", self.place.text, "no gateway answers", "It is asked again.")


def _gave(status: Mapping[str, Any], lease: Lease) -> bool:
    """Whether the process that answers is the one that gave a lease."""
    return bool(status["incarnation"] == lease.opening and status["epoch"] == lease.epoch)


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


#: A poll that has been unanswered for so long, in seconds, is at a gateway without rows: one that has some answers at
#: once. So much may a batch wait for the gateways beside the first that answered.
GRACE_S: Final = 0.02
#: How long a new query waits for the other gateways once one has answered, in seconds.
MEET_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """What a poll asks: commit up to ``safe``, and tell what lies beyond ``here`` within the limits of a batch."""

    here: JournalPlace
    safe: int
    max_rows: int | None = None
    max_bytes: int | None = None


@dataclass(eq=False)
class _Poll:
    """A question on its way; `window` or `error` is set before `done`."""

    question: Question | None
    timeout_s: float
    deadline: float
    began: float = field(default_factory=time.monotonic)
    window: Window | None = None
    error: BaseException | None = None
    done: bool = False


class SourceGateway:
    """One gateway of a source.

    Attributes:
        lease: As it was given last; None before the first.
        absence: Why it is done without now, or None.
        tip: Offset after the newest row it told of.
    """

    def __init__(self, place: GatewayPlace, consumer: str, met: Callable[[SourceGateway, str, str], None]) -> None:
        self.hold = GatewayHold(place, consumer, lambda name, journal: met(self, name, journal))
        #: Set with the first answer, and the same afterwards.
        self.name = ""
        self.journal = ""
        self.lease: Lease | None = None
        self.absence: Absence | None = None
        self.tip = 0
        self.poll: _Poll | None = None
        #: It is not asked again before, on `time.monotonic`.
        self.rests_until = 0.0

    @property
    def place(self) -> GatewayPlace:
        """Where it is."""
        return self.hold.place


class SourceGateways:
    """The gateways that a stream reads.

    Args:
        places: Where they are, in any order.
        consumer: Name under which rows are committed at each.
        several: Whether one that is away is done without, as of a source over several gateways.
    """

    def __init__(self, places: Sequence[GatewayPlace], consumer: str, *, several: bool) -> None:
        self.several = several
        self._consumer = consumer
        self._changed = Condition()
        self._closed = False
        self.all = tuple(SourceGateway(place, consumer, self._met) for place in places)
        #: Gateways that were taken out of the list, and are asked whether they may go; by place.
        self._former: dict[str, SourceGateway] = {}

    # -- meeting -------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Take the leases: of the one gateway, or of at least one of several, and of whoever answers soon.

        Raises:
            ConfigError: TL-G50, two of them are one.
            Fenced: TL-G03 when another living reader has a lease.
            GatewayError: TL-G40, TL-G44 or TL-G46, none of them lets us in.
            GatewayUnreachable: None answers within `PATIENCE_S` seconds.
        """
        began = time.monotonic()
        for one in self.all:
            if one.lease is None:
                self._begin(one, None, 0.0, began + PATIENCE_S)

        def over() -> bool:
            waited = time.monotonic() - began
            known = any(one.lease for one in self.all)
            left = [one for one in self.all if one.lease is None and not (one.poll and one.poll.done)]
            if self._refused():
                return True
            return not left or (known and self.several and (waited > MEET_S or all(one.absence for one in left)))

        self._wait(over, began + PATIENCE_S + 1)
        self._raise()
        if not any(one.lease for one in self.all):
            error = next((one.poll.error for one in self.all if one.poll and one.poll.error), None)
            raise error or GatewayUnreachable("TL-G01", self.all[0].place.text, "no gateway answers", "Is it running?")

    def lease_of(self, one: SourceGateway, patience_s: float = PATIENCE_S) -> Lease:
        """The lease of one gateway, which is waited for.

        Raises:
            GatewayUnreachable: It does not answer for ``patience_s`` seconds.
        """
        deadline = time.monotonic() + patience_s
        while one.lease is None or one.absence is not None:
            if one.poll is None or one.poll.done:
                self._begin(one, None, 0.0, deadline)
            poll = one.poll
            assert poll is not None
            self._wait(partial(getattr, poll, "done"), deadline + 1)
            self._raise()
            if poll.error is not None:
                raise poll.error
            if time.monotonic() >= deadline:
                break
        if one.lease is None:
            raise GatewayUnreachable("TL-G01", one.place.text, "no gateway answers", "Is it running?")
        return one.lease

    def _met(self, one: SourceGateway, name: str, journal: str) -> None:
        """Refuse a gateway that another one of the list is already, before it takes that one's lease."""
        with self._changed:
            for other in self.all:
                if other is not one and one in self.all and (other.name == name or other.journal == journal):
                    same = f'have the same name "{name}"' if other.name == name else f"serve one journal, {journal}"
                    raise ConfigError(
                        "TL-G50",
                        'format("mqtt") option "gateways"',
                        f"{other.place.text} and {one.place.text} {same}",
                        "Name each gateway once, and give each a name of its own: it stands in the checkpoint.",
                    )
            one.name, one.journal = name, journal

    # -- polling -------------------------------------------------------------------------------------------------

    def ask(self, questions: Mapping[SourceGateway, Question], patience_s: float) -> dict[SourceGateway, Window]:
        """Commit at each gateway and wait until one has rows, or one is met that was away from the beginning.

        Args:
            questions: For each gateway that was met. The others are looked for meanwhile.
            patience_s: Longest wait, in seconds; 0 for an answer of each.

        Returns:
            The answers that have come.

        Raises:
            TowlineError: What a gateway said; that it is not there only where it is the only one.
        """
        began = time.monotonic()
        deadline = began + patience_s
        unmet = [one for one in self.all if one.lease is None]
        last = deadline if self.several else deadline + PATIENCE_S
        for one in self.all:
            question = questions.get(one)
            if (question is not None or one.lease is None) and not self._extended(one, question, last):
                self._begin(one, question, patience_s, last)

        def over() -> bool:
            now = time.monotonic()
            if self._refused() or any(one.poll and one.poll.done and self._fatal(one.poll.error) for one in self.all):
                return True
            pending = [one for one in questions if one.poll and not one.poll.done]
            waited_for = [one for one in pending if not (self.several and one.absence)]
            if any(one.lease for one in unmet) or any(map(_has_news, questions)):
                return not any(now - one.poll.began < GRACE_S for one in waited_for if one.poll)
            if patience_s <= 0:
                return not waited_for
            return not pending and now >= deadline if self.several else not pending

        self._wait(over, deadline if self.several and patience_s > 0 else deadline + PATIENCE_S + 30)
        self._raise()
        answers = {}
        for one, question in questions.items():
            poll = one.poll
            if poll is not None and poll.done and poll.question == question:
                if poll.window is not None:
                    answers[one] = poll.window
                    one.tip = poll.window.tip
                one.poll = None
        return answers

    def again(self, questions: Mapping[SourceGateway, Question]) -> dict[SourceGateway, Window]:
        """Ask gateways that have just answered with other limits; one that has gone meanwhile gives no answer."""
        found: dict[SourceGateway, Window] = {}
        for one, question in questions.items():
            try:
                window = interruptible(partial(self._asked, one, question, 0.0))
            except TowlineError as error:
                if self._fatal(error):
                    raise
                self.miss(one, error)
                continue
            if window is not None:
                found[one] = window
        return found

    def _asked(self, one: SourceGateway, question: Question | None, timeout_s: float) -> Window | None:
        lease = one.hold.lease()
        if one.lease is not lease:
            one.lease, one.tip = lease, max(one.tip, lease.tip)
        if question is None:
            return None
        return one.hold.wait(
            question.here,
            question.safe,
            timeout_s=timeout_s,
            max_rows=question.max_rows,
            max_bytes=question.max_bytes,
        )

    def _begin(self, one: SourceGateway, question: Question | None, timeout_s: float, deadline: float) -> None:
        poll = one.poll = _Poll(question, timeout_s, deadline)
        guarded_thread(self._run, f"gateway {one.name}", one, poll, ended=partial(self._answered, poll, None)).start()

    def _extended(self, one: SourceGateway, question: Question | None, deadline: float) -> bool:
        """Whether a poll with this question is on its way; it then goes on as long as this one would.

        One that has ended is asked again, whatever it found: its gateway may have gone since, and the batch with it.
        """
        with self._changed:
            poll = one.poll
            if poll is None or poll.done or poll.question != question:
                return False
            poll.deadline = max(poll.deadline, deadline)
            return True

    def _run(self, one: SourceGateway, poll: _Poll) -> None:
        """Ask until there are rows, or the poll's time is over; then say so."""
        while not poll.done:
            time.sleep(max(0.0, one.rests_until - time.monotonic()))
            window: Window | None = None
            failure: BaseException | None = None
            try:
                window = self._asked(one, poll.question, poll.timeout_s)
                self._present(one)
            except BaseException as error:  # noqa: BLE001 - raised on the reader's thread
                failure = error
            away = is_silence(failure) or (self.several and is_refusal(failure))
            if away:
                self.miss(one, failure)
            with self._changed:
                late = self._closed or one.poll is not poll or time.monotonic() >= poll.deadline
                empty = window is not None and poll.question is not None and not _is_news(window, poll.question)
                # An empty answer of the only gateway is one too: its deadline leaves time to wait for its return.
                if late or not (away or (empty and self.several)):
                    self._answered(poll, window, failure)

    def _answered(self, poll: _Poll, window: Window | None, failure: BaseException | None) -> None:
        """End a poll, by what was found or by a fault of its thread; raised on the reader's."""
        with self._changed:
            poll.window, poll.error, poll.done = window, failure, True
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            while not over() and (left := deadline - time.monotonic()) > 0:
                # Not only a notice ends a wait: polls grow older than the grace.
                self._changed.wait(min(left, GRACE_S if any(map(_has_news, self.all)) else 1.0))

    def _fatal(self, error: BaseException | None) -> bool:
        return error is not None and not (self.several and is_absence(error))

    def _refused(self) -> GatewayError | None:
        """The error where each gateway refuses."""
        return nobody_lets_in([(self.called(one), one.absence) for one in self.all])

    def _raise(self) -> None:
        """Raise what a gateway said; that two are one explains whatever else they say."""
        if refused := self._refused():
            raise refused
        errors = [one.poll.error for one in self.all if one.poll and one.poll.done and self._fatal(one.poll.error)]
        for error in sorted(errors, key=lambda one: getattr(one, "code", "") != "TL-G50"):
            assert error is not None
            raise error

    # -- who is away -----------------------------------------------------------------------------------------------

    def miss(self, one: SourceGateway, error: BaseException | None) -> None:
        """Do without a gateway for now; the next poll asks it again."""
        assert isinstance(error, TowlineError)
        absence = Absence.after(one.absence, error)
        with self._changed:
            one.rests_until = time.monotonic() + absence.pause_s
            if self.several and not self._closed:
                one.absence = absence
                absence.tell(self.called(one))
            self._changed.notify_all()

    def forget(self, one: SourceGateway, error: BaseException) -> None:
        """Look for a gateway as if it had never been met: it was gone before it had a place."""
        self.miss(one, error)
        one.lease = None

    def _present(self, one: SourceGateway) -> None:
        with self._changed:
            if one.absence is not None:
                one.absence.over(self.called(one))
                one.absence = None

    def called(self, one: SourceGateway) -> str:
        """What a person calls it: its name, as far as it ever answered, and its place."""
        return f"{one.name} ({one.place.text})" if one.name else one.place.text

    # -- former gateways -------------------------------------------------------------------------------------------

    def former(self, place: GatewayPlace) -> SourceGateway:
        """A gateway that is not in the list, to be asked the same way."""
        if place.text not in self._former:
            self._former[place.text] = SourceGateway(place, self._consumer, self._met)
        return self._former[place.text]

    def let_go(self, one: SourceGateway) -> None:
        """Give the lease of a former gateway back."""
        self._former.pop(one.place.text, None)
        one.hold.release()

    def release(self) -> None:
        """Give all leases back; commits nothing. One that is away has none, and is asked for none any more."""
        self._closed = True
        for one in (*self.all, *self._former.values()):
            one.hold.release()

    def statuses(self) -> dict[SourceGateway, dict[str, Any]]:
        """What each gateway says of itself; nothing of those that do not answer within a second."""
        found: dict[SourceGateway, dict[str, Any]] = {}
        for one in self.all:
            if one.absence is None:
                try:
                    found[one] = one.hold.status()
                except GatewayError:
                    continue  # the next poll tells it better
        return found


def _has_news(one: SourceGateway) -> bool:
    poll = one.poll
    return bool(poll and poll.window and poll.question and _is_news(poll.window, poll.question))


def _is_news(window: Window, question: Question) -> bool:
    return window.end > question.here.offset
