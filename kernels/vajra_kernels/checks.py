"""Compare the kernels with a float64 reference on random, ragged and poisoned inputs.

Tests run these cases in Triton's interpreter, and ``benchmarks/gpu_check.py`` runs them on a GPU.

Invariants:
    - Every slot without a written token holds NaN, and so do outputs before the launch, so stray reads and missing
      writes become visible.
    - Sequences get blocks in random order, with unused blocks between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vajra_kernels.call import AttentionCall
from vajra_kernels.config import DeviceFacts
from vajra_kernels.gpu import attention_launches
from vajra_kernels.launch import Launch
from vajra_kernels.metadata import AttentionMetadata, build_metadata
from vajra_kernels.operands import Column
from vajra_kernels.reference import attention_reference, sample_reference

TOLERANCES = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""Largest allowed error of an output relative to max(1, its magnitude); outputs are means of standard normal values."""
LSE_TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-4, torch.bfloat16: 2e-4}
"""Largest allowed absolute error of a log-sum-exp, which is float32 for every dtype."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One random attention problem.

    Attributes:
        heads: (query heads, KV heads).
        dims: (head dimension of q and k, head dimension of v).
        block_size: tokens per KV block.
        lens: (query length, KV length) per sequence; (1, 0) is a padding row.
        dtype: dtype of q and both caches.
        window: sliding window in tokens, or None.
        softcap: soft cap, or None.
        causal: see ``AttentionMetadata.causal``.
        head_major: True for the physical order [num_blocks, Hkv, block_size, D], False for [num_blocks, block_size,
            Hkv, D].
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    block_size: int
    lens: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    head_major: bool = True

    @property
    def label(self) -> str:
        """Return a short name for test ids and reports."""
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [dtype, f"h{self.heads[0]}:{self.heads[1]}", f"d{self.dims[0]}", f"b{self.block_size}"]
        parts += [f"v{self.dims[1]}"] if self.dims[1] != self.dims[0] else []
        parts += [f"w{self.window}"] if self.window is not None else []
        parts += [f"c{self.softcap:g}"] if self.softcap is not None else []
        parts += ["parts"] if not self.causal else []
        parts += ["tokenmajor"] if not self.head_major else []
        return "-".join([*parts, f"n{len(self.lens)}", f"q{sum(q for q, _ in self.lens)}"])


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors of one case, on one device."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata


def make_inputs(case: AttentionCase, generator: torch.Generator, device: torch.device | str) -> AttentionInputs:
    """Return random inputs for ``case``, drawn on the CPU from ``generator``."""
    query_lens, kv_lens = [q for q, _ in case.lens], [kv for _, kv in case.lens]
    needed = [-(-n // case.block_size) for n in kv_lens]
    num_blocks = sum(needed) + 3
    ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [[next(ids) for _ in range(n)] for n in needed]
    metadata = build_metadata(query_lens, kv_lens, tables, case.block_size, device, case.causal)
    caches = [_poisoned_cache(case, dim, tables, num_blocks, generator).to(device) for dim in case.dims]
    if case.head_major:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    # q is a part of a wider tensor, as in a fused projection, and so not contiguous.
    fused = torch.full(
        (sum(query_lens), case.heads[0] + 2 * case.heads[1], case.dims[0]), float("nan"), dtype=case.dtype
    )
    q = fused.to(device)[:, : case.heads[0]]
    q.copy_(torch.randn(q.shape, generator=generator))
    return AttentionInputs(q, caches[0], caches[1], metadata)


def _poisoned_cache(
    case: AttentionCase, dim: int, tables: list[list[int]], num_blocks: int, generator: torch.Generator
) -> torch.Tensor:
    """Return a cache [num_blocks, block_size, Hkv, dim] with normal values for tokens, and NaN elsewhere."""
    shape = (num_blocks, case.block_size, case.heads[1], dim)
    cache = torch.full(shape, float("nan"), dtype=case.dtype)
    for blocks, (_, kv_len) in zip(tables, case.lens, strict=True):
        for i, block in enumerate(blocks):
            filled = min(case.block_size, kv_len - i * case.block_size)
            cache[block, :filled] = torch.randn((filled, *shape[2:]), generator=generator).to(case.dtype)
    return cache


def expected(case: AttentionCase, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in float64, computed from the inputs rounded to the case's dtype."""
    return attention_reference(
        inputs.q.double(),
        inputs.k_cache.double(),
        inputs.v_cache.double(),
        inputs.metadata,
        window=case.window,
        softcap=case.softcap,
    )


