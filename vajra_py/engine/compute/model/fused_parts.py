"""The parts of a fused decoder: linear layers, norms, rotary embeddings and MLPs over rearranged weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from vajra_kernels.operands import Rotation as TableRotation

Rotation = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Product:
    """A linear layer x @ weight.T + bias, with the weight in the fastest layout for its device."""

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Use `weight` [outputs, inputs] without a copy."""
        self._weight = weight
        self._bias = bias
        self._is_packed = False

    @classmethod
    def packed(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Return the layer with `weight` [outputs, inputs] contiguous, and packed for oneDNN if `can_pack` allows."""
        product = cls(weight.contiguous(), bias)
        if can_pack(weight):
            product._weight = torch.ops.mkldnn._reorder_linear_weight(product._weight, _PACKED_FOR_ROWS)
            product._is_packed = True
        return product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [T, outputs] for x [T, inputs]."""
        if self._is_packed:
            result: torch.Tensor = _packed_linear(x, self._weight, self._bias, "none", [], "")
            return result
        return functional.linear(x, self._weight, self._bias)

    @property
    def adds_in_place(self) -> bool:
        """True if `add_to` allocates no memory for the layer's output."""
        return not self._is_packed

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the output for x [T, inputs] to `hidden` [T, outputs] in place, and return `hidden`."""
        if self._is_packed:
            return hidden.add_(self(x))
        if self._bias is not None:
            hidden += self._bias
        return hidden.addmm_(x, self._weight.t())


_packed_linear = torch.ops.mkldnn._linear_pointwise.default
_PACKED_FOR_ROWS = 32
"""Number of rows of x for which the weight's layout is optimised. With any value from 8 on, the speed is the same, for
every actual number of rows (measured)."""


def can_pack(weight: torch.Tensor) -> bool:
    """Return True if oneDNN can use a packed copy of this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


class Norm:
    """Root-mean-square norm over the last dimension, times a weight unless the next linear layer includes the weight.

    A weight of a wider dtype than the input (Gemma's in half precision) is applied before rounding. On a CPU, an input
    in half precision is converted to float32 once, normalised in place and rounded once. This takes fewer passes over
    the input than torch's function.
    """

    __slots__ = ("_eps", "_native", "_wide_weight", "eps", "is_fused", "is_wide", "weight", "width")

    def __init__(
        self, weight: torch.Tensor | None, eps: float, width: int, is_wide: bool = False, is_fused: bool = False
    ) -> None:
        """Create the norm; `is_fused`: `vajra_kernels.layer_ops` computes it, which requires a weight."""
        self.weight = weight
        self.eps = eps
        self.width = width
        self._eps = torch.tensor(eps)
        self.is_wide = is_wide
        self.is_fused = is_fused
        self._native = weight is not None and weight.device.type != "cpu"
        is_half_on_cpu = weight is not None and not self._native and (is_wide or weight.dtype != torch.float32)
        self._wide_weight = weight.float() if weight is not None and is_half_on_cpu else None

    @classmethod
    def of(cls, module: Any, is_fused: bool = False) -> Norm:
        """Return the norm that a transformers module computes.

        The module is run to find its weights, since Gemma adds 1 to the stored ones.
        """
        weight: torch.Tensor = module.weight.detach()
        eps = getattr(module, "variance_epsilon", None)
        if eps is None:
            eps = module.eps
        ones = torch.ones((1, weight.shape[-1]), dtype=weight.dtype, device=weight.device)
        full = module(ones)[0] * (1.0 + float(eps)) ** 0.5
        plain = (full - weight).abs().max() <= (full - weight - 1.0).abs().max()
        if plain:
            return cls(weight, float(eps), weight.shape[-1], is_fused=is_fused)
        return cls(weight.float() + 1.0, float(eps), weight.shape[-1], weight.dtype != torch.float32, is_fused)

    def after_adding(self, hidden: torch.Tensor, part: torch.Tensor, part_norm: Norm | None) -> torch.Tensor:
        """Add `part_norm(part)` (None: `part`) to `hidden` [T, width] in place, and return `hidden` normalised."""
        if not self.is_fused:
            return self(hidden.add_(part if part_norm is None else part_norm(part)))
        from vajra_kernels.layer_ops import add_norm

        return add_norm(hidden, self.parameters, part, None if part_norm is None else part_norm.parameters)

    @property
    def parameters(self) -> tuple[torch.Tensor, float]:
        """Weight and epsilon; only for a norm with a weight."""
        assert self.weight is not None
        return self.weight, self.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., width] normalised."""
        if self.is_fused and x.dim() == 2:
            from vajra_kernels.layer_ops import add_norm

            return add_norm(x, self.parameters)
        if self._wide_weight is not None:
            wide = x.float()
            return wide.mul_(self._inverse_length(wide)).mul_(self._wide_weight).type_as(x)
        if self.is_wide and self.weight is not None:
            return (functional.rms_norm(x.float(), (self.width,), None, self.eps) * self.weight).to(x.dtype)
        if self._native and self.weight is not None:
            if self.weight.dim() == 1:
                return functional.rms_norm(x, (self.width,), self.weight, self.eps)
            return functional.rms_norm(x, (self.width,), None, self.eps) * self.weight
        # On a CPU, this makes fewer passes over x than torch's `rms_norm`.
        x = x * self._inverse_length(x)
        return x if self.weight is None else x.mul_(self.weight)

    def _inverse_length(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1 / sqrt(mean of squares + epsilon), [..., 1], of x [..., width]."""
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.addcmul(self._eps, length, length, value=1.0 / self.width).rsqrt_()


