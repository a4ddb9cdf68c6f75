"""`/admin/policy`: inspect and swap policies of a running server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError

from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, PolicyError, Problem, VajraError
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.serve.api import schema_answers as answers
from vajra_py.serve.api.reading import BodyReader, documented_body
from vajra_py.serve.api.schema_admin import LayerName, PolicyBody
from vajra_py.serve.http.errors import ApiError, bad_request, of_validation
from vajra_py.serve.session.session import EngineSession, Unavailable

MAX_BYTES = 2**20
"""Largest body in bytes; a policy and its parameters take a few hundred."""


class PolicyInForce(BaseModel):
    """A policy with all its parameters."""

    policy: str
    params: dict[str, Any]


class SwapAnswer(BaseModel):
    """Answer of `POST /admin/policy`."""

    replicaset: str
    layer: LayerName
    was: PolicyInForce
    now: PolicyInForce
    num_requeued: int = Field(description="Number of waiting requests that were ordered or placed again.")


class ReplicasetPolicies(BaseModel):
    """The policies of a replicaset, by layer."""

    request_prioritizer: PolicyInForce
    replicaset_scheduler: PolicyInForce
    replica_scheduler: PolicyInForce
    out_of_service: str | None = Field(description="Error of a policy because of which no requests are accepted.")


class PoliciesAnswer(BaseModel):
    """Answer of `GET /admin/policy`."""

    replicasets: dict[str, ReplicasetPolicies]


def add_admin(app: FastAPI, session: EngineSession, bodies: BodyReader) -> None:
    """Add the `/admin/policy` paths to the application."""

    @app.get(
        "/admin/policy", response_model=PoliciesAnswer, responses=answers.errors(401, 503), tags=["administration"]
    )
    async def policies() -> JSONResponse:
        """Return the policies in force."""
        return JSONResponse({"replicasets": _in_force(session)})

    @app.post(
        "/admin/policy",
        response_model=SwapAnswer,
        responses=answers.errors(400, 401, 409, 413, 503),
        openapi_extra=documented_body(PolicyBody),
        tags=["administration"],
    )
    async def swap(request: Request) -> JSONResponse:
        """Replace a policy between two steps; requests in progress continue."""
        swapped = (await _swap(session, await bodies.read(request, PolicyBody, MAX_BYTES))).swap
        return JSONResponse(
            {
                "replicaset": swapped.replicaset,
                "layer": swapped.layer.value,
                "was": {"policy": swapped.old_policy, "params": dict(swapped.old_params)},
                "now": {"policy": swapped.policy, "params": dict(swapped.params)},
                "num_requeued": swapped.num_requeued,
            }
        )


def _in_force(session: EngineSession) -> dict[str, Any]:
    controller = session.controller
    if controller is None:
        raise ApiError(503, session.why_unavailable(), code="unavailable", retry_after_s=1)
    found = {}
    for name, one in controller.replicasets.items():
        assert one.policies is not None
        row: dict[str, Any] = {
            layer.value: {"policy": choice.policy, "params": dict(choice.params)}
            for layer, choice in one.policies.common_choices().items()
        }
        found[name] = {**row, "out_of_service": one.out_of_service or None}
    return found


async def _swap(session: EngineSession, body: PolicyBody) -> Swapped:
    """Swap the policy.

    Raises `ApiError`: 400 for a wrong request, 409 if requests in progress do not allow the swap.
    """
    engine, layer = session.engine, Layer(body.layer)
    if engine is None:
        raise ApiError(503, session.why_unavailable(), code="unavailable", retry_after_s=1)
    replicaset = body.replicaset
    if replicaset is None:
        if len(engine.models) > 1:
            raise bad_request(f"is missing. Allowed: {', '.join(engine.models)}", "replicaset")
        replicaset = next(iter(engine.models))
    try:
        change = await asyncio.to_thread(engine.check_change, replicaset, layer, body.policy, body.params)
    except VajraError as error:
        raise _refused(error, body.layer) from None
    config = engine.maker.services.registry.policy(layer, body.policy).spec.config
    try:  # strict: settings files may contain numbers as text, but requests may not
        config.model_validate_json(json.dumps(body.params), strict=True)
    except ValidationError as error:
        named = error.errors(include_url=False, include_input=False)
        raise of_validation([{**one, "loc": ("params", *one["loc"])} for one in named]) from None
    try:
        return await session.swap_policy(change)
    except Unavailable as error:
        raise ApiError(503, str(error), code="unavailable", retry_after_s=1) from None
    except (ConfigError, PolicyError) as error:
        raise ApiError(409, _one_line(error), code="refused", param=None) from None


def _refused(error: VajraError, layer: str) -> ApiError:
    """Return the error for the client; it names the field as the client sent it."""
    if not isinstance(error, ConfigError):
        return bad_request(_one_line(error), "policy", "refused")
    problems = [
        Problem(one.where.split(f"scheduling.{layer}.")[-1], one.message, one.allowed) for one in error.problems
    ]
    return bad_request(" ".join(map(str, problems[:_MOST_SHOWN])), problems[0].where)


_MOST_SHOWN = 8
"""Maximum number of problems reported for one request."""


def _one_line(error: VajraError) -> str:
    return " ".join(str(error).split())
