"""The start on a bare Python: which virtual environments are reused, redone, or left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localdev import bootstrap


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Bootstraps into tmp_path/venv; pip and npm are not run, only noted."""
    noted: list[Path] = []
    monkeypatch.setenv(bootstrap.FOLDER_VARIABLE, str(tmp_path / "venv"))
    monkeypatch.setattr(bootstrap, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(bootstrap, "install", lambda python, folder: noted.append(folder))
    return noted


def test_it_installs_once(installs: list[Path]) -> None:
    python = bootstrap.ensure()
    assert bootstrap.ensure() == python
    assert len(installs) == 1
    assert subprocess.run([python, "-c", ""], check=True).returncode == 0


def test_changed_requirements_are_installed(installs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.ensure()
    monkeypatch.setattr(bootstrap, "fingerprint", lambda: "changed")
    bootstrap.ensure()
    assert len(installs) == 2


def test_a_half_finished_install_is_redone(installs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(python: Path, folder: Path) -> None:
        raise bootstrap.BootstrapError("no network")

    with monkeypatch.context() as broken, pytest.raises(bootstrap.BootstrapError):
        broken.setattr(bootstrap, "install", fail)
        bootstrap.ensure()
    bootstrap.ensure()
    assert len(installs) == 1


def test_an_environment_of_another_python_is_made_anew(installs: list[Path]) -> None:
    bootstrap.ensure()
    folder = bootstrap.venv_folder()
    (folder / "pyvenv.cfg").write_text("home = /nowhere\nversion = 3.10.1\n")
    (folder / "localdev.stamp").unlink()
    (folder / "left-over").touch()
    bootstrap.ensure()
    assert not (folder / "left-over").exists()


def test_a_folder_that_is_no_environment_is_left_alone(installs: list[Path]) -> None:
    folder = bootstrap.venv_folder()
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(bootstrap.BootstrapError, match="no virtual environment"):
        bootstrap.ensure()
    assert (folder / "thesis.txt").exists()


def test_where_a_process_cannot_be_replaced_a_child_gives_the_exit_code() -> None:
    script = "from localdev.bootstrap import run_as_child; import sys; sys.exit(run_as_child(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        script,
        sys.executable,
        "-c",
        "import os; os._exit(len(os.environ['LOCALDEV_LAUNCHER']) and 7)",
    ]
    assert subprocess.run(command).returncode == 7


def test_nothing_outside_the_standard_library_is_needed_before_the_install() -> None:
    packages = ["aiohttp", "azure", "psutil", "psycopg"]
    script = f"import localdev.commands, sys; print([m for m in sys.modules if m in {packages}])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
