"""Route templates as ASP.NET reads them, as far as function apps use them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from localdev.host.configuration import ConfigurationError

PARAMETER = re.compile(r"\{(?P<all>\*{0,2})(?P<name>[A-Za-z_]\w*)(?P<constraint>:[a-z]+)?(?P<optional>\?)?\}")

CONSTRAINTS: dict[str, Callable[[str], bool]] = {
    "int": lambda text: re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII) is not None and -(2**31) <= int(text) < 2**31,
    "long": lambda text: re.fullmatch(r"[+-]?\d{1,19}", text, re.ASCII) is not None and -(2**63) <= int(text) < 2**63,
    "alpha": lambda text: re.fullmatch(r"[A-Za-z]+", text) is not None,
    "bool": lambda text: text.lower() in ("true", "false"),
    "guid": lambda text: re.fullmatch(r"\{?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\}?", text) is not None,
}


@dataclass(frozen=True)
class Segment:
    """A literal, or a parameter."""

    literal: str | None = None
    name: str = ""
    constraint: str = ""
    optional: bool = False
    catch_all: bool = False

    @property
    def rank(self) -> int:
        if self.literal is not None:
            return 0
        return 3 if self.catch_all else 1 if self.constraint else 2


class Route:
    """A template such as `api/orders/{order_id}/complete`."""

    def __init__(self, template: str) -> None:
        self.template = template.strip("/")
        self._segments = [parse_segment(part, template) for part in self.template.split("/") if part]

    @property
    def rank(self) -> list[int]:
        """Orders routes: where two fit, the one of the lower rank is meant."""
        return [segment.rank for segment in self._segments]

    def match(self, parts: list[str]) -> dict[str, str] | None:
        """The parameters, when the decoded path fits."""
        found: dict[str, str] = {}
        rest = list(parts)
        for segment in self._segments:
            if segment.catch_all:
                if rest or not segment.optional:
                    found[segment.name] = "/".join(rest)
                return found
            if not rest:
                if segment.optional:
                    continue
                return None
            part = rest.pop(0)
            if segment.literal is not None:
                if part.lower() != segment.literal.lower():
                    return None
            elif not part or (segment.constraint and not CONSTRAINTS[segment.constraint](part)):
                return None
            else:
                found[segment.name] = part
        return None if rest else found


def parse_segment(part: str, template: str) -> Segment:
    if "{" not in part and "}" not in part:
        return Segment(literal=part)
    match = PARAMETER.fullmatch(part)
    constraint = (match["constraint"] or "")[1:] if match else ""
    if match is None or (constraint and constraint not in CONSTRAINTS):
        raise ConfigurationError(
            f"the stand-in cannot read {part!r} in the route {template!r}; "
            f"it knows {{name}}, {{name?}}, {{*name}} and the constraints {', '.join(CONSTRAINTS)}"
        )
    return Segment(
        name=match["name"], constraint=constraint, optional=bool(match["optional"]), catch_all=bool(match["all"])
    )


def split_path(raw_path: str) -> list[str]:
    """The decoded segments of a request's path. An encoded slash stays encoded: it does not part segments."""
    path = raw_path.split("?", 1)[0].removeprefix("/").removesuffix("/")
    return [re.sub("/", "%2F", unquote(part)) for part in path.split("/")] if path else []
