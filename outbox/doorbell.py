"""The doorbell: messages on an Azure Storage queue that say no more than 'look at the table'."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.queue import QueueClient, TextBase64EncodePolicy

from outbox.errors import DoorbellUnavailable, SettingsError
from outbox.settings import Storage

log = logging.getLogger(__name__)
# It writes every request's and answer's headers at INFO.
logging.getLogger("azure.core.pipeline.policies.http_logging_policy").setLevel(logging.WARNING)

RING_SECONDS = 2.0
MUTE_SECONDS = 30.0
#: A doorbell that nobody heard is worthless soon after: the timer has been by.
KEEP_SECONDS = 600


class QueueDoorbell:
    """Rings the queue that `outbox_wakeup` listens to."""

    def __init__(self, queue_name: str, storage: Storage) -> None:
        # One try and short timeouts: the SDK's own retries would hold a request for more than a minute.
        options: dict[str, Any] = {
            "retry_total": 0,
            "connection_timeout": 1,
            "read_timeout": 1,
            # The host expects base64 (host.json, messageEncoding); plain text would go to the poison queue unseen.
            "message_encode_policy": TextBase64EncodePolicy(),
        }
        if storage.queue_service is None:
            assert storage.connection_string is not None
            try:
                self._queue = QueueClient.from_connection_string(
                    storage.connection_string.get_secret_value(), queue_name, **options
                )
            except ValueError:
                raise SettingsError("AzureWebJobsStorage: it should be a storage connection string") from None
        else:
            from azure.identity import ManagedIdentityCredential  # only where an identity is used: it is slow to load

            credential = ManagedIdentityCredential(client_id=storage.client_id)
            self._queue = QueueClient(storage.queue_service, queue_name, credential=credential, **options)
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="outbox-doorbell")
        self._lock = threading.Lock()
        self._muted_until = 0.0

    def ring(self, delay_seconds: float = 0) -> None:
        """Send a doorbell that is heard `delay_seconds` from now (rounded down).

        Raises DoorbellUnavailable, after 2 seconds at the latest.
        """
        sent = self._threads.submit(self._send, int(delay_seconds))
        try:
            sent.result(timeout=RING_SECONDS)
        except Exception as error:
            sent.cancel()
            raise DoorbellUnavailable(f"the queue did not take a doorbell ({type(error).__name__})") from error

    def ring_for_request(self) -> None:
        """Ring, or leave it to the timer: never raises, and after a failure does not try for 30 seconds."""
        if monotonic() < self._muted_until:
            return
        try:
            self.ring()
        except DoorbellUnavailable as error:
            with self._lock:
                first = monotonic() >= self._muted_until
                self._muted_until = monotonic() + MUTE_SECONDS
            if first:
                log.warning("doorbell failed error=%s; the timer will find the rows", error)

    def _send(self, delay_seconds: int) -> None:
        body = json.dumps({"requestedAt": datetime.now(UTC).isoformat()})
        try:
            self._queue.send_message(body, visibility_timeout=delay_seconds, time_to_live=delay_seconds + KEEP_SECONDS)
        except ResourceNotFoundError:
            self._queue.create_queue()
            self._queue.send_message(body, visibility_timeout=delay_seconds, time_to_live=delay_seconds + KEEP_SECONDS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._queue.close()
