"""The functions of an app: what `function_app.app` says about them."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from azure.functions.decorators.function_app import FunctionRegister

from localdev.host.configuration import ConfigurationError

TRIGGERS = ("httpTrigger", "queueTrigger", "timerTrigger")
SETTING = re.compile(r"%([^%\s]+)%")
CONTEXT = "context"


@dataclass(frozen=True)
class AppFunction:
    """One function and its trigger, with the settings it names filled in."""

    name: str
    call: Callable[..., Any]
    trigger: Mapping[str, Any]
    wants_context: bool
    folder: Path

    @property
    def trigger_type(self) -> str:
        return str(self.trigger["type"])

    @property
    def parameter(self) -> str:
        """The parameter that takes the trigger's value."""
        return str(self.trigger["name"])

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call)


def load_functions(folder: Path, settings: Mapping[str, str] = os.environ) -> list[AppFunction]:
    """Import function_app from `folder` and read its functions. It can be done once for an app."""
    sys.path.insert(0, str(folder))
    module = importlib.import_module("function_app")
    apps = [value for value in vars(module).values() if isinstance(value, FunctionRegister)]
    if len(apps) != 1:
        raise ConfigurationError(f"function_app.py should have one FunctionApp at its top level; it has {len(apps)}")
    functions = [read_function(function, folder, settings) for function in apps[0].get_functions()]
    if not functions:
        raise ConfigurationError("function_app.py has no functions")
    return functions


def read_function(function: Any, folder: Path, settings: Mapping[str, str]) -> AppFunction:
    name = function.get_function_name()
    bindings = [fill_in(json.loads(raw), name, settings) for raw in function.get_raw_bindings()]
    triggers = [binding for binding in bindings if str(binding["type"]).endswith("Trigger")]
    others = [binding["type"] for binding in bindings if binding not in triggers and binding["name"] != "$return"]
    if len(triggers) != 1 or triggers[0]["type"] not in TRIGGERS or others:
        found = ", ".join([trigger["type"] for trigger in triggers] + others)
        raise ConfigurationError(f"{name} uses {found}; the stand-in knows one of {', '.join(TRIGGERS)} a function")
    trigger = triggers[0]
    call = cast(Callable[..., Any], function.get_user_function())
    parameters = set(inspect.signature(call).parameters)
    unbound = parameters - {trigger["name"], CONTEXT}
    if unbound or trigger["name"] not in parameters:
        raise ConfigurationError(
            f"{name} should take {trigger['name']!r} and at most {CONTEXT!r}; it takes {', '.join(sorted(parameters))}"
        )
    return AppFunction(name, call, trigger, CONTEXT in parameters and trigger["name"] != CONTEXT, folder)


def fill_in(binding: dict[str, Any], function: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """The binding with each %SETTING% replaced by the setting's value."""

    def value_of(match: re.Match[str]) -> str:
        value = settings.get(match[1])
        if not value:
            raise ConfigurationError(f"{function} names %{match[1]}% in its trigger, and that setting is not set")
        return value

    return {key: SETTING.sub(value_of, value) if isinstance(value, str) else value for key, value in binding.items()}
