"""OpenTelemetry spans of served requests.

Each HTTP generation request has one span. It contains a span for each phase that an output entered: queue, prefill,
decode. With a `traceparent` header, all of these spans are part of the client's trace. Names follow the GenAI semantic
conventions; names that the conventions lack begin with `vajra.`. Spans contain no text written by users.

Invariants:
    - This module is imported only if tracing is on: it needs the extra `otel`.
    - Spans for work in the engine are created afterwards, from the times that every request records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import propagate
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from vajra_py import __version__
from vajra_py.contract.facts import FACTS
from vajra_py.engine.requests import RequestMetrics
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.serve.api.answers import usage
from vajra_py.serve.api.schema import ChatBody, GenerationBody
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.session.output_streams import OutputStream

_SAMPLING = {
    names.GEN_AI_REQUEST_TEMPERATURE: "temperature",
    names.GEN_AI_REQUEST_TOP_P: "top_p",
    names.GEN_AI_REQUEST_TOP_K: "top_k",
    names.GEN_AI_REQUEST_PRESENCE_PENALTY: "presence_penalty",
    names.GEN_AI_REQUEST_FREQUENCY_PENALTY: "frequency_penalty",
    names.GEN_AI_REQUEST_SEED: "seed",
}


class Tracing:
    """Creates the spans of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("vajra_py.serve", __version__)
        self.zero_ns: Callable[[], int] = time.time_ns
        """Returns the time at which the engine's clock was zero, in nanoseconds since 1970."""

    def begin(self, headers: Mapping[str, str], body: GenerationBody) -> RequestTrace:
        """Begin the span of a request."""
        operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        given = {name: getattr(body, field) for name, field in _SAMPLING.items()}
        attributes = {
            names.GEN_AI_OPERATION_NAME: operation,
            names.GEN_AI_PROVIDER_NAME: "vajra",
            names.GEN_AI_REQUEST_MODEL: body.model,
            names.GEN_AI_REQUEST_STREAM: bool(body.stream),
            **{name: value for name, value in given.items() if value is not None},
        }
        if body.n > 1:
            attributes[names.GEN_AI_REQUEST_CHOICE_COUNT] = body.n
        if body.wanted_tokens() is not None:
            attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = body.wanted_tokens()
        span = self._tracer.start_span(
            f"{operation} {body.model}", propagate.extract(headers), SpanKind.SERVER, attributes
        )
        return RequestTrace(span, self._outputs)

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()

    def _outputs(self, parent: Span, streams: Sequence[OutputStream]) -> None:
        zero = self.zero_ns()
        context = set_span_in_context(parent)
        for stream in streams:
            metrics = None if stream.end is None else stream.end.metrics
            if metrics is None:
                continue
            attributes = {"vajra.output.index": stream.index}
            for name, start, end in _stretches(metrics):
                span = self._tracer.start_span(
                    name, context, SpanKind.INTERNAL, attributes, start_time=zero + _nanoseconds(start)
                )
                span.end(zero + _nanoseconds(end))
            parent.add_event("arrival", attributes, zero + _nanoseconds(metrics.arrived_at))


class RequestTrace:
    """The span of one HTTP request; ended exactly once, by `end` or `fail`."""

    def __init__(self, span: Span, outputs: Callable[[Span, Sequence[OutputStream]], None]) -> None:
        self._span = span
        self._outputs = outputs

    def fail(self, error: BaseException) -> None:
        """End the span of a request that was refused before its submission to the engine."""
        self._error(error.code or str(error.status) if isinstance(error, ApiError) else type(error).__name__)
        self._span.end()

    def end(self, name: str, streams: Sequence[OutputStream], num_per_prompt: int) -> None:
        """End the span; an output without an end was aborted because its client disconnected."""
        span = self._span
        if not span.is_recording():
            span.end()
            return
        facts = streams[0].submission.facts
        took = usage(streams, num_per_prompt)
        reasons = ["aborted" if stream.end is None else stream.end.reason.value for stream in streams]
        metrics = [
            stream.end.metrics for stream in streams if stream.end is not None and stream.end.metrics is not None
        ]
        span.set_attributes(
            {
                names.GEN_AI_RESPONSE_ID: name,
                names.GEN_AI_RESPONSE_MODEL: facts.metadata["model"],
                names.GEN_AI_RESPONSE_FINISH_REASONS: reasons,
                names.GEN_AI_USAGE_INPUT_TOKENS: took["prompt_tokens"],
                names.GEN_AI_USAGE_OUTPUT_TOKENS: took["completion_tokens"],
                names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: took["prompt_tokens_details"]["cached_tokens"],
                "vajra.request.num_preemptions": sum(one.num_preemptions for one in metrics),
                **_scheduling(facts),
            }
        )
        first = [one.ttft_s for one in metrics if one.ttft_s is not None]
        if first:
            span.set_attribute(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, min(first))
        self._outputs(span, streams)
        failed = [reason for reason in reasons if reason not in ("stop", "length")]
        if failed:
            self._error(failed[0])
        span.end()

    def _error(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))


def _stretches(metrics: RequestMetrics) -> list[tuple[str, float, float]]:
    """Return (phase, start, end) of each phase that an output entered, in seconds on the engine's clock.

    The last phase ends with the output.
    """
    marks = [metrics.arrived_at, metrics.admitted_at, metrics.first_token_at]
    ended = metrics.ended_at
    found = []
    for name, start, end in zip(("queue", "prefill", "decode"), marks, (*marks[1:], ended), strict=True):
        until = ended if end is None else end
        if start is not None and until is not None:
            found.append((name, start, until))
    return found


def _scheduling(facts: RequestFacts) -> dict[str, Any]:
    """Return the facts that a request states for policies, by name of the span attribute."""
    given = {fact.span: getattr(facts, fact.name) for fact in FACTS if fact.span is not None}
    return {name: value for name, value in given.items() if value not in (None, "", ()) and value is not False}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def make_tracing(endpoint: str | None) -> Tracing:
    """Return a `Tracing` that exports to this OTLP endpoint; None: to the endpoint that the variables `OTEL_*` name.
    Raises `ConfigError`.
    """
    own = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "vajra"}
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    return Tracing(provider)


def _exporter(endpoint: str | None) -> SpanExporter:
    kind = "otlp" if endpoint is not None else os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ConfigError(Problem("OTEL_TRACES_EXPORTER", f"is unknown ({kind!r})", "Allowed: otlp, console, none"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint)
