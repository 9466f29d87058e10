"""What can be set, what a wrong setting says, and that the files which name settings agree with each other."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import traceback
from collections.abc import Callable
from importlib.metadata import distribution
from typing import Any

import httpx
import pytest

from outbox.addresses import blocked
from outbox.errors import SettingsError
from outbox.settings import Settings, Storage, load, load_database_url

from .support import ROOT, SECRET

PASSWORD = "hunter2hunter2"
VALID = {
    "OUTBOX_DATABASE_URL": f"postgresql://outbox:{PASSWORD}@db.example/outbox",
    "OUTBOX_QUEUE_NAME": "outbox-wakeup",
    "OUTBOX_DESTINATIONS": "{}",
    "AzureWebJobsStorage": f"AccountName=a;AccountKey={PASSWORD}",
}
URL = "https://crm.example/hook"

Load = Callable[..., tuple[Settings, Storage]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the settings from a valid environment, changed by field name; None takes one away."""

    def read(environment: Any = None, **changes: Any) -> tuple[Settings, Storage]:
        for name in os.environ:
            if name.upper().startswith(("OUTBOX_", "AZUREWEBJOBSSTORAGE")):
                monkeypatch.delenv(name)
        named = {f"OUTBOX_{field.upper()}": value for field, value in changes.items()}
        for name, value in {**VALID, **(environment or {}), **named}.items():
            if value is not None:
                monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))
        return load()

    return read


def refusal(read: Load, environment: Any = None, **changes: Any) -> str:
    """What loading says. It never shows a secret, neither in its text nor in a traceback."""
    with pytest.raises(SettingsError) as caught:
        read(environment, **changes)
    shown = "".join(traceback.format_exception(caught.value))
    for secret in (PASSWORD, SECRET, SECRET[6:], "s3cret"):
        assert secret not in shown
    return str(caught.value)


def crm(**values: Any) -> dict[str, Any]:
    return {"crm": {"url": URL, "secret": SECRET, **values}}


# -- every setting -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_contracts(read: Load) -> None:
    settings, _ = read()
    required = {"database_url", "queue_name", "destinations"}
    assert {name: value for name, value in settings if name not in required} == {
        "batch_size": 100,
        "lease_seconds": 30,
        "max_attempts": 50,
        "give_up_after_seconds": 259_200,
        "unknown_grace_seconds": 600,
        "backoff_base_seconds": 10,
        "backoff_cap_seconds": 1800,
        "delivery_timeout_seconds": 10,
        "delivery_concurrency": 32,
        "max_in_flight": 256,
        "drain_budget_seconds": 240,
        "retention_days": 30,
        "max_payload_bytes": 262_144,
        "allowed_private_networks": (),
        "allow_http": False,
        "pool_size": 8,
        "prepare_threshold": None,
    }
    assert settings.destinations == {}
    assert settings.database_url.get_secret_value() == VALID["OUTBOX_DATABASE_URL"]
    assert PASSWORD not in repr(settings)


BOUNDS: dict[str, tuple[float | str, float | str, list[float | str]]] = {
    "batch_size": (1, 5000, [0, 5001, "1.5"]),
    "lease_seconds": (1, 3600, [0.9, 3601]),
    "max_attempts": (1, 1_000_000, [0, 1_000_001, "1.5"]),
    "give_up_after_seconds": (0.001, 31_536_000, [0, 31_536_001]),
    "unknown_grace_seconds": (0, 86_400, [-1, 86_401]),
    "backoff_base_seconds": (0.001, 86_400, [0, 86_401]),
    "backoff_cap_seconds": (0.001, 86_400, [0, 86_401]),
    "delivery_timeout_seconds": (0.001, 3595, [0, 3601]),
    "delivery_concurrency": (1, 10_000, [0, 10_001, "1.5"]),
    "max_in_flight": (1, 10_000, [0, 10_001, "1.5"]),
    "drain_budget_seconds": (0.001, 86_400, [0, 86_401]),
    "retention_days": (0.001, 36_500, [0, 36_501]),
    "max_payload_bytes": (1, 10_485_760, [0, 10_485_761, "1.5"]),
    "pool_size": (1, 100, [0, 101, "1.5"]),
    "prepare_threshold": (0, 1_000_000, [-1, "1.5"]),
}
ROOMY = {"lease_seconds": 3600, "delivery_timeout_seconds": 0.5}  # the rule between these two is a test of its own


