"""`python -m localdev.host`: the stand-in host, in the folder of a function app, with settings from the environment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from localdev.host.configuration import ConfigurationError, HostConfiguration, read_host_json
from localdev.host.functions import AppFunction, load_functions
from localdev.host.http_trigger import HttpTriggers
from localdev.host.logs import configure_logging
from localdev.host.queue_trigger import QueueTrigger, queue_trigger
from localdev.host.timer_trigger import TimerTrigger, run_timers
from localdev.host.worker import Worker

log = logging.getLogger("host")

HONESTY = (
    "This is a stand-in for Azure Functions Core Tools (func), for development and tests: HTTP, queue and timer "
    "triggers of the Python v2 model. No other bindings, no retry policies, no scaling, no telemetry, one key for all."
)
KEY_VARIABLE = "LOCALDEV_FUNCTION_KEY"
STATE_VARIABLE = "LOCALDEV_STATE_DIR"
#: Azure's host waits this long for running invocations when it shuts down.
SHUTDOWN_SECONDS = 10


class Host:
    """The triggers of an app, started and stopped together."""

    def __init__(self, functions: Sequence[AppFunction], host_json: HostConfiguration, key: str, state: Path) -> None:
        self._worker = Worker(host_json.function_timeout)
        self._state = state
        by_type: dict[str, list[AppFunction]] = {}
        for function in functions:
            by_type.setdefault(function.trigger_type, []).append(function)
        settings = dict(os.environ)
        self._queues: dict[str, QueueTrigger] = {
            function.name: queue_trigger(function, host_json.queues, settings, self._worker)
            for function in by_type.get("queueTrigger", [])
        }
        self._timers: dict[str, TimerTrigger] = {
            function.name: TimerTrigger(function, state, self._worker) for function in by_type.get("timerTrigger", [])
        }
        self._http = HttpTriggers(
            by_type.get("httpTrigger", []),
            prefix=host_json.route_prefix,
            key=key,
            worker=self._worker,
            start_once=self._start_once,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, port: int, stop: asyncio.Event) -> None:
        """Serve until asked to stop, then let running invocations end."""
        runner = web.AppRunner(self._http.application(), access_log=None, handle_signals=False, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        queues = [queue.describe() for queue in self._queues.values()]
        timers = [timer.describe() for timer in self._timers.values()]
        for line in [*self._http.describe(), *queues, *timers]:
            log.info("%s", line)
        listening = [asyncio.create_task(queue.listen()) for name, queue in self._queues.items() if enabled(name)]
        if ticking := [timer for name, timer in self._timers.items() if enabled(name)]:
            listening.append(asyncio.create_task(run_timers(ticking, self._state)))
        log.info("listening on http://127.0.0.1:%d", port)
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *listening], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopped}:
            task.result()  # a trigger ends only by an error
        await self._stop(listening)

    async def _stop(self, listening: Sequence[asyncio.Task[None]]) -> None:
        log.info("stopping: no new work, up to %d s for what is running", SHUTDOWN_SECONDS)
        self._http.stopping = True
        for task in listening:
            task.cancel()
        hook: Callable[[], Any] | None = getattr(sys.modules.get("outbox"), "stop_draining", None)
        if hook is not None:
            hook()
        left = await self._worker.wait_until_idle(SHUTDOWN_SECONDS)
        settling = [*listening, *(task for queue in self._queues.values() for task in queue.settling())]
        if settling and not left:
            await asyncio.wait(settling, timeout=2)
        if left:
            log.warning("%d invocations are cut off, as Azure does it", left)

    async def _start_once(self, name: str, text: str) -> bool:
        if name in self._timers:
            task = asyncio.create_task(self._timers[name].run_once())
        elif name in self._queues:
            task = asyncio.create_task(self._queues[name].run_once(text))
        else:
            return False
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True


def enabled(name: str) -> bool:
    """Whether a function's trigger is on; as in Azure, one that is off can still be started by the admin endpoint."""
    off = os.environ.get(f"AzureWebJobs.{name}.Disabled", "").lower() in ("true", "1")
    if off:
        log.info("%s: its trigger is off (AzureWebJobs.%s.Disabled)", name, name)
    return not off


async def serve(functions: Sequence[AppFunction], configuration: HostConfiguration, port: int, state: Path) -> None:
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    if KEY_VARIABLE not in os.environ:
        log.info("function key of this run: %s (set %s for one that stays)", key, KEY_VARIABLE)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(*_: Any) -> None:
        loop.call_soon_threadsafe(stop.set)

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), ask)
    await Host(functions, configuration, key, state).run(port, stop)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m localdev.host", description=HONESTY)
    parser.add_argument("--port", type=int, default=7071)
    options = parser.parse_args()
    print(HONESTY, flush=True)
    configure_logging()
    folder = Path.cwd()
    state = Path(os.environ.get(STATE_VARIABLE, ".localdev")).resolve()
    state.mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        configuration = read_host_json(folder)
        functions = load_functions(folder)
        asyncio.run(serve(functions, configuration, options.port, state))
        code = 0
    except ConfigurationError as error:
        log.error("%s", error)
    except Exception:
        log.exception("the host ends")
    logging.shutdown()
    os._exit(code)  # as in Azure: no atexit, no waiting for the app's threads


if __name__ == "__main__":
    main()
