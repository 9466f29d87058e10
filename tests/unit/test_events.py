"""Event types: their registry, what becomes of their payloads, and what can never be stored."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, computed_field

import orders
from outbox.errors import EventRefused
from outbox.events import Event, misfit, registered, to_payload

LIMIT = 262_144


class Anything(Event, type="test.Anything"):
    value: Any


class Strict(Event, type="test.strict_2"):
    n: int
    f: float = 0.0


class Rich(Event, type="test.Rich"):
    key: UUID
    when: datetime
    price: Decimal
    text: str
    maybe: int | None = None
    counts: dict[str, int] | None = None


def define(name: str, **keywords: Any) -> type[Event]:
    return types.new_class(name, (Event,), keywords, lambda namespace: namespace.update(__module__=__name__))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def test_a_type_is_registered_under_its_name_by_its_definition() -> None:
    assert registered()["test.Anything"] is Anything
    assert Strict(n=1).event_type == Strict.event_type == "test.strict_2"
    assert registered()["OrderCompleted"] is orders.OrderCompleted
    with pytest.raises(TypeError):
        registered()["x"] = Strict  # type: ignore[index]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"'test\.Anything' is already registered by .*test_events\.Anything"):

        class Another(Event, type="test.Anything"):
            n: int

    assert registered()["test.Anything"] is Anything


def test_a_module_that_is_loaded_again_may_register_its_types_again() -> None:
    first, second = define("Again", type="test.Again"), define("Again", type="test.Again")
    assert registered()["test.Again"] is second is not first


def test_a_subclass_of_an_event_is_a_type_of_its_own() -> None:
    class More(Strict, type="test.More"):
        more: int

    assert (More(n=1, more=2).event_type, Strict(n=1).event_type) == ("test.More", "test.strict_2")
    with pytest.raises(TypeError, match="type"):
        define("Nameless")


@pytest.mark.parametrize("name", ["", "a b", "a-b", ".a", "a.", "a..b", "ä", "a\n", "a/b", "a\0"])
def test_a_name_is_words_parted_by_dots(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits and _"):
        define("Odd", type=name)
    assert name not in registered()


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": "x"}, {"n": 1, "surplus": 1}, {"n": 1, "f": float("nan")}, {"n": 1, "f": float("inf")}],
    ids=["missing", "wrong", "surplus", "nan", "infinity"],
)
def test_an_event_that_does_not_fit_its_model_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Strict(**fields)


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Strict(n=1).n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("event", "golden"),
    [
        (
            orders.OrderCompleted(orderId=UUID("0190A0B1-C2D3-7E4F-8A9B-0C1D2E3F4A5B")),
            '{"orderId":"0190a0b1-c2d3-7e4f-8a9b-0c1d2e3f4a5b"}',
        ),
        (
            Rich(
                key=UUID(int=1),
                when=datetime(2025, 1, 2, 3, 4, 5, 6, UTC),
                price=Decimal("1.10"),
                text='grün 😀 "\\/\x1f\x7f\u2028',
                counts={"b": 2**64, "a": -1},
            ),
            '{"key":"00000000-0000-0000-0000-000000000001","when":"2025-01-02T03:04:05.000006Z","price":"1.10",'
            '"text":"grün 😀 \\"\\\\/\\u001f\x7f\u2028","maybe":null,"counts":{"b":18446744073709551616,"a":-1}}',
        ),
    ],
    ids=["the order's", "all kinds of values"],
)
def test_a_payload_is_these_bytes(event: Event, golden: str) -> None:
    assert to_payload(event, max_bytes=LIMIT).encode() == golden.encode()
    assert misfit(event.event_type, golden) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Anything(value={"a": ["x", "b\0c"]}), "value.a.1 holds a NUL"),
        (lambda: Anything(value={"a": {"k\0": 1}}), "value.a holds a NUL"),
        (lambda: Rich(key=UUID(int=1), when=datetime.now(UTC), price=Decimal(1), text="\0"), "text holds a NUL"),
        (lambda: Anything(value="\ud800"), "JSON cannot hold"),
        (lambda: Anything(value={"\udfff": 1}), "JSON cannot hold"),
        (lambda: Anything(value=10**5000), "JSON cannot hold"),
        (lambda: Strict(n=10**5000), "JSON cannot hold"),
        (lambda: Anything(value=nested(300)), "JSON cannot hold"),
        (lambda: Anything(value=nested(100_000)), "JSON cannot hold"),
        (lambda: Anything(value=object()), "JSON cannot hold"),
        (lambda: Anything(value=b"\xff"), "JSON cannot hold"),
        (lambda: Anything(value=circle()), "JSON cannot hold"),
    ],
    ids=["nul", "nul in key", "nul in str", "surrogate", "surrogate in key", "huge", "huge int", "deep", "very deep",
         "no JSON type", "bytes", "circle"],
)  # fmt: skip
def test_what_jsonb_cannot_hold_is_refused_with_the_type_and_the_reason(make: Callable[[], Event], says: str) -> None:
    event = make()
    with pytest.raises(EventRefused, match=rf"^{event.event_type}: .*{says}") as caught:
        to_payload(event, max_bytes=LIMIT)
    assert "\0" not in str(caught.value)
    str(caught.value).encode()


def test_the_limit_is_in_bytes_of_utf_8_and_inclusive() -> None:
    event = Anything(value="é" * 100)  # {"value":"…"} is 12 bytes
    assert len(to_payload(event, max_bytes=212)) == 112
    with pytest.raises(EventRefused, match="212 bytes; OUTBOX_MAX_PAYLOAD_BYTES allows 211"):
        to_payload(event, max_bytes=211)


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(JSON)
def test_every_other_json_value_goes_through_unchanged_and_fits(value: Any) -> None:
    payload = to_payload(Anything(value=value), max_bytes=10**9)
    assert json.loads(payload) == {"value": value}
    assert misfit("test.Anything", payload) is None


@pytest.mark.parametrize("payload", ['{"n": 1}', '{"f": 1e300, "n": -12345678901234567890}', '{"n":1.0,"f":1}'])
def test_a_stored_payload_that_fits(payload: str) -> None:
    assert misfit("test.strict_2", payload) is None


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ("{}", "n"),
        ('{"n": "s3cret"}', "n"),
        ('{"n": null}', "n"),
        ('{"n": 1, "f": 1e400}', "f"),
        ('{"n": 1, "more": "s3cret"}', "more"),
        ('["s3cret"]', "payload"),
        ("null", "payload"),
        ("", "payload"),
        ('{"n": 1', "payload"),
        ('{"n": ' + "9" * 5000 + "}", "payload"),
        ('{"n": ' + "[" * 100_000 + "]" * 100_000 + "}", "payload"),
        ('{"n": 1, "a.b \\u0000' + "k" * 100 + '": 1}', r"a\?b\?\?k{55}"),
    ],
    ids=[
        "missing",
        "wrong",
        "null",
        "infinite",
        "surplus",
        "array",
        "no object",
        "empty",
        "half",
        "huge",
        "deep",
        "odd",
    ],
)
def test_one_that_does_not_is_told_by_its_field_and_never_by_its_value(payload: str, path: str) -> None:
    found = misfit("test.strict_2", payload)
    assert found is not None
    assert re.match(rf"{path}: .", found)
    assert "s3cret" not in found
    assert found.isprintable()


class Aliased(Event, type="test.Aliased"):
    number: int = Field(alias="the_number")


class Lopsided(Event, type="test.Lopsided"):
    number: int = Field(validation_alias="in", serialization_alias="out")


class Computed(Event, type="test.Computed"):
    n: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.n


def test_an_alias_is_the_name_that_goes_over_the_wire() -> None:
    payload = to_payload(Aliased(the_number=1), max_bytes=LIMIT)
    assert payload == '{"the_number":1}'
    assert misfit("test.Aliased", payload) is None


@pytest.mark.parametrize(
    "event",
    [Lopsided.model_validate({"in": 1}), Computed(n=1), Anything(value=nested(230)), Anything(value=nested(250))],
)
def test_what_a_drain_would_refuse_is_refused_before_it_is_stored(event: Event) -> None:
    with pytest.raises(EventRefused, match=event.event_type):
        to_payload(event, max_bytes=LIMIT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), {"a": [float("nan")]}])
def test_a_number_that_json_has_not_is_refused_wherever_it_is(value: Any) -> None:
    with pytest.raises(EventRefused, match="which JSON cannot hold"):
        to_payload(Anything(value=value), max_bytes=LIMIT)
