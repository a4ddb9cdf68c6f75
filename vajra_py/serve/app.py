"""The HTTP application: paths and handlers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from vajra_py import __version__
from vajra_py.contract.observer import Observer
from vajra_py.metrics.tables.movement_log import paths_of
from vajra_py.runtime.serving.controller import Controller
from vajra_py.serve.api import schema_answers as answers
from vajra_py.serve.api.admin import add_admin
from vajra_py.serve.api.answers import Answer
from vajra_py.serve.api.openapi import true_document
from vajra_py.serve.api.prepare import Preparer, Wanted, unknown_model
from vajra_py.serve.api.reading import BodyReader, documented, read_headers, with_tenant
from vajra_py.serve.api.replies import Generation, now_s
from vajra_py.serve.api.schema import ChatBody, CompletionBody, GenerationBody, SchedulingHeaders, unknown_fields
from vajra_py.serve.api.tokenizing import Tokenizing
from vajra_py.serve.api.tokens import TokenPaths
from vajra_py.serve.http import errors as api_errors
from vajra_py.serve.http.auth import HAS_KEY, TENANT, AuthMiddleware, BrowserMiddleware, HostMiddleware, open_paths
from vajra_py.serve.http.errors import ApiError, bad_request
from vajra_py.serve.http.options import ServeOptions
from vajra_py.serve.http.page import page_rules
from vajra_py.serve.http.unsupported import UnknownFields
from vajra_py.serve.observe.exposition import Exposition
from vajra_py.serve.observe.history import History
from vajra_py.serve.observe.live import live, server_health, totals
from vajra_py.serve.observe.movement import MovementCounts
from vajra_py.serve.observe.stats import ServerStats, time_policies
from vajra_py.serve.session.catalogue import Catalogue
from vajra_py.serve.session.session import EngineSession

if TYPE_CHECKING:  # not imported at run time, because `tracing` needs the extra `otel`
    from vajra_py.serve.api.tracing import RequestTrace, Tracing

_GENERATION_ERRORS = answers.errors(400, 401, 404, 408, 413, 429, 503)
_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
_TURNS = 8
"""Number of event-loop iterations to wait for pending disconnections before a request is refused for load."""


class Service:
    """State shared by all paths: the session, the options, and the number of requests in progress."""

    def __init__(self, session: EngineSession, options: ServeOptions, tracing: Tracing | None = None) -> None:
        self.session = session
        self.options = options
        self.catalogue = Catalogue(session.config, options.served_names)
        self.bodies = BodyReader(options)
        self.tokenizing = Tokenizing()
        self.preparer = Preparer(session, self.catalogue, self.tokenizing)
        self.created = now_s()
        self.num_generating = 0
        self.most_sent_on = 0
        self.num_broken_streams = 0
        self.statuses: Counter[int] = Counter()
        """Number of answers by HTTP status."""
        self.history = History(self.totals, time.time)
        self.stats: ServerStats | None = None
        self.movement: MovementCounts | None = None
        self.tracing = tracing
        self._unknown_fields = UnknownFields(strict=options.strict_fields)
        if tracing is not None:
            tracing.zero_ns = lambda: session.clock_zero_ns
        self.exposition = Exposition(self, options.metric_names)
        session.watchers.append(self._watch)

    def _watch(self, controller: Controller) -> Sequence[Observer]:
        stats = ServerStats(controller, self.options.max_labels)
        time_policies(controller, stats)
        self.session.on_formed = stats.on_formed
        self.stats = stats
        paths = paths_of(controller)
        self.movement = MovementCounts(paths) if paths else None
        return (stats,) if self.movement is None else (stats, self.movement)

    @property
    def names(self) -> Sequence[str]:
        """Names of the models that requests may use."""
        return self.catalogue.names

    def make_app(self) -> FastAPI:
        """Return the application."""
        return create_app(self)

    @property
    def controller(self) -> Controller | None:
        """See `Source`."""
        return self.session.controller

    @property
    def num_replicas_up(self) -> int:
        """See `Source`."""
        return self.session.num_replicas_up

    @property
    def is_saturated(self) -> bool:
        """True if no further generation request is accepted now."""
        return self.num_generating >= self.options.max_concurrent

    async def enter(self) -> None:
        """Count a generation request. Raises `ApiError` if there are too many, or if no replica is ready."""
        for _ in range(_TURNS):
            if self.is_saturated:  # let requests of disconnected clients finish first
                await asyncio.sleep(0)
        retry = self.options.retry_after_s
        if not self.session.is_ready:
            raise ApiError(503, self.session.why_unavailable(), code="unavailable", retry_after_s=retry)
        if self.is_saturated:
            message = f"{self.num_generating} requests are being answered; no more may be at once"
            raise ApiError(429, message, code="too_many_requests", retry_after_s=retry)
        self.num_generating += 1

    def leave(self) -> None:
        """Count the end of a generation request."""
        self.num_generating -= 1

    async def generate(self, request: Request, body: GenerationBody) -> Response:
        """Answer a generation request."""
        headers = with_tenant(read_headers(request.headers), request.scope.get(TENANT))
        for name in unknown_fields(body):
            wrong = self._unknown_fields.check(name, type(body).model_fields)
            if wrong is not None:
                raise bad_request(wrong, name, "unknown_field")
        trace = None if self.tracing is None else self.tracing.begin(request.headers, body)
        try:
            generation = await self._generation(body, headers, trace)
        except BaseException as error:
            if trace is not None:
                trace.fail(error)
            raise
        return await generation.respond(request)

    async def _generation(
        self, body: GenerationBody, headers: SchedulingHeaders, trace: RequestTrace | None
    ) -> Generation:
        """Prepare a request for submission to the engine. Raises `ApiError`."""
        if body.model not in self.names:
            raise unknown_model(body.model, self.names)
        await self.enter()
        try:
            wanted = Wanted(body, headers, self.options.max_choices)
            is_chat = isinstance(body, ChatBody)
            name = self.preparer.new_id("chatcmpl" if is_chat else "cmpl")
            prepare = self.preparer.chat if is_chat else self.preparer.completion
            prepared = await prepare(wanted, name)
            answer = Answer(name, now_s(), body.model, body, prepared.response, prepared.tokenizer, prepared.echoes)
        except BaseException:
            self.leave()
            raise

        def release() -> None:
            self.leave()
            if trace is not None:
                trace.end(name, prepared.response.outputs, body.n)

        return Generation(self.session, answer, self.options.retry_after_s, self._count_broken_stream, release)

    def _count_broken_stream(self) -> None:
        self.num_broken_streams += 1

    @property
    def num_errors(self) -> int:
        """Number of requests that were refused for load (429) or failed (5xx), plus the number of streams that ended
        with an error.
        """
        refused = sum(count for status, count in self.statuses.items() if status == 429 or status >= 500)
        return refused + self.num_broken_streams

    def totals(self) -> dict[str, float] | None:
        """Return the values that the dashboard's history records; None while the engine is being loaded."""
        if self.stats is None or self.controller is None:
            return None
        return {**totals(self.controller, self.stats), "errors": self.num_errors, "replicas_up": self.num_replicas_up}


