"""Route templates and the paths that fit them."""

from __future__ import annotations

import pytest

from localdev.host.configuration import ConfigurationError
from localdev.host.routes import Route, split_path


@pytest.mark.parametrize(
    ("template", "path", "parameters"),
    [
        ("api/orders/{id}/complete", "/api/orders/7/complete", {"id": "7"}),
        ("api/orders/{id}/complete", "/API/Orders/7/COMPLETE/", {"id": "7"}),  # case and a last slash do not matter
        ("api/orders/{id}/complete", "/api/orders/a%20b%2Fc/complete", {"id": "a b%2Fc"}),  # a slash stays encoded
        ("api/orders/{id}/complete", "/api/orders//complete", None),
        ("api/orders/{id}/complete", "/api/orders/7/complete/8", None),
        ("api/orders/{id}/complete", "/api/orders/7", None),
        ("api/items/{n:int}", "/api/items/-12", {"n": "-12"}),
        ("api/items/{n:int}", "/api/items/2147483648", None),
        ("api/items/{n:int}", "/api/items/twelve", None),
        ("api/items/{n?}", "/api/items", {}),
        ("api/files/{*path}", "/api/files/a/b", {"path": "a/b"}),
        ("api/x", "/api/x?y=1", {}),
    ],
)
def test_match(template: str, path: str, parameters: dict[str, str] | None) -> None:
    assert Route(template).match(split_path(path)) == parameters


def test_a_literal_goes_before_a_parameter() -> None:
    routes = sorted([Route("a/{x}"), Route("a/{x:int}"), Route("{*all}"), Route("a/b")], key=lambda route: route.rank)
    assert [route.template for route in routes] == ["a/b", "a/{x:int}", "a/{x}", "{*all}"]


@pytest.mark.parametrize("template", ["a/{x:regex(^b$)}", "a/{x", "a/b{x}c", "a/{x=5}"])
def test_a_template_that_it_cannot_read_is_refused(template: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        Route(template)
