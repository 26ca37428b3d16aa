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
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from towline.backoff import Backoff
from towline.errors import ConfigError, Fenced, GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import REFUSALS
from towline.gateway.endpoint import GatewayEndpoint
from towline.spark.link import PATIENCE_S
from towline.threads import guarded_thread, later

if TYPE_CHECKING:
    from collections.abc import Iterator

    from towline.gateway.client import GatewayClient, Lease, Window
    from towline.spark.link import GatewayPlace
    from towline.spark.offsets import JournalPlace

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

    def has_news(self, window: Window | None) -> bool:
        """Whether an answer has rows."""
        return window is not None and window.end > self.here.offset


class _Poll(NamedTuple):
    """A question on its way, None for the lease alone; since when on `time.monotonic`."""

    question: Question | None
    answer: futures.Future[Window | None]
    began: float


class SourceGateway:
    """One gateway of a source: the connection to it, and the lease of its reader.

    Args:
        place: Where the gateway is.
        consumer: Name under which rows are committed.
        met: Called with this and the gateway's name and id of its journal before a lease is taken; what it raises keeps
            the lease from being taken.

    Attributes:
        name: Its name; set with the first answer, and the same afterwards.
        journal: Id of its journal; set with the name.
        lease: As it was given last; None before the first.
        absence: Why it is done without now: what it, or the way to it, said last; None while it is there.
        away_since: Since when, in seconds since 1970.
        tip: Offset after the newest row it told of.
        poll: What it was asked last; None when the answer was taken.
        rests_until: It is not asked again before, on `time.monotonic`.
        warned_at: When a person was told last that it is away, on the same clock.
    """

    def __init__(
        self, place: GatewayPlace, consumer: str, met: Callable[[SourceGateway, str, str], None] | None = None
    ) -> None:
        self.place = place
        self.name = ""
        self.journal = ""
        self.lease: Lease | None = None
        self.absence: TowlineError | None = None
        self.away_since = 0.0
        self.tip = 0
        self.poll: _Poll | None = None
        self.rests_until = 0.0
        self.warned_at = 0.0
        self._consumer = consumer
        self._met = met
        self._client: GatewayClient | None = None
        #: The lease of this connection; None after it was given up.
        self._held: Lease | None = None
        #: A second lease would take the first one over: one thread at a time takes one, and none after `release`.
        self._opening = threading.Lock()
        self._released = threading.Event()
        self._keeping = guarded_thread(self._keep, "keep-gateway", again_s=1.0)

    @property
    def called(self) -> str:
        """What a person calls it: its name, as far as it ever answered, and its place."""
        return f"{self.name} ({self.place.text})" if self.name else self.place.text

    def open(self) -> Lease:
        """The lease; connects, and starts the gateway where that is ours to do, at the first call.

        Raises:
            Fenced: TL-G03 when another living reader has it.
            GatewayUnreachable: No gateway answers.
        """
        with self._opening:
            if self._released.is_set():
                raise self._gone()
            lease = self._held or self._taken()
            if self.lease is not lease:
                self.lease, self.tip = lease, max(self.tip, lease.tip)
            return lease

    def answer(self, question: Question | None, timeout_s: float) -> Window | None:
        """What a poll does: as `wait`, or `open` alone without a question."""
        if question is not None:
            return self.wait(question, timeout_s)
        self.open()
        return None

    def _taken(self) -> Lease:
        client = self._client = self._client or self.place.connect()
        if self.place.settings and not self._keeping.is_alive():
            self._keeping.start()
        with self._renewed_after(client):
            if self._met:
                status = client.status()
                self._met(self, str(status["name"]), str(status["journal"]))
            lease = self._held = client.open(self._consumer, patience_s=TAKEOVER_S)
        if self._released.is_set():  # while it was being taken
            self.release()
            raise self._gone()
        return lease

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

    def wait(self, question: Question, timeout_s: float) -> Window:
        """Ask, and wait for rows.

        Args:
            question: What is asked.
            timeout_s: Longest wait, in seconds.

        Raises:
            Fenced: TL-G04 when the gateway serves another journal; as `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        here = question.here

        def asked(client: GatewayClient, lease: Lease) -> Window:
            if here.journal != lease.journal:
                raise foreign(here, lease.journal)
            try:
                return client.wait(
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
                if error.code != "TL-G07" or _gave(client.status(), lease):
                    raise
                self._drop(client)  # not taken over: the gateway was started again and knows no leases
                return self.wait(question, timeout_s)

        return self._call(asked)

    def incarnation(self, offset: int) -> str:
        """Which opening of the journal wrote the row below ``offset``. Raises as `wait`."""
        return self._call(lambda client, _: client.incarnation(offset))

    def tickets(self, end: JournalPlace, bounds: Sequence[tuple[int, int]]) -> list[str]:
        """What lets workers in to read the parts of a range, see `GatewayPlace.tickets`. Raises as `wait`."""
        return self._call(lambda client, _: self.place.tickets(client, end, bounds))

    def status(self) -> dict[str, Any]:
        """The account of the gateway; empty while there is no connection.

        Raises:
            GatewayError: It gave none within a second.
        """
        client = self._client
        return client.status(timeout_s=1.0) if client else {}

    def release(self) -> None:
        """Give the lease back and close; never commits anything. No other one is taken."""
        self._released.set()
        client, lease = self._client, self._held
        with contextlib.suppress(GatewayError):
            if client and lease:
                client.release(lease)
        self._drop(client)

    def _call(self, call: Callable[[GatewayClient, Lease], _T]) -> _T:
        lease, client = self.open(), self._client
        if client is None:  # another thread has found it gone
            raise self._gone()
        with self._renewed_after(client):
            return call(client, lease)

    @contextlib.contextmanager
    def _renewed_after(self, client: GatewayClient) -> Iterator[None]:
        """Forget a connection that may be what is wrong: the next one is made with the files as they are then."""
        try:
            yield
        except TowlineError as error:
            if is_absence(error):
                self._drop(client)
            raise

    def _drop(self, client: GatewayClient | None) -> None:
        """Forget a connection, unless a newer one is there; the next call makes a new one."""
        if client is not None and self._client is client:
            self._client, self._held = None, None
            client.close()

    @property
    def is_there(self) -> bool:
        """Whether it was met, and not missed since."""
        return self.lease is not None and self.absence is None

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


#: What gateways have answered; None of one that was asked for its lease alone.
Answers: TypeAlias = "dict[SourceGateway, Window | None]"


class SourceGateways:
    """The gateways that a stream reads.

    Args:
        places: Where they are, in any order.
        consumer: Name under which rows are committed at each.
    """

    def __init__(self, places: Sequence[GatewayPlace], consumer: str) -> None:
        self._consumer = consumer
        self._meeting = threading.Lock()
        self.all = tuple(SourceGateway(place, consumer, self._met) for place in places)
        #: Gateways that were taken out of the list, and are asked whether they may go; by place.
        self._former: dict[str, SourceGateway] = {}

    # -- polling -------------------------------------------------------------------------------------------------

    def meet(self, needed: SourceGateway | None = None) -> None:
        """Take the leases of at least one gateway, and of whoever answers soon; or wait for the one that is needed.

        Raises:
            ConfigError: TL-G50, two of them are one.
            Fenced: TL-G03 when another living reader has a lease.
            GatewayError: TL-G40, TL-G44 or TL-G46, none of them lets us in.
            GatewayUnreachable: None answers within `PATIENCE_S` seconds.
        """
        began, wanted = time.monotonic(), (needed,) if needed else self.all

        def over(now: float, _: Answers) -> bool:
            left = [one for one in wanted if not one.is_there]
            late = now - began > MEET_S or all(one.absence for one in left)
            return not left or (len(left) < len(wanted) and late)

        self._poll({one: None for one in wanted if not one.is_there}, 0.0, began + PATIENCE_S, over)
        if not any(one.is_there for one in wanted):
            absence = next((one.absence for one in wanted if one.absence), None)
            silence = GatewayUnreachable("TL-G01", wanted[0].place.text, "no gateway answers", "Is it running?")
            raise absence or silence

    def _met(self, one: SourceGateway, name: str, journal: str) -> None:
        """Refuse a gateway that another one of the list is already, before it takes that one's lease."""
        with self._meeting:
            for other in self.all:
                if other is not one and one in self.all and (other.name == name or other.journal == journal):
                    same = f'have the same name "{name}"' if other.name == name else f"serve one journal, {journal}"
                    what = f"{other.place.text} and {one.place.text} {same}"
                    do = "Name each gateway once, and give each a name of its own: it stands in the checkpoint."
                    raise ConfigError("TL-G50", LIST, what, do)
            one.name, one.journal = name, journal

    def ask(
        self, questions: Mapping[SourceGateway, Question], patience_s: float, grace_s: float | None = None
    ) -> dict[SourceGateway, Window]:
        """Commit at each gateway and wait until one has rows, or one is met that was away from the beginning.

        Args:
            questions: For each gateway that was met. The others are looked for meanwhile.
            patience_s: Longest wait, in seconds; 0 for an answer of each.
            grace_s: How long the others are waited for once one has rows, in seconds; None for `GRACE_S`.

        Returns:
            The answers that have come.

        Raises:
            TowlineError: What a gateway said, unless it is an absence.
        """
        grace = GRACE_S if grace_s is None else grace_s
        unmet = [one for one in self.all if one.lease is None]
        if len(unmet) == len(self.all):
            patience_s = max(patience_s, MEET_S)

        def over(now: float, answers: Answers) -> bool:
            waited_for = [one.poll for one in questions if one.poll and not one.absence]
            if any(one not in questions or questions[one].has_news(window) for one, window in answers.items()):
                return all(now - poll.began >= grace for poll in waited_for)
            return patience_s <= 0 and not waited_for

        longest = patience_s if patience_s > 0 else PATIENCE_S + 30
        asked = {**dict.fromkeys(unmet), **questions}
        answers = self._poll(asked, patience_s, time.monotonic() + longest, over)
        return {one: window for one, window in answers.items() if window is not None}

    def _poll(
        self,
        asked: Mapping[SourceGateway, Question | None],
        patience_s: float,
        deadline: float,
        over: Callable[[float, Answers], bool],
    ) -> Answers:
        """Ask each on a thread, again and again, until it is over.

        A poll with the same question that is on its way from the call before is waited for. One that has ended is asked
        again, whatever it found: its gateway may have gone since, and the batch with it.
        """
        answers: Answers = {}
        self._heard(asked)
        for one, question in asked.items():
            if one.poll and one.poll.question != question:
                one.poll = None
        while True:
            now = time.monotonic()
            for one, question in asked.items():
                if one.poll is None and one not in answers and now >= one.rests_until:
                    call = partial(one.answer, question, min(patience_s, max(0.0, deadline - now)))
                    one.poll = _Poll(question, later(call, f"gateway {one.name}"), now)
            for one, window in self._heard(asked).items():
                question = asked[one]
                if patience_s <= 0 or question is None or question.has_news(window):
                    answers[one] = window
            now = time.monotonic()
            if over(now, answers) or now >= deadline:
                return answers
            # Not only an answer ends a wait: polls grow older than the grace, and who was away is asked again.
            rests = [one.rests_until - now for one in asked if one.rests_until > now]
            pause = min(deadline - now, GRACE_S if answers else 1.0, *rests)
            if pending := [one.poll.answer for one in asked if one.poll]:
                futures.wait(pending, pause, futures.FIRST_COMPLETED)
            else:
                time.sleep(pause)

    def _heard(self, asked: Iterable[SourceGateway]) -> Answers:
        """The answers that have come; what is wrong is raised, that two are one before whatever else they say."""
        windows: Answers = {}
        errors: list[BaseException] = []
        for one in asked:
            if one.poll is None or not one.poll.answer.done():
                continue
            answer, one.poll = one.poll.answer, None
            error = answer.exception()
            if is_absence(error):
                self.miss(one, error)
            elif error is not None:
                errors.append(error)
            else:
                self._present(one)
                windows[one] = window = answer.result()
                one.tip = window.tip if window else one.tip
        if refused := self._refused():
            raise refused
        for error in sorted(errors, key=lambda one: getattr(one, "code", "") != "TL-G50"):
            raise error
        return windows

    def _refused(self) -> TowlineError | None:
        """The error where each gateway refuses: only a person can help then."""
        refusals = [(one.called, one.absence) for one in self.all if one.absence and is_refusal(one.absence)]
        if len(refusals) < len(self.all):
            return None
        first = refusals[0][1]
        if len(refusals) == 1:
            return first
        why = "; ".join(f"{name}: {error.what}" for name, error in refusals)
        return GatewayError(first.code, LIST, f"no gateway of the list lets this query in ({why})", first.do)

    # -- who is away -----------------------------------------------------------------------------------------------

    def miss(self, one: SourceGateway, error: BaseException | None) -> None:
        """Do without a gateway for now, and say so: silence once, a refusal each minute; later it is asked again."""
        assert isinstance(error, TowlineError)
        now, before, refused = time.monotonic(), one.absence, is_refusal(error)
        one.absence = error
        if before is None:
            one.away_since = time.time()
        one.rests_until = now + (_REFUSED_PAUSE_S if refused else _PAUSE_S)
        new = before is None or is_refusal(before) is not refused
        if new or (refused and now - one.warned_at >= _REMIND_S):
            one.warned_at = now
            how, code, do = ("held back", error.code, f". {error.do}") if refused else ("away", "TL-G54", "")
            others = ", the others' go on" if len(self.all) > 1 else ""
            what = "gateway %s is %s: %s; its messages wait there%s%s   [%s]"
            _LOG.warning(what, one.called, how, error.what, others, do, code)

    def forget(self, one: SourceGateway, error: BaseException) -> None:
        """Look for a gateway as if it had never been met: it was gone before it had a place."""
        self.miss(one, error)
        one.lease = None

    def _present(self, one: SourceGateway) -> None:
        if one.absence is not None:
            since = datetime.fromtimestamp(one.away_since).astimezone()
            _LOG.warning("gateway %s is back; it was away since %s", one.called, f"{since:%H:%M:%S}")
            one.absence = None

    # -- former gateways -------------------------------------------------------------------------------------------

    def former(self, place: GatewayPlace) -> SourceGateway:
        """A gateway that is not in the list, to be asked the same way."""
        return self._former.setdefault(place.text, SourceGateway(place, self._consumer, self._met))

    def let_go(self, one: SourceGateway) -> None:
        """Give the lease of a former gateway back."""
        self._former.pop(one.place.text, None)
        one.release()

    def release(self) -> None:
        """Give all leases back; commits nothing. One that is away has none, and is asked for none any more."""
        for one in (*self.all, *self._former.values()):
            one.release()

    def statuses(self) -> dict[SourceGateway, dict[str, Any]]:
        """What each gateway says of itself; nothing of those that do not answer within a second."""
        found: dict[SourceGateway, dict[str, Any]] = {}
        for one in self.all:
            if one.absence is None:
                with contextlib.suppress(GatewayError):  # the next poll tells it better
                    found[one] = one.status()
        return found
