"""The commands of `python3 -m localdev`; this file and `bootstrap` run before anything is installed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from localdev import bootstrap

DEFAULT_STATE_DIR = Path(".localdev")


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python3 -m localdev", description="The app on this machine, on real parts.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("demo", help="watch orders and their events go through faults and arrive")

    up = commands.add_parser("up", help="run database, storage, webhook receiver and functions host until Ctrl-C")
    up.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="data, logs and stack.json (%(default)s)")
    up.add_argument("--hosts", type=positive, default=1, help="how many functions hosts (%(default)s)")
    for part in ("", "postgres-", "queue-", "blob-", "receiver-"):
        up.add_argument(f"--{part}port", type=positive, help="a free one unless given")

    order = commands.add_parser("order", help="create an order in the running stack and complete it over HTTP")
    order.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR)
    order.add_argument("--count", type=positive, default=1, help="how many orders (%(default)s)")

    test = commands.add_parser("test", help="what CI runs; further arguments go to pytest")
    test.add_argument("--full", action="store_true", help="with the tests that wait for long")

    commands.add_parser("bench", help="the benchmarks; further arguments go to them")
    return root


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("should be 1 or more")
    return number


def main() -> int:
    arguments = sys.argv[1:]
    options, rest = parser().parse_known_args(arguments)
    if rest and options.command not in ("test", "bench"):
        parser().parse_args(arguments)  # says what is wrong
    if not bootstrap.inside():
        try:
            python = bootstrap.ensure()
        except bootstrap.BootstrapError as error:
            print(error, file=sys.stderr)
            return 1
        return bootstrap.run_inside(python, arguments)
    return run(options, [argument for argument in rest if argument != "--"])


def run(options: argparse.Namespace, rest: list[str]) -> int:
    # Imported here: these need what bootstrap installs.
    if options.command == "demo":
        from localdev import demo

        return demo.main()
    if options.command == "up":
        from localdev import up
        from localdev.stack import Ports

        ports = Ports(
            host=options.port,
            postgres=options.postgres_port,
            queue=options.queue_port,
            blob=options.blob_port,
            receiver=options.receiver_port,
        )
        return up.main(options.state_dir, options.hosts, ports)
    if options.command == "order":
        from localdev import order

        return order.main(options.state_dir, options.count)
    if options.command == "test":
        from localdev import checks

        return checks.main(options.full, rest)
    return subprocess.run([sys.executable, "-m", "bench", *rest], cwd=bootstrap.ROOT).returncode