@pytest.mark.parametrize("field", BOUNDS)
def test_a_number_is_taken_within_its_bounds(read: Load, field: str) -> None:
    for value in BOUNDS[field][:2]:
        settings, _ = read(**{**ROOMY, field: value})
        assert getattr(settings, field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in BOUNDS for value in [*BOUNDS[field][2], "x", "-1", "nan", "inf", "1e999", "٣", "{}"]],
)
def test_any_other_value_is_refused_with_the_settings_name_and_meaning(
    read: Load, field: str, value: float | str
) -> None:
    said = refusal(read, **{**ROOMY, field: value})
    assert said.startswith(f"OUTBOX_{field.upper()}: Input should be ")
    assert (Settings.model_fields[field].description or "?").rstrip(".") in said


def test_every_number_has_its_bounds_tested(read: Load) -> None:
    settings, _ = read()
    assert {n for n, v in settings if type(v) in (int, float) or n == "prepare_threshold"} == set(BOUNDS)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("field", ["database_url", "queue_name", "destinations"])
def test_a_required_setting_that_is_missing_or_empty_is_named(read: Load, field: str, value: str | None) -> None:
    assert refusal(read, **{field: value}).startswith(f"OUTBOX_{field.upper()} is missing (")


def test_an_empty_setting_is_its_default(read: Load) -> None:
    settings, _ = read(batch_size="", prepare_threshold="", allowed_private_networks="")
    assert (settings.batch_size, settings.prepare_threshold, settings.allowed_private_networks) == (100, None, ())


def test_all_that_is_wrong_is_said_at_once(read: Load) -> None:
    said = refusal(read, dict.fromkeys(VALID), batch_size="0", destinations=crm(url="ftp://x"))
    for name in ("DATABASE_URL", "QUEUE_NAME", "BATCH_SIZE", "DESTINATIONS: crm.url"):
        assert f"OUTBOX_{name}" in said
    assert "AzureWebJobsStorage is missing" in said


@pytest.mark.parametrize("name", ["abc", "a" * 63, "outbox-wakeup", "0-1-2", "a-b", "a-" * 31 + "a"])
def test_a_queue_name_as_azure_has_them(read: Load, name: str) -> None:
    assert read(queue_name=name)[0].queue_name == name


@pytest.mark.parametrize(
    "name", ["ab", "a" * 64, "a-" * 32 + "a", "Outbox", "out_box", "a--bc", "-abc", "abc-", "outböx", "abc\n", "%X%"]
)
def test_any_other_queue_name_is_refused(read: Load, name: str) -> None:
    assert "OUTBOX_QUEUE_NAME: " in (said := refusal(read, queue_name=name))
    assert "3 to 63 of a-z, 0-9 and single dashes" in said


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        ("10.0.0.0/8", ["10.0.0.0/8"]),
        (" 127.0.0.0/8 ,::1/128,", ["127.0.0.0/8", "::1/128"]),
        ("10.1.2.3", ["10.1.2.3/32"]),
        ('["10.0.0.0/8", "fd00::/8"]', ["10.0.0.0/8", "fd00::/8"]),
    ],
)
def test_networks_are_parted_by_commas(read: Load, text: str, networks: list[str]) -> None:
    settings, _ = read(allowed_private_networks=text)
    assert list(settings.allowed_private_networks) == [ipaddress.ip_network(each) for each in networks]


