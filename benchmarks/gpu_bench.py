"""Time the kernels and the engine on this GPU, against its own measured copy bandwidth and matrix rate.

Writes one JSON file with the chip, the versions, the date and every figure. ``--sweep`` also times other tile shapes, to
revise the built-in ones; ``--only PART ...`` measures some parts.
Exit code 0, 1 where a part failed, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gpu_facts import machine, output_arguments, require_gpu, use_checkout, write_results

use_checkout()

import gpu_engine  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import vajra_kernels  # noqa: E402
from vajra_kernels.call import AttentionCall  # noqa: E402
from vajra_kernels.config import TileConfig  # noqa: E402
from vajra_kernels.decode import decode_launches  # noqa: E402
from vajra_kernels.gpu import attention_launches  # noqa: E402
from vajra_kernels.launch import Launch, device_facts  # noqa: E402
from vajra_kernels.operands import Column  # noqa: E402
from vajra_kernels.ragged import ragged_launches  # noqa: E402
from vajra_kernels.sampling import sample_tokens  # noqa: E402

DECODES = [(1, 8192), (1, 131072), *((n, kv) for n in (16, 64, 256) for kv in (1024, 4096, 32768))]
CHUNKS = [(512, 512), (128, 131072), (2048, 10240), *((n, n) for n in (4096, 8192, 32768))]
VOCABULARY, NUM_SAMPLED = 151_936, 256
LONG_PROMPT = 8192
NUM_BLOCKS, WRITTEN = 4096, (64, 8192)
COPY_BYTES, MATRIX = 2**32, 8192
PARTS = ("attention", "memory", "engine", "copies", "serving")
PEERS = ("torch_sdpa", "torch_flex")
DECODE_TILES = [TileConfig(16, n, warps, stages) for n in (32, 64, 128) for warps in (2, 4) for stages in (3, 5, 7)]
CHUNK_TILES = [
    *(TileConfig(128, n, 8, stages) for n in (32, 64, 128) for stages in (3, 5, 6)),
    *(TileConfig(64, n, 4, stages) for n in (32, 64, 128) for stages in (3, 5)),
]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of one shape: ``num_seqs`` of them, each with ``query_len`` new tokens and ``kv_len`` positions."""

    num_seqs: int
    query_len: int
    kv_len: int
    heads: tuple[int, int] = (32, 4)
    head_dim: int = 128
    block_size: int = 64
    window: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one pass reads."""
        positions = self.kv_len if self.window is None else min(self.kv_len, self.window)
        return self.num_seqs * positions * self.heads[1] * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        """Floating-point operations of the causal products."""
        context = self.kv_len - self.query_len
        pairs = self.query_len * context + self.query_len * (self.query_len + 1) // 2
        return self.num_seqs * pairs * self.heads[0] * self.head_dim * 4


SWEPT = [
    *(Shape(64, 1, 8192), Shape(8, 1, 4096), Shape(64, 1, 8192, block_size=16), Shape(1, 8192, 8192)),
    *(Shape(1, 2048, 10240), Shape(1, 8192, 8192, head_dim=64)),
]


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of ``function`` on the GPU, the L2 cache emptied before each run."""
    return float(triton.testing.do_bench(function, warmup=50, rep=300, return_mode="median"))


