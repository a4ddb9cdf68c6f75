"""Experts that a model's routers choose in one forward pass, chosen again in another.

In 16 bits two correct ways of computing the same hidden states differ by roundings. Where a router scores two experts almost
equally, that is enough to choose the other one, and logits from there on differ by tenths of a standard deviation. With equal
choices they differ by roundings alone. Positions with such choices cannot be left out instead: a model with many layers of
many experts would have no others.

Invariants:
    - Only the choice is taken over: scores, and with them the weights of the experts, are those of the pass itself.
    - A router is known by its module, so that a pass may have some of the layers only (pipeline stages).
    - Other threads' models are not touched, and hooks are removed when a pass ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_Call = tuple[torch.nn.Module, int, int]
"""A call of `torch.topk` in a pass: the module that was entered last, the number of its calls before, that of experts."""


class Routing:
    """Every router's choices, as `torch.topk` of each token's scores returns them."""

    def __init__(self) -> None:
        self._chosen: dict[_Call, torch.Tensor] = {}
        """Indices of experts, int64 [tokens, k]."""

    @contextmanager
    def recorded(self, model: torch.nn.Module, num_tokens: int) -> Iterator[None]:
        """Record the choices of a pass of `model` over this number of tokens."""

        def keep(call: _Call, scores: torch.Tensor, found: Any) -> Any:
            if found.indices.shape[:-1] == scores.shape[:-1] and scores[..., 0].numel() == num_tokens:
                self._chosen[call] = found.indices.flatten(0, -2)
            return found

        with _observed(model.modules(), keep):
            yield

    @contextmanager
    def repeated(self, tokens: torch.Tensor) -> Iterator[None]:
        """Make a pass over some of the tokens, `tokens` int64 [T] of the recorded ones, choose the same."""

        def choose(call: _Call, scores: torch.Tensor, found: Any) -> Any:
            chosen = self._chosen.get(call)
            if chosen is None or found.indices.numel() != len(tokens) * chosen.shape[1]:
                return found
            indices = chosen[tokens.to(chosen.device)].to(scores.device).view(found.indices.shape)
            return torch.return_types.topk((scores.gather(-1, indices), indices))

        with _observed({module for module, *_ in self._chosen}, choose):
            yield


@contextmanager
def _observed(modules: Iterable[torch.nn.Module], replace: Callable[[_Call, torch.Tensor, Any], Any]) -> Iterator[None]:
    """Let `replace` change what `torch.topk` returns after one of `modules` was entered: called with the call, scores, result."""
    observer = _Observer(replace)
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(observer.enter).remove)
        stack.enter_context(observer)
        yield


class _Observer(TorchFunctionMode):
    def __init__(self, replace: Callable[[_Call, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self._replace = replace
        self._module: torch.nn.Module | None = None
        self._counts: Counter[torch.nn.Module] = Counter()

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk) or self._module is None:
            return result
        scores = args[0] if args else kwargs["input"]
        call = self._module, self._counts[self._module], scores.shape[-1]
        self._counts[self._module] += 1
        return self._replace(call, scores, result)
