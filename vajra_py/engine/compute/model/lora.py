"""LoRA adapters (Hu et al. 2021) in a fused forward pass: several adapters in one batch, each in its slot.

A row with adapter a gets x W^T + scale_a (x A_a^T) B_a^T. Rows are grouped by adapter, so the number of small matrix
multiplications in a step depends on the number of its adapters, not on the number of its requests. A `Product` is a
linear layer that computes one or more merged modules, such as query, key and value.

Invariants:
    - Rows of the base model, and steps without adapters, are computed exactly as without this module.
    - Transformations of a layer's weight (a folded norm weight, reordered rows) are applied to A and B when these are
      read.
    - Memory of the slots is allocated at start-up, for the largest rank; a load copies into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from vajra_py.engine.compute.interface import RunnerOptions
from vajra_py.engine.compute.model.adapter_files import AdapterFiles, inspect_adapter, tensor_name
from vajra_py.engine.compute.model.fused_parts import Product
from vajra_py.errors import ConfigError, ExecutorError, Problem

Matrices = tuple[torch.Tensor, torch.Tensor]
"""Matrices A [rank, inputs] and B [outputs, rank] of a module, with the scale folded into B."""
RowGroups = list[tuple[int, torch.Tensor | None]]
"""For each adapter of a step: its slot, and its rows of the flattened batch (None: all rows)."""
_NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class Part:
    """One of the modules (such as query, key and value) that are merged into one linear layer.

    Attributes:
        module: name of the module.
        num_outputs: number of the module's rows in the merged weight.
        reorder: function that brings rows of the module's weight into the order of the merged weight; None: same order.
    """

    module: str
    num_outputs: int
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(slots=True)
class StepRows:
    """The rows that the current forward pass computes, grouped by adapter; shared by all `AdaptedProduct`s."""

    groups: RowGroups = field(default_factory=list)


class AdaptedProduct(Product):
    """A linear layer of one or more merged modules, which adds each row's adapter term to the output."""

    __slots__ = ("_first", "_parts", "_rank", "_rows", "_second")

    def __init__(self, product: Product, parts: Sequence[slice], sizes: tuple[int, int, int], rows: StepRows) -> None:
        """Add slots for adapters to the linear layer `product`.

        `parts`: columns of the output that belong to each adapted module; `sizes`: (number of slots, largest rank,
        number of inputs).
        """
        self._weight, self._bias, self._is_packed = product._weight, product._bias, product._is_packed
        num_slots, rank, inputs = sizes
        self._parts = list(parts)
        self._rank = rank
        self._rows = rows
        dtype, device = self._weight.dtype, self._weight.device
        self._first = torch.zeros((num_slots, rank * len(parts), inputs), dtype=dtype, device=device)
        self._second = [
            torch.zeros((num_slots, one.stop - one.start, rank), dtype=dtype, device=device) for one in parts
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of the slots."""
        return sum(one.numel() * one.element_size() for one in (self._first, *self._second))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        result = super().__call__(x)
        if self._rows.groups:
            self._add(result, x)
        return result

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        hidden = super().add_to(hidden, x)
        # An addition in place bypasses `__call__`, so the adapters' terms are added here.
        if self.adds_in_place and self._rows.groups:
            self._add(hidden, x)
        return hidden

    def put(self, slot: int, matrices: Sequence[Matrices | None]) -> None:
        """Copy each part's matrices into a slot; None: the adapter does not change the module."""
        for index, pair in enumerate(matrices):
            first = self._first[slot, index * self._rank : (index + 1) * self._rank]
            second = self._second[index][slot]
            first.zero_()
            second.zero_()
            if pair is not None:
                first[: pair[0].shape[0]].copy_(pair[0])
                second[:, : pair[1].shape[1]].copy_(pair[1])

    def _add(self, result: torch.Tensor, x: torch.Tensor) -> None:
        for slot, rows in self._rows.groups:
            low = (x if rows is None else x[rows]) @ self._first[slot].t()
            for index, columns in enumerate(self._parts):
                part = low[:, index * self._rank : (index + 1) * self._rank] @ self._second[index][slot].t()
                if rows is None:
                    result[:, columns].add_(part)
                else:
                    result[:, columns].index_add_(0, rows, part)


@dataclass(slots=True)
class _Adapted:
    """An adapted linear layer, and each adapter's matrices for the layer's modules, by adapter name."""

    product: AdaptedProduct
    matrices: dict[str, list[Matrices | None]]


class AdapterSlots:
    """The adapters of one worker: their weights, the contents of the slots, and the rows of a step by slot."""

    def __init__(self, options: RunnerOptions) -> None:
        """Read the adapters' folders. Raises `ConfigError`."""
        self._files = {source.name: inspect_adapter(source) for source in options.adapters}
        self._num_slots = options.max_loras
        self._rank = max(one.rank for one in self._files.values())
        self._rows = StepRows()
        self._products: list[_Adapted] = []
        self._left = {(name, *key): None for name, one in self._files.items() for key in one.shapes}
        """Adapted modules whose matrices have not been read yet: (adapter, layer, module)."""
        self._numbers = {name: number for number, name in enumerate(self._files)}
        self._slot_of: npt.NDArray[np.int64] = np.full(len(self._files) + 1, _NO_ADAPTER)
        """Slot that holds each adapter; the last entry is for the base model."""
        self._adapter_of: npt.NDArray[np.int64] = np.full(options.max_requests, _NO_ADAPTER)
        """Index of each request's adapter, by the request's slot in the worker."""
        self._step: npt.NDArray[np.int64] | None = None

    # Called while the forward pass is built

    def adapted(
        self, product: Product, layer: int, parts: Sequence[Part], inputs: int, folded: torch.Tensor | None
    ) -> Product:
        """Return `product` with adapter slots if some adapter changes one of its modules, else `product` itself.

        `folded`: weight of the preceding norm if it is folded into the weight of `product`, else None. Raises
        `ConfigError` if the shape of an adapter's matrices differs from the module's.
        """
        known = [(part, columns) for part, columns in _columns(parts) if self._is_changed(layer, part.module)]
        if not known:
            return product
        sizes = self._num_slots, self._rank, inputs
        adapted = AdaptedProduct(product, [columns for _, columns in known], sizes, self._rows)
        matrices = {
            name: [self._read(files, layer, part, inputs, folded) for part, _ in known]
            for name, files in self._files.items()
        }
        self._products.append(_Adapted(adapted, matrices))
        return adapted

    def check_all_used(self, where: str) -> None:
        """Raise `ConfigError` if an adapter changes a module that the model does not have."""
        if self._left:
            name, layer, module = next(iter(self._left))
            message = f"adapter {name!r} changes a module that this model does not have ({module} of layer {layer})"
            raise ConfigError(Problem(where, message, "Allowed: adapters that were trained on this model"))

    def _is_changed(self, layer: int, module: str) -> bool:
        return any((layer, module) in files.shapes for files in self._files.values())

    def _read(
        self, files: AdapterFiles, layer: int, part: Part, inputs: int, folded: torch.Tensor | None
    ) -> Matrices | None:
        shape = files.shapes.get((layer, part.module))
        if shape is None:
            return None
        if shape != (part.num_outputs, inputs):
            message = f"{part.module} of layer {layer} is not of the model's shape ({shape[0]} x {shape[1]})"
            allowed = f"Allowed: {part.num_outputs} x {inputs}, of an adapter that was trained on this model"
            raise ConfigError(Problem(str(files.weights_file), message, allowed))
        self._left.pop((files.source.name, layer, part.module))
        with safe_open(str(files.weights_file), framework="pt") as tensors:
            first = tensors.get_tensor(tensor_name(layer, part.module, "A")).float()
            second = tensors.get_tensor(tensor_name(layer, part.module, "B")).float() * files.scale
        if folded is not None:
            first = first * folded.to("cpu", torch.float32)
        return first, second if part.reorder is None else part.reorder(second)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of all slots."""
        return sum(one.product.num_bytes for one in self._products)

    # Called between steps and during steps

    def load(self, name: str, slot: int) -> None:
        """Copy an adapter's weights into a slot, replacing its content. Raises `ExecutorError`."""
        number = self._numbers.get(name)
        if number is None or not 0 <= slot < self._num_slots:
            raise ExecutorError(f"adapter {name!r}: cannot be loaded into slot {slot} of {self._num_slots}.")
        self._slot_of[self._slot_of == slot] = _NO_ADAPTER
        for one in self._products:
            one.product.put(slot, one.matrices[name])
        self._slot_of[number] = slot

    def note(self, request_slot: int, name: str) -> None:
        """Store the adapter of a new request; empty: the base model. Raises `ValueError` for an unknown adapter."""
        if name and name not in self._numbers:
            raise ValueError(f"there is no adapter {name!r}")
        self._adapter_of[request_slot] = self._numbers[name] if name else _NO_ADAPTER

    def begin(self, request_slots: npt.NDArray[np.int64], query_lens: npt.NDArray[np.int64]) -> None:
        """Store the adapter slot of each row of the step to compute next.

        Raises `ExecutorError` if an adapter of a request is not loaded.
        """
        adapters = self._adapter_of[request_slots]
        slots = self._slot_of[adapters]
        lacking = np.flatnonzero((slots == _NO_ADAPTER) & (adapters != _NO_ADAPTER))
        if lacking.size:
            raise ExecutorError(f"step: the adapter of slot {request_slots[lacking[0]]} is not loaded.")
        self._step = np.repeat(slots, query_lens) if (slots != _NO_ADAPTER).any() else None

    def use_all_rows(self) -> None:
        """Start a forward pass over all rows of the step."""
        self._rows.groups = [] if self._step is None else _grouped(self._step)

    def use_rows(self, rows: torch.Tensor) -> None:
        """Restrict the rest of the forward pass to these rows of the step."""
        if self._step is not None:
            self._rows.groups = _grouped(self._step[rows.cpu().numpy()])


def _columns(parts: Sequence[Part]) -> list[tuple[Part, slice]]:
    """Return each part of a merged linear layer, with the part's columns in the layer's output."""
    ends = np.cumsum([part.num_outputs for part in parts]).tolist()
    return [(part, slice(end - part.num_outputs, end)) for part, end in zip(parts, ends, strict=True)]


def _grouped(slots: npt.NDArray[np.int64]) -> RowGroups:
    """Return the rows of each adapter slot; `slots`: adapter slot of each row."""
    groups: RowGroups = []
    for slot in np.unique(slots[slots != _NO_ADAPTER]).tolist():
        rows = np.flatnonzero(slots == slot)
        groups.append((slot, None if len(rows) == len(slots) else torch.from_numpy(rows)))
    return groups