def poisoned_call(case: AttentionCase, inputs: AttentionInputs, *, with_lse: bool = True) -> AttentionCall:
    """Return the call that computes the case, with outputs filled with NaN."""
    num_tokens, num_heads = inputs.q.shape[:2]
    out = torch.full((num_tokens, num_heads, case.dims[1]), float("nan"), dtype=case.dtype, device=inputs.q.device)
    lse = torch.full((num_tokens, num_heads), float("nan"), device=inputs.q.device) if with_lse else None
    return AttentionCall(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.metadata,
        case.dims[0] ** -0.5,
        case.window,
        case.softcap,
        out,
        lse,
    )


def worst_errors(
    out: torch.Tensor, lse: torch.Tensor | None, wanted: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """Return (largest error of out, relative to max(1, the wanted magnitude), largest error of lse).

    An error is infinite if a value is NaN, or if only one of the two compared values is finite.
    """
    scaled = (out.double() - wanted[0]).abs() / wanted[0].abs().clamp(min=1.0)
    out_error = float(scaled.nan_to_num(nan=torch.inf).max()) if out.numel() else 0.0
    if lse is None or lse.numel() == 0:
        return out_error, 0.0
    difference = torch.where(lse.double() == wanted[1], 0.0, lse.double() - wanted[1]).abs()
    return out_error, float(difference.nan_to_num(nan=torch.inf).max())


def run_case(case: AttentionCase, inputs: AttentionInputs, device: DeviceFacts) -> tuple[float, float, list[Launch]]:
    """Run the launches that ``device`` would use; return (largest output error, largest lse error, launches)."""
    call = poisoned_call(case, inputs)
    launches = attention_launches(call, device)
    for launch in launches:
        launch.run()
    return *worst_errors(call.out, call.lse, expected(case, inputs)), launches


_DECODES = ((1, 37), (1, 130), (1, 0), (1, 300), (1, 64))
_CHUNKS = ((70, 70), (5, 133), (0, 40), (40, 200))
_MIXED = ((1, 90), (1, 17), (33, 150), (3, 3))


def interpreter_cases() -> list[AttentionCase]:
    """Return cases that cover every feature at least once, and are small enough for the interpreter."""
    base = AttentionCase((8, 2), (64, 64), 16, _DECODES)
    half, brain = torch.float16, torch.bfloat16
    decodes = [
        base,
        replace(base, dtype=half, dims=(128, 128), block_size=64),
        replace(base, dtype=brain, heads=(6, 2), dims=(96, 96), block_size=32, head_major=False),
        replace(base, dtype=half, heads=(20, 1), dims=(80, 80), block_size=128),
        replace(base, heads=(48, 1), dims=(64, 64), lens=((1, 100), (1, 30))),
        replace(base, dtype=half, heads=(4, 4), dims=(64, 64), window=50),
        replace(base, dtype=half, heads=(4, 2), dims=(256, 256), block_size=128, window=33, softcap=30.0),
        replace(base, heads=(4, 2), dims=(112, 64), block_size=48, softcap=20.0),
    ]
    chunks = [
        replace(base, lens=((20, 61), (7, 7))),
        replace(base, dtype=half, lens=_CHUNKS, dims=(128, 128), block_size=64),
        replace(base, dtype=brain, lens=_CHUNKS, heads=(6, 2), dims=(80, 80), block_size=32),
        replace(base, dtype=half, lens=_CHUNKS, heads=(3, 1), dims=(96, 96), block_size=48, window=24),
        replace(base, dtype=half, lens=((30, 90),), heads=(4, 2), dims=(256, 256), block_size=128, softcap=30.0),
        replace(base, dtype=brain, lens=_MIXED, dims=(128, 128), block_size=16, window=40, softcap=50.0),
        replace(base, dtype=half, lens=_MIXED, heads=(4, 1), head_major=False),
        replace(base, dtype=half, lens=((1, 1100), (1, 30), (40, 80)), heads=(4, 1), block_size=128),
        replace(base, dtype=half, lens=((3, 10), (2, 300)), heads=(4, 1)),
        replace(base, dtype=half, lens=((20, 100), (40, 0), (33, 7)), causal=False),
        replace(base, dtype=half, lens=((4, 20), (2, 40)), heads=(150, 1)),
    ]
    return decodes + chunks


def gpu_cases() -> list[AttentionCase]:
    """Return the cases for a real GPU.

    These are the interpreter's cases, and one for each combination of dtype, head dimension and (window, soft cap).
    Heads, block sizes and lengths vary from case to case.
    """
    cases = list(interpreter_cases())
    mixes = (_DECODES, _CHUNKS, ((1, 2000), *_MIXED), ((1, 3000), (1, 5), (300, 1500), (129, 129)))
    features: tuple[tuple[int | None, float | None], ...] = ((None, None), (100, None), (None, 30.0), (7, 50.0))
    for dtype in TOLERANCES:
        for index, dim in enumerate((64, 80, 96, 112, 128, 160, 192, 256)):
            for number, (window, softcap) in enumerate(features):
                heads = ((8, 2), (4, 4), (16, 1), (14, 2))[(index + number) % 4]
                block_size = (16, 32, 64, 128)[(index + 2 * number) % 4]
                lens = mixes[(index * 3 + number) % 4]
                cases.append(AttentionCase(heads, (dim, dim), block_size, lens, dtype, window, softcap))
    return cases


_SAMPLING: tuple[dict[str, float], ...] = (
    {"TEMPERATURE": 0.0},
    {"TEMPERATURE": 0.0, "HISTORY": 0, "REPETITION": 1.7, "FREQUENCY": 0.3, "PRESENCE": -0.5},
    {"TEMPERATURE": 0.7},
    {"TEMPERATURE": 2.5, "TOP_K": 7},
    {"TOP_P": 0.8},
    {"TOP_P": 0.05},
    {"MIN_P": 0.1},
    {"TEMPERATURE": 1.4, "TOP_K": 20, "TOP_P": 0.7, "MIN_P": 0.02},
    {"TOP_P": 0.95, "HISTORY": 1, "REPETITION": 0.6, "FREQUENCY": 0.1},
    {"TOP_K": 15, "HISTORY": 2, "PRESENCE": 1.5},
)


def sampling_inputs(
    vocab_size: int, dtype: torch.dtype, generator: torch.Generator, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, parameters, seen), arguments of ``sampling.sample_tokens``, for rows that cover every feature."""
    rows = _SAMPLING * repeats
    parameters = torch.zeros((len(rows), len(Column)), dtype=torch.float64)
    parameters[:, [Column.TEMPERATURE, Column.TOP_P, Column.REPETITION]] = 1.0
    parameters[:, Column.TOP_K] = vocab_size
    parameters[:, Column.HISTORY] = -1
    parameters[:, Column.NUMBER] = torch.rand(len(rows), generator=generator, dtype=torch.float64)
    for row, columns in zip(parameters, rows, strict=True):
        for name, value in columns.items():
            row[Column[name]] = value
    # The rows are not contiguous: each is the first part of a longer one, as with a padded vocabulary.
    logits = (torch.randn((len(rows), vocab_size + 8), generator=generator) * 2.5).to(dtype)[:, :vocab_size]
    seen = torch.randint(0, 4, (3, vocab_size), generator=generator) * torch.randint(
        0, 2, (3, vocab_size), generator=generator
    )
    return logits, parameters, seen.to(torch.int32)


def sampling_mismatches(
    tokens: torch.Tensor, logits: torch.Tensor, parameters: torch.Tensor, seen: torch.Tensor
) -> list[tuple[int, int]]:
    """Return (row, token) for each token that differs from the reference by more than rounding can explain.

    A token is returned if the reference never draws it: neither with the row's parameters, nor with the random number,
    top-p or min-p changed by 1e-5.
    """
    possible = []
    for slack in (0.0, 1e-5, -1e-5):
        for column in (Column.NUMBER, Column.TOP_P, Column.MIN_P):
            moved = parameters.clone()
            moved[:, column] = torch.where(moved[:, column] % 1.0 == 0.0, moved[:, column], moved[:, column] + slack)
            possible.append(sample_reference(logits, moved, seen))
    rows = zip(tokens.tolist(), torch.stack(possible, 1).tolist(), strict=True)
    return [(row, token) for row, (token, allowed) in enumerate(rows) if token not in allowed]
