"""The project's virtual environment: made, filled and kept up to date. Standard library only."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

from localdev.filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / ".localdev"
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt")
#: Names another folder than .venv; a CI run on a second Python uses it.
FOLDER_VARIABLE = "LOCALDEV_VENV"
#: Set for the command in the virtual environment where it is a child process of the command as typed (Windows).
LAUNCHER_VARIABLE = "LOCALDEV_LAUNCHER"


class BootstrapError(Exception):
    """What went wrong, in words for a person."""


def venv_folder() -> Path:
    return ROOT / os.environ.get(FOLDER_VARIABLE, ".venv")


def inside() -> bool:
    """Whether this process runs in the virtual environment."""
    return Path(sys.prefix).resolve() == venv_folder().resolve()


def ensure() -> Path:
    """Bring the virtual environment up to date; its Python."""
    folder = venv_folder()
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = folder / "localdev.stamp"
    wanted = fingerprint()
    LOCKS.mkdir(exist_ok=True)
    with FileLock(LOCKS / f"{folder.name}.lock"):
        if python.exists() and stamp.exists() and stamp.read_text("utf-8") == wanted:
            return python
        stamp.unlink(missing_ok=True)
        if not python.exists() or minor_version(folder) != this_minor_version():
            create(folder)
        install(python, folder)
        stamp.write_text(wanted, "utf-8")
    return python


def fingerprint() -> str:
    """Changes with what is to be installed and with the Python it is installed for."""
    digest = hashlib.sha256()
    for name in REQUIREMENTS:
        digest.update((ROOT / name).read_bytes())
    return f"{this_minor_version()} {digest.hexdigest()}\n"


def this_minor_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def minor_version(folder: Path) -> str:
    """The Python that a virtual environment was made with, as 3.x; empty when it cannot be told."""
    try:
        lines = (folder / "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError:
        return ""
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    return ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])


def create(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "pyvenv.cfg").exists():
            raise BootstrapError(
                f"{folder} is not empty and no virtual environment: move it, or set {FOLDER_VARIABLE}."
            )
        shutil.rmtree(folder)
    try:
        venv.create(folder, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BootstrapError(
            f"This Python could not make a virtual environment in {folder} ({error}). "
            "On Debian and Ubuntu the package python3-venv is what it misses."
        ) from None


def install(python: Path, folder: Path) -> None:
    print(f"Installing Python packages into {folder.name} (once, about a minute) ...", flush=True)
    arguments = [part for name in REQUIREMENTS for part in ("-r", name)]
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], "pip")
    _run([str(python), "-m", "localdev.azurite"], "npm", show=True)


def _run(command: list[str], what: str, *, show: bool = False) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise BootstrapError(f"{what} failed; the next run tries again.\n{done.stdout or ''}".rstrip())


def run_inside(python: Path, arguments: list[str]) -> int:
    """Go on in the virtual environment with the same arguments; the exit code, where this process lives on."""
    command = [str(python), "-m", "localdev", *arguments]
    if sys.platform != "win32":
        sys.stdout.flush()
        os.execv(command[0], command)
    return run_as_child(command)


def run_as_child(command: list[str]) -> int:
    """For Windows, which cannot replace a process: wait for the child, which gets the console's Ctrl-C by itself."""
    child = subprocess.Popen(command, env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())})
    for name in ("SIGINT", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    return child.wait()
