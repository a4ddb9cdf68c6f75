"""Is the OpenAPI document true? Schemathesis sends what it allows, and what it forbids."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/dashboard",
    "/dashboard/data",
}


KEPT = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos", "return_token_ids", "priority", "slo_class", "ttft_slo_ms", "tpot_slo_ms", "tbt_slo_ms",
    "deadline_ms", "session_id", "user", "metadata", "logprobs", "stream",
    "add_special_tokens", "skip_special_tokens", "include_stop_str_in_output", "return_tokens_as_token_ids", "cache_salt",
)  # fmt: skip


def test_the_document_lists_every_path_and_no_422(puppet_server: Callable[..., Any]) -> None:
    document = httpx.get(f"{puppet_server(api_key='k').url}/openapi.json", headers={"authorization": "Bearer k"}).json()
    assert set(document["paths"]) == PATHS
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert bool(operation.get("security")) == (path not in ("/health", "/metrics", "/ready"))


def sent(operation: Any, mode: GenerationMode, checks: list[Any]) -> set[int]:
    """Send examples of an operation; the statuses that came back."""
    seen: set[int] = set()

    @settings(
        max_examples=20 if operation.method.upper() == "POST" else 3,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        seen.add(case.call_and_validate(checks=checks, timeout=60).status_code)

    send()
    return seen


def test_nothing_that_a_client_sends_is_a_server_error(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    document = httpx.get(f"{server.url}/openapi.json").json()
    load_all_checks()
    checks = CHECKS.get_by_names(["not_a_server_error", "status_code_conformance", "content_type_conformance"])
    checks += CHECKS.get_by_names(["response_schema_conformance"])
    forms = [(document, GenerationMode.NEGATIVE), (servable(document), GenerationMode.POSITIVE)]
    statuses: dict[tuple[str, str], set[int]] = {}
    for form, mode in forms:
        schema = schemathesis.openapi.from_dict(form)
        schema.config.update(base_url=server.url)
        for result in schema.get_all_operations():
            operation = result.ok()
            if mode is GenerationMode.POSITIVE or operation.method.upper() == "POST":
                statuses[operation.path, mode.value] = sent(operation, mode, checks)
    assert {path for path, _ in statuses} == PATHS
    # 408: its timeout is 0; 400: 1.0 is an integer in JSON schema, but not for this server
    assert {200} <= statuses["/v1/completions", "positive"] <= {200, 400, 408}
    assert 400 in statuses["/v1/completions", "negative"]
    assert statuses["/version", "positive"] == {200}
    assert server.post().status_code == 200
    assert server.service.num_generating == 0
    assert server.service.session.controller.num_alive == 0


def servable(document: dict[str, Any]) -> dict[str, Any]:
    """The document, narrowed to completions that this model can serve: what is left must be answered 200."""
    narrow: dict[str, Any] = copy.deepcopy(document)
    body = narrow["components"]["schemas"]["CompletionBody"]
    token = {"type": "integer", "minimum": 1, "maximum": 999}
    prompt = {"type": "array", "items": token, "minItems": 1, "maxItems": 20}
    body["properties"] = {
        **{name: body["properties"][name] for name in KEPT},
        "prompt": {"anyOf": [prompt, {"type": "array", "items": prompt, "minItems": 1, "maxItems": 3}]},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
    }
    return narrow


def test_no_swap_that_the_document_allows_or_forbids_is_a_server_error(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server({"replica": {"max_batch_size": 2, "max_model_len": 256}}, admin=True)
    document = httpx.get(f"{server.url}/openapi.json").json()
    document["paths"] = {path: one for path, one in document["paths"].items() if path == "/admin/policy"}
    load_all_checks()
    checks = CHECKS.get_by_names(["not_a_server_error", "status_code_conformance", "response_schema_conformance"])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    seen: set[int] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        takes_a_body = operation.method.upper() == "POST"
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if takes_a_body else (GenerationMode.POSITIVE,):
            seen |= sent(operation, mode, checks)
    assert seen == {200, 400}
    assert server.post().status_code == 200
