"""Model names that requests may use, and the replicasets that serve each name.

A replicaset serves the names listed in its `select.models`. A replicaset without a list serves the name of its model's
directory (or `--served-model-name`), and any other served name that no earlier replicaset serves. If replicasets run
different models, each must list its names, so that each request reaches the model that it names.

A LoRA adapter has its own model name: a request with that name runs on the base model with the fact `adapter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from vajra_py.config import ReplicasetConfig, SystemConfig
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.requests.request import RequestFacts


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that requests may name as model.

    Attributes:
        parent: name of the base model.
        root: folder of the adapter; empty if no weights are loaded.
    """

    parent: str
    root: str


class Catalogue:
    """The models of one server. The constructor raises `ConfigError` if some name could not be served as configured."""

    def __init__(self, config: SystemConfig, served_names: Sequence[str] = ()) -> None:
        settings: ModelBackendConfig = config.backend.settings
        self._replicasets: Mapping[str, ReplicasetConfig] = config.effective_replicasets
        own = {name: settings.of(name) for name in self._replicasets}
        self._models = {name: (one.model, one.random_weights, one.weights_seed) for name, one in own.items()}
        self._names = {
            name: one.select.models or tuple(served_names) or (_folder_name(own[name].model),)
            for name, one in self._replicasets.items()
        }
        if served_names and all(one.select.models for one in self._replicasets.values()):
            message = "has no effect: every replicaset names the models that it serves"
            raise ConfigError(Problem("--served-model-name", message, "Say it under `select.models`"))
        self._check_models()
        base = tuple(dict.fromkeys(name for names in self._names.values() for name in names))
        self.adapters: Mapping[str, ServedAdapter] = self._found_adapters(base)
        """Adapters by name."""
        self.names: tuple[str, ...] = (*base, *self.adapters)

    def _found_adapters(self, base: Sequence[str]) -> dict[str, ServedAdapter]:
        found: dict[str, ServedAdapter] = {}
        problems = []
        for name, one in self._replicasets.items():
            parent = next((own for own in self._names[name] if name in self._behind(own)), self._names[name][0])
            where = f"replicasets.{name}.replica.adapters"
            offered = [pool.replica.adapters.models for pool in one.effective_pools.values() if pool.replica.adapters]
            for adapter in (adapter for models in offered for adapter in models or ()):
                if adapter.name in base:
                    message = f"a model is served under the name of an adapter ({adapter.name!r})"
                    problems.append(Problem(where, message, "Allowed: other names"))
                elif found.setdefault(adapter.name, ServedAdapter(parent, adapter.path or "")).parent != parent:
                    message = f"two models have an adapter of one name ({adapter.name!r})"
                    problems.append(Problem(where, message, "Allowed: other names"))
        if problems:
            raise ConfigError(problems)
        return found

    def _check_models(self) -> None:
        problems = []
        for name, one in self._replicasets.items():
            if not one.select.models and len(set(self._models.values())) > 1:
                message = "is missing, but the replicasets run different models"
                problems.append(Problem(f"replicasets.{name}.select.models", message, "Names that requests may say"))
        for first, second in combinations(self._replicasets, 2):
            selects = [self._replicasets[name].select for name in (first, second)]
            meet = set(selects[0].models or ()) & set(selects[1].models or ())
            by_length = any(one.is_by_length for one in selects)
            if meet and by_length and self._models[first] != self._models[second]:
                message = (
                    f"a prompt's length cannot choose between the models of {first!r} and {second!r}: tokens differ"
                )
                problems.append(
                    Problem(f"replicasets.{first}.select", message, "Different `models`, or the same model")
                )
        if problems:
            raise ConfigError(problems)

    def label(self, replicaset: str) -> str:
        """Return the model label of a replicaset's metrics."""
        return self._names[replicaset][0]

    def behind(self, name: str) -> list[str]:
        """Return the replicasets that may get a request with this model name."""
        return self._behind(self.adapters[name].parent if name in self.adapters else name)

    def _behind(self, name: str) -> list[str]:
        found = []
        for replicaset, one in self._replicasets.items():
            if not one.select.models or name in one.select.models:
                found.append(replicaset)
                if one.select.model_copy(update={"models": None}).takes_all:
                    break
        return found

    def root(self, name: str) -> str:
        """Return the folder of a model or an adapter."""
        return self.adapters[name].root if name in self.adapters else self._models[self.behind(name)[0]][0]

    def with_adapter(self, facts: RequestFacts, name: str) -> RequestFacts:
        """Return the facts of a request for the model `name`; if that is an adapter, the fact `adapter` is set.

        Raises `ValueError` if the request states another adapter, or one that is not served.
        """
        adapter = self.adapters.get(name)
        if adapter is None:
            if facts.adapter and facts.adapter not in self.adapters:
                raise ValueError(f"there is no such adapter ({facts.adapter!r}). {_allowed(self.adapters)}")
            return facts
        if facts.adapter not in ("", name):
            raise ValueError(f"is not the adapter that `model` names ({facts.adapter!r}, and model is {name!r})")
        return replace(facts, adapter=name, metadata={**facts.metadata, "model": adapter.parent})

    def candidates(self, facts: RequestFacts) -> list[str]:
        """Return the replicasets whose conditions a request meets, in the order in which the conditions are tried.

        Conditions on prompt length are ignored.
        """
        request = cast(Any, facts)
        return [name for name, one in self._replicasets.items() if one.select.matches_labels(request)]

    def by_length(self, candidates: Iterable[str], num_prompt_tokens: int) -> str | None:
        """Return the first candidate that accepts a prompt of this length; None if none does."""
        selects = ((name, self._replicasets[name].select) for name in candidates)
        return next((name for name, select in selects if select.matches_length(num_prompt_tokens)), None)


def _allowed(adapters: Iterable[str]) -> str:
    return f"Allowed: {', '.join(adapters) or 'none, since no adapter is served'}"


def _folder_name(folder: str) -> str:
    return Path(folder).expanduser().resolve().name
