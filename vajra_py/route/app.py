"""The router's HTTP application: OpenAI's paths, forwarded to servers, and a few paths of its own."""

from __future__ import annotations

from collections import Counter
from secrets import token_hex
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vajra_py.errors import ConfigError, Problem
from vajra_py.route.body import RouteBody, prompt_tokens, tokenizer_of
from vajra_py.route.connections import ServerFault
from vajra_py.route.exchange import Exchange, passed_on
from vajra_py.route.session import RouteSession
from vajra_py.runtime.kv.block_hashes import adapter_salt
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.serve.api.reading import BodyReader, read_headers, with_tenant
from vajra_py.serve.api.schema_facts import stated_in
from vajra_py.serve.http.access import route_path
from vajra_py.serve.http.auth import TENANT, AuthMiddleware, BrowserMiddleware, HostMiddleware
from vajra_py.serve.http.errors import ApiError, of_config_error
from vajra_py.serve.http.options import ServeOptions
from vajra_py.serve.session.session import SessionState

_GENERATING = ("/v1/completions", "/v1/chat/completions")


class RouteService:
    """State of the router's application: the session, the options, and counts of requests and answers."""

    def __init__(self, session: RouteSession, options: ServeOptions) -> None:
        """Create the service; raises `ConfigError` if the tokenizer cannot be read."""
        self.session = session
        self.options = options
        self.statuses: Counter[int] = Counter()
        self.num_generating = 0
        self.most_sent_on = options.max_concurrent
        replicasets = session.controller.replicasets.values()
        self._room_on_every_server = min(one.max_request_tokens for each in replicasets for one in each.replicas)
        """Maximum number of tokens of a prompt and its output together that every server can hold."""
        self._bodies = BodyReader(options)
        self._models = frozenset(session.settings.models)
        self._adapters = frozenset(session.settings.adapters)
        try:
            self._tokenizer = tokenizer_of(session.settings.tokenizer)
        except (OSError, ValueError) as error:
            allowed = "Allowed: a tokenizer.json, or a model's folder"
            raise ConfigError(Problem("backend.route.tokenizer", f"cannot be read ({error})", allowed)) from None

    def make_app(self) -> ASGIApp:
        """Return the application, which starts and closes the session."""
        app: ASGIApp = AuthMiddleware(self._app, self.options)
        if self.options.allowed_origins:
            app = BrowserMiddleware(app, self.options)
        return HostMiddleware(app, self.options)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except HTTPException as error:
            code = "request_too_large" if error.status_code == 413 else None
            await ApiError(error.status_code, str(error.detail), code=code).response()(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.session.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._bodies.close()
        await self.session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if path in _GENERATING:
            if scope["method"] != "POST":
                raise ApiError(405, f"{scope['method']} is not allowed at {path}", code="method_not_allowed")
            await self._generate(scope, receive, send)
            return
        if scope["method"] != "GET":
            raise ApiError(404, f"there is nothing at {path}", code="not_found")
        await (await self._own(path, scope))(scope, receive, send)

    async def _own(self, path: str, scope: Scope) -> Response:
        session = self.session
        if path in ("/health", "/ready"):
            if path == "/ready" and not session.is_ready:
                why = "; ".join(f"{name}: {text}" for name, text in session.unavailable().items())
                raise ApiError(503, why or "the router is shutting down", code="unavailable", retry_after_s=1)
            shown = {"status": session.state.value, "servers_up": session.num_up, "servers": session.status()}
            return JSONResponse({**shown, "unavailable": session.unavailable()})
        if path == "/metrics":
            return PlainTextResponse(self._metrics(), media_type="text/plain; version=0.0.4")
        if path == "/v1/models":
            if self._models:
                data = [{"id": one, "object": "model", "owned_by": "vajra"} for one in session.settings.models]
                return JSONResponse({"object": "list", "data": data})
            return await self._models_of_servers(scope)
        raise ApiError(404, f"there is nothing at {path}", code="not_found")

    async def _models_of_servers(self, scope: Scope) -> Response:
        """Return the first list of models that a server answers with, or else the last refusal. Raises `ApiError`."""
        client = self.session.client
        assert client is not None
        headers = passed_on(scope, has_own_keys=self.options.has_keys)
        refusal: ServerFault | None = None
        for one in self.session.status().values():
            if one["state"] == "up":
                try:
                    return Response(await client.models(one["url"], headers), media_type="application/json")
                except ServerFault as fault:
                    refusal = fault if fault.status else refusal
        if refusal is not None:
            return Response(refusal.body, refusal.status, media_type="application/json")
        raise ApiError(503, "no server is up", code="unavailable", retry_after_s=1)

    def _metrics(self) -> str:
        controller, lines = self.session.controller, []
        for kind, count in sorted(controller.num_ended.items(), key=str):
            lines.append(f'vajra:route_requests_ended_total{{reason="{kind.value}"}} {count}')
        lines.append(f"vajra:route_requests_alive {controller.num_alive}")
        for name, one in self.session.status().items():
            labels = f'{{server="{name}",pool="{one["pool"]}"}}'
            figures = ("num_running", "num_waiting", "free_blocks")
            lines += [f"vajra:route_server_{figure}{labels} {one[figure]}" for figure in figures]
            lines.append(f'vajra:route_server_up{{server="{name}"}} {int(one["state"] == "up")}')
        return "\n".join(lines) + "\n"

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw, body = await self._bodies.read_with_bytes(request, RouteBody)
        self._enter(body)
        try:
            exchange = Exchange(self.session, scope, bytes(raw), send, self.options)
            self._submit(request, body, exchange)
            await exchange.run(receive)
        finally:
            self.num_generating -= 1

    def _enter(self, body: Any) -> None:
        retry = self.options.retry_after_s
        if self._models and body.model not in self._models:
            allowed = ", ".join(sorted(self._models))
            raise ApiError(404, f"there is no model {body.model!r}. Allowed: {allowed}", code="model_not_found")
        if self.session.state is not SessionState.READY:
            raise ApiError(503, "the router is shutting down", code="unavailable", retry_after_s=retry)
        if self.num_generating >= self.options.max_concurrent:
            message = f"{self.num_generating} requests are being answered; no more may be at once"
            raise ApiError(429, message, code="too_many_requests", retry_after_s=retry)
        self.num_generating += 1

    def _submit(self, request: Request, body: Any, exchange: Exchange) -> None:
        headers = with_tenant(read_headers(request.headers), request.scope.get(TENANT))
        limit = body.max_completion_tokens or body.max_tokens
        if limit == 0:  # allowed with `echo`; the server then computes a token that it does not send
            limit = 1
        # Servers treat each prompt of a body as a separate request, so only the longest prompt must fit.
        tokens = prompt_tokens(body, self._tokenizer, self._room_on_every_server - (limit or 1))
        metadata = _plain(body.metadata)
        if body.model:
            metadata["model"] = body.model
        facts = RequestFacts(f"route-{token_hex(16)}", len(tokens), limit, metadata, **stated_in(headers, body))
        salt = body.cache_salt
        if body.model in self._adapters:
            own = facts.tenant if self.session.has_tenant_salt else ""
            salt = adapter_salt(own if salt is None else salt, body.model)
        try:
            self.session.submit(facts, tuple(tokens), salt, exchange.routed)
        except ConfigError as error:
            raise of_config_error(error) from None


def _plain(given: Any) -> dict[str, str | int | float]:
    if not isinstance(given, dict):
        return {}
    return {str(name): value for name, value in given.items() if isinstance(value, str | int | float)}
