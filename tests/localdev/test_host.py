"""The stand-in host as a process, over Azurite and a small app of these tests."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.queue import QueueClient

from localdev.azurite import Azurite
from localdev.processes import answers, ask_to_stop, free_port, own_group, wait_until
from localdev.settings import ROOT
from localdev.stack import Reply, request

APP = """
import asyncio, json, os, threading, time
import azure.functions as func

app = func.FunctionApp(http_auth_level=func.AuthLevel.FUNCTION)
public = func.Blueprint()
pair = threading.Barrier(2, timeout=20)
turns = threading.Semaphore(0)
loops = set()

def note(what, **facts):
    with open("notes.jsonl", "a") as notes:
        notes.write(json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts}) + "\\n")

@public.route("hello", auth_level=func.AuthLevel.ANONYMOUS)
def hello(req: func.HttpRequest) -> str:
    return "hello"

@app.route("things/{thing}", methods=["POST"])
def thing(req: func.HttpRequest) -> func.HttpResponse:
    return func.HttpResponse(f"{req.route_params['thing']} {req.get_body().decode()}", status_code=201)

@app.route("nothing")
def nothing(req: func.HttpRequest) -> str:
    return None

@app.route("meet")
def meet(req: func.HttpRequest) -> str:
    pair.wait()
    return threading.current_thread().name

@app.route("loop")
async def loop(req: func.HttpRequest) -> str:
    loops.add(asyncio.get_running_loop())
    asyncio.get_running_loop().call_later(0.2, note, "later")
    return str(len(loops))

@app.route("turns/{count:int}")
def give_turns(req: func.HttpRequest) -> str:
    turns.release(int(req.route_params["count"]))
    return "given"

@app.queue_trigger("msg", "%QUEUE%", "AzureWebJobsStorage")
def work(msg: func.QueueMessage) -> None:
    body = msg.get_body().decode()
    note("begin", body=body, time=msg.dequeue_count)
    if body == "fail":
        raise RuntimeError("on purpose")
    if body == "return":
        return "what no queue function may return"
    if body == "exit":
        os._exit(7)
    if body == "nap":
        time.sleep(2)
    if body == "turn":
        turns.acquire()
    note("end", body=body)

@app.timer_trigger("tick", "%TICK%")
async def clock(tick: func.TimerRequest) -> None:
    loops.add(asyncio.get_running_loop())
    note("tick", past_due=tick.past_due, loops=len(loops))
    await asyncio.sleep(1.2)
    note("tock")

