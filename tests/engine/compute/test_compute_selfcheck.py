"""The work of the check at loading, counted in forward passes: each reads all weights once, as loading does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vajra_py.engine.compute import RunnerOptions  # noqa: E402
from vajra_py.engine.compute.model import prepare as preparing  # noqa: E402
from vajra_py.engine.compute.model.fused import FusedForward  # noqa: E402
from vajra_py.engine.compute.model.loading import load_model  # noqa: E402
from vajra_py.engine.compute.model.prepare import prepare  # noqa: E402
from vajra_py.engine.compute.model.ranks import Ranks  # noqa: E402


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Forward passes by who makes them, and the tokens of all of them."""
    found: Counter[str] = Counter()
    fused_call = FusedForward.__call__

    def fused(self: FusedForward, token_ids: Any, *given: Any) -> Any:
        found.update(fused=1, tokens=token_ids.numel())
        return fused_call(self, token_ids, *given)

    def loaded(*given: Any, **named: Any) -> Any:
        result = load_model(*given, **named)

        def count(module: Any, arguments: Any, named: Any) -> None:
            found.update(modules=1, tokens=named["input_ids"].numel())

        result.model.register_forward_pre_hook(count, with_kwargs=True)
        found.update(loads=1)
        return result

    monkeypatch.setattr(FusedForward, "__call__", fused)
    monkeypatch.setattr(preparing, "load_model", loaded)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2"])
def test_the_check_costs_a_handful_of_short_passes(
    small_models: Callable[[str], str], passes: Counter[str], family: str
) -> None:
    assert prepare(RunnerOptions(small_models(family)), Ranks()).facts.forward == "fused"
    assert passes["loads"] == 1
    assert passes["modules"] == (
        2 if family == "llama" else 3
    )  # what layers ask for (twice with windows), the reference
    assert passes["fused"] == 4
    assert passes["tokens"] < 120


def test_without_the_check_layers_are_looked_at_alone(small_models: Callable[[str], str], passes: Counter[str]) -> None:
    prepare(RunnerOptions(small_models("llama"), self_check=False), Ranks())
    assert passes == Counter(loads=1, modules=1, tokens=2)


def test_modules_are_checked_where_they_are_what_computes(
    small_models: Callable[[str], str], passes: Counter[str]
) -> None:
    model = prepare(RunnerOptions(small_models("llama"), fused=False), Ranks())
    assert model.facts.forward == "transformers"
    assert (passes["loads"], passes["modules"], passes["fused"]) == (1, 6, 0)


def test_a_fused_pass_that_computes_something_else_is_found_and_left(
    small_models: Callable[[str], str], passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = FusedForward.__call__

    def wrong(self: FusedForward, *given: Any) -> Any:
        logits = counting(self, *given)
        logits[-1, 0] += 1.0
        return logits

    monkeypatch.setattr(FusedForward, "__call__", wrong)
    assert prepare(RunnerOptions(small_models("llama")), Ranks()).facts.forward == "transformers"
    assert (passes["loads"], passes["fused"]) == (2, 4)
