"""`/admin/policy`: inspect and swap policies of a running server."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, PolicyError, Problem, VajraError
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.serve import schema_answers as answers
from vajra_py.serve.errors import ApiError, bad_request
from vajra_py.serve.session import EngineSession, Unavailable

LayerName = Literal["request_prioritizer", "replicaset_scheduler", "replica_scheduler"]


class PolicyBody(BaseModel):
    """Which policy shall be in force, in which layer."""

    model_config = ConfigDict(extra="forbid")

    layer: LayerName
    policy: str = Field(min_length=1, description="Name of an installed policy.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its parameters; the others have their defaults.")
    replicaset: str | None = Field(None, description="May be left out where there is only one.")


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
    num_requeued: int = Field(description="Waiting requests that were put in order, or placed, anew.")


class ReplicasetPolicies(BaseModel):
    """The policies of a replicaset, by layer."""

    request_prioritizer: PolicyInForce
    replicaset_scheduler: PolicyInForce
    replica_scheduler: PolicyInForce
    out_of_service: str | None = Field(description="What a policy did for which no requests are taken.")


class PoliciesAnswer(BaseModel):
    """Answer of `GET /admin/policy`."""

    replicasets: dict[str, ReplicasetPolicies]


def add_admin(app: FastAPI, session: EngineSession) -> None:
    """Add the paths."""

    @app.get(
        "/admin/policy", response_model=PoliciesAnswer, responses=answers.errors(401, 503), tags=["administration"]
    )
    async def policies() -> JSONResponse:
        """The policies in force."""
        return JSONResponse({"replicasets": _in_force(session)})

    @app.post(
        "/admin/policy",
        response_model=SwapAnswer,
        responses=answers.errors(400, 401, 409, 413, 503),
        tags=["administration"],
    )
    async def swap(body: Annotated[PolicyBody, Body()]) -> JSONResponse:
        """Let a policy take another's place between two steps; whatever is being served goes on."""
        swapped = (await _swap(session, body)).swap
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
            for layer, choice in one.policies.choices.items()
        }
        found[name] = {**row, "out_of_service": one.out_of_service or None}
    return found


async def _swap(session: EngineSession, body: PolicyBody) -> Swapped:
    """Raises `ApiError`: 400 where the request is wrong, 409 where what is being served stands against it."""
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
    try:
        return await session.swap_policy(change)
    except Unavailable as error:
        raise ApiError(503, str(error), code="unavailable", retry_after_s=1) from None
    except (ConfigError, PolicyError) as error:
        raise ApiError(409, _one_line(error), code="refused", param=None) from None


def _refused(error: VajraError, layer: str) -> ApiError:
    """What is wrong, at the place where the client wrote it."""
    if not isinstance(error, ConfigError):
        return bad_request(_one_line(error), "policy", "refused")
    problems = [
        Problem(one.where.split(f"scheduling.{layer}.")[-1], one.message, one.allowed) for one in error.problems
    ]
    return bad_request(" ".join(map(str, problems)), problems[0].where)


def _one_line(error: VajraError) -> str:
    return " ".join(str(error).split())
