"""What all tests share: the way to the code under test, and the tests that only a full run takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `pytest` alone, unlike `python -m pytest`, does not add it
    sys.path.insert(0, str(ROOT))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a long test, run with OUTBOX_TEST_FULL=1 (`localdev test --full`)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("OUTBOX_TEST_FULL") == "1":
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="a long test: set OUTBOX_TEST_FULL=1"))
