"""The queue trigger: polls a Storage queue, runs the function for each message, retries, and sets poison aside."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from azure.core.exceptions import AzureError, ResourceExistsError, ResourceNotFoundError
from azure.functions.meta import Datum
from azure.functions.queue import QueueMessageInConverter
from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueClient, QueueServiceClient

from localdev.host.configuration import LOCAL_POLLING_LIMIT, ConfigurationError, QueueOptions
from localdev.host.functions import AppFunction
from localdev.host.worker import InvocationFailed, Worker

log = logging.getLogger("host")

FIRST_DELAY = 0.1
#: How long a message stays hidden while its function runs; renewed at half of it.
INVISIBLE_SECONDS = 600
#: A request to a queue service that is down should fail soon: the next poll comes anyway.
FAIL_SOON: dict[str, Any] = {"retry_total": 0, "connection_timeout": 5, "read_timeout": 30}


class QueueTrigger:
    """Listens to the queue of one function."""

    def __init__(self, function: AppFunction, connection_string: str, options: QueueOptions, worker: Worker) -> None:
        self._function = function
        self._options = options
        self._worker = worker
        self._name = str(function.trigger["queueName"])
        self._service = QueueServiceClient.from_connection_string(connection_string, **FAIL_SOON)
        self._queue: QueueClient = self._service.get_queue_client(self._name)
        self._longest_delay = min(options.max_polling_interval, LOCAL_POLLING_LIMIT).total_seconds()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    def describe(self) -> str:
        capped = "" if self._options.max_polling_interval <= LOCAL_POLLING_LIMIT else ", the most in local development"
        return (
            f"{self._function.name}: queue {self._name}, polled at least every {self._longest_delay:g} s{capped}, "
            f"at most {self._options.batch_size + self._options.new_batch_threshold} messages at once"
        )

    async def listen(self) -> None:
        """Poll until cancelled; running invocations go on then."""
        idle_polls = 0
        outage: str | None = None
        while True:
            while len(self._in_flight) > self._options.new_batch_threshold:
                self._room.clear()
                await self._room.wait()
            try:
                messages = await self._receive()
            except (AzureError, OSError) as error:
                messages = []
                problem = "does not exist" if isinstance(error, ResourceNotFoundError) else "cannot be read"
                if outage != problem:
                    reason = "" if isinstance(error, ResourceNotFoundError) else f" ({type(error).__name__})"
                    log.warning("queue %s %s%s: still trying", self._name, problem, reason)
                outage = problem
            else:
                if outage is not None:
                    log.info("queue %s can be read again", self._name)
                outage = None
            for message in messages:
                task = asyncio.create_task(self._handle(message))
                self._in_flight.add(task)
                task.add_done_callback(self._finished)
            idle_polls = 0 if messages else idle_polls + 1
            if not messages:
                await asyncio.sleep(self._delay(idle_polls))

    async def run_once(self, text: str) -> None:
        """Run the function for a message that never was in the queue, as /admin does."""
        now = datetime.now(UTC)
        message = QueueMessage(
            id=str(uuid.uuid4()), inserted_on=now, expires_on=now + timedelta(days=7), dequeue_count=1
        )
        with suppress(InvocationFailed):
            await self._invoke(message, text, "started by /admin")

    def settling(self) -> set[asyncio.Task[None]]:
        """Messages whose invocation runs, or whose deletion is on its way."""
        return set(self._in_flight)

    def _delay(self, idle_polls: int) -> float:
        grown: float = FIRST_DELAY * 2.0 ** min(idle_polls - 1, 30) * random.uniform(0.8, 1.2)
        return min(max(grown, FIRST_DELAY), self._longest_delay)

    async def _receive(self) -> list[QueueMessage]:
        size = self._options.batch_size
        pages = self._queue.receive_messages(messages_per_page=size, visibility_timeout=INVISIBLE_SECONDS).by_page()
        async for page in pages:
            return [message async for message in page]
        return []

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("queue %s: a message could not be settled: %s", self._name, error)

    async def _handle(self, message: QueueMessage) -> None:
        try:
            text = decode(message.content, self._options.base64)
        except ValueError:
            log.error("queue %s: message %s is not base64: the function is not called for it", self._name, message.id)
            await self._set_aside(message, str(message.content))
            return
        times = message.dequeue_count or 1
        if times > self._options.max_dequeue_count:
            await self._set_aside(message, text)
            return
        reason = f"queue message {message.id[:8]}" + (f", time {times}" if times > 1 else "")
        invocation = asyncio.create_task(self._invoke(message, text, reason))
        while not (await asyncio.wait([invocation], timeout=INVISIBLE_SECONDS / 2))[0]:
            await self._renew(message)
        if invocation.exception() is None:
            await self._queue.delete_message(message)
        elif times >= self._options.max_dequeue_count:
            await self._set_aside(message, text)
        else:
            seconds = int(self._options.visibility_timeout.total_seconds())
            await self._queue.update_message(message, visibility_timeout=seconds)

    async def _renew(self, message: QueueMessage) -> None:
        try:
            renewed = await self._queue.update_message(message, visibility_timeout=INVISIBLE_SECONDS)
        except AzureError as error:
            log.warning("queue %s: message %s could not be kept hidden: %s", self._name, message.id, error)
        else:
            message.pop_receipt = renewed.pop_receipt

    async def _invoke(self, message: QueueMessage, text: str, reason: str) -> None:
        await self._worker.invoke(self._function, to_queue_message(message, text), reason, accept_nothing)

    async def _set_aside(self, message: QueueMessage, text: str) -> None:
        poison = f"{self._name}-poison"
        content = base64.b64encode(text.encode()).decode() if self._options.base64 else text
        queue = self._service.get_queue_client(poison)
        try:
            await queue.send_message(content)
        except ResourceNotFoundError:
            with suppress(ResourceExistsError):
                await queue.create_queue()
            await queue.send_message(content)
        await self._queue.delete_message(message)
        log.error("queue %s: message %s moved to %s", self._name, message.id, poison)


def queue_trigger(
    function: AppFunction, options: QueueOptions, settings: Mapping[str, str], worker: Worker
) -> QueueTrigger:
    """The listener of a queue function, on the connection that its trigger names."""
    setting = str(function.trigger.get("connection") or "AzureWebJobsStorage")
    connection_string = settings.get(setting) or settings.get(f"AzureWebJobs{setting}")
    if not connection_string:
        raise ConfigurationError(f"{function.name} names the connection {setting}, and that setting is not set")
    try:
        return QueueTrigger(function, connection_string, options, worker)
    except ValueError:
        raise ConfigurationError(f"{setting} is not a storage connection string") from None


def decode(content: Any, is_base64: bool) -> str:
    """A message's text; ValueError when it should be base64 and is not."""
    if not is_base64:
        return str(content)
    try:
        raw = base64.b64decode("".join(str(content).split()), validate=True)
    except binascii.Error as error:
        raise ValueError from error
    return raw.decode("utf-8", "replace")


def to_queue_message(message: QueueMessage, text: str) -> Any:
    """The `QueueMessage` that azure.functions' own converter makes of a message."""
    metadata = {
        "Id": Datum(message.id, "string"),
        "DequeueCount": Datum(message.dequeue_count, "int"),
        "InsertionTime": Datum(timestamp(message.inserted_on), "string"),
        "ExpirationTime": Datum(timestamp(message.expires_on), "string"),
        "NextVisibleTime": Datum(timestamp(message.next_visible_on), "string"),
        "PopReceipt": Datum(message.pop_receipt or "", "string"),
    }
    return QueueMessageInConverter.decode(Datum(text, "string"), trigger_metadata=metadata)


def timestamp(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S+00:00")


def accept_nothing(result: Any) -> None:
    if result is not None:
        raise TypeError(f"a function without an output should return None, not {type(result).__name__}")
