"""Make a model's routers choose the same experts in one forward pass as in an earlier one.

In 16 bits, two correct ways to compute the same hidden states differ by rounding errors. Where a router scores two
experts almost equally, such an error is enough to choose the other expert, and from there on the logits differ by
tenths of a standard deviation. With equal choices only rounding errors remain. Leaving out positions with such near
ties is no alternative: in a model with many layers and many experts, nearly every position has one in some layer.

Invariants:
    - Only the choice is repeated: the scores, and thus the routing weights, are those of the current pass.
    - Routers are identified by their modules, so a pass may cover some of the layers only (pipeline stages).
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
"""A call of `torch.topk` in a pass: the last module entered, the number of earlier `topk` calls in this module, and the
number of experts."""


class Routing:
    """Experts that each router chose in a pass: the indices that `torch.topk` returned for each token's scores."""

    def __init__(self) -> None:
        self._chosen: dict[_Call, torch.Tensor] = {}
        """Chosen experts, int64 [tokens, k], by call."""

    @contextmanager
    def recorded(self, model: torch.nn.Module, num_tokens: int) -> Iterator[None]:
        """Record the choices of a pass of `model` over `num_tokens` tokens."""

        def keep(call: _Call, scores: torch.Tensor, found: Any) -> Any:
            if found.indices.shape[:-1] == scores.shape[:-1] and scores[..., 0].numel() == num_tokens:
                self._chosen[call] = found.indices.flatten(0, -2)
            return found

        with _observed(model.modules(), keep):
            yield

    @contextmanager
    def repeated(self, tokens: torch.Tensor) -> Iterator[None]:
        """Make a pass repeat the recorded choices.

        `tokens`, int64 [T], are the indices that the tokens of this pass had in the recorded pass.
        """

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
    """Replace results of `torch.topk` inside `modules` with `replace(call, scores, result)`."""
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
