"""Running functions as the Python worker does: one event loop for `async def`, a thread pool for `def`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import azure.functions as func

from localdev.host.functions import CONTEXT, AppFunction
from localdev.host.logs import current_invocation, thread_local_storage

T = TypeVar("T")
log = logging.getLogger("host")

TIMEOUT_EXIT_CODE = 3
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class InvocationFailed(Exception):
    """The function raised, or what it returned does not fit; it has been logged."""


@dataclass(frozen=True)
class TraceContext:
    trace_parent: str
    trace_state: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_request(cls, trace_parent: str, trace_state: str) -> TraceContext:
        """The caller's trace, or a new one where it has none that is valid."""
        if TRACEPARENT.fullmatch(trace_parent):
            return cls(trace_parent, trace_state)
        return cls.new()

    @classmethod
    def new(cls) -> TraceContext:
        return cls(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")


class InvocationContext(func.Context):
    """What a parameter named `context` gets."""

    def __init__(self, function: AppFunction, invocation_id: str, trace: TraceContext) -> None:
        self._function = function
        self._invocation_id = invocation_id
        self._trace = trace

    @property
    def invocation_id(self) -> str:
        return self._invocation_id

    @property
    def thread_local_storage(self) -> Any:
        return thread_local_storage

    @property
    def function_name(self) -> str:
        return self._function.name

    @property
    def function_directory(self) -> str:
        return str(self._function.folder)

    @property
    def trace_context(self) -> Any:
        return self._trace

    @property
    def retry_context(self) -> Any:
        return None


class Worker:
    """Runs functions, one event loop and one thread pool for all; call it from the host's loop.

    The functions' loop is not the host's: a function that blocks it stalls other functions but no trigger.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        threads = os.environ.get("PYTHON_THREADPOOL_THREAD_COUNT")
        self._pool = concurrent.futures.ThreadPoolExecutor(int(threads) if threads else None, "function")
        self._loop = asyncio.new_event_loop()
        self._running: set[str] = set()
        threading.Thread(target=self._loop.run_forever, name="functions", daemon=True).start()

    async def invoke(
        self,
        function: AppFunction,
        argument: object,
        reason: str,
        accept: Callable[[Any], T],
        trace: TraceContext | None = None,
    ) -> T:
        """Call the function; `accept` makes the trigger's result of what it returned, or raises."""
        invocation = str(uuid.uuid4())
        arguments: dict[str, object] = {function.parameter: argument}
        if function.wants_context:
            arguments[CONTEXT] = InvocationContext(function, invocation, trace or TraceContext.new())
        started = time.monotonic()
        self._running.add(invocation)
        try:
            running = self._start(function, invocation, arguments)
            result = accept(await self._within_timeout(function, invocation, running))
        except Exception as raised:
            # Azure's host would hear nothing of an escaped one until functionTimeout.
            error = raised.__cause__ if isinstance(raised, _Escaped) and raised.__cause__ else raised
            outcome = f"failed: {type(error).__name__}: {error}"
            self._report(logging.ERROR, function, reason, outcome, started, invocation, error)
            raise InvocationFailed from error
        else:
            outcome = "succeeded" if result is None else str(result)
            self._report(logging.INFO, function, reason, outcome, started, invocation)
            return result
        finally:
            self._running.discard(invocation)

    async def wait_until_idle(self, seconds: float) -> int:
        """Wait for running invocations; how many still run after that time."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return len(self._running)

    def _start(self, function: AppFunction, invocation: str, arguments: dict[str, object]) -> asyncio.Future[Any]:
        if function.is_async:

            async def run_async() -> Any:
                current_invocation.set(invocation)
                return await _contained(function.call(**arguments))

            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_async(), self._loop))

        def run() -> Any:
            current_invocation.set(invocation)
            thread_local_storage.invocation_id = invocation
            try:
                return function.call(**arguments)
            except (SystemExit, asyncio.CancelledError) as error:
                raise _Escaped from error

        context = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(self._pool, context.run, run)

    async def _within_timeout(self, function: AppFunction, invocation: str, running: asyncio.Future[Any]) -> Any:
        seconds = None if self._timeout is None else self._timeout.total_seconds()
        done, _ = await asyncio.wait([running], timeout=seconds)
        if not done:
            log.error(
                "%s ran longer than functionTimeout (%s): this process ends with all that runs in it, as in Azure [%s]",
                function.name,
                self._timeout,
                invocation[:8],
            )
            logging.shutdown()
            os._exit(TIMEOUT_EXIT_CODE)
        return running.result()

    @staticmethod
    def _report(
        level: int,
        function: AppFunction,
        reason: str,
        outcome: str,
        started: float,
        invocation: str,
        error: BaseException | None = None,
    ) -> None:
        milliseconds = (time.monotonic() - started) * 1000
        line = "%s: %s -> %s in %.0f ms [%s]"
        log.log(level, line, function.name, reason, outcome, milliseconds, invocation[:8], exc_info=error)


class _Escaped(Exception):
    """Carries what is no Exception out of a function without ending the loop that ran it."""


async def _contained(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise _Escaped from error