def make_call(shape: Shape, device: str) -> AttentionCall:
    """Random bf16 operands; every sequence has blocks of its own, in random order."""
    per_seq = -(-shape.kv_len // shape.block_size)
    num_blocks = per_seq * shape.num_seqs
    block_shape = (shape.block_size, shape.heads[1], shape.head_dim)
    k_cache, v_cache = vajra_kernels.allocate_kv_cache(1, num_blocks, block_shape, torch.bfloat16, device)
    k_cache.normal_()
    v_cache.normal_()
    tables = torch.randperm(num_blocks).view(shape.num_seqs, per_seq)
    query_lens, kv_lens = [shape.query_len] * shape.num_seqs, [shape.kv_len] * shape.num_seqs
    metadata = vajra_kernels.build_metadata(query_lens, kv_lens, tables, shape.block_size, device)
    q = torch.randn((metadata.num_query_tokens, shape.heads[0], shape.head_dim), dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)
    scale = shape.head_dim**-0.5
    return AttentionCall(q, k_cache[0], v_cache[0], metadata, scale, shape.window, None, out, None)


def timed(launches: list[Launch]) -> float:
    """Milliseconds of one attention call."""

    def run() -> None:
        for launch in launches:
            launch.run()

    return milliseconds(run)


def device_limits(device: str) -> dict[str, float]:
    """Measured bytes per second of a copy (read and written) and bf16 FLOP per second of a product of random matrices."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source))
    source = target = torch.empty(0)  # releases the memory
    a, b = (torch.randn((MATRIX, MATRIX), dtype=torch.bfloat16, device=device) for _ in range(2))
    product_ms = milliseconds(lambda: a @ b)
    return {"copy_bytes_per_s": 2 * COPY_BYTES / copy_ms * 1e3, "bf16_flop_per_s": 2 * MATRIX**3 / product_ms * 1e3}


def bench_attention(
    shapes: list[Shape], limits: dict[str, float], device: str, peers: Collection[str]
) -> list[dict[str, Any]]:
    """Time, bytes and FLOP rates of every shape with the built-in configuration."""
    records = []
    dense: dict[Shape, dict[str, Any]] = {}
    for shape in shapes:
        call = make_call(shape, device)
        launches = attention_launches(call, device_facts(call.q.device))
        ms = timed(launches)
        attends = next(one for one in launches if one.kernel.__name__ in ("decode_kernel", "ragged_kernel"))
        record = asdict(shape) | {
            "ms": ms,
            "tile": asdict(attends.tile),
            "grid": attends.grid,
            "copy_bandwidth_fraction": shape.kv_bytes / ms * 1e3 / limits["copy_bytes_per_s"],
            "matrix_rate_fraction": shape.flops / ms * 1e3 / limits["bf16_flop_per_s"],
        }
        key = replace(shape, block_size=0)
        if key not in dense:
            dense[key] = dense_peers(call, shape, peers)
        record |= dense[key]
        records.append(record)
        print({k: record[k] for k in ("num_seqs", "query_len", "kv_len", "heads", "block_size", "ms")}, record["tile"])
        print(
            f"   {record['copy_bandwidth_fraction']:.1%} of copy, {record['matrix_rate_fraction']:.1%} of matrix rate"
        )
    return records


def dense_peers(call: AttentionCall, shape: Shape, peers: Collection[str]) -> dict[str, Any]:
    """Milliseconds of torch's own attention on the same heads with K and V dense: SDPA and flex_attention; or why there are none."""
    q = call.q.view(shape.num_seqs, shape.query_len, *call.q.shape[1:]).transpose(1, 2)
    found: dict[str, Any] = {}
    for name, peer in (("torch_sdpa", sdpa_peer), ("torch_flex", flex_peer)):
        if name not in peers:
            continue
        try:
            dense = (shape.num_seqs, shape.heads[1], shape.kv_len, shape.head_dim)
            k, v = (torch.randn(dense, dtype=q.dtype, device=q.device) for _ in range(2))
            found[f"{name}_ms"] = milliseconds(partial(peer(shape, q.device), q, k, v))
        except Exception as problem:
            found[f"{name}_left_out"] = repr(problem)[:200]
    return found


def sdpa_peer(shape: Shape, device: torch.device) -> Callable[..., torch.Tensor]:
    """Scaled dot-product attention of the last queries of a causal sequence."""
    if shape.window is not None:
        raise ValueError("it has no window without a mask of all scores")
    attention = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    if shape.query_len == shape.kv_len:
        return partial(attention, is_causal=True)
    return (
        attention
        if shape.query_len == 1
        else partial(attention, attn_mask=causal_lower_right(shape.query_len, shape.kv_len))
    )


def flex_peer(shape: Shape, device: torch.device) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled for this shape, with its mask of blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # imports a compiler

    context = shape.kv_len - shape.query_len

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        causal = query + context >= key
        return causal if shape.window is None else causal & (query + context - key < shape.window)

    torch.compiler.reset()  # otherwise torch stops compiling after some shapes
    mask = create_block_mask(sees, None, None, shape.query_len, shape.kv_len, device=device)
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=True)