class Rope:
    """Rotary embedding of one layer type.

    If `is_complex`, pairs are rotated by multiplying complex numbers in float32, in place if the input is float32.
    """

    __slots__ = ("_tables", "dim", "is_complex", "kind", "rotary_dim")

    def __init__(self, tables: RopeTables, kind: str | None, dim: int, is_complex: bool) -> None:
        self._tables = tables
        self.kind = kind
        self.dim = dim
        self.is_complex = is_complex
        self.rotary_dim = tables.rotary_dim(kind)

    def reorder(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return rows [heads * dim, ...] of W_q or W_k in the order that `apply` needs.

        If the embedding `is_complex`, the two members of each rotated pair are next to each other; otherwise, the rows
        keep their order.
        """
        if not self.is_complex:
            return rows
        half = self.rotary_dim // 2
        pairs = torch.arange(half).repeat_interleave(2)
        pairs[1::2] += half
        order = torch.cat((pairs, torch.arange(self.rotary_dim, dim)))
        return rows.view(-1, dim, *rows.shape[1:])[:, order].reshape(rows.shape)

    def at(self, positions: torch.Tensor, num_positions: int) -> Rotation:
        """Return the rotations at positions int64 [T], all below `num_positions`, in the form that `apply` takes."""
        cos, sin, both = self._tables.get(self.kind, num_positions, self.is_complex)
        if both is not None:
            return both[positions].unsqueeze(1)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def table(self, positions: torch.Tensor, num_positions: int) -> TableRotation:
        """Return the rotations as a table, for a kernel that indexes it by position."""
        from vajra_kernels.operands import Rotation as TableRotation

        cos, sin, _ = self._tables.get(self.kind, num_positions, False)
        return TableRotation(cos, sin, positions)

    def apply(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return x [T, heads, dim] rotated."""
        if isinstance(rotation, torch.Tensor):
            wide = x.float()
            pairs = wide[..., : self.rotary_dim].view(*x.shape[:2], self.rotary_dim // 2, 2)
            torch.view_as_complex(pairs).mul_(rotation)
            return wide.type_as(x)
        cos, sin = rotation
        first, second = x[..., : self.rotary_dim].chunk(2, -1)
        parts = [first * cos - second * sin, second * cos + first * sin]
        if self.rotary_dim < self.dim:
            parts.append(x[..., self.rotary_dim :])
        return torch.cat(parts, -1)


class RopeTables:
    """Rotations by position, computed once by the model's own module and extended for longer sequences."""

    __slots__ = ("_dtype", "_module", "_ropes", "_tables", "_takes_kind")

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._takes_kind = "layer_type" in inspect.signature(module.forward).parameters
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._ropes: dict[str | None, Rope] = {}

    def rope(self, kind: str | None, dim: int, is_complex: bool) -> Rope:
        """Return the rotary embedding of layers of this type."""
        kind = kind if self._takes_kind else None
        if kind not in self._ropes:
            self._ropes[kind] = Rope(self, kind, dim, is_complex)
        return self._ropes[kind]

    def rotary_dim(self, kind: str | None) -> int:
        """Return the number of rotated dimensions of a head."""
        return 2 * self.get(kind, 1, False)[0].shape[-1]

    def get(
        self, kind: str | None, num_positions: int, is_complex: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return cos, sin, and (with `is_complex`) both as complex numbers, for at least `num_positions` positions.

        Each has the shape [positions, rotary_dim / 2].
        """
        found = self._tables.get(kind)
        if found is not None and found[0].shape[0] >= num_positions and (found[2] is not None or not is_complex):
            return found
        count = max(1024, 1 << (num_positions - 1).bit_length())
        buffer = next(self._module.buffers())
        positions = torch.arange(count, device=buffer.device)[None]
        like = torch.zeros((), dtype=self._dtype, device=buffer.device)
        extra = {"layer_type": kind} if self._takes_kind else {}
        cos, sin = (part[0, :, : part.shape[-1] // 2].contiguous() for part in self._module(like, positions, **extra))
        both = torch.complex(cos.float(), sin.float()) if is_complex else None
        self._tables[kind] = (cos, sin, both)
        return self._tables[kind]


@dataclass(slots=True)
class Mlp:
    """MLP down(act(gate(x)) * up(x)); the caller applies `down`."""

    gate_up: Product
    down: Product
    act: Activation

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return act(gate(x)) * up(x), [T, inner], of x [T, h]."""
        return self.act(self.gate_up(x))


class Activation:
    """Gated activation act(gate) * up, with gate and up concatenated in one row."""

    __slots__ = ("_function", "_kind")

    def __init__(self, module: Any, is_fused: bool) -> None:
        """Create the activation; `is_fused`: `vajra_kernels.layer_ops` computes it if it supports the function."""
        name = type(module).__name__
        kind = "silu" if name in ("SiLU", "SiLUActivation") else "gelu_tanh" if name == "GELUTanh" else None
        self._kind = kind if is_fused else None
        self._function: Callable[[torch.Tensor], torch.Tensor] = module

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return act(gate) * up, [T, inner], of gate_up [T, 2 * inner]."""
        if self._kind is not None:
            from vajra_kernels.layer_ops import gated_activation

            return gated_activation(gate_up, self._kind)
        gate, up = gate_up.chunk(2, -1)
        return self._function(gate).mul_(up)


@dataclass(slots=True)
class ModuleMlp:
    """Mixture of experts, computed by transformers' module."""

    module: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output [T, h] for x [T, h]."""
        out = self.module(x[None])
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result[0]
