"""Compiled properties of the built-in configurations, and their bounds.

``python -m vajra_kernels.static`` compiles every case for its GPU (which need not be present) and prints a table, of
which docs/evidence/kernels.md has a part; tests check the same cases against their bounds.

Invariants:
    - Launches are created by the same functions as at run time, on small tensors with the strides and alignment of the
      shapes.
    - No case spills registers (except for 8 bytes in one of them, and a little at head dimension 512 and in sampling),
      and every case fits the shared memory of its device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import triton

from vajra_kernels.activation import gated_launch
from vajra_kernels.aot import CompiledFigures, compile_launch
from vajra_kernels.block_copy import copy_words_launch
from vajra_kernels.cache import allocate_kv_cache, block_words
from vajra_kernels.call import AttentionCall
from vajra_kernels.config import A10, A100, H200, L4, DeviceFacts
from vajra_kernels.decode_plan import plan_launch
from vajra_kernels.draw import sample_launch
from vajra_kernels.gpu import attention_launches
from vajra_kernels.kv_write import kv_write_launch
from vajra_kernels.launch import Launch
from vajra_kernels.layer_ops import ACTIVATIONS
from vajra_kernels.merge import merge_launch, merge_pieces_launch
from vajra_kernels.metadata import build_metadata
from vajra_kernels.norm import norm_launch
from vajra_kernels.operands import Column, Rotation
from vajra_kernels.rotate import rotate_launch


@dataclass(frozen=True, slots=True)
class StaticCase:
    """One launch on one device, and the bounds of its machine code.

    Attributes:
        name: kernel and shape.
        device: GPU that it is compiled for.
        launch: launch to compile.
        max_registers: bound of registers per thread.
        max_shared_bytes: bound of shared memory per program.
        wants_wgmma: True if the matrix products must use Hopper's warp-group instructions.
        wants_overlap: True if loads of a later K/V tile must be in flight while a tile is multiplied.
        max_stack_bytes: bound of stack per thread: 0, except for sampling, for head dimension 512, and for one case in
            which one Triton version keeps an address on the stack.
    """

    name: str
    device: DeviceFacts
    launch: Launch
    max_registers: int = 255
    max_shared_bytes: int = 227 * 1024
    wants_wgmma: bool = False
    wants_overlap: bool = False
    max_stack_bytes: int = 0

    def violations(self, figures: CompiledFigures) -> list[str]:
        """Return a description of each bound or requirement that the compiled code violates."""
        shared_limit = min(self.max_shared_bytes, self.device.shared_limit_bytes)
        found = []
        if figures.registers > self.max_registers:
            found.append(f"{figures.registers} registers, at most {self.max_registers}")
        if figures.stack_bytes > self.max_stack_bytes:
            found.append(f"{figures.stack_bytes} bytes of stack, at most {self.max_stack_bytes}: registers spill")
        if figures.shared_bytes > shared_limit:
            found.append(f"{figures.shared_bytes} bytes of shared memory, at most {shared_limit}")
        if self.wants_wgmma and figures.num_wgmma == 0:
            found.append("no wgmma instruction")
        if self.wants_overlap and figures.max_pending_copies == 0:
            found.append("every K/V load is waited for before the next product: no overlap")
        return found


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention call, for compilation only."""

    query_len: int
    head_dim: int = 128
    heads: tuple[int, int] = (32, 8)
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None

    def launch(self, device: DeviceFacts) -> Launch:
        """Return the decode or ragged launch for one sequence of this shape with 4096 positions of context.

        Launches that plan or merge splits are left out, since they are cases of their own.
        """
        kv_len = 4096 + self.query_len
        num_blocks = -(-kv_len // self.block_size)
        metadata = build_metadata([self.query_len], [kv_len], [[0] * num_blocks], self.block_size)
        cache = torch.empty((2, self.heads[1], self.block_size, self.head_dim), dtype=self.dtype).transpose(1, 2)
        q = torch.empty((self.query_len, self.heads[0], self.head_dim), dtype=self.dtype)
        call = AttentionCall(
            q, cache, cache, metadata, self.head_dim**-0.5, self.window, self.softcap, torch.empty_like(q), None
        )
        launches = attention_launches(call, device)
        return next(one for one in launches if one.kernel.__name__ in ("decode_kernel", "ragged_kernel"))


_KIB = 1024
# Three programs of 128 threads must fit on a multiprocessor for a decode to keep enough loads in flight.
_DECODE_REGISTERS, _DECODE_SHARED = 168, 75 * _KIB


def static_cases() -> Iterator[StaticCase]:
    """Yield every kernel at the shapes where configurations change, for the devices whose configurations differ."""
    yield from _decode_cases()
    yield from _ragged_cases()
    yield from _memory_cases()
    yield from _layer_cases()
    yield from _sampling_cases()


def _decode_cases() -> Iterator[StaticCase]:
    for device in (H200, A100):
        shape = AttentionShape(1)
        small = (_DECODE_REGISTERS, _DECODE_SHARED)
        stack = 8 if device is A100 else 0  # on the A100, Triton 3.6 needs 8 bytes of stack, 3.9 none
        name = "decode bf16 d128 GQA4 block64"
        yield StaticCase(name, device, shape.launch(device), *small, wants_overlap=True, max_stack_bytes=stack)
        shape = AttentionShape(1, block_size=16, dtype=torch.float16)
        yield StaticCase("decode fp16 d128 GQA4 block16", device, shape.launch(device), *small, wants_overlap=True)
    for device in (H200, L4):
        shape = AttentionShape(1, 256, (8, 4), 32, window=1024, softcap=50.0)
        yield StaticCase("decode bf16 d256 window softcap", device, shape.launch(device), wants_overlap=True)
    yield StaticCase("decode bf16 d128 MQA32", H200, AttentionShape(1, 128, (32, 1)).launch(H200), wants_overlap=True)
    for device in (H200, L4):
        yield StaticCase(
            "decode bf16 d512", device, AttentionShape(1, 512, (8, 2), 32).launch(device), wants_overlap=True
        )
        launch = AttentionShape(1, 512, (8, 2), 32, torch.float32).launch(device)
        yield StaticCase("decode fp32 d512", device, launch, max_stack_bytes=16)
    yield StaticCase("decode fp32 d128", H200, AttentionShape(1, dtype=torch.float32).launch(H200), 128)


def _ragged_cases() -> Iterator[StaticCase]:
    for device in (H200, A100, L4, A10):
        wgmma = device is H200
        shape = AttentionShape(512)
        yield StaticCase("prefill bf16 d128 GQA4 block64", device, shape.launch(device), 255, 163 * _KIB, wgmma, True)
        shape = AttentionShape(512, 256, (8, 4), 32, softcap=50.0)
        yield StaticCase("prefill bf16 d256 softcap", device, shape.launch(device), 255, 163 * _KIB, wgmma, True)
    # With 128 registers and 110 KiB, two programs of 256 threads fit on a multiprocessor.
    shape = AttentionShape(512, 64, block_size=16)
    yield StaticCase("prefill bf16 d64 GQA4 block16", H200, shape.launch(H200), 128, 110 * _KIB, True, True)
    shape = AttentionShape(512, 80, (32, 32), 16, torch.float16)
    yield StaticCase("prefill fp16 d80 MHA block16", H200, shape.launch(H200), 255, 163 * _KIB, True, True)
    shape = AttentionShape(512, window=1024)
    yield StaticCase("prefill bf16 d128 window", H200, shape.launch(H200), 255, 163 * _KIB, True, True)
    yield StaticCase("chunk of 16 bf16 d128", H200, AttentionShape(16).launch(H200), 255, 115 * _KIB, True, True)
    for device in (H200, A100, L4, A10):
        launch = AttentionShape(512, 512, (8, 2), 32).launch(device)
        wgmma = device is H200
        yield StaticCase(
            "prefill bf16 d512", device, launch, wants_wgmma=wgmma, wants_overlap=True, max_stack_bytes=128
        )
        launch = AttentionShape(512, 512, (8, 2), 32, torch.float32).launch(device)
        yield StaticCase("prefill fp32 d512", device, launch, max_stack_bytes=16)
    yield StaticCase("prefill fp32 d128", H200, AttentionShape(512, dtype=torch.float32).launch(H200), 128)


def _memory_cases() -> Iterator[StaticCase]:
    k_cache, v_cache = allocate_kv_cache(1, 4, (64, 8, 128), torch.bfloat16, "cpu")
    new = torch.empty((16, 8, 128), dtype=torch.bfloat16)
    slots = torch.zeros(16, dtype=torch.int64)
    yield StaticCase("write K/V", H200, kv_write_launch(new, new, k_cache[0], v_cache[0], slots), 64)
    pairs = torch.zeros((3, 2), dtype=torch.int64)
    yield StaticCase("copy blocks", H200, copy_words_launch(block_words(k_cache), block_words(k_cache), pairs), 64)
    parts = torch.empty((16, 32, 32, 128))
    out = torch.empty((32, 32, 128), dtype=torch.bfloat16)
    yield StaticCase("merge 16 parts", H200, merge_launch(parts, parts[..., 0].contiguous(), out, None), 128)
    starts = torch.zeros(33, dtype=torch.int32)
    pieces = parts.view(-1, 32, 128)[:164]
    merged = merge_pieces_launch(pieces, pieces[..., 0].contiguous(), starts, out, None)
    yield StaticCase("merge pieces of 32 sequences", H200, merged, 128)
    metadata = build_metadata([1] * 32, [4096] * 32, [[0] * 64] * 32, 64)
    yield StaticCase("plan of 32 sequences", H200, plan_launch(starts, metadata, 164, 8, 64, None, H200), 128)


def _layer_cases() -> Iterator[StaticCase]:
    """Yield a layer's operations between its matrix products and attention, with the shapes of Llama 8B and Qwen3."""
    rows = torch.empty((16, 4096), dtype=torch.bfloat16)
    weight = torch.empty(4096, dtype=torch.bfloat16)
    yield StaticCase("norm 4096", H200, norm_launch(rows, rows, (weight, 1e-5)), 64)
    wide = (torch.empty(4096), 1e-5)
    yield StaticCase("add and norm twice 4096", H200, norm_launch(rows, rows, wide, rows, wide), 64)
    caches = tuple(one[0] for one in allocate_kv_cache(1, 4, (64, 8, 128), torch.bfloat16, "cpu"))
    qkv, query = torch.empty((16, 48 * 128), dtype=torch.bfloat16), torch.empty((16, 32, 128), dtype=torch.bfloat16)
    table, positions = torch.empty((4096, 64), dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    for name, norm in (("rotate and write", None), ("norm heads, rotate, write", (torch.empty((40, 128)), 1e-6))):
        launch = rotate_launch(query, qkv, (caches[0], caches[1]), positions, Rotation(table, table, positions), norm)
        yield StaticCase(name, H200, launch, 96)
    out, gate_up = torch.empty((16, 14336), dtype=torch.bfloat16), torch.empty((16, 28672), dtype=torch.bfloat16)
    for activation in ACTIVATIONS:
        yield StaticCase(f"gated {activation}", H200, gated_launch(out, gate_up, activation), 64)


def _sampling_cases() -> Iterator[StaticCase]:
    """Yield the cases of sampling, whose bounds let two programs of 256 threads run on each multiprocessor.

    The kernel may use up to 80 bytes of stack, outside the passes over the logits.
    """
    tokens, seen = torch.zeros(16, dtype=torch.int64), torch.zeros((1, 151936), dtype=torch.int32)
    parameters = torch.zeros((16, len(Column)), dtype=torch.float64)
    for device, dtype in ((H200, torch.bfloat16), (H200, torch.float32), (A100, torch.bfloat16), (L4, torch.bfloat16)):
        launch = sample_launch(tokens, torch.empty((16, 151936), dtype=dtype), parameters, seen)
        name = f"sample of 151936 {'fp32' if dtype == torch.float32 else 'bf16'}"
        yield StaticCase(name, device, launch, 128, 32 * _KIB, wants_overlap=True, max_stack_bytes=80)


def main(arguments: list[str] | None = None) -> int:
    """Print the properties of every case as a Markdown table, or as JSON lines with ``--json``.

    Returns 1 if a bound is exceeded, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m vajra_kernels.static", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per case instead of a table")
    options = parser.parse_args(arguments)
    write = sys.stdout.write
    if not options.json:
        write(f"triton {triton.__version__}\n\n")
        write("| case | sm | tile | warps | stages | registers | shared KiB | products | copies in flight |\n")
        write("|---|---|---|--:|--:|--:|--:|---|--:|\n")
    broken = 0
    for case in static_cases():
        figures = compile_launch(case.launch, case.device.capability)
        broken += bool(case.violations(figures))
        write(_as_json(case, figures) if options.json else _as_row(case, figures))
        sys.stdout.flush()
    return 1 if broken else 0


def _as_json(case: StaticCase, figures: CompiledFigures) -> str:
    facts = {"case": case.name, "capability": case.device.capability, "tile": asdict(case.launch.tile)}
    return json.dumps(facts | asdict(figures) | {"violations": case.violations(figures)}) + "\n"


def _as_row(case: StaticCase, figures: CompiledFigures) -> str:
    tile = case.launch.tile
    products = "wgmma" if figures.num_wgmma else "mma.sync" if figures.num_mma else "scalar"
    if not any(name in case.name for name in ("decode", "prefill", "chunk")):
        products = "none"
    cells = [
        case.name,
        "{}{}".format(*case.device.capability),
        f"{tile.tile_m}x{tile.tile_n}",
        str(tile.num_warps),
        str(tile.num_stages),
        str(figures.registers),
        f"{figures.shared_bytes / 1024:.1f}",
        products,
        str(figures.max_pending_copies),
    ]
    return "| " + " | ".join(cells) + " |\n" + "".join(f"  broken: {text}\n" for text in case.violations(figures))


if __name__ == "__main__":
    sys.exit(main())
