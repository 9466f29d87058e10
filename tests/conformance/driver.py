"""The Functions host's side of the official worker: one worker's life, as a process of its own.

    python driver.py APP_DIRECTORY < invocations.json

Starts the worker logic (PyPI azure-functions-runtime) on the app, loads its functions, makes the invocations in turn
and prints one JSON object. The host speaks protobuf to a worker; the worker logic takes the message classes as an
argument and reads them as plain objects, so no protobuf is needed here. As in Azure, settings are environment
variables, and the process ends without a goodbye.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from typing import Any

import azure_functions_runtime as worker

APP = sys.argv[1]
FOREVER = "9999-12-31T23:59:59.9999999+00:00"


class Message:
    """Any protobuf message: a bag of fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class TypedData(Message):
    """A value with its type, or none at all."""

    def WhichOneof(self, _: str) -> str | None:  # noqa: N802 - protobuf's spelling
        return next(iter(vars(self)), None)


class ParameterBinding(Message):
    def WhichOneof(self, _: str) -> str:  # noqa: N802
        return "data"


class StatusResult(Message):
    Failure, Success, Cancelled = 0, 1, 2


class BindingInfo(Message):
    undefined, out, inout = 0, 1, 2


class Protos:
    """The message classes, by name; those without a rule of their own are plain messages."""

    TypedData = TypedData
    ParameterBinding = ParameterBinding
    StatusResult = StatusResult
    BindingInfo = BindingInfo

    def __getattr__(self, _: str) -> type[Message]:
        return Message


def request(**content: Any) -> Message:
    return Message(request=Message(**content), properties={"host": "127.0.0.1", "protos": Protos()})


def http_data(http: dict[str, Any]) -> TypedData:
    body = http.get("body", "").encode()
    return TypedData(
        http=Message(
            method=http.get("method", "POST"),
            url="http://localhost:7071/api/" + http.get("path", ""),
            headers=http.get("headers", {}),
            params=http.get("params", {}),
            query={},
            body=TypedData(bytes=body) if body else TypedData(),
        )
    )


def queue_metadata(text: str) -> dict[str, TypedData]:
    return {
        "QueueTrigger": TypedData(string=text),
        "Id": TypedData(string=str(uuid.uuid4())),
        "PopReceipt": TypedData(string="AgAAAAMAAAAAAAAA"),
        "DequeueCount": TypedData(json="1"),
        **{n: TypedData(json=json.dumps(FOREVER)) for n in ("InsertionTime", "NextVisibleTime", "ExpirationTime")},
    }


def timer_data(past_due: bool) -> TypedData:
    info = {"Schedule": {"AdjustForDST": True}, "ScheduleStatus": None, "IsPastDue": past_due}
    return TypedData(json=json.dumps(info))


async def invoke(function: Message, invocation: dict[str, Any]) -> dict[str, Any]:
    trigger = next(b for b in map(json.loads, vars(function)["raw_bindings"]) if b["type"].endswith("Trigger"))
    metadata: dict[str, TypedData] = {}
    if "http" in invocation:
        data = http_data(invocation["http"])
    elif "queue" in invocation:
        data, metadata = TypedData(string=invocation["queue"]), queue_metadata(invocation["queue"])
    else:
        data = timer_data(invocation["timer"]["past_due"])
    response = await worker.invocation_request(
        request(
            invocation_request=Message(
                invocation_id=str(uuid.uuid4()),
                function_id=vars(function)["function_id"],
                input_data=[ParameterBinding(name=trigger["name"], data=data)],
                trigger_metadata=metadata,
                trace_context=Message(trace_parent=invocation.get("traceparent", ""), trace_state="", attributes={}),
                retry_context=Message(retry_count=0, max_retry_count=0, exception=None),
            )
        )
    )
    answer = outcome(response.result)
    if "http" in invocation and answer["ok"]:
        http = response.return_value.http
        headers = {name.lower(): value for name, value in http.headers.items()}
        answer |= {"status": int(http.status_code), "headers": headers, "body": http.body.bytes.decode()}
    return answer


def outcome(result: Any) -> dict[str, Any]:
    ok = result.status == StatusResult.Success
    return {"ok": ok, "error": None if ok else result.exception.message}


async def live(invocations: list[dict[str, Any]]) -> dict[str, Any]:
    worker.start_threadpool_executor()  # where the host runs functions that are not async
    init = outcome(
        (
            await worker.worker_init_request(
                request(worker_init_request=Message(capabilities={}, function_app_directory=APP))
            )
        ).result
    )
    if not init["ok"]:
        return {"init": init, "functions": {}, "load": {}, "answers": []}
    metadata = await worker.functions_metadata_request(request(functions_metadata_request=Message()))
    functions = {each.name: each for each in metadata.function_metadata_results or []}
    load = {}
    for name, each in functions.items():
        response = await worker.function_load_request(
            request(function_load_request=Message(function_id=each.function_id))
        )
        load[name] = outcome(response.result)
    return {
        "init": init,
        "functions": {name: [json.loads(binding) for binding in each.raw_bindings] for name, each in functions.items()},
        "load": load,
        "answers": [await invoke(functions[each["function"]], each) for each in invocations],
    }


if __name__ == "__main__":
    sys.path[0] = APP  # the worker imports function_app by name
    print(json.dumps(asyncio.run(live(json.load(sys.stdin)))), flush=True)
    os._exit(0)
