"""The timer trigger: one run at a time, missed runs told as past due, one host of several does it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from azure.functions.meta import Datum
from azure.functions.timer import TimerRequestConverter

from localdev.filelock import FileLock
from localdev.host.configuration import ConfigurationError
from localdev.host.functions import AppFunction
from localdev.host.ncrontab import Schedule
from localdev.host.queue_trigger import accept_nothing
from localdev.host.worker import InvocationFailed, Worker

T = TypeVar("T")
log = logging.getLogger("host")

TAKE_OVER_SECONDS = 1
#: The host keeps no status of schedules that are due more often than this.
SHORTEST_MONITORED = timedelta(minutes=1)


class TimerTrigger:
    """Runs one function on its schedule."""

    def __init__(self, function: AppFunction, folder: Path, worker: Worker) -> None:
        try:
            self._schedule = Schedule(str(function.trigger["schedule"]))
            soon = self._schedule.next_after(datetime.now(UTC))
            period = self._schedule.next_after(soon) - soon
        except ValueError as error:
            raise ConfigurationError(f"the schedule of {function.name} cannot be read: {error}") from None
        self._function = function
        self._worker = worker
        self._run_on_startup = bool(function.trigger.get("runOnStartup", False))
        monitored = bool(function.trigger.get("useMonitor", True)) and period >= SHORTEST_MONITORED
        self._status_file = folder / f"{function.name}.json" if monitored else None
        self._running = asyncio.Lock()

    def describe(self) -> str:
        return f"{self._function.name}: timer {self._schedule.expression} (UTC)"

    async def run(self) -> None:
        """Follow the schedule until cancelled; a run that has begun ends first."""
        last, due = self._read_status()
        if due is not None and due <= datetime.now(UTC):
            last = await to_its_end(self._tick(past_due=True, last=last, due=due))
        elif self._run_on_startup:
            last = await to_its_end(self._tick(past_due=False, last=last, due=None))
        while True:
            due = self._schedule.next_after(datetime.now(UTC))
            self._write_status(last, due)
            # Short sleeps follow a clock that is set, or a machine that slept.
            while (left := (due - datetime.now(UTC)).total_seconds()) > 0:
                await asyncio.sleep(min(left, 10))
            last = await to_its_end(self._tick(past_due=False, last=last, due=due))

    async def run_once(self) -> None:
        """Run the function now, as /admin does."""
        last, due = self._read_status()
        await self._invoke(False, last, due, "started by /admin")

    async def _tick(self, *, past_due: bool, last: datetime | None, due: datetime | None) -> datetime:
        now = datetime.now(UTC)
        await self._invoke(past_due, last, due, f"timer due {due or now:%H:%M:%S}{', past due' if past_due else ''}")
        self._write_status(now, self._schedule.next_after(datetime.now(UTC)))
        return now

    async def _invoke(self, past_due: bool, last: datetime | None, due: datetime | None, reason: str) -> None:
        status = status_json(last, due) if self._status_file else None
        info = {"Schedule": {"AdjustForDST": True}, "ScheduleStatus": status, "IsPastDue": past_due}
        argument: Any = TimerRequestConverter.decode(Datum(json.dumps(info), "json"), trigger_metadata=None)
        async with self._running:
            with suppress(InvocationFailed):
                await self._worker.invoke(self._function, argument, reason, accept_nothing)

    def _read_status(self) -> tuple[datetime | None, datetime | None]:
        if self._status_file is None or not self._status_file.exists():
            return None, None
        try:
            status = json.loads(self._status_file.read_text("utf-8"))
            return parse(status["Last"]), parse(status["Next"])
        except (ValueError, KeyError, TypeError):
            return None, None

    def _write_status(self, last: datetime | None, due: datetime) -> None:
        if self._status_file is not None:
            unfinished = self._status_file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(status_json(last, due)), "utf-8")
            os.replace(unfinished, self._status_file)


async def run_timers(timers: Sequence[TimerTrigger], folder: Path) -> None:
    """Run the timers in one host of several: the one that holds the lock, and another when that one is gone."""
    lock = FileLock(folder / "timers.lock")
    waiting = False
    while not lock.acquire():
        if not waiting:
            log.info("timers: another host runs them; this one takes over when it is gone")
        waiting = True
        await asyncio.sleep(TAKE_OVER_SECONDS)
    if waiting:
        log.info("timers: this host runs them now")
    try:
        await asyncio.gather(*(timer.run() for timer in timers))
    finally:
        lock.release()


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a cancellation meanwhile takes effect when it has ended."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def status_json(last: datetime | None, due: datetime | None) -> dict[str, str | None]:
    now = datetime.now(UTC).isoformat()
    return {"Last": last.isoformat() if last else None, "Next": due.isoformat() if due else None, "LastUpdated": now}


def parse(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
