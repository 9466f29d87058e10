"""The environment of the stack's processes: the user's own, then the stack's addresses, then local settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def given(name: str, overrides: Mapping[str, str]) -> str | None:
    """A setting that the caller or the environment gives; an empty one counts as not given."""
    return overrides.get(name) or os.environ.get(name) or None


def environment(defaults: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Settings for a child process; later ones win: local settings, `defaults`, os.environ, `overrides`."""
    own = {name: value for name, value in os.environ.items() if value or name not in defaults}
    return {**local_values(), **defaults, **own, **overrides}


def local_values() -> dict[str, str]:
    """`Values` of local.settings.json, or of the sample where there is none."""
    for name in ("local.settings.json", "local.settings.sample.json"):
        path = ROOT / name
        if path.exists():
            values = json.loads(path.read_text("utf-8-sig")).get("Values", {})
            return {key: str(value) for key, value in values.items()}
    return {}
