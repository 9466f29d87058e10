"""The certificate authorities are loaded once for all senders: 60 ms each would be most of the tests' time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import httpx
import pytest


@pytest.fixture(scope="session", autouse=True)
def authorities() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "create_ssl_context", cache(httpx.create_ssl_context))
        yield