def bench_memory(limits: dict[str, float], device: str) -> list[dict[str, Any]]:
    """Writing K/V, copying blocks and merging partial results, as fractions of copy bandwidth."""
    records = []

    def add(name: str, num_bytes: int, function: Callable[[], object]) -> None:
        ms = milliseconds(function)
        fraction = num_bytes / ms * 1e3 / limits["copy_bytes_per_s"]
        records.append({"kernel": name, "bytes": num_bytes, "ms": ms, "copy_bandwidth_fraction": fraction})
        print(f"{name}: {ms:.4f} ms, {fraction:.1%} of copy")

    k_cache, v_cache = (
        c[0] for c in vajra_kernels.allocate_kv_cache(1, NUM_BLOCKS, (64, 8, 128), torch.bfloat16, device)
    )
    for num_tokens in WRITTEN:
        new = torch.randn((num_tokens, 8, 128), dtype=torch.bfloat16, device=device)
        slots = torch.randperm(NUM_BLOCKS * 64)[:num_tokens].to(device)
        add(
            f"write {num_tokens} tokens",
            4 * new.nbytes,
            partial(vajra_kernels.write_kv, new, new, k_cache, v_cache, slots),
        )
    half = NUM_BLOCKS // 2
    pairs = torch.stack((torch.randperm(half), torch.randperm(half) + half), 1).to(device)
    num_bytes = 2 * half * k_cache[0].nbytes
    add(f"copy {half} blocks", num_bytes, lambda: vajra_kernels.copy_blocks(k_cache, k_cache, pairs))
    parts = torch.randn((4, WRITTEN[-1], 32, 128), dtype=torch.bfloat16, device=device)
    lses = torch.randn((4, WRITTEN[-1], 32), device=device)
    moved = parts.nbytes + parts.nbytes // 4 + lses.nbytes
    add(f"merge 4 parts of {WRITTEN[-1]} tokens", moved, lambda: vajra_kernels.merge_partials(parts, lses))
    vocab_size, rows = VOCABULARY, NUM_SAMPLED
    logits = torch.randn((rows, vocab_size), dtype=torch.bfloat16, device=device)
    seen = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
    for name, top_k, top_p in (("", vocab_size, 1.0), (" top-p", vocab_size, 0.9), (" top-k and top-p", 50, 0.9)):
        parameters = torch.zeros((rows, len(Column)), dtype=torch.float64, device=device)
        parameters[:, Column.TEMPERATURE], parameters[:, Column.REPETITION] = 0.7, 1.0
        parameters[:, Column.TOP_K], parameters[:, Column.TOP_P] = top_k, top_p
        parameters[:, Column.HISTORY], parameters[:, Column.NUMBER] = -1.0, 0.5
        add(f"sample {rows} rows{name}", logits.nbytes, partial(sample_tokens, logits, parameters, seen))
    add(f"sort {rows} rows, for comparison", logits.nbytes, lambda: logits.float().sort(-1))
    return records


def sweep(device: str) -> list[dict[str, Any]]:
    """Times of other tiles than the built-in ones; a tile that does not fit the device is left out with its reason."""
    records = []
    for shape in SWEPT:
        call = make_call(shape, device)
        facts = device_facts(call.q.device)
        for tile in DECODE_TILES if shape.query_len == 1 else CHUNK_TILES:
            record: dict[str, Any] = asdict(shape) | {"tile": asdict(tile)}
            try:
                is_decode = shape.query_len == 1
                launches = decode_launches(call, facts, tile) if is_decode else ragged_launches(call, facts, tile)
                record["ms"] = timed(launches)
            except Exception as problem:
                record["left_out"] = repr(problem)[:200]
            records.append(record)
            print(record)
    return records


def main() -> int:
    """Measure everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    output_arguments(parser, "gpu_bench.json")
    parser.add_argument("--sweep", action="store_true", help="also time other tile shapes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=PEERS,
        metavar="PEER",
        help="attention of torch to compare with: " + ", ".join(PEERS),
    )
    options = parser.parse_args()
    require_gpu("gpu_bench")
    device = "cuda"
    limits = device_limits(device)
    print({name: f"{value:.3g}" for name, value in limits.items()})
    shapes = [
        Shape(n, 1, kv, heads, 128, block) for n, kv in DECODES for heads in ((32, 4), (32, 8)) for block in (16, 64)
    ]
    shapes += [Shape(1, new, kv, (32, 4), 128, block) for new, kv in CHUNKS for block in (16, 64)]
    shapes += [Shape(1, LONG_PROMPT, LONG_PROMPT, (32, 4), dim) for dim in (64, 256)]
    shapes.append(Shape(1, LONG_PROMPT, LONG_PROMPT, window=1024))
    missing = gpu_engine.unavailable()
    sections: dict[str, Callable[[], Any]] = {
        "attention": lambda: bench_attention(shapes, limits, device, options.peers),
        "memory": lambda: bench_memory(limits, device),
        "engine": lambda: missing or gpu_engine.bench_decodes(gpu_engine.DECODES, limits, device),
        "copies": lambda: missing or gpu_engine.bench_copies(gpu_engine.BESIDE_COPIES, gpu_engine.NUM_COPIED, device),
        "serving": lambda: missing or gpu_engine.bench_serving(gpu_engine.SERVED, limits, device),
    }
    sections = {name: section for name, section in sections.items() if name in options.only}
    if options.sweep:
        sections["sweep"] = lambda: sweep(device)
    content: dict[str, Any] = {"machine": machine(), "limits": limits}
    failed = False
    for name, section in sections.items():  # written one by one, so that results survive a later failure
        try:
            content[name] = section()
        except Exception as problem:
            failed = True
            content[name] = {"failed": repr(problem), "trace": traceback.format_exc(limit=-3)}
            print(f"FAILED {name}: {problem!r}")
        write_results(options.output, content)
    print(f"written: {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