@pytest.mark.parametrize("text", ["private", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/8 127.0.0.0/8", "[", '["x"]', "{}"])
def test_what_is_no_network_is_refused(read: Load, text: str) -> None:
    said = refusal(read, allowed_private_networks=text)
    assert said.startswith("OUTBOX_ALLOWED_PRIVATE_NETWORKS: it should be networks like 10.1.0.0/16, parted by commas")


@pytest.mark.parametrize(
    ("lease", "timeout", "own", "fits"),
    [
        (30, 25, None, True), (30, 25.1, None, False),
        (15, 10, None, True), (14.9, 10, None, False),
        (4, 2, None, True), (4, 2.1, None, False),  # half of a lease below 10 s
        (30, 10, 25, True), (30, 10, 25.1, False),
        (10, 30, 5, True),  # the general timeout counts only where it applies
    ],
)  # fmt: skip
def test_a_lease_outlives_the_longest_delivery_by_5_seconds_or_its_half(
    read: Load, lease: float, timeout: float, own: float | None, fits: bool
) -> None:
    values = {"lease_seconds": lease, "delivery_timeout_seconds": timeout, "destinations": crm(timeout_seconds=own)}
    if fits:
        assert read(**values)[0].timeout_of("crm") == (own or timeout)
        return
    said = refusal(read, **values)
    assert said.startswith(f"OUTBOX_LEASE_SECONDS ({lease:g}) should exceed the longest delivery timeout (")
    assert "OUTBOX_DELIVERY_TIMEOUT_SECONDS" in said
    assert ";" not in said  # one sentence


# -- destinations ------------------------------------------------------------------------------------------------------


def test_a_destination_has_what_it_says_and_else_the_general_settings(
    read: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRM_SECRET", SECRET)
    erp = {"url": "https://u:p@erp.example:8080/a?b=c", "secrets": [{"env": "CRM_SECRET"}, SECRET],
           "event_types": ["A", "B"], "timeout_seconds": 2.5, "concurrency": 3}  # fmt: skip
    settings, _ = read(destinations={**crm(), "erp.2_x-Y": erp})
    assert [s.get_secret_value() for s in settings.destinations["erp.2_x-Y"].secrets] == [SECRET, SECRET]
    assert [s.get_secret_value() for s in settings.destinations["crm"].secrets] == [SECRET]
    assert (settings.timeout_of("erp.2_x-Y"), settings.concurrency_of("erp.2_x-Y")) == (2.5, 3)
    assert (settings.timeout_of("crm"), settings.concurrency_of("crm")) == (10, 32)
    assert [settings.destinations["erp.2_x-Y"].wants(each) for each in "ABC"] == [True, True, False]
    assert settings.destinations["crm"].wants("anything")
    assert settings.destinations["erp.2_x-Y"].url == erp["url"]
    assert SECRET not in repr(settings)


def one(**values: Any) -> str:
    return json.dumps(crm(**values))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is not JSON (line 1, column 2)"),
        (f"{{'crm': {{'secret': '{SECRET}'}}}}", "it is not JSON (line 1, column 2)"),
        ("[]", "it should be a JSON object"),
        (f'"{SECRET}"', "it should be a JSON object"),
        ("1" * 5000, ": "),
        ("[" * 100_000, "it is nested too deeply"),
        (f'{{"crm": "{URL}"}}', "crm: Input should be a valid dictionary"),
        (f'{{"crm": {{"secret": "{SECRET}"}}, "crm": {{}}}}', "'crm' stands in it twice"),
        (f'{{"crm": {{"url": "{URL}", "secret": "{SECRET}", "url": "{URL}"}}}}', "'url' stands in it twice"),
        ('{"a b": {}}', "a b.[key]: "),
        ('{"\\ud800": {}}', "[key]: "),
        (json.dumps({"x" * 101: {"url": URL, "secret": SECRET}}), "[key]: "),
        ('{"crm": {}}', "crm.url: Field required"),
        (f'{{"crm": {{"url": "{URL}"}}}}', "crm.secrets: Field required"),
        (one(secrets=[SECRET]), 'crm: give "secret" or "secrets", not both'),
        (one(secret=None), 'crm.secrets.0: a secret is a text, or {"env": "NAME"}'),
        (one(secret={"env": 1}), 'crm.secrets.0: a secret is a text, or {"env": "NAME"}'),
        (one(secret={"env": "GONE"}), "crm.secrets.0: the environment variable GONE that it names is not set"),
        (one(secret={"env": SECRET}), "crm.secrets.0: the environment variable that it names is not set"),
        (one(secret={"env": "BAD_SECRET"}), "crm.secrets.0: a secret is whsec_ followed by base64"),
        (one(secret="s3cret"), "crm.secrets.0: a secret is whsec_ followed by base64"),
        (one(secret="whsec_" + "QUFB" * 2), "crm.secrets.0: a secret holds 24 to 64 bytes in base64; this one holds 6"),
        (f'{{"crm": {{"url": "{URL}", "secrets": []}}}}', "crm.secrets: it should have at least one secret"),
        (f'{{"crm": {{"url": "{URL}", "secrets": "{SECRET}"}}}}', "crm.secrets: "),
        (one(timeout_seconds=0), "crm.timeout_seconds: Input should be greater than 0"),
        (one(timeout_seconds=float("nan")), "crm.timeout_seconds: "),
        (one(timeout_seconds="s3cret"), "crm.timeout_seconds: Input should be a valid number"),
        (one(concurrency=0), "crm.concurrency: Input should be greater than or equal to 1"),
        (one(event_types="A"), "crm.event_types: "),
        (one(event_types=[1]), "crm.event_types.0: Input should be a valid string"),
        (one(typo=1), "crm.typo: Extra inputs are not permitted"),
        *[
            (one(url=url), "crm.url: it should be an http:// or https:// address")
            for url in ["", "crm.example", "ftp://s3cret@crm.example/", "http://", "https:///x", "https://:443/",
                        "https://crm.example:80x/", "https://crm.example/s3cret path", "https://crm.example/\n",
                        "https://crm.example/\0", "https://crüm.example/", "https://crm.example/" + "a" * 70_000,
                        "https://[/", "https://[::1", "https://crm..example/", "https://.crm/", "https://crm\\@example/",
                        "https://-crm.example/", "https://127.1/", "https://2130706433/", "https://0x7f000001/",
                        "https://1.2.3.4.5/", "https://256.1.1.1/"]
        ],
        (one(url="https://crm.example:0/"), "crm.url: its port should be 1 to 65535"),
        (one(url="https://crm.example:99999/"), "crm.url: its port should be 1 to 65535"),
        (one(url=URL + "?s3cret#x"), "crm.url: it should have no #fragment"),
    ],
)  # fmt: skip
def test_wrong_destinations_are_told_by_place_and_remedy(
    read: Load, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setenv("BAD_SECRET", "s3cret")
    said = refusal(read, destinations=text)
    assert said.startswith("OUTBOX_DESTINATIONS: ")
    assert says in said
    # One fault is told once.
    assert said.count("OUTBOX_DESTINATIONS") == 1 or text == '{"crm": {}}' or "[key]" in says
    said.encode()


@pytest.mark.parametrize("url", ["https://crm/", "https://a_b.c-d.example.:1/?q", "HTTPS://[2606:4700::1111]:65535/"])
def test_any_address_that_can_be_sent_to_is_taken(read: Load, url: str) -> None:
    assert read(destinations=crm(url=url))[0].destinations["crm"].url == url


PRIVATE = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "168.63.129.16", "0.0.0.0", "100.64.1.1", "[::1]",
           "[::ffff:10.1.2.3]", "[fe80::1]", "[fd00::1]", "[64:ff9b::a9fe:a9fe]"]  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE)
def test_a_private_address_is_refused_unless_its_network_is_named(read: Load, host: str) -> None:
    url = f"https://{host}/hook"
    said = refusal(read, destinations=crm(url=url))
    assert said.startswith("OUTBOX_DESTINATIONS: crm.url: ")
    assert said.endswith(" is a private address; OUTBOX_ALLOWED_PRIVATE_NETWORKS should name its network")
    everything = "0.0.0.0/0,::/0"
    assert read(destinations=crm(url=url), allowed_private_networks=everything)[0].destinations["crm"].url == url


def test_plain_http_is_for_this_machine_unless_it_is_allowed(read: Load) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]"):
        url = f"http://{host}:8080/hook"
        assert read(destinations=crm(url=url), allowed_private_networks="127.0.0.0/8,::1")
    for host in ("crm.example", "93.184.216.34", "localhost.example"):
        said = refusal(read, destinations=crm(url=f"http://{host}/s3cret"))
        assert said.startswith("OUTBOX_DESTINATIONS: crm.url: it should be https://")
        assert "OUTBOX_ALLOW_HTTP" in said
        assert read(destinations=crm(url=f"http://{host}/"), allow_http="true")


