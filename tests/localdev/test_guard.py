"""What is left when a stack is killed: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from localdev.filelock import FileLock
from localdev.processes import wait_until

# Starts a child that starts one of its own, tells both pids, and waits to be killed.
STACK = """
import sys, time
from pathlib import Path
from localdev.guard import Guard
from localdev.processes import Child
nested = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); " \
         "print(p.pid, flush=True); time.sleep(99)"
child = Child("child", [sys.executable, "-c", nested], log=Path(sys.argv[1]), guard=Guard())
child.start()
gone = Child("gone", [sys.executable, "-c", ""], log=Path(sys.argv[1]), guard=None)
print(child.pid, flush=True)
time.sleep(99)
"""


def test_after_a_sigkill_children_and_their_children_are_gone(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    stack = subprocess.Popen([sys.executable, "-c", STACK, str(log)], stdout=subprocess.PIPE, text=True)
    assert stack.stdout is not None
    child = psutil.Process(int(stack.stdout.readline()))
    wait_until(lambda: log.exists() and log.read_text().strip().isdigit(), 10, "the child's start")
    grandchild = psutil.Process(int(log.read_text()))
    stack.kill()
    stack.communicate()
    _, alive = psutil.wait_procs([child, grandchild], timeout=10)
    assert alive == []


LOCKER = """
import sys, time
from pathlib import Path
from localdev.filelock import FileLock
print(FileLock(Path(sys.argv[1])).acquire(), flush=True)
time.sleep(99)
"""


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", LOCKER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    # The lock object is garbage in the holder by now, which does not let go of it.
    assert holder.stdout.readline().strip() == "True"
    lock = FileLock(path)
    assert not lock.acquire()
    holder.kill()
    holder.communicate()
    wait_until(lock.acquire, 5, "the release of the lock")
    lock.release()
