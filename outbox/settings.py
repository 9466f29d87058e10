"""The app's settings: environment variables, read once, checked while function_app is imported.

Each field of `Settings` is the environment variable OUTBOX_<FIELD>; `Storage` reads the host's AzureWebJobsStorage.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import httpx
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outbox import addresses
from outbox.errors import SettingsError
from outbox.signing import decode_secret


def _secret(value: Any) -> SecretStr:
    """A secret is its text, or {"env": "NAME"} for one kept in another setting (a Key Vault reference)."""
    if isinstance(value, SecretStr):
        return value
    if isinstance(value, dict) and set(value) == {"env"} and isinstance(value["env"], str):
        text = os.environ.get(value["env"], "")
        if not text:  # said by name only if it looks like one: it may be the secret itself
            name = value["env"] if re.fullmatch(r"[A-Z][A-Z0-9_]{0,40}", value["env"]) else ""
            raise ValueError(f"the environment variable {name + ' ' if name else ''}that it names is not set")
    elif isinstance(value, str):
        text = value
    else:
        raise ValueError('a secret is a text, or {"env": "NAME"}')
    decode_secret(text)
    return SecretStr(text)


def _url(value: str) -> str:
    try:
        url = httpx.URL(value)
        host = url.raw_host.decode()
    except (httpx.InvalidURL, UnicodeError):
        host = ""
    # A host is an IPv6 address, or labels of a name; all digits in the last make it an IPv4 address, spelt out.
    labels = host.removesuffix(".").split(".")
    sound = ":" in host or all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels)
    numeric = re.fullmatch(r"\d+|0x[\da-f]*", labels[-1]) and not addresses.is_literal(host)
    if not host or not sound or numeric or not re.fullmatch(r"(?i)https?://[!-\[\]-~]+", value):
        raise ValueError("it should be an http:// or https:// address")
    if url.port is not None and not 1 <= url.port <= 65535:
        raise ValueError("its port should be 1 to 65535")
    if url.fragment:
        raise ValueError("it should have no #fragment: a receiver never sees one")
    return value


def _some(value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not value:
        raise ValueError("it should have at least one secret")
    return value


class Destination(BaseModel):
    """A receiver of events, from OUTBOX_DESTINATIONS."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_url)]
    #: Newest first; each signs, so that a receiver can move from one to the next.
    secrets: Annotated[tuple[Annotated[SecretStr, BeforeValidator(_secret)], ...], AfterValidator(_some)]
    #: None: all types.
    event_types: frozenset[str] | None = None
    timeout_seconds: float | None = Field(default=None, gt=0, le=3600)
    concurrency: int | None = Field(default=None, ge=1, le=10_000)

    @model_validator(mode="before")
    @classmethod
    def _one_secret_or_several(cls, value: Any) -> Any:
        if isinstance(value, dict) and "secret" in value:
            if "secrets" in value:
                raise ValueError('give "secret" or "secrets", not both')
            value = {**value, "secrets": [value["secret"]]}
            del value["secret"]
        return value

    def wants(self, event_type: str) -> bool:
        return self.event_types is None or event_type in self.event_types


def _destinations(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError('it should be a JSON object: {"name": {"url": "…", "secret": "whsec_…"}}')
    return parsed


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)[:60]!r} stands in it twice")
    return dict(pairs)


def _networks(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parts = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        return [ipaddress.ip_network(part.strip()) for part in parts if part.strip()]
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("it should be networks like 10.1.0.0/16, parted by commas") from None


Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]