# -- the host's storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({"AzureWebJobsStorage__queueServiceUri": "https://q.example"}, "https://q.example"),
        ({"AzureWebJobsStorage__accountName": "acc"}, "https://acc.queue.core.windows.net"),
        ({"AzureWebJobsStorage__queueServiceUri": "https://q.example", "AzureWebJobsStorage__accountName": "acc"},
         "https://q.example"),
        ({"AzureWebJobsStorage": "UseDevelopmentStorage=true", "AzureWebJobsStorage__accountName": "acc"}, None),
    ],
)  # fmt: skip
def test_storage_is_a_connection_string_or_else_an_identity(
    read: Load, environment: dict[str, str | None], service: str | None
) -> None:
    _, storage = read({"AzureWebJobsStorage": None, "AzureWebJobsStorage__clientId": "id", **environment})
    assert storage.queue_service == service
    assert storage.client_id == "id"


def test_storage_that_is_missing_is_told_with_both_ways(read: Load) -> None:
    said = refusal(read, {"AzureWebJobsStorage": "", "AzureWebJobsStorage__credential": "managedidentity"})
    assert said == (
        "AzureWebJobsStorage is missing: it should be a connection string, or "
        "AzureWebJobsStorage__queueServiceUri (or __accountName) for a managed identity"
    )


def test_a_command_may_need_the_databases_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "host=x")
    assert load_database_url() == "host=x"
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "")
    with pytest.raises(SettingsError, match="OUTBOX_DATABASE_URL is missing: it should be"):
        load_database_url()


