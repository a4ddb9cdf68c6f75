"""Check that a model with paged attention computes what transformers computes.

Three sequences of different lengths are computed over shuffled blocks, in steps of chunks and decodes. The reference is
one forward pass over all three sequences with transformers' plain attention. Windows are narrowed meanwhile, so that
even short sequences exceed them. Weights are read once for the reference and once for each of the four steps. In a
mixture of experts, every token goes to the experts that the reference chose for it, with routing weights computed by
the pass under test (see `routing`).

Invariants:
    - The model is restored afterwards, even after an error.
    - The comparison covers every layer and every position, and the window of every layer that has one.
    - Routers that choose differently between two experts with nearly equal scores cause no reported difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vajra_kernels import build_metadata
from vajra_py.engine.compute.model.attention import LayerFacts
from vajra_py.engine.compute.model.forward import Forward, probe_layers, unsupported
from vajra_py.engine.compute.model.kv_memory import KvMemory
from vajra_py.engine.compute.model.loading import LoadedModel
from vajra_py.engine.compute.model.routing import Routing

_WINDOW = 6
_LENGTHS = (11, 19, 5)
_BLOCK = 4
_STEPS = ((7, 1, 5), (1, 9, 0), (2, 8, 0), (1, 1, 0))
"""For each step, the number of tokens that it computes of each sequence; over all steps, they add up to `_LENGTHS`."""
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Largest allowed difference between a logit and its reference, in standard deviations of all reference logits."""
_LOCAL_NAMES = ("sliding_window", "attention_chunk_size")


class SelfCheck:
    """Comparison with the output of transformers' own forward pass."""

    def __init__(self, loaded: LoadedModel, layers: list[LayerFacts]) -> None:
        """Compute the reference; `layers` are those of the unmodified model."""
        self._loaded = loaded
        self._routing = Routing()
        with _narrowed(loaded) as has_windows:
            self.layers = probe_layers(loaded.model, f"model {loaded.where}") if has_windows else layers
            """Layer facts with narrow windows."""
            try:
                self._expected = _reference(loaded, self._routing)
            except Exception as error:  # the model's own code may raise any exception
                reason = f"its own forward pass failed with {type(error).__name__}: {error}"
                raise unsupported(f"model {loaded.where}", loaded.model, reason) from error

    def difference(self, forward: Forward, layers: list[LayerFacts], device: torch.device) -> str | None:
        """Return a description of how `forward` differs from the reference; None if it agrees within the tolerance.

        `layers` are this rank's layers, with narrow windows.
        """
        with _narrowed(self._loaded):
            try:
                actual = _paged(self._loaded, forward, layers, device, self._routing)
            except Exception as error:  # the model's own code may raise any exception
                return f"its forward pass over paged memory failed with {type(error).__name__}: {error}"
        if not forward.has_head:  # only the last pipeline stage has logits to compare
            return None
        scale = float(torch.cat(self._expected).std()) or 1.0
        pairs = zip(self._expected, actual, strict=True)
        worst = max(float((one - other.to(one.device)).abs().max()) for one, other in pairs) / scale
        if not worst <= _TOLERANCES[self._loaded.dtype]:
            return f"over paged memory its logits differ by {worst:.2g} standard deviations from transformers' own"
        return None


def _tokens(loaded: LoadedModel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(loaded.config.vocab_size)
    lengths = [min(length, loaded.max_model_len) for length in _LENGTHS]
    return [torch.randint(vocab_size, (length,), generator=generator).to(loaded.device) for length in lengths]


@torch.inference_mode()
def _reference(loaded: LoadedModel, routing: Routing) -> list[torch.Tensor]:
    model: Any = loaded.model
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        sequences = _tokens(loaded)
        # Padding comes last: in a causal model, no token of a sequence attends to it.
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        with routing.recorded(model, padded.numel()):
            logits = model(input_ids=padded, use_cache=False).logits.float()
        return [rows[: len(ids)] for rows, ids in zip(logits, sequences, strict=True)]
    finally:
        model.set_attn_implementation(name)


@torch.inference_mode()
def _paged(
    loaded: LoadedModel, forward: Forward, layers: list[LayerFacts], device: torch.device, routing: Routing
) -> list[torch.Tensor]:
    """Return the logits of every position, [length, vocab] per sequence, that `forward` computes in `_STEPS`."""
    tokens = [ids.to(device) for ids in _tokens(loaded)]
    tables = [[7, 2, 11], [4, 0, 9, 1, 6], [3, 10]]
    memory = KvMemory(layers, (12, 0, _BLOCK), loaded.dtype, device)
    # The memory is filled with large values, so that a read of KV that no step has written changes the logits visibly.
    for k_cache, v_cache in memory.caches:
        k_cache.fill_(1e3)
        v_cache.fill_(1e3)
    found: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for step in _STEPS:
        counts = [min(count, len(ids) - at) for count, ids, at in zip(step, tokens, done, strict=True)]
        members = sorted((index for index in range(3) if counts[index]), key=lambda index: counts[index] > 1)
        if not members:
            continue
        ids = torch.cat([tokens[index][done[index] : done[index] + counts[index]] for index in members])
        positions = [torch.arange(done[index], done[index] + counts[index]) for index in members]
        metadata = build_metadata(
            [counts[index] for index in members],
            [done[index] + counts[index] for index in members],
            [tables[index] for index in members],
            _BLOCK,
            device,
        )
        rows = torch.arange(len(ids), device=device)
        padded = torch.cat([at + index * max(map(len, tokens)) for index, at in zip(members, positions, strict=True)])
        with routing.repeated(padded):
            logits = forward(ids, torch.cat(positions).to(device), rows, metadata, memory.caches).float()
        parts = torch.split(logits, [counts[index] for index in members] if forward.has_head else [0] * len(members))
        for index, part in zip(members, parts, strict=True):
            found[index].append(part)
            done[index] += counts[index]
    return [torch.cat(parts) for parts in found]


@contextmanager
def _narrowed(loaded: LoadedModel) -> Iterator[bool]:
    """Narrow every active window to `_WINDOW` tokens; yield True if the model has one."""
    owners: list[Any] = [loaded.model.config, *loaded.model.modules()]
    owners += [config for module in loaded.model.modules() if (config := getattr(module, "config", None)) is not None]
    found: dict[tuple[int, str], tuple[Any, int]] = {}
    for owner in owners:
        for name in _LOCAL_NAMES:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and _WINDOW < value < loaded.max_model_len:
                found[id(owner), name] = (owner, value)
    try:
        for (_, name), (owner, _) in found.items():
            setattr(owner, name, _WINDOW)
        yield bool(found)
    finally:
        for (_, name), (owner, value) in found.items():
            setattr(owner, name, value)
