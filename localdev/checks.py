"""`python3 -m localdev test`: what CI runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localdev.settings import ROOT

CODE = ("function_app.py", "orders.py", "outbox", "localdev", "tests", "bench")
FULL_VARIABLE = "OUTBOX_TEST_FULL"


def main(full: bool, pytest_arguments: Sequence[str]) -> int:
    """Run every check, also after one that failed; pytest last, so that its summary ends the output."""
    environment = {**os.environ, **({FULL_VARIABLE: "1"} if full else {})}
    code = [path for path in CODE if (ROOT / path).exists()]
    lint_imports = Path(sys.executable).with_name("lint-imports.exe" if sys.platform == "win32" else "lint-imports")
    failed = [
        name
        for name, command in {
            "ruff check": [sys.executable, "-m", "ruff", "check", "."],
            "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
            "mypy": [sys.executable, "-m", "mypy", "--strict", *code],
            "lint-imports": [str(lint_imports)],
            "pytest": [sys.executable, "-m", "pytest", *pytest_arguments],
        }.items()
        if run(name, command, environment) != 0
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, command: Sequence[str], environment: dict[str, str]) -> int:
    print(f"== {name}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment).returncode