app.register_functions(public)
"""
KEY = "the-key-of-these-tests"
EACH_SECOND = {"TICK": "* * * * * *"}


class Host:
    """A function app in a folder, with a queue of its own, and the process that runs it."""

    def __init__(self, folder: Path, storage: str, queue: str, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self._queue, self._poison = (
            QueueClient.from_connection_string(storage, name) for name in (queue, f"{queue}-poison")
        )
        self._queue.create_queue()
        own = {"AzureWebJobsStorage": storage, "QUEUE": queue, "TICK": "0 0 0 1 1 *", "LOCALDEV_FUNCTION_KEY": KEY}
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), **own, **settings}

    def start(self) -> None:
        """Start the process, and wait until it answers or has ended."""
        command = [sys.executable, "-m", "localdev.host", "--port", str(self.port)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=self._env, stdout=log, stderr=log, **own_group()
            )
        wait_until(lambda: answers(self.port) or self.process.poll() is not None, 20, "the host's start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def http(self, method: str, path: str, body: str = "", key: str = KEY) -> Reply:
        headers = {"x-functions-key": key} if key else {}
        return request(method, f"http://127.0.0.1:{self.port}{path}", body.encode() or None, headers)

    def run(self, function: str) -> None:
        assert self.http("POST", f"/admin/functions/{function}", "{}").status == 202

    def send(self, body: str, *, plain: bool = False) -> None:
        self._queue.send_message(body if plain else base64.b64encode(body.encode()).decode())

    def notes(self, *whats: str) -> list[dict[str, Any]]:
        """What the functions noted, in order."""
        path = self.folder / "notes.jsonl"
        notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [note for note in notes if note["what"] in whats]

    def wait_for_notes(self, count: int, what: str) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.notes(what)) >= count, 20, f"{count} times {what}")
        return self.notes(what)

    def visible_and_hidden(self) -> tuple[int, int]:
        """How many messages are waiting in the queue, and how many are being processed."""
        visible = len(self._queue.peek_messages(max_messages=32))
        return visible, (self._queue.get_queue_properties().approximate_message_count or 0) - visible

    def wait_for_poison(self, body: str) -> None:
        def poisoned() -> bool:
            try:
                bodies = [base64.b64decode(message.content).decode() for message in self._poison.peek_messages()]
            except ResourceNotFoundError:
                return False
            return bodies == [body] and self.visible_and_hidden() == (0, 0)

        wait_until(poisoned, 20, f"{body!r} as the poison message, and an empty queue")


@dataclass
class Launcher:
    """Starts hosts."""

    folder: Path
    storage: str
    hosts: list[Host] = field(default_factory=list)

    def __call__(
        self,
        *messages: str,
        app: str = APP,
        queues: Mapping[str, Any] | None = None,
        settings: Mapping[str, str] | None = None,
        beside: Host | None = None,
        prefix: str = "api",
        **host_json: Any,
    ) -> Host:
        """A host with `messages` in its queue; in a folder of its own, or in that of another."""
        name = f"app-{len(self.hosts)}"
        host = Host(beside.folder if beside else self.folder / name, self.storage, name, settings or {})
        host.folder.mkdir(exist_ok=True)
        (host.folder / "function_app.py").write_text(app)
        extensions = {"queues": {"maxPollingInterval": "00:00:00.1", **(queues or {})}, "http": {"routePrefix": prefix}}
        (host.folder / "host.json").write_text(json.dumps({"version": "2.0", "extensions": extensions, **host_json}))
        for message in messages:
            host.send(message)
        host.start()
        self.hosts.append(host)
        return host


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("hosts")
    azurite = Azurite(folder / "azurite")
    azurite.start()
    launcher = Launcher(folder, azurite.connection_string)
    yield launcher
    for host in launcher.hosts:
        host.kill()
    azurite.stop()


@pytest.fixture(scope="module")
def host(launch: Launcher) -> Host:
    """For the tests that need no host of their own."""
    return launch()


def test_the_log_begins_with_the_word_stand_in_and_the_bindings_of_the_app(host: Host) -> None:
    first, *lines = host.log().splitlines()
    assert first.startswith("This is a stand-in for Azure Functions Core Tools")
    bindings = [line.partition(" host: ")[2] for line in lines]
    assert "hello: [DELETE,GET,HEAD,OPTIONS,PATCH,POST,PUT] /api/hello" in bindings  # of a blueprint
    assert "thing: [POST] /api/things/{thing} (function key)" in bindings
    assert "clock: timer 0 0 0 1 1 * (UTC)" in bindings


@pytest.mark.parametrize(
    ("app", "settings", "reason"),
    [
        (APP, {"QUEUE": ""}, "work names %QUEUE% in its trigger, and that setting is not set"),
        (APP, {"TICK": "soon"}, "the schedule of clock cannot be read"),
        ("import no_such_module", {}, "No module named 'no_such_module'"),
    ],
)
def test_an_app_that_cannot_be_read_ends_the_host_with_the_reason(
    launch: Launcher, app: str, settings: dict[str, str], reason: str
) -> None:
    host = launch(app=app, settings=settings)
    assert host.process.wait(20) == 1
    assert reason in host.log()


def test_route_parameters_and_the_body_reach_the_function(host: Host) -> None:
    reply = host.http("POST", "/api/things/a%20b", "body")
    assert (reply.status, reply.body) == (201, b"a b body")


def test_a_function_key_is_asked_for_in_header_or_query(host: Host) -> None:
    asked = ["/api/things/1", "/api/things/1?code=wrong", "/admin/functions/clock"]
    assert [host.http("POST", path, key=key).status for path in asked for key in ("", KEY + "x")] == [401] * 6
    assert host.http("POST", "/api/things/1").status == 201
    assert host.http("POST", f"/api/things/1?code={KEY}", key="").status == 201
    assert host.http("GET", "/api/hello", key="").body == b"hello"
    assert KEY not in host.log()


def test_an_unknown_route_is_404_and_a_wrong_method_405(host: Host) -> None:
    assert [host.http("GET", path).status for path in ("/api/none", "/hello", "/api/turns/one")] == [404] * 3
    assert host.http("GET", "/api/things/1").status == 405


def test_an_http_function_that_returns_none_is_a_500(host: Host) -> None:
    assert host.http("GET", "/api/nothing").status == 500


def test_def_functions_run_in_threads_side_by_side(host: Host) -> None:
    with ThreadPoolExecutor(2) as pool:
        threads = {reply.body for reply in pool.map(lambda _: host.http("GET", "/api/meet"), range(2))}
    assert len(threads - {b""}) == 2


def test_async_functions_share_one_loop_that_outlives_them(host: Host) -> None:
    assert [host.http("GET", "/api/loop").body for _ in range(3)] == [b"1"] * 3
    host.wait_for_notes(3, "later")
    host.run("clock")
    assert host.wait_for_notes(1, "tick")[0]["loops"] == 1


def test_an_invocation_is_one_line_in_the_log(host: Host) -> None:
    def count(invocation: str) -> int:
        line = rf"^\d\d:\d\d:\d\d\.\d{{3}} (INFO|ERROR) +host: {invocation} in \d+ ms \[[0-9a-f]{{8}}\]$"
        return len(re.findall(line, host.log(), re.MULTILINE))

    host.http("POST", "/api/things/once")
    host.send("logged")
    host.send("fail")
    host.wait_for_poison("fail")
    assert count("thing: POST /api/things/once -> 201") == 1
    assert count(r"work: queue message \S{8} -> succeeded") == 1
    assert count(r"work: queue message \S{8}(, time [2-5])? -> failed: RuntimeError: on purpose") == 5


def test_a_message_that_is_not_base64_is_set_aside_and_the_queue_goes_on(launch: Launcher) -> None:
    host = launch()
    host.send("not base64!", plain=True)
    host.send("grüße")
    host.wait_for_poison("not base64!")
    assert [note["body"] for note in host.notes("begin", "end")] == ["grüße"] * 2


@pytest.mark.parametrize(
    ("queues", "body", "times", "pause"),
    [
        ({}, "fail", 5, 0),  # Azure's defaults
        ({"maxDequeueCount": 2, "visibilityTimeout": "00:00:02"}, "return", 2, 2),
    ],
)
def test_a_failed_message_comes_back_after_the_timeout_and_ends_as_poison(
    launch: Launcher, queues: dict[str, Any], body: str, times: int, pause: int
) -> None:
    host = launch(body, queues=queues)
    host.wait_for_poison(body)
    calls = host.notes("begin")
    assert [call["time"] for call in calls] == list(range(1, times + 1))
    assert all(pause <= second["at"] - first["at"] < pause + 3 for first, second in pairwise(calls))


def test_batch_size_and_threshold_bound_what_runs_at_once(launch: Launcher) -> None:
    host = launch(*["turn"] * 7, queues={"batchSize": 2, "newBatchThreshold": 1})
    host.wait_for_notes(2, "begin")
    host.http("POST", "/api/turns/1")
    host.wait_for_notes(4, "begin")  # one ended, and the one that is left lets the next two in
    host.http("POST", "/api/turns/6")
    host.wait_for_notes(7, "end")
    changes = [1 if note["what"] == "begin" else -1 for note in host.notes("begin", "end")]
    assert max(accumulate(changes)) == 3


def test_prefix_encoding_and_function_timeout_are_those_of_host_json(launch: Launcher) -> None:
    host = launch(prefix="v2", queues={"messageEncoding": "none"}, functionTimeout="00:00:01")
    assert [host.http("GET", path).status for path in ("/v2/hello", "/api/hello")] == [200, 404]
    host.send("turn", plain=True)
    assert host.process.wait(20) == 3
    assert "work ran longer than functionTimeout" in host.log()


def test_a_disabled_function_runs_only_when_asked_to(launch: Launcher) -> None:
    host = launch("unread", settings={"AzureWebJobs.work.Disabled": "true"})
    host.run("work")
    assert [note["body"] for note in host.wait_for_notes(1, "end")] == [""]
    assert host.visible_and_hidden() == (1, 0)


def test_a_timer_runs_once_at_a_time_in_one_host_of_several(launch: Launcher) -> None:
    first = launch(settings=EACH_SECOND)
    second = launch(settings=EACH_SECOND, beside=first)
    seen = len(first.notes("tick"))
    first.wait_for_notes(seen + 2, "tock")
    beats = first.notes("tick", "tock")[: 2 * seen + 4]
    assert [beat["what"] for beat in beats] == ["tick", "tock"] * (seen + 2)  # a run takes longer than its interval
    assert {(beat["pid"], beat.get("past_due", False)) for beat in beats} == {(first.process.pid, False)}
    first.kill()
    wait_until(lambda: second.notes("tick")[-1]["pid"] == second.process.pid, 20, "the second host's turn")


def test_a_missed_run_comes_once_and_is_told_as_past_due(launch: Launcher) -> None:
    host = launch()
    host.run("clock")
    host.wait_for_notes(1, "tick")
    host.kill()
    file = host.folder / ".localdev" / "clock.json"
    status = json.loads(file.read_text())
    file.write_text(json.dumps({**status, "Next": "2020-01-01T00:00:00+00:00"}))  # as if it had been off since then
    host.start()
    host.wait_for_notes(2, "tick")
    ask_to_stop(host.process)  # a run that has begun ends, and is recorded
    assert host.process.wait(15) == 0
    assert len(host.notes("tock")) == 1
    assert json.loads(file.read_text())["Next"] == status["Next"]
    host.start()
    host.run("clock")
    assert [tick["past_due"] for tick in host.wait_for_notes(3, "tick")] == [False, True, False]


def test_a_crash_ends_the_host_and_its_message_stays_hidden(launch: Launcher) -> None:
    host = launch("exit")
    assert host.process.wait(20) == 7
    host.start()
    host.send("after")
    host.wait_for_notes(1, "end")
    wait_until(lambda: host.visible_and_hidden() == (0, 1), 5, "the end of the second message")
    assert [note["body"] for note in host.notes("begin")] == ["exit", "after"]


@pytest.mark.parametrize(
    ("message", "cut_off", "seconds"),
    [("nap", 0, 2), ("turn", 1, 10)],  # a turn never comes, and Azure's grace is 10 s
)
def test_sigterm_takes_no_new_work_and_ends_cleanly_within_the_grace(
    launch: Launcher, message: str, cut_off: int, seconds: int
) -> None:
    host = launch(message)
    host.wait_for_notes(1, "begin")
    asked = time.monotonic()
    ask_to_stop(host.process)
    wait_until(lambda: host.http("GET", "/api/hello").status == 503, 5, "the refusal of new work")
    host.send("too late")
    assert host.process.wait(15) == 0
    assert cut_off * seconds <= time.monotonic() - asked < seconds + 3
    assert [note["body"] for note in host.notes("begin")] == [message]
    assert len(host.notes("end")) == 1 - cut_off
    assert host.visible_and_hidden() == (1, cut_off)
