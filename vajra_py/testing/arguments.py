"""Check what a test passes as a policy, as parameters or as a request, and name mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from pydantic import ValidationError

from vajra_py.config.explain import explain
from vajra_py.config.places import Place, written_at
from vajra_py.contract import AdmissionSpec, AnyPolicySpec, PolicyContext, PolicySpec
from vajra_py.errors import ConfigError, Problem
from vajra_py.workload.request import RequestSpec


def require_spec(given: object, kind: type) -> None:
    """Raise `ConfigError` unless a policy under test is given as a spec of this kind."""
    if not isinstance(given, kind):
        advice = "Pass the spec that the package offers, not the policy's class or name"
        raise ConfigError(Problem("policy under test", f"must be a {kind.__name__} (got {given!r})", advice))


def require_tokens(spec: RequestSpec) -> None:
    """Raise `ConfigError` unless a request has at least one prompt token and one output token."""
    for name in ("num_prompt_tokens", "num_output_tokens"):
        value = getattr(spec, name)
        if not isinstance(value, Integral) or value < 1:
            message = f"{name} must be a whole number of at least 1 (got {value!r})"
            raise ConfigError(Problem(f"request {spec.request_id!r}", message))


def params_of(spec: AnyPolicySpec, params: Mapping[str, Any]) -> Any:
    """Return the parameters as an instance of the policy's own model. Raises `ConfigError` if they are wrong."""
    try:
        return spec.config(**params)
    except ValidationError as error:
        root = written_at(Place(), {"params": params})
        findings = explain(error, spec.config, root, ("params",))
        raise ConfigError(one.problem() for one in findings) from error


def policy_of(source: Any, params: Mapping[str, Any], context: PolicyContext, place: str, method: str) -> Any:
    """Return the policy that a spec or a function builds; an object with the policy's `method` is returned itself.

    Raises `ConfigError` that names `place` if the source is none of these, or if it cannot take parameters.
    """
    if isinstance(source, PolicySpec | AdmissionSpec):
        return source.build(params_of(source, params), context)
    is_policy = not isinstance(source, type) and hasattr(source, method)
    if params or not (is_policy or callable(source)):
        message = f"must be a policy{' that takes parameters' if params else ''} (got {source!r})"
        with_params = "a name or a spec, alone or as a pair with parameters"
        allowed = (
            with_params if params else f"{with_params}; an object with a method {method}; a function of the context"
        )
        raise ConfigError(Problem(place, message, f"Allowed: {allowed}"))
    return source if is_policy else source(context)
