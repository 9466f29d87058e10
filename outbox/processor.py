"""The drain: claim due rows, deliver them, settle the results, until nothing is due or the time budget is spent.

Claiming, delivering and settling overlap on one event loop; the statements run in two threads of the drain's own. It
knows neither PostgreSQL nor HTTP nor the queue: those come in through the three Protocols below.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar
from uuid import UUID

from outbox import events
from outbox.errors import DatabaseUnavailable, DoorbellUnavailable
from outbox.message import Dead, Delivered, Due, Message, Outcome, Retry, Settlement
from outbox.retry import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Rows due later than this are the timer's; no doorbell is armed for them.
HORIZON_SECONDS = 300.0
#: A row due within this is waited for rather than rung for.
WAIT_SECONDS = 2.0
#: How long finished results are gathered before they are settled, and how many end the gathering.
SETTLE_SECONDS = 0.05
SETTLE_ROWS = 100
#: While deliveries are in flight, how often to look for rows that became due meanwhile.
LOOK_SECONDS = 1.0
#: How long freed room is gathered before the next claim.
ROOM_SECONDS = 0.02
#: While rows flow, how often to stop for one that must be delivered alone.
SUSPECT_SECONDS = 5.0
#: More due rows than this many batches at the end of a drain ring for more instances, with this many doorbells.
BUSY_BATCHES = 20
BUSY_DOORBELLS = 4
#: Room for messages to destinations that this process does not know: they only wait out their grace.
UNKNOWN_ROOM = 32
#: Status of a Settlement whose attempt never started.
GIVEN_BACK = "GivenBack"


class Store(Protocol):
    """Where the rows are. Every method blocks; any may raise DatabaseUnavailable."""

    def destinations(self) -> list[str]: ...
    def claim(self, rooms: Mapping[str, int], limit: int) -> list[Message]: ...
    def claim_suspect(self, destinations: Sequence[str]) -> list[Message]: ...
    def suspects(self, destinations: Sequence[str]) -> bool: ...
    def expire(self, destinations: Sequence[str]) -> list[dict[str, Any]]: ...
    def promote(self) -> bool: ...
    def release(self, keys: Iterable[tuple[str, str]]) -> int: ...
    def settle(self, results: Sequence[Settlement]) -> set[UUID]: ...
    def give_back(self, messages: Iterable[Message]) -> set[UUID]: ...
    def due(self, destinations: Sequence[str], *, soon_seconds: float, horizon_seconds: float) -> Due: ...
    def arm(self, delay_seconds: float, ring: Callable[[float], None]) -> None: ...
    def backlog(self, destinations: Sequence[str], at_most: int) -> int: ...


class Sender(Protocol):
    """How a message reaches its destination."""

    async def send(self, message: Message) -> Outcome: ...


class Doorbell(Protocol):
    """How a later drain is called. Blocks; raises DoorbellUnavailable."""

    def ring(self, delay_seconds: float = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """What the drain must know of a destination."""

    timeout_seconds: float
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    routes: Mapping[str, Route]
    backoff: Backoff
    batch_size: int
    max_in_flight: int
    lease_seconds: float
    max_attempts: int
    give_up_seconds: float
    unknown_grace_seconds: float


@dataclass(slots=True)
class Report:
    """What a drain did, in rows."""

    claimed: int = 0
    delivered: int = 0
    retried: int = 0
    failed: int = 0
    given_back: int = 0
    lost_leases: int = 0


class Processor:
    """Runs at most one drain at a time in this process. All its coroutines run on one event loop."""

    def __init__(self, store: Store, sender: Sender, doorbell: Doorbell, policy: Policy) -> None:
        self.store = store
        self.sender = sender
        self.doorbell = doorbell
        self.policy = policy
        self.stopping = False
        self._current: _Drain | None = None

    async def drain(self, budget_seconds: float) -> Report | None:
        """Work until nothing is due or the budget is spent. None: a running drain was told to look once more.

        Raises DatabaseUnavailable; rows that were claimed then come back when their leases end.
        """
        if self._current is not None:
            self._current.look_again()
            return None
        self._current = drain = _Drain(self, monotonic() + budget_seconds)
        try:
            # A drain returns in the same step in which it last saw that nobody asked for another look.
            return await drain.run()
        finally:
            self._current = None
            drain.close()

    def stop(self) -> None:
        """Claim no more; what is in flight is finished and settled. Call it on the loop."""
        self.stopping = True
        if self._current is not None:
            self._current.look_again()


class _Drain:
    """One drain, from its first look at the table to its last."""

    def __init__(self, processor: Processor, deadline: float) -> None:
        self._processor = processor
        self._store = processor.store
        self._policy = processor.policy
        self._deadline = deadline
        self._report = Report()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="outbox-drain")
        self._names: list[str] = []
        self._flying: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: list[Settlement] = []
        self._unsettled = 0
        self._failure: DatabaseUnavailable | None = None
        self._again = False
        self._released = False
        self._blocked = 0
        self._next_watch = 0.0
        self._next_suspect = monotonic() + SUSPECT_SECONDS
        self._nudge = asyncio.Event()  # a delivery ended, results were settled, or another look is wanted
        self._result = asyncio.Event()
        self._batch_full = asyncio.Event()

    async def run(self) -> Report:
        started = monotonic()
        settler = asyncio.create_task(self._settle_forever())
        try:
            await self._keep_watch()
            while not self._over:
                await self._keep_watch()
                await self._deliver_suspect()
                claimed, passed_over = await self._claim()
                if claimed:
                    continue
                if passed_over or self._in_flight:
                    await self._wait_for_room(passed_over)
                elif not await self._look_closer():
                    break
            await self._land()
            if self._over:
                await self._ring_for_the_rest()
            if self._failure is not None:
                raise self._failure
        finally:
            await self._land()
            settler.cancel()
            with suppress(asyncio.CancelledError):
                await settler
            self._log(monotonic() - started)
        return self._report

    def look_again(self) -> None:
        self._again = True
        self._nudge.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @property
    def _in_flight(self) -> int:
        return self._flying.total()

    @property
    def _over(self) -> bool:
        return self._processor.stopping or self._failure is not None or monotonic() >= self._deadline

    # -- claim -------------------------------------------------------------------------------------------------------

    async def _claim(self) -> tuple[int, list[str]]:
        """Claim as much as can start at once. Returns how many rows, and the destinations that had no room."""
        self._released = False
        rooms = {name: room for name in self._names if (room := self._room(name)) > 0}
        passed_over = [name for name in self._names if name not in rooms]
        if not rooms:
            return 0, passed_over
        limit = min(self._policy.batch_size, self._free)
        messages = await self._call(self._store.claim, rooms, limit)
        self._report.claimed += len(messages)
        for message in messages:
            self._start(message)
        return len(messages), passed_over

    @property
    def _free(self) -> int:
        most = self._policy.max_in_flight
        return min(most - self._in_flight, 2 * most - self._unsettled)

    def _room(self, name: str) -> int:
        return min(self._free, self._concurrency(name) - self._flying[name])

    def _concurrency(self, name: str) -> int:
        """How many deliveries at once: beside others never more than half of all, so that none waits for its end."""
        route = self._policy.routes.get(name)
        most = self._policy.max_in_flight if len(self._names) == 1 else max(1, self._policy.max_in_flight // 2)
        return min(most, UNKNOWN_ROOM if route is None else route.concurrency)

    async def _deliver_suspect(self, *, now: bool = False) -> bool:
        """Deliver one row that lost two leases in a row, with nothing else in flight: it may kill this process."""
        if not now and monotonic() < self._next_suspect:
            return False
        self._next_suspect = monotonic() + SUSPECT_SECONDS
        if self._unsettled:
            if not await self._call(self._store.suspects, self._names):
                return False
            await self._land()
        messages = await self._call(self._store.claim_suspect, self._names)
        self._report.claimed += len(messages)
        for message in messages:
            log.warning("claimed alone message=%s: its last two leases were lost", message.outbox_message_id)
            self._start(message)
        await self._land()
        return bool(messages)

    async def _expire(self) -> bool:
        """Make rows Failed that are out of attempts or time."""
        rows = await self._call(self._store.expire, self._names)
        self._report.failed += len(rows)
        for row in rows:
            log.error(
                "message failed message=%s type=%s destination=%s attempts=%d code=%s error=%s",
                row["outbox_message_id"], row["event_type"], row["destination"], row["attempt_count"],
                row["failure_code"], row["last_error"],
            )  # fmt: skip
        await self._release([(row["destination"], row["ordering_key"]) for row in rows])
        return bool(rows)

    async def _release(self, finished: Iterable[tuple[str, str | None]]) -> None:
        """Let the next messages go whose turn has come, where one with an ordering_key is finished."""
        keys = {(destination, key) for destination, key in finished if key is not None}
        if not keys:
            return
        try:
            released = await self._call(self._store.release, keys)
            self._released = self._released or released > 0
            self._nudge.set()
        except DatabaseUnavailable as error:
            log.warning("next messages not released keys=%d error=%s; the timer will do it", len(keys), error)

    # -- wait --------------------------------------------------------------------------------------------------------

    async def _wait_for_room(self, passed_over: list[str]) -> None:
        """A claim found nothing. Wait until the destinations that it passed over, if any, have room by now."""
        if not passed_over:  # nothing is due: only a doorbell, time, or the end of all deliveries brings more
            await self._wait(lambda: not self._in_flight, LOOK_SECONDS)
            return
        await self._wait(lambda: any(self._room(n) > 0 for n in passed_over), LOOK_SECONDS)
        # One claim for several rows, rather than one for each that lands.
        await self._wait(lambda: any(4 * self._room(n) >= self._concurrency(n) for n in passed_over), ROOM_SECONDS)

    async def _look_closer(self) -> bool:
        """Nothing is in flight and a claim found nothing. Returns whether to go on."""
        await self._land()
        if await self._deliver_suspect(now=True) or await self._expire() or await self._call(self._store.promote):
            return True
        due = await self._due(0)
        if due.soon and self._blocked < 5:  # another worker holds its lock at this moment
            self._blocked += 1
            await self._wait(lambda: False, 0.2)
            return True
        if not due.soon:
            self._blocked = 0
            if due.next_in is not None and due.next_in <= WAIT_SECONDS:
                await self._wait(lambda: False, due.next_in + 0.002)
                return True
        await self._arm(1.0 if due.soon else due.next_in)
        return self._again or self._released

    async def _wait(self, worth: Callable[[], bool], seconds: float) -> None:
        """Wait until `worth()`, another look is wanted, or `seconds` have passed."""
        until = min(monotonic() + seconds, self._deadline)
        while not (worth() or self._again or self._released or self._over):
            self._nudge.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), max(0.0, until - monotonic()))
            if monotonic() >= until:
                return

    async def _land(self) -> None:
        """Wait until nothing is in flight and every result is settled, or its lease has ended."""
        while self._unsettled:
            self._nudge.clear()
            self._result.set()
            await self._nudge.wait()

    # -- doorbell ----------------------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        """Keep a doorbell armed that will ring if this process is killed, and find destinations that rows name."""
        if not self._again and monotonic() < self._next_watch:
            return
        self._again = False
        self._next_watch = monotonic() + self._policy.lease_seconds / 2
        live = await self._call(self._store.destinations)
        self._names = sorted({*self._policy.routes, *live})
        await self._call(self._store.promote)
        await self._expire()
        due = await self._due(WAIT_SECONDS)
        # What is due while this drain runs will be claimed by it, and is claimable again when that lease ends.
        ends = [self._policy.lease_seconds] if due.soon else []
        await self._arm(min(ends + ([] if due.next_in is None else [due.next_in]), default=None))

    async def _due(self, soon_seconds: float) -> Due:
        look = partial(self._store.due, self._names, soon_seconds=soon_seconds, horizon_seconds=HORIZON_SECONDS)
        return await self._call(look)

    async def _arm(self, delay_seconds: float | None) -> None:
        if delay_seconds is None or delay_seconds > HORIZON_SECONDS:
            return
        try:
            await self._call(self._store.arm, delay_seconds, self._processor.doorbell.ring)
        except DoorbellUnavailable as error:
            log.warning("doorbell not armed error=%s; the timer will find the rows", error)

    async def _ring_for_the_rest(self) -> None:
        """The time budget is spent: call the next drain, and more instances where one cannot keep up."""
        busy = BUSY_BATCHES * self._policy.batch_size
        left = await self._call(self._store.backlog, self._names, busy + 1)
        if left == 0:
            await self._arm((await self._due(0)).next_in)
            return
        try:
            for _ in range(1 + BUSY_DOORBELLS if left > busy else 1):
                await self._call(self._processor.doorbell.ring)
        except DoorbellUnavailable as error:
            log.warning("doorbell failed error=%s; the timer will find the rows", error)

    # -- deliver -----------------------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        self._flying[message.destination] += 1
        self._unsettled += 1
        task = asyncio.create_task(self._fly(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fly(self, message: Message) -> None:
        try:
            outcome = await self._attempt(message)
        except Exception as error:
            log.exception("attempt failed message=%s", message.outbox_message_id)
            outcome = Retry("delivery_error", type(error).__name__)
        self._flying[message.destination] -= 1
        self._results.append(self._settlement(message, outcome))
        self._result.set()
        if len(self._results) >= SETTLE_ROWS or not self._in_flight:
            self._batch_full.set()
        self._nudge.set()

    async def _attempt(self, message: Message) -> Outcome | None:
        """The outcome of one attempt; None where it could not start within its lease."""
        route = self._policy.routes.get(message.destination)
        if route is None:
            return self._wait_out(message, "unknown_destination", "OUTBOX_DESTINATIONS has no destination of this name")
        if message.event_type not in events.registered():
            return self._wait_out(message, "unknown_event_type", "no event type of this name is registered")
        if message.payload is None:
            return self._wait_out(message, "payload_too_large", "the payload exceeds OUTBOX_MAX_PAYLOAD_BYTES")
        if (misfit := events.misfit(message.event_type, message.payload)) is not None:
            return self._wait_out(message, "payload_mismatch", f"the payload does not fit its event type: {misfit}")
        if self._over or message.lease_left < route.timeout_seconds:
            return None
        return await self._processor.sender.send(message)

    def _wait_out(self, message: Message, code: str, error: str) -> Outcome:
        """A worker of an older version may have claimed it: a newer one will know it within the grace."""
        left = self._policy.unknown_grace_seconds - message.age_seconds - message.seconds_since_claim
        return Retry(code, error, at_most=left) if left > 0 else Dead(code, error)

    def _settlement(self, message: Message, outcome: Outcome | None) -> Settlement:
        now = monotonic()
        policy = self._policy
        match outcome:
            case None:
                return Settlement(message=message, status=GIVEN_BACK, ended=now)
            case Delivered():
                return Settlement(message=message, status="Processed", ended=now)
            case Dead(code, error):
                return Settlement(message=message, status="Failed", code=code, error=error, ended=now)
            case Retry(code, error, retry_after, at_most):
                tried = message.tried_seconds + message.seconds_since_claim
                if message.attempt_count >= policy.max_attempts:
                    code, error = "attempts_exhausted", f"attempt {message.attempt_count}, the last: {error}"
                elif tried >= policy.give_up_seconds:
                    code, error = "gave_up", f"attempt {message.attempt_count}, out of time: {error}"
                else:
                    delay = max(policy.backoff.delay(message.attempt_count), retry_after)
                    if at_most is not None:
                        delay = min(delay, at_most)
                    return Settlement(
                        message=message, status="Pending", delay_seconds=delay, code=code, error=error, ended=now
                    )
                return Settlement(message=message, status="Failed", code=code, error=error, ended=now)

    # -- settle ------------------------------------------------------------------------------------------------------

    async def _settle_forever(self) -> None:
        while True:
            await self._result.wait()
            self._result.clear()
            if self._in_flight and len(self._results) < SETTLE_ROWS:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._batch_full.wait(), SETTLE_SECONDS)
            self._batch_full.clear()
            batch, self._results = self._results, []
            try:
                await self._give_back([r.message for r in batch if r.status == GIVEN_BACK])
                await self._settle([r for r in batch if r.status != GIVEN_BACK])
            except Exception:  # their leases end, and they are delivered again
                log.exception("results not recorded rows=%d", len(batch))
            finally:
                self._unsettled -= len(batch)
                self._nudge.set()

    async def _settle(self, batch: list[Settlement]) -> None:
        pause = 0.2
        while batch:
            try:
                counted = await self._call(self._store.settle, batch)
            except DatabaseUnavailable as error:
                held = [result for result in batch if result.message.lease_left > 0]
                if len(held) < len(batch):
                    log.error("results lost rows=%d error=%s; delivered again", len(batch) - len(held), error)
                    self._failure = error
                batch = held
                await asyncio.sleep(pause)
                pause = min(2.0, 2 * pause)
            except Exception:
                if len(batch) == 1:
                    await self._settle_unstorable(batch[0])
                else:  # one result that cannot be stored must not hold up its mates
                    for result in batch:
                        await self._settle([result])
                return
            else:
                for result in batch:
                    self._note(result, result.message.outbox_message_id in counted)
                done = [r.message for r in batch if r.status != "Pending" and r.message.ordering_key is not None]
                await self._release([(m.destination, m.ordering_key) for m in done if m.outbox_message_id in counted])
                return

    async def _settle_unstorable(self, result: Settlement) -> None:
        log.exception("result cannot be stored message=%s", result.message.outbox_message_id)
        bare = replace(result, error=None if result.status == "Processed" else "its error text could not be stored")
        if bare != result:
            await self._settle([bare])

    async def _give_back(self, messages: list[Message]) -> None:
        if not messages:
            return
        try:
            counted = await self._call(self._store.give_back, messages)
        except DatabaseUnavailable as error:  # their leases end by themselves, at the cost of an attempt
            log.warning("rows not given back rows=%d error=%s", len(messages), error)
        else:
            self._report.given_back += len(counted)

    def _note(self, result: Settlement, counted: bool) -> None:
        message = result.message
        if not counted:
            self._report.lost_leases += 1
            log.warning(
                "lease lost message=%s destination=%s result=%s; not recorded",
                message.outbox_message_id, message.destination, result.status,
            )  # fmt: skip
        elif result.status == "Processed":
            self._report.delivered += 1
        elif result.status == "Failed":
            self._report.failed += 1
            log.error(
                "message failed message=%s type=%s destination=%s attempts=%d code=%s error=%s",
                message.outbox_message_id, message.event_type, message.destination, message.attempt_count,
                result.code, result.error,
            )  # fmt: skip
        else:
            self._report.retried += 1
            log.info(
                "retry message=%s destination=%s attempt=%d code=%s next_in=%.1f error=%s",
                message.outbox_message_id, message.destination, message.attempt_count, result.code,
                result.delay_seconds, result.error,
            )  # fmt: skip

    def _log(self, seconds: float) -> None:
        r = self._report
        if r.claimed or r.failed:
            log.info(
                "drain claimed=%d delivered=%d retried=%d failed=%d given_back=%d lost_leases=%d seconds=%.2f",
                r.claimed, r.delivered, r.retried, r.failed, r.given_back, r.lost_leases, seconds,
            )  # fmt: skip

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in one of this drain's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
