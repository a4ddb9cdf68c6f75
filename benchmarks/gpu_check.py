"""Check the kernels on this GPU: every dtype and feature against float64, then graphs, swap, sampling and large caches, then
the tokens of the whole engine against transformers' model, with captured graphs, look-ahead, swapping and sampling.

Writes one JSON file with the chip, the versions, the date, the worst error of every check and the log's lines on graphs.
Exit code 0 when all pass, 1 when one fails, 2 when there is no GPU. `--only WORD` leaves out checks without it in their name.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_facts import machine, output_arguments, require_gpu, use_checkout, write_results

use_checkout()

import gpu_engine  # noqa: E402
import gpu_tokens  # noqa: E402
import torch  # noqa: E402

import vajra_kernels  # noqa: E402
from vajra_kernels import checks, layer_checks, reference  # noqa: E402
from vajra_kernels.sampling import sample_tokens  # noqa: E402

FLOAT32_TOLERANCE = 3e-5  # the GPU's exponential is approximate to 2 units in the last place
LARGE_ELEMENTS = 2**31
DTYPES = tuple(checks.TOLERANCES)
VOCABULARY, SAMPLED = 128_256, 4
KV_HEADS = (8, 32)  # of 128: rows of 32 heads are written by two programs
WIDTHS = (4096, 14336)
Outcome = tuple[float, float] | tuple[float, float, str]  # (worst error, tolerance, additional information)


def on_device(inputs: checks.AttentionInputs, device: str) -> checks.AttentionInputs:
    """The inputs moved, each cache in the memory order that it had."""

    def moved(cache: torch.Tensor) -> torch.Tensor:
        if cache.is_contiguous():
            return cache.to(device)
        return cache.transpose(1, 2).contiguous().to(device).transpose(1, 2)

    old = inputs.metadata
    metadata = replace(
        old,
        query_start=old.query_start.to(device),
        kv_lens=old.kv_lens.to(device),
        block_table=old.block_table.to(device),
        slot_mapping=old.slot_mapping.to(device),
        memo=type(old.memo)(old.memo.cpu_plans),
    )
    return checks.AttentionInputs(inputs.q.to(device), moved(inputs.k_cache), moved(inputs.v_cache), metadata)


def check_attention(case: checks.AttentionCase, generator: torch.Generator, device: str) -> Outcome:
    """One case through the public function, against float64 on the host."""
    inputs = checks.make_inputs(case, generator, "cpu")
    wanted = checks.expected(case, inputs)
    moved = on_device(inputs, device)
    out = torch.full((*inputs.q.shape[:2], case.dims[1]), float("nan"), dtype=case.dtype, device=device)
    result, lse = vajra_kernels.paged_attention(
        moved.q,
        moved.k_cache,
        moved.v_cache,
        moved.metadata,
        window=case.window,
        softcap=case.softcap,
        return_lse=True,
        out=out,
    )
    error, lse_error = checks.worst_errors(result.cpu(), lse.cpu(), wanted)
    tolerance = FLOAT32_TOLERANCE if case.dtype == torch.float32 else checks.TOLERANCES[case.dtype]
    return (error, tolerance) if lse_error <= max(tolerance, 1e-4) else (lse_error, 1e-4)


def check_write(heads: int, dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """K/V of 300 tokens into shuffled slots, some of them nowhere; exact."""
    k_cache, v_cache = (cache[0] for cache in vajra_kernels.allocate_kv_cache(1, 40, (16, heads, 128), dtype, device))
    fused = torch.randn((300, 3 * heads, 128), generator=generator).to(dtype)
    slots = torch.randperm(640, generator=generator)[:300]
    slots[::7] = -1
    moved = fused.to(device)
    _, key, value = moved.chunk(3, 1)
    vajra_kernels.write_kv(key, value, k_cache, v_cache, slots.to(device))
    error = 0.0
    for cache, new in zip((k_cache, v_cache), fused.chunk(3, 1)[1:], strict=True):
        wanted = torch.zeros(cache.shape, dtype=dtype)
        reference.write_kv_reference(new, wanted, slots)
        error = max(error, float((cache.cpu().float() - wanted.float()).abs().max()))
    return error, 0.0


def check_layer(dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """Norms, rotary embedding with its cache write, and gated activations, at widths of an 8B model and others."""
    random = (dtype, generator, device)
    errors = [
        layer_checks.norm_error(k, (33, w), *random) for k in ("norm", "add", "add normed") for w in (200, WIDTHS[0])
    ]
    for heads, dim, rotary in (((32, 8), 128, 128), ((6, 2), 48, 24), ((33, 33), 64, 64)):
        turned = [layer_checks.RotationCase(heads, dim, rotary, has_norm) for has_norm in (False, True)]
        errors += [layer_checks.rotation_error(case, *random) for case in turned]
    errors += [layer_checks.gated_error(act, (33, WIDTHS[1]), *random) for act in ("silu", "gelu_tanh")]
    return max(errors), max(layer_checks.LAYER_TOLERANCES[dtype], FLOAT32_TOLERANCE)


def check_merge(dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """Partial results of which some are empty and hold NaN."""
    parts = torch.randn((5, 70, 12, 96), generator=generator).to(dtype)
    lses = torch.randn((5, 70, 12), generator=generator) * 10
    empty = torch.rand(lses.shape, generator=generator) < 0.3
    lses[empty], parts[empty] = float("-inf"), float("nan")
    wanted = reference.merge_reference(parts.double(), lses.double())
    out, lse = vajra_kernels.merge_partials(parts.to(device), lses.to(device))
    return max(checks.worst_errors(out.cpu(), lse.cpu(), wanted)), max(checks.TOLERANCES[dtype], 1e-5)


def check_copies(dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """Blocks between two caches of the GPU, then to the host and back; exact."""
    source, _ = vajra_kernels.allocate_kv_cache(3, 30, (16, 2, 80), dtype, device)
    source.copy_(torch.randn(source.shape, generator=generator))
    before = source.clone()
    target = torch.zeros_like(source)
    pairs = torch.stack((torch.randperm(30, generator=generator), torch.arange(30)), 1)
    vajra_kernels.copy_blocks(source, target, pairs)
    error = float((target.float() - before[:, pairs[:, 0].to(device)].float()).abs().max())
    swap = vajra_kernels.SwapSpace([source], 30)
    out = [(4, 0), (5, 1), (6, 2), (20, 9)]
    swap.to_host(out)
    source[:, [block for block, _ in out]] = 0
    swap.to_device(out)
    return max(error, float((source.float() - before.float()).abs().max())), 0.0


def check_sampling(dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """Tokens of a large vocabulary with every sampling parameter, against sorting in float64: how many differ."""
    given = checks.sampling_inputs(VOCABULARY, dtype, generator, SAMPLED)
    tokens = sample_tokens(*(tensor.to(device) for tensor in given))
    return float(len(checks.sampling_mismatches(tokens.cpu(), *given))), 0.0


def check_graph(dtype: torch.dtype, generator: torch.Generator, device: str) -> Outcome:
    """A decode captured in a CUDA graph with large bounds and short sequences, replayed with others and padding rows."""
    longest = checks.AttentionCase((8, 2), (128, 128), 64, ((1, 900),) * 6, dtype)
    now = replace(longest, lens=((1, 900), (1, 33), (1, 0), (1, 512), (1, 1), (1, 0)))
    cpu = checks.make_inputs(now, generator, "cpu")
    inputs = on_device(cpu, device)
    table = torch.zeros((6, 15), dtype=torch.int32, device=device)
    table[:, : inputs.metadata.block_table.shape[1]] = inputs.metadata.block_table
    lens = torch.ones(6, dtype=torch.int32, device=device)
    metadata = replace(
        inputs.metadata,
        kv_lens=lens,
        block_table=torch.zeros_like(table),
        max_kv_len=900,
        num_kv_tokens=5400,
        memo=type(cpu.metadata.memo)(),
    )
    out = torch.full(inputs.q.shape, float("nan"), dtype=dtype, device=device)

    def step() -> None:
        metadata.memo.decode_plans.clear()  # so that the plan is captured too, and recomputed in each replay
        vajra_kernels.paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, metadata, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    metadata.kv_lens.copy_(inputs.metadata.kv_lens)
    metadata.block_table.copy_(table)
    out.fill_(float("nan"))
    graph.replay()
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else checks.TOLERANCES[dtype]
    return checks.worst_errors(out.cpu(), None, checks.expected(now, cpu))[0], tolerance


def check_large_cache(generator: torch.Generator, device: str) -> Outcome:
    """Blocks beyond 2^31 elements of a cache: offsets must be 64-bit."""
    num_blocks = LARGE_ELEMENTS // (64 * 8 * 128) + 64
    block_shape = (64, 8, 128)
    k_cache, v_cache = (
        c[0] for c in vajra_kernels.allocate_kv_cache(1, num_blocks, block_shape, torch.bfloat16, device)
    )
    blocks = [num_blocks - 1, 3, num_blocks - 7]
    metadata = vajra_kernels.build_metadata([150], [150], [blocks], 64, device)
    drawn = [torch.randn((150, 8, 128), generator=generator).to(torch.bfloat16) for _ in range(3)]
    q, key, value = (tensor.to(device) for tensor in drawn)
    vajra_kernels.write_kv(key, value, k_cache, v_cache, metadata.slot_mapping)
    out = vajra_kernels.paged_attention(q, k_cache, v_cache, metadata)
    dense_q, dense_k, dense_v = (tensor.double().transpose(0, 1)[None] for tensor in drawn)
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = attention(dense_q, dense_k, dense_v, is_causal=True)[0].transpose(0, 1)
    return checks.worst_errors(out.cpu(), None, (wanted, wanted))[0], checks.TOLERANCES[torch.bfloat16]


def all_checks(generator: torch.Generator, device: str) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """(name, check) pairs, small ones first."""
    for case in checks.gpu_cases():
        yield f"attention {case.label}", partial(check_attention, case, generator, device)
    per_dtype: dict[str, Callable[..., Outcome]] = {
        **{f"write {heads} heads": partial(check_write, heads) for heads in KV_HEADS},
        "layer": check_layer,
        "merge": check_merge,
        "copy": check_copies,
        "graph": check_graph,
        "sampling": check_sampling,
    }
    for name, check in per_dtype.items():
        for dtype in DTYPES:
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            yield label, partial(check, dtype, generator, device)
    yield "large cache bfloat16", partial(check_large_cache, generator, device)
    missing = gpu_engine.unavailable()
    if missing is not None:
        print(f"tokens and warm-up of the engine: {missing}")
        return
    for one in gpu_tokens.cases():
        yield one.label, partial(gpu_tokens.check_tokens, one, device)
    yield "kernels are compiled before the first step", partial(gpu_engine.check_warm_up, device)


def run(seed: int, device: str, only: str = "", part: tuple[int, int] = (1, 1)) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every check whose name has the word, or of one part of them; an exception is a failure with its text."""
    generator = torch.Generator()
    number, of = part
    chosen = [(name, check) for name, check in all_checks(generator, device) if only in name]
    for name, check in chosen[number - 1 :: of]:
        generator.manual_seed(seed)  # the inputs of a check do not depend on those that ran before it
        record: dict[str, Any] = {"check": name}
        start = time.perf_counter()
        try:
            error, tolerance, *known = check()
            record |= {"passed": error <= tolerance, "error": error, "tolerance": tolerance}
            record |= {"known": known[0]} if known else {}
        except Exception as problem:
            record |= {"passed": False, "exception": repr(problem), "trace": traceback.format_exc(limit=-3)}
        record["seconds"] = round(time.perf_counter() - start, 2)
        if not record["passed"]:
            print(f"FAILED {record}", flush=True)
        yield record


def part_of(text: str) -> tuple[int, int]:
    """Read `2/6`: the second of six parts."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part: 2/6 is the second of six")
    return int(number), int(of)


def main() -> int:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    output_arguments(parser, "gpu_check.json")
    parser.add_argument("--only", default="", metavar="WORD", help="only checks with this in their name")
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="N/M", help="every Mth of them, from the Nth on"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    options = parser.parse_args()
    require_gpu("gpu_check")
    results: list[dict[str, Any]] = []
    content = {"machine": machine(), "seed": options.seed, "checks": results}
    for record in run(
        options.seed, "cuda", options.only, options.part
    ):  # written one by one: a run that is stopped keeps them
        results.append(record)
        write_results(options.output, content)
    if not results:
        parser.error(f"no check has {options.only!r} in its name")
    num_failed = sum(not record["passed"] for record in results)
    print(f"written: {options.output}")
    print(f"{len(results) - num_failed} of {len(results)} checks passed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