def create_app(service: Service) -> FastAPI:
    """Return the application, which starts and closes its session."""
    session = service.session

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        session.start()
        keeper = asyncio.create_task(service.history.keep())
        try:
            yield
        finally:
            keeper.cancel()
            service.bodies.close()
            service.tokenizing.close()
            await session.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    app = FastAPI(
        title="vajra",
        version=__version__,
        description="An OpenAI-compatible server under pluggable scheduling policies.",
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
        separate_input_output_schemas=False,
    )
    api_errors.install(app)
    _add_generation(app, service)
    TokenPaths(session, service.catalogue, service.bodies, service.tokenizing).add_to(app)
    _add_facts(app, service)
    _add_numbers(app, service)
    if service.options.admin:
        add_admin(app, session, service.bodies)
    options = service.options
    app.add_middleware(AuthMiddleware, options=options)
    if options.allowed_origins:
        app.add_middleware(BrowserMiddleware, options=options)
    app.add_middleware(HostMiddleware, options=options)
    needs_no_key = open_paths(options) if options.has_keys else None
    app.openapi = lambda: true_document(app, service.names, open_paths=needs_no_key)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/completions",
        response_model=answers.CompletionAnswer,
        responses={200: {"content": _STREAM}, **_GENERATION_ERRORS},
        openapi_extra=documented(CompletionBody),
        tags=["generation"],
    )
    async def completions(request: Request) -> Response:
        """Continue a text, or several."""
        return await service.generate(request, await service.bodies.read(request, CompletionBody))

    @app.post(
        "/v1/chat/completions",
        response_model=answers.ChatAnswer,
        responses={200: {"content": _STREAM}, **_GENERATION_ERRORS},
        openapi_extra=documented(ChatBody),
        tags=["generation"],
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, in the model's own chat template."""
        return await service.generate(request, await service.bodies.read(request, ChatBody))


def _add_numbers(app: FastAPI, service: Service) -> None:
    page = resources.files("vajra_py.serve").joinpath("dashboard.html").read_text("utf-8")
    rules = page_rules(page)
    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", response_class=Response, responses={200: {"content": text}})
    async def metrics(request: Request) -> Response:
        """Return the metrics for Prometheus; on a server with keys, tenants' metrics are included only with a key."""
        text = service.exposition.text(names_clients=request.scope.get(HAS_KEY, False))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/dashboard", response_class=HTMLResponse, responses=answers.errors(401))
    async def dashboard() -> HTMLResponse:
        """Return the dashboard, a page that shows the server's live state."""
        return HTMLResponse(page, headers=rules)

    @app.get("/dashboard/data", response_model=dict[str, Any], responses=answers.errors(401))
    async def dashboard_data(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> JSONResponse:
        """Return the dashboard's data: live state, and the last hour's samples after `since` (seconds since 1970)."""
        shown: dict[str, Any] = server_health(service.session)
        if service.stats is not None and service.controller is not None:
            shown.update(live(service.controller, service.stats, service.catalogue))
            shown.update(now={"at": time.time(), **(service.totals() or {})}, history=service.history.since(since))
        return JSONResponse(shown)


def _add_facts(app: FastAPI, service: Service) -> None:
    session = service.session

    def describe(name: str) -> dict[str, Any]:
        engine = session.engine
        behind = service.catalogue.behind(name)
        longest = None if engine is None else max(engine.prompt_limits_of(one).max_request_tokens for one in behind)
        adapter = service.catalogue.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vajra",
            "root": service.catalogue.root(name),
            "parent": None if adapter is None else adapter.parent,
            "max_model_len": longest,
        }

    def health() -> dict[str, Any]:
        replicas = 0 if session.engine is None else len(session.engine.replicas)
        return {
            "status": session.state.value,
            "replicas_up": session.num_replicas_up,
            "replicas": replicas,
            "replicas_restarting": session.num_restarting,
            "unavailable": session.unavailable(),
        }

    @app.get("/v1/models", response_model=answers.ModelsAnswer, responses=answers.errors(401))
    async def models() -> JSONResponse:
        """Return the models that requests may name."""
        return JSONResponse({"object": "list", "data": [describe(name) for name in service.names]})

    @app.get("/v1/models/{name:path}", response_model=answers.ModelAnswer, responses=answers.errors(401, 404))
    async def model(name: str) -> JSONResponse:
        """Return one of the models."""
        if name not in service.names:
            raise unknown_model(name, service.names)
        return JSONResponse(describe(name))

    @app.get("/health", response_model=answers.HealthAnswer, responses=answers.errors(503))
    async def healthy() -> JSONResponse:
        """Report liveness: 200 while the server loads or serves, 503 after the engine has ended."""
        if session.has_ended:
            raise ApiError(503, session.why_unavailable(), code="unavailable")
        return JSONResponse(health())

    @app.get("/ready", response_model=answers.HealthAnswer, responses=answers.errors(401, 503))
    async def ready() -> JSONResponse:
        """Report readiness for requests: 200 if the model is loaded, a replica is up and no shutdown has begun."""
        if not session.is_ready:
            raise ApiError(503, session.why_unavailable(), code="unavailable", retry_after_s=1)
        return JSONResponse(health())

    @app.get("/version", response_model=answers.VersionAnswer, responses=answers.errors(401))
    async def version() -> JSONResponse:
        """Return the package's version."""
        return JSONResponse({"version": __version__})


__all__ = ["Service", "create_app"]