# -- what other files say ----------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")
HOST = json.loads((ROOT / "host.json").read_text(encoding="utf-8"))
SAMPLE = json.loads((ROOT / "local.settings.sample.json").read_text(encoding="utf-8"))["Values"]
HOSTS_OWN = {"FUNCTIONS_WORKER_RUNTIME", "PYTHON_THREADPOOL_THREAD_COUNT", "AzureWebJobsStorage"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(text: str, *header: str) -> list[list[str]]:
    """The cells of the Markdown table under this header."""
    _, found, rest = text.partition("| " + " | ".join(header) + " |\n")
    assert found, f"there is no table {header}"
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def seconds(span: str) -> int:
    hours, minutes, rest = map(int, span.split(":"))
    return 3600 * hours + 60 * minutes + rest


def test_the_readme_lists_every_setting_with_its_default_and_no_other() -> None:
    def shown(field: str) -> str:
        info = Settings.model_fields[field]
        if info.is_required():
            return "required"
        return f"`{info.default}`" if info.default not in (None, ()) else "(none)"

    rows = table(README, "setting", "default", "meaning")
    assert {name: default for name, default, _ in rows} == {
        f"`OUTBOX_{field.upper()}`": shown(field) for field in Settings.model_fields
    }
    assert all(meaning for *_, meaning in rows)
    for name in re.findall(r"OUTBOX_[A-Z_]+", "".join(each.read_text(encoding="utf-8") for each in DOCUMENTS)):
        assert name.startswith("OUTBOX_TEST_") or name.removeprefix("OUTBOX_").lower() in Settings.model_fields


def test_the_sample_is_a_valid_environment_and_has_no_name_that_nobody_reads(read: Load) -> None:
    settings, storage = read(SAMPLE)
    assert settings.destinations
    assert storage.connection_string is not None
    assert set(SAMPLE) <= HOSTS_OWN | {f"OUTBOX_{field.upper()}" for field in Settings.model_fields}
    for destination in settings.destinations.values():  # it works as it is
        assert not blocked(httpx.URL(destination.url).host, settings.allowed_private_networks)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`([^`]+)`", str(table(README, "question", "where", "proof")))))
)
def test_the_readme_shows_a_way_that_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(each.name))
def test_every_relative_link_leads_to_a_file(document: Any) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://", target):
            assert (document.parent / target.partition("#")[0]).exists(), target


def test_a_function_outlives_its_drain() -> None:
    fields = Settings.model_fields
    # A delivery that started last is settled, and settling is tried again, as long as its lease holds.
    longest = fields["drain_budget_seconds"].default + fields["lease_seconds"].default
    assert seconds(HOST["functionTimeout"]) > longest


def test_host_json_is_as_its_page_says() -> None:
    def flat(value: Any, path: str = "") -> dict[str, str]:
        if not isinstance(value, dict):
            return {path: str(value)}
        return {name: text for key, item in value.items() for name, text in flat(item, f"{path}.{key}").items()}

    host = flat(HOST)
    page = (ROOT / "docs" / "host-json.md").read_text(encoding="utf-8")
    said = {
        name: value.strip(" ,")
        for cell, _ in table(page, "value", "why")
        for name, value in re.findall(r"`([\w.]+)`((?: [^`\s]+)+)", cell)
    }
    for name, value in said.items():
        assert value in [text for path, text in host.items() if f".{name}" in path], name
    queues = {path.rpartition(".")[2] for path in host if path.startswith(".extensions.queues.")}
    assert queues == {name.rpartition(".")[2] for name in said} & queues
    assert (said["functionTimeout"], said["queues.messageEncoding"]) == ("00:05:00", "base64")
    assert f"{Settings.model_fields['drain_budget_seconds'].default:g}" in page
    assert f"{SAMPLE['PYTHON_THREADPOOL_THREAD_COUNT']} in `local.settings.sample.json`" in page


def test_the_app_is_deployed_with_bounded_requirements_that_it_imports() -> None:
    code = [ROOT / "function_app.py", ROOT / "orders.py", *(ROOT / "outbox").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in code)
    imported = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE))
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        match = re.fullmatch(r"([a-z-]+)(?:\[\w+\])?>=\d+(?:\.\d+)*,<\d+", line)
        assert match, f"{line}: not bounded on both sides"
        modules = {str(file.parent).replace("/", ".") for file in distribution(match[1]).files or []}
        assert modules & imported, f"{line}: nothing imports it"
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z-]+>=\d+(?:\.\d+)*,<\d+(; .*)?", line), line