class Settings(BaseSettings):
    """What an operator can set. Durations are seconds."""

    model_config = SettingsConfigDict(
        env_prefix="OUTBOX_", env_ignore_empty=True, frozen=True, extra="ignore", hide_input_in_errors=True
    )

    database_url: SecretStr = Field(description="PostgreSQL connection string (URL or key=value).")
    queue_name: str = Field(
        pattern=r"^[a-z0-9](-?[a-z0-9])*$",
        min_length=3,
        max_length=63,
        description="Storage queue of the doorbell: 3 to 63 of a-z, 0-9 and single dashes.",
    )
    destinations: Annotated[dict[Name, Destination], NoDecode, BeforeValidator(_destinations)] = Field(
        description='JSON object of receivers: `{"name": {"url", "secret" or "secrets", "event_types"?, '
        '"timeout_seconds"?, "concurrency"?}}`; `{}` for none.'
    )
    batch_size: int = Field(default=100, ge=1, le=5000, description="Most rows one claim takes.")
    lease_seconds: float = Field(
        default=30, ge=1, le=3600, description="How long a claim holds a row before others may take it over."
    )
    max_attempts: int = Field(default=50, ge=1, le=1_000_000, description="Attempts before a row becomes Failed.")
    give_up_after_seconds: float = Field(
        default=259_200,
        gt=0,
        le=31_536_000,
        description="Age (since created or redriven) at which a row becomes Failed.",
    )
    unknown_grace_seconds: float = Field(
        default=600,
        ge=0,
        le=86_400,
        description="How long a row of unknown type or destination, or with a payload that does not fit, is retried.",
    )
    backoff_base_seconds: float = Field(default=10, gt=0, le=86_400, description="Wait after the first failed attempt.")
    backoff_cap_seconds: float = Field(default=1800, gt=0, le=86_400, description="Longest wait between attempts.")
    delivery_timeout_seconds: float = Field(
        default=10, gt=0, le=3600, description="Total time of one delivery; a destination may set its own."
    )
    delivery_concurrency: int = Field(
        default=32, ge=1, le=10_000, description="Deliveries at once to one destination, per process."
    )
    max_in_flight: int = Field(default=256, ge=1, le=10_000, description="Deliveries at once in all, per process.")
    drain_budget_seconds: float = Field(
        default=240,
        gt=0,
        le=86_400,
        description="When a drain stops claiming; less than functionTimeout in host.json.",
    )
    retention_days: float = Field(default=30, gt=0, le=36_500, description="Age at which Processed rows are purged.")
    max_payload_bytes: int = Field(
        default=262_144, ge=1, le=10_485_760, description="Largest payload; `enqueue` refuses more."
    )
    allowed_private_networks: Annotated[tuple[addresses.Network, ...], NoDecode, BeforeValidator(_networks)] = Field(
        default=(), description="Private networks that destinations may be in: CIDRs parted by commas."
    )
    allow_http: bool = Field(
        default=False, description="Whether destinations other than this machine may be `http://`, in plain text."
    )
    pool_size: int = Field(
        default=8,
        ge=1,
        le=100,
        description="Most PostgreSQL connections for requests, per process; a drain has 2.",
    )
    prepare_threshold: int | None = Field(
        default=None, ge=0, description="Uses before a statement is prepared; unset: never, as PgBouncer needs it."
    )

    @model_validator(mode="after")
    def _lease_outlives_deliveries(self) -> Settings:
        longest = max((self.timeout_of(name) for name in self.destinations), default=self.delivery_timeout_seconds)
        if longest + min(5, self.lease_seconds / 2) > self.lease_seconds:
            raise ValueError(
                f"OUTBOX_LEASE_SECONDS ({self.lease_seconds:g}) should exceed the longest delivery timeout "
                f"({longest:g}) by {min(5, self.lease_seconds / 2):g} seconds, so that a delivery ends in time: "
                "raise it, or lower OUTBOX_DELIVERY_TIMEOUT_SECONDS or the destination's timeout_seconds"
            )
        return self

    @model_validator(mode="after")
    def _destinations_may_be_sent_to(self) -> Settings:
        for name, destination in self.destinations.items():
            url = httpx.URL(destination.url)
            if addresses.is_literal(url.host) and addresses.blocked(url.host, self.allowed_private_networks):
                raise ValueError(
                    f"OUTBOX_DESTINATIONS: {name}.url: {url.host} is a private address; "
                    "OUTBOX_ALLOWED_PRIVATE_NETWORKS should name its network"
                )
            if url.scheme == "http" and not self.allow_http and not addresses.is_loopback(url.host):
                raise ValueError(
                    f"OUTBOX_DESTINATIONS: {name}.url: it should be https://, since anybody on the way can read "
                    "http://; OUTBOX_ALLOW_HTTP=true allows it"
                )
        return self

    def timeout_of(self, destination: str) -> float:
        """Seconds that one delivery to `destination` may take."""
        own = self.destinations[destination].timeout_seconds
        return self.delivery_timeout_seconds if own is None else own

    def concurrency_of(self, destination: str) -> int:
        own = self.destinations[destination].concurrency
        return self.delivery_concurrency if own is None else own


