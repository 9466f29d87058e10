"""`python3 -m localdev up`: the stack, left running until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from localdev.console import Console
from localdev.stack import Ports, Stack, StackError


def main(state_dir: Path, hosts: int, ports: Ports) -> int:
    console = Console()
    stack = Stack(state_dir, hosts=hosts, ports=ports, say=console.say)
    stop_on_signals()
    try:
        with stack:
            tell(stack, console)
            forever = threading.Event()
            while not forever.wait(1):  # Windows notices Ctrl-C between two waits only
                pass
    except KeyboardInterrupt:
        console.say("stopped")
        return 0
    except (StackError, RuntimeError, TimeoutError) as error:
        console.say(str(error))
        return 1
    finally:
        console.close()
    return 0


def stop_on_signals() -> None:
    """Make the first stop signal a KeyboardInterrupt; on a second the guard kills what is still there."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(1)
        asked.set()
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)


def tell(stack: Stack, console: Console) -> None:
    for host in stack.hosts:
        console.follow(host.child.log, f"{host.child.name} | ")
    console.say("The stack is up.")
    for host in stack.hosts:
        console.say(f"  {host.child.name:<9} {host.url}")
    console.say(f"  key       {stack.function_key}")
    console.say(f"  database  {stack.database_url}")
    console.say(f"  storage   {stack.storage_connection_string}")
    console.say(f"  receiver  {stack.receiver_url}")
    console.say(f"  all of it {stack.state_dir / 'stack.json'}")
    console.say("Try: python3 -m localdev order      Stop: Ctrl-C")
