"""Running stacks: one that all tests share, and one for a test that ruins it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localdev.stack import request as http
from tests.acceptance.running import App, started


@pytest.fixture(scope="session")
def shared_app() -> Iterator[App]:
    yield from started()


@pytest.fixture
def app(shared_app: App) -> Iterator[App]:
    """The shared stack, emptied before each test."""
    shared_app.sql("TRUNCATE outbox_messages, orders")
    shared_app.sql("UPDATE outbox_doorbell SET armed = '{}'")
    shared_app.stack.queue.clear_messages()
    assert http("DELETE", f"{shared_app.stack.receiver_url}/deliveries").status in (200, 204)
    yield shared_app


@pytest.fixture
def own_app(request: pytest.FixtureRequest) -> Iterator[App]:
    """A stack that the test may ruin; `request.param` holds further settings."""
    yield from started(getattr(request, "param", None))
