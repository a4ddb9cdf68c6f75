"""Norms, rotary embedding with cache writes, and gated activations on one CPU core, compiled by Numba.

What ``layer_ops`` offers, with the same results as the Triton kernels: everything in float32, rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vajra_kernels.cpu_loops import as_element, as_float, compiled, elements, exp2, rotate

if TYPE_CHECKING:
    from vajra_kernels.layer_ops import Norm, Rotation

_NO_WEIGHT = np.empty(0, np.float32)
_NO_WEIGHTS = np.empty((0, 0), np.float32)
_NO_ROWS = np.empty((0, 0), np.float32)


def add_norm(
    out: torch.Tensor, hidden: torch.Tensor, norm: Norm, part: torch.Tensor | None, part_norm: Norm | None
) -> None:
    """Writes out [T, W], the norm of hidden [T, W] after ``hidden += part_norm(part)``."""
    weight, eps = norm
    part_weight = _NO_WEIGHT if part_norm is None else elements(part_norm[0])
    _add_norm(
        elements(out),
        elements(hidden),
        elements(weight),
        np.float32(eps),
        _NO_ROWS if part is None else elements(part),
        part_weight,
        np.float32(0.0 if part_norm is None else part_norm[1]),
    )


def rotate_and_write(
    query: torch.Tensor,
    qkv: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norm: Norm | None,
) -> None:
    """Writes query [T, Hq, D], and keys and values of qkv [T, (Hq + 2 Hkv) * D] to their slots of the caches."""
    weight, eps = (_NO_WEIGHTS, 0.0) if norm is None else (elements(norm[0]), norm[1])
    _rotate_and_write(
        elements(query),
        elements(qkv),
        elements(caches[0]),
        elements(caches[1]),
        slot_mapping.numpy(),
        elements(rotation.cos),
        elements(rotation.sin),
        rotation.positions.numpy(),
        weight,
        np.float32(eps),
    )


def gated_activation(out: torch.Tensor, gate_up: torch.Tensor, activation: str) -> None:
    """Writes out [T, W], ``act(gate) * up`` of gate_up [T, 2 W]."""
    _gated(elements(out), elements(gate_up), activation == "silu")


def _invert(rows: Any, row: int, begin: int, width: int, eps: float) -> Any:
    """What a norm multiplies rows[row, begin:begin + width] with, weights apart."""
    squares = np.float32(0)
    for i in range(begin, begin + width):
        x = as_float(rows[row, i])
        squares += x * x
    return np.float32(1) / np.sqrt(squares / np.float32(width) + eps)


_factor = compiled(_invert)


def _normalise(out: Any, hidden: Any, weight: Any, eps: float, part: Any, part_weight: Any, part_eps: float) -> None:
    """``part`` and ``part_weight`` have no rows where there is none."""
    width = hidden.shape[1]
    for row in range(hidden.shape[0]):
        if part.shape[0]:
            if part_weight.shape[0]:
                factor = _factor(part, row, 0, width, part_eps)
                for i in range(width):
                    x = as_float(as_element(as_float(part[row, i]) * factor * as_float(part_weight[i]), part))
                    hidden[row, i] = as_element(as_float(hidden[row, i]) + x, hidden)
            else:
                for i in range(width):
                    hidden[row, i] = as_element(as_float(hidden[row, i]) + as_float(part[row, i]), hidden)
        factor = _factor(hidden, row, 0, width, eps)
        for i in range(width):
            out[row, i] = as_element(as_float(hidden[row, i]) * factor * as_float(weight[i]), out)


_add_norm = compiled(_normalise)


def _write(
    query: Any,
    qkv: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    weight: Any,
    eps: float,
) -> None:
    """``weight`` has no rows where heads are not normalised."""
    (num_tokens, num_query, dim), block_size, num_kv = query.shape, k_cache.shape[1], k_cache.shape[2]
    half = cos.shape[1]
    normed = np.empty((1, dim), np.float32)
    for token in range(num_tokens):
        position, slot = positions[token], slots[token]
        block, offset = slot // block_size, slot % block_size
        for head in range(num_query + num_kv if slot >= 0 else num_query):
            begin, key = head * dim, head - num_query
            if weight.shape[0]:
                factor = _factor(qkv, token, begin, dim, eps)
                for i in range(dim):
                    normed[0, i] = as_float(qkv[token, begin + i]) * factor * as_float(weight[head, i])
                if key < 0:
                    rotate(query, (token, head, 0), normed, (0, 0), cos, sin, position, half)
                else:
                    rotate(k_cache, (block, offset, key, 0), normed, (0, 0), cos, sin, position, half)
            elif key < 0:
                rotate(query, (token, head, 0), qkv, (token, begin), cos, sin, position, half)
            else:
                rotate(k_cache, (block, offset, key, 0), qkv, (token, begin), cos, sin, position, half)
            for i in range(2 * half, dim):
                x = normed[0, i] if weight.shape[0] else as_float(qkv[token, begin + i])
                if key < 0:
                    query[token, head, i] = as_element(x, query)
                else:
                    k_cache[block, offset, key, i] = as_element(x, k_cache)
        for head in range(num_kv if slot >= 0 else 0):
            begin = (num_query + num_kv + head) * dim
            for i in range(dim):
                v_cache[block, offset, head, i] = qkv[token, begin + i]


_rotate_and_write = compiled(_write)


def _activate(out: Any, gate_up: Any, is_silu: bool) -> None:
    """Both activations are gate * sigmoid(z): (1 + tanh(y)) / 2 is the sigmoid of 2 y."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = as_float(gate_up[row, i])
            z = gate
            if not is_silu:
                z = np.float32(1.5957691216057308) * (gate + np.float32(0.044715) * gate * gate * gate)
            active = gate / (np.float32(1) + exp2(z * np.float32(-1.4426950408889634)))
            out[row, i] = as_element(active * as_float(gate_up[row, width + i]), out)


_gated = compiled(_activate)
