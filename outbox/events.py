"""Event types: pydantic models under a name, in one registry.

To add one, subclass Event and give it the name that goes over the wire:

    class OrderCompleted(Event, type="OrderCompleted"):
        orderId: UUID

The module that holds it must be imported by function_app, else a worker meets rows whose type it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError

from outbox.errors import EventRefused

# Standard Webhooks: names of dot-separated words.
_TYPE_NAME = re.compile(r"[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*")
_registry: dict[str, type[Event]] = {}


class Event(BaseModel):
    """Base of all event types. Frozen; refuses unknown fields, NaN and infinity, which JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    event_type: ClassVar[str]

    def __init_subclass__(cls, /, type: str, **kwargs: Any) -> None:  # noqa: A002 - reads as `class X(Event, type=…)`
        super().__init_subclass__(**kwargs)
        if not _TYPE_NAME.fullmatch(type):
            raise ValueError(f"event type {type!r}: use letters, digits and _ in words parted by dots")
        known = _registry.get(type)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"event type {type!r} is already registered by {known.__module__}.{known.__qualname__}")
        cls.event_type = type
        _registry[type] = cls

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__()  # `type=` is ours; pydantic would not know it


def registered() -> Mapping[str, type[Event]]:
    """The event types known to this process, by name."""
    return MappingProxyType(_registry)


def misfit(event_type: str, payload: str) -> str | None:
    """Why a stored payload does not fit its event type's model, or None. It names fields, never their values."""
    try:
        _registry[event_type].model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        return f"{_path(first['loc'])}: {first['msg']}"
    return None


def to_payload(event: Event, *, max_bytes: int) -> str:
    """The event as JSON text that PostgreSQL's jsonb can hold.

    Raises EventRefused where it cannot: a NUL character, a lone surrogate, a number out of JSON's range, or more than
    `max_bytes` of UTF-8; and where the model would not accept its own JSON, as with a computed field.
    """
    try:
        text = event.model_dump_json(by_alias=True)
        size = len(text.encode())
        refused = _unstorable(json.loads(text, parse_constant=_refuse_constant), ())
    except (PydanticSerializationError, UnicodeEncodeError, ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0][:200] if isinstance(error, _NotJson) else "it has a value JSON cannot hold"
        raise EventRefused(f"{event.event_type}: {reason}; change the field before calling enqueue") from None
    if refused is not None:
        raise EventRefused(f"{event.event_type}: {_path(refused)} holds a NUL character, which jsonb cannot store")
    if size > max_bytes:
        raise EventRefused(
            f"{event.event_type}: the payload is {size} bytes; OUTBOX_MAX_PAYLOAD_BYTES allows {max_bytes}. "
            "Send a reference to large data instead"
        )
    if (unfit := misfit(event.event_type, text)) is not None:  # a drain would refuse it
        raise EventRefused(f"{event.event_type}: its own JSON does not fit the model: {unfit}")
    return text


class _NotJson(ValueError):
    pass


def _refuse_constant(name: str) -> Any:
    raise _NotJson(f"it holds {name}, which JSON cannot hold")


def _unstorable(value: Any, path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    """The path of the first string with a NUL in it, key or value."""
    if isinstance(value, str):
        return path if "\0" in value else None
    if isinstance(value, dict):
        for key, item in value.items():
            found = path if "\0" in key else _unstorable(item, (*path, key))
            if found is not None:
                return found
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _unstorable(item, (*path, index))) is not None:
                return found
    return None


def _path(loc: tuple[str | int, ...]) -> str:
    return ".".join(re.sub(r"[^\w-]", "?", str(part))[:60] for part in loc) or "payload"
