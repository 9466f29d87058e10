"""host.json, as far as the stand-in follows it; what it leaves out has Azure's defaults."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

#: In local development the real host polls an idle queue at least this often, whatever host.json says.
LOCAL_POLLING_LIMIT = timedelta(seconds=2)


class ConfigurationError(Exception):
    """What is wrong with host.json, the settings or function_app.py, in one sentence."""


@dataclass(frozen=True)
class QueueOptions:
    max_polling_interval: timedelta
    visibility_timeout: timedelta
    batch_size: int
    new_batch_threshold: int
    max_dequeue_count: int
    base64: bool


@dataclass(frozen=True)
class HostConfiguration:
    route_prefix: str
    #: None: no limit.
    function_timeout: timedelta | None
    queues: QueueOptions


def read_host_json(folder: Path) -> HostConfiguration:
    path = folder / "host.json"
    try:
        content = json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path} is missing: the host starts in the folder of a function app") from None
    except ValueError as error:
        raise ConfigurationError(f"host.json is not JSON: {error}") from None
    extensions = content.get("extensions", {})
    queues = extensions.get("queues", {})
    batch_size = int(queues.get("batchSize", 16))
    if not 1 <= batch_size <= 32:
        raise ConfigurationError(f"queues.batchSize in host.json should be 1 to 32, not {batch_size}")
    encoding = queues.get("messageEncoding", "base64").lower()
    if encoding not in ("base64", "none"):
        raise ConfigurationError(f"queues.messageEncoding in host.json should be base64 or none, not {encoding}")
    timeout = content.get("functionTimeout", "00:30:00")
    return HostConfiguration(
        route_prefix=str(extensions.get("http", {}).get("routePrefix", "api")).strip("/"),
        function_timeout=None if str(timeout) == "-1" else time_span(timeout),
        queues=QueueOptions(
            max_polling_interval=time_span(queues.get("maxPollingInterval", "00:01:00")),
            visibility_timeout=time_span(queues.get("visibilityTimeout", "00:00:00")),
            batch_size=batch_size,
            new_batch_threshold=int(queues.get("newBatchThreshold", batch_size // 2)),
            max_dequeue_count=int(queues.get("maxDequeueCount", 5)),
            base64=encoding == "base64",
        ),
    )


TIME_SPAN = re.compile(r"(?:(\d+)\.)?(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,7}))?)?")


def time_span(text: Any) -> timedelta:
    """A .NET TimeSpan: [days.]hours:minutes[:seconds[.fraction]]."""
    match = TIME_SPAN.fullmatch(str(text).strip())
    if match is None:
        raise ConfigurationError(f"{text!r} in host.json is no time span like 00:05:00")
    days, hours, minutes, seconds, fraction = match.groups()
    return timedelta(
        days=int(days or 0),
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(seconds or 0) + (float(f"0.{fraction}") if fraction else 0),
    )