class Storage(BaseSettings):
    """The host's own storage account, under the names that the host uses (a connection string, or an identity)."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True, extra="ignore", hide_input_in_errors=True)

    connection_string: SecretStr | None = Field(default=None, validation_alias="AzureWebJobsStorage")
    queue_service_uri: str | None = Field(default=None, validation_alias="AzureWebJobsStorage__queueServiceUri")
    account_name: str | None = Field(default=None, validation_alias="AzureWebJobsStorage__accountName")
    client_id: str | None = Field(default=None, validation_alias="AzureWebJobsStorage__clientId")
    credential: str | None = Field(default=None, validation_alias="AzureWebJobsStorage__credential")

    @model_validator(mode="after")
    def _reachable(self) -> Storage:
        if not (self.connection_string or self.queue_service_uri or self.account_name):
            raise ValueError(
                "AzureWebJobsStorage is missing: it should be a connection string, or "
                "AzureWebJobsStorage__queueServiceUri (or __accountName) for a managed identity"
            )
        return self

    @property
    def queue_service(self) -> str | None:
        """The queue service's address for identity-based access; None with a connection string."""
        if self.connection_string:
            return None
        return self.queue_service_uri or f"https://{self.account_name}.queue.core.windows.net"


def load() -> tuple[Settings, Storage]:
    """Settings from the environment. Raises SettingsError naming each wrong one, never its value."""
    problems: list[str] = []
    settings: Settings | None = None
    storage: Storage | None = None
    try:
        settings = Settings()
    except ValidationError as error:
        problems += [_sentence(Settings, problem) for problem in error.errors(include_input=False, include_url=False)]
    try:
        storage = Storage()
    except ValidationError as error:
        problems += [_sentence(Storage, problem) for problem in error.errors(include_input=False, include_url=False)]
    if settings is None or storage is None:
        raise SettingsError("; ".join(problems))
    return settings, storage


def load_database_url() -> str:
    """OUTBOX_DATABASE_URL alone, for a command that needs no other setting. Raises SettingsError."""
    url = os.environ.get("OUTBOX_DATABASE_URL", "")
    if not url:
        raise SettingsError("OUTBOX_DATABASE_URL is missing: it should be a PostgreSQL connection string")
    return url


def _sentence(model: type[BaseSettings], problem: Mapping[str, Any]) -> str:
    message = re.sub(r"^Value error, ", "", problem["msg"])
    if not problem["loc"]:
        return message
    field, *inner = [str(part) for part in problem["loc"]]
    field = field.lower().removeprefix("outbox_")
    name = "OUTBOX_" + field.upper()
    where = ": " + ".".join(part[:60] for part in inner if not part.startswith("function-")) if inner else ""
    info = model.model_fields.get(field)
    about = f" ({info.description.rstrip('.')})" if info is not None and info.description and not inner else ""
    if problem["type"] == "missing" and not inner:
        return f"{name} is missing{about}"
    return f"{name}{where}: {message}{about}"
