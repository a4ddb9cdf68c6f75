"""Admission policies of packages: registered, checked and built like policies of the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vajra_py.contract import ACCEPT, AdmissionSpec, PolicyConfig, PolicyContext
from vajra_py.errors import ConfigError, PluginError, UnknownNameError
from vajra_py.plugins import build_admission_policy, load_registry
from vajra_py.testing import Harness

MODULE = """
    from pydantic import BaseModel
    from vajra_py.contract import ACCEPT, AdmissionSpec, PolicyConfig, hookimpl

    class Config(PolicyConfig):
        share: float = 1.0

    class Loose(BaseModel):
        model_config = {"extra": "forbid"}

    class Gate:
        def admit(self, request, replicasets, now): return ACCEPT

    @hookimpl
    def vajra_admission_policies():
        return [SPEC]
"""
SPEC = "AdmissionSpec('gate', Config, lambda c, x: Gate(), 'A gate.')"


def module(spec: str = SPEC) -> str:
    return MODULE.replace("SPEC", spec)


def test_a_package_offers_one(site: Any) -> None:
    site.install("lab", module(), version="1.2")
    registry = site.registry()
    offer = registry.admission_policy("gate")
    assert (offer.package, offer.version, offer.spec.summary) == ("lab", "1.2", "A gate.")
    with pytest.raises(UnknownNameError, match="admission policy: no installed package offers that name"):
        registry.admission_policy("gatte")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (SPEC.replace("'gate'", "'A Gate'"), "offers an admission policy named 'A Gate'; a name is made of"),
        (SPEC.replace("'A gate.'", "''"), "offers the admission policy 'gate' without a summary"),
        (SPEC.replace("Config", "dict"), "expected a pydantic model class"),
        (SPEC.replace("Config", "Loose"), "which is not a PolicyConfig"),
        (SPEC.replace("lambda c, x: Gate()", "7"), "with build 7; expected a callable"),
        ("3", "offers 3 as an admission policy; expected an AdmissionSpec"),
    ],
)
def test_a_malformed_spec_is_refused(site: Any, spec: str, complaint: str) -> None:
    site.install("lab", module(spec))
    with pytest.raises(PluginError, match=complaint):
        _ = site.registry().admission_policies


def test_two_packages_with_one_name_are_both_blamed(site: Any) -> None:
    site.install("alpha", module(), version="1.1")
    site.install("beta", module(), version="2.2")
    with pytest.raises(PluginError) as caught:
        _ = site.registry().admission_policies
    assert "offers an admission policy named 'gate', and so does plug-in 'alpha' of alpha 1.1" in str(caught.value)
    assert "'beta' of beta 2.2" in str(caught.value)


class Config(PolicyConfig):
    """One parameter."""

    share: float = 1.0


class Gate:
    """Accepts everything."""

    def admit(self, request: Any, replicasets: Any, now: float) -> Any:
        return ACCEPT


class Listening(Gate):
    """Listens under a name that nobody calls."""

    def on_arrival(self, request: Any, now: float) -> None:
        pass


class Misspelt(Gate):
    """Has a method that nobody calls beside the one that counts."""

    def on_departure(self, requests: Any, now: float) -> None:
        pass


class Short:
    """Takes too few arguments."""

    def admit(self, request: Any) -> Any:
        return ACCEPT


class Slow:
    """Is a coroutine."""

    async def admit(self, request: Any, replicasets: Any, now: float) -> Any:
        return ACCEPT


@pytest.fixture
def context() -> PolicyContext:
    return Harness("fcfs", "round_robin", "fixed_chunk").context


def raises(error: Exception) -> Callable[..., Any]:
    def build(config: Any, context: Any) -> Any:
        raise error

    return build


@pytest.mark.parametrize(
    ("build", "kind", "complaint"),
    [
        (lambda c, x: object(), PluginError, "object has no method 'admit'"),
        (lambda c, x: Gate, PluginError, "build returned the class Gate; expected an instance"),
        (lambda c, x: Short(), PluginError, "it is called with 3 arguments"),
        (lambda c, x: Slow(), PluginError, "'admit' is a coroutine; expected a plain method"),
        (lambda c, x: Listening(), PluginError, "nothing calls 'on_arrival'. Did you mean 'on_arrivals'?"),
        (lambda c, x: Misspelt(), PluginError, "nothing calls 'on_departure'"),
        (raises(ValueError("too small")), ConfigError, "scheduling.admission: 'gate' of .* cannot be built: too small"),
        (raises(KeyError("x")), PluginError, "building 'gate' raised KeyError"),
    ],
)
def test_what_is_built_is_checked(
    build: Callable[..., Any], kind: type[Exception], complaint: str, context: PolicyContext
) -> None:
    registry = load_registry().with_policies([AdmissionSpec("gate", Config, build, "A gate.")])
    with pytest.raises(kind, match=complaint):
        build_admission_policy("gate", {}, context, registry)


def test_wrong_parameters_are_named(context: PolicyContext) -> None:
    registry = load_registry().with_policies([AdmissionSpec("gate", Config, lambda c, x: Gate(), "A gate.")])
    with pytest.raises(ConfigError, match=r"scheduling\.admission\.params\.share"):
        build_admission_policy("gate", {"share": "much"}, context, registry)
    with pytest.raises(ConfigError, match=r"scheduling\.admission\.params\.shares"):
        build_admission_policy("gate", {"shares": 1}, context, registry)
