"""The host's log: one line a record, with the invocation it belongs to."""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
from datetime import UTC, datetime

#: The invocation that the current code runs for; empty outside of one.
current_invocation: contextvars.ContextVar[str] = contextvars.ContextVar("current_invocation", default="")
#: What `context.thread_local_storage` is: a function's own threads set `invocation_id` on it.
thread_local_storage = threading.local()


class LineFormatter(logging.Formatter):
    """Time, level, logger, message, invocation; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        invocation = current_invocation.get() or getattr(thread_local_storage, "invocation_id", "")
        line = f"{at} {record.levelname:<7} {record.name}: {message}"
        if invocation:
            line += f" [{invocation[:8]}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # The host's own polling goes through the SDK, which logs each request and answer.
    logging.getLogger("azure.core.pipeline.policies.http_logging_policy").setLevel(logging.WARNING)
