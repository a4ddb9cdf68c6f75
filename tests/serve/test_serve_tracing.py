"""Can a request be followed by its spans, from its client's trace to its last token?"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from vajra_py.errors import ConfigError
from vajra_py.serve.api.tracing import Tracing, make_tracing
from vajra_py.serve.http.options import ServeOptions

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(puppet_server: Callable[..., Any], exporter: InMemorySpanExporter) -> Any:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return puppet_server(tracing=Tracing(provider))


def ended(exporter: InMemorySpanExporter, until: Callable[..., None], num_roots: int = 1) -> Sequence[ReadableSpan]:
    def done() -> bool:
        return sum(one.kind is SpanKind.SERVER for one in exporter.get_finished_spans()) == num_roots

    until(done, "the request's span has ended")
    return exporter.get_finished_spans()


def test_a_request_continues_its_clients_trace(
    traced: Any, exporter: InMemorySpanExporter, until: Callable[..., None]
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-slo-ttft-ms": "500", "x-session-id": "s1"}
    body = {"model": "puppet", "prompt": [5] * 40, "max_tokens": 6, "temperature": 0.5, "seed": 7, "priority": -2}
    answers = []
    for stream in (False, True):
        answers.append(httpx.post(f"{traced.url}/v1/completions", json={**body, "stream": stream}, headers=headers))
        assert answers[-1].status_code == 200
    spans = ended(exporter, until, 2)
    assert {format(one.context.trace_id, "032x") for one in spans} == {TRACE}
    first, second = (one for one in spans if one.kind is SpanKind.SERVER)
    assert first.name == "text_completion puppet"
    assert first.parent is not None
    assert format(first.parent.span_id, "016x") == PARENT
    found = dict(first.attributes or {})
    assert found["gen_ai.response.time_to_first_chunk"] > 0  # type: ignore[operator]
    del found["gen_ai.response.time_to_first_chunk"]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vajra",
        "gen_ai.request.model": "puppet",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": answers[0].json()["id"],
        "gen_ai.response.model": "puppet",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.conversation.id": "s1",
        "vajra.request.priority": -2,
        "vajra.request.ttft_slo_s": 0.5,
        "vajra.request.num_preemptions": 0,
    }
    assert (second.attributes or {})["gen_ai.usage.cache_read.input_tokens"] == 32


def test_waiting_prompt_and_decodes_follow_one_another(
    traced: Any, exporter: InMemorySpanExporter, until: Callable[..., None]
) -> None:
    assert traced.post(n=2, max_tokens=5).status_code == 200
    spans = ended(exporter, until)
    root = next(one for one in spans if one.kind is SpanKind.SERVER)
    for index in (0, 1):
        queue, prefill, decode = (one for one in spans if (one.attributes or {}).get("vajra.output.index") == index)
        assert [one.name for one in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
        assert queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time
        assert root.start_time <= queue.start_time  # type: ignore[operator]
        assert decode.start_time < decode.end_time <= root.end_time  # type: ignore[operator]
        assert all(one.parent is not None and one.parent.span_id == root.context.span_id for one in (queue, decode))
    assert [event.name for event in root.events] == ["arrival", "arrival"]


def test_what_fails_has_a_span_that_says_so(
    traced: Any, exporter: InMemorySpanExporter, until: Callable[..., None]
) -> None:
    assert traced.post(model="other").status_code == 404
    traced.strings.hold()
    address, body = httpx.URL(traced.url), b'{"model":"puppet","prompt":[5,5,5]}'
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        until(lambda: traced.service.num_generating == 1, "it is let in")
    until(lambda: traced.service.num_generating == 0, "its client is gone")
    traced.strings.let_go()
    unknown, gone = (one for one in ended(exporter, until, 2) if one.kind is SpanKind.SERVER)
    assert (unknown.attributes or {})["error.type"] == "model_not_found"
    assert (gone.attributes or {})["error.type"] == "aborted"
    assert not unknown.status.is_ok


@pytest.mark.parametrize(
    ("variables", "endpoint", "wanted"),
    [
        ({}, None, False),
        ({}, "http://127.0.0.1:4318/v1/traces", True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, None, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, None, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, None, False),
        ({"OTEL_SDK_DISABLED": "true"}, "http://127.0.0.1:4318/v1/traces", False),
    ],
)
def test_spans_are_made_where_somebody_wants_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], endpoint: str | None, wanted: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ServeOptions(otlp_traces_endpoint=endpoint).traces is wanted


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER: is unknown \('zipkin'\)"):
        make_tracing(None)
