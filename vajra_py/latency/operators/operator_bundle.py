"""Build a bundle of operator times for one model from an engine's operator tables.

Every operator of a step is looked up by its sizes on one GPU. Times that the tables lack follow from rules. Norms,
activations, rotary embedding and embedding take the time of their memory traffic. Attention of a chunk with cached
context takes the time of a causal prefill of both, minus that of a causal prefill of the context. It takes no less than
the chunk alone, and no less than one decode with that context. `Operators.filled` names the dense operators whose times
follow from rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.operators.bundle_files import NO_SKEW, Bundle, Samples
from vajra_py.latency.operators.operator_tables import GemmTimes, OperatorTables, SystemFigures, chosen, column, fastest

Array = npt.NDArray[np.float64]

ACTIVATION_BYTES = 2
LONGEST_STEP = 32768.0
CONTEXTS = (0.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)
"""Numbers of cached tokens before a chunk for which the rule for attention is evaluated."""
MLA_SHAPE = (512, 64, 128, 128, 1536)
"""Ranks and head sizes of the measured latent attention (DeepSeek-V3's)."""
DISTRIBUTIONS = ("power_law_1.2", "power_law_1.01", "balanced", "uniform")


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the model over GPUs."""

    tensor: int = 1
    data: int = 1
    """Number of data-parallel attention ranks that share the experts."""
    expert_parallel: bool = False

    @property
    def experts(self) -> tuple[int, int]:
        """(Tensor-parallel degree, expert-parallel degree) of the experts."""
        ranks = self.tensor * self.data
        return (1, ranks) if self.expert_parallel else (ranks, 1)


@dataclass(frozen=True, slots=True)
class Precision:
    """Precisions of the operators, by the tables' names."""

    gemm: str = "bfloat16"
    kv: str = "bfloat16"
    moe: str | None = None
    """Precision of the experts; None: that of the matrix products."""
    conversion: str = "dynamic"
    """Conversion of the inputs of 8-bit matrix products: `dynamic`, `static` or `fused`."""
    fused_norms: bool = False
    """True if norms are part of the all-reduces before them."""


@dataclass(frozen=True, slots=True)
class Operators:
    """A bundle from operator tables, and the names of operators that were not measured."""

    bundle: Bundle
    filled: frozenset[str]
    """Dense operators whose times follow from a rule."""


def operators(tables: OperatorTables, model: ModelSpec, split: Split, precision: Precision) -> Operators:
    """Return the operator times of a model.

    Raises:
        ConfigError: the tables lack the model's heads, experts, precision or parallelism; the error lists the available
            ones.
    """
    if model.num_heads % split.tensor:
        message = f"does not divide the {model.num_heads} attention heads of {model.name} ({split.tensor})"
        raise ConfigError(Problem("tensor_parallel", message))
    figures, gemm = tables.figures(), GemmTimes(tables, precision.gemm, precision.conversion)
    dense, filled = _dense(model, split, gemm, figures)
    if precision.fused_norms and split.tensor > 1:
        del dense["layernorm"]
        filled -= {"layernorm"}
    attention = _attention(tables, model, split, precision, gemm)
    head = gemm if precision.gemm == "bfloat16" else GemmTimes(tables, "bfloat16")
    vocabulary = model.vocab_size / split.tensor
    lm_head, _ = head.samples(vocabulary, model.hidden_size)
    bundle = Bundle(
        folder=tables.root,
        model=model.name,
        hardware=tables.system,
        gpu=tables.system,
        engine=tables.measured_in,
        variant=f"{precision.gemm}-kv{precision.kv}",
        tensor_parallel=split.tensor,
        dense=dense,
        # Logits have 32 bits and are moved four times: written, scaled, and read for softmax and for sampling.
        per_sequence={"lm_head": lm_head, "sampler": _traffic(figures, 4 * 4 * model.vocab_size)},
        attention=attention,
        experts=_experts(tables, model, split, precision) if model.experts else None,
        skew=NO_SKEW,
        all_reduce=_all_reduce(tables, split.tensor) if split.tensor > 1 else None,
    )
    return Operators(bundle, filled)


def _traffic(figures: SystemFigures, bytes_per_token: float) -> Samples:
    """Return the times of an operator that only moves memory: a kernel's fixed time plus the time to move its bytes."""
    sizes = np.array([1.0, LONGEST_STEP])
    return Samples(sizes, 1e6 * (figures.kernel_latency_s + bytes_per_token * sizes / figures.memory_bandwidth))


def _dense(
    model: ModelSpec, split: Split, gemm: GemmTimes, figures: SystemFigures
) -> tuple[dict[str, Samples], frozenset[str]]:
    hidden, tensor = model.hidden_size, split.tensor
    queries = model.num_heads * model.head_dim / tensor
    keys = max(1.0, model.num_kv_heads / tensor) * model.head_dim
    moved = {
        "embedding": 2 * hidden,
        "final_layernorm": 2 * hidden,
        "layernorm": 4 * hidden,
        "rotary_emb": 2 * (queries + keys),
    }
    matrices: dict[str, tuple[float, float, float]] = {}
    if model.latent is None:
        matrices["qkv_proj"] = (queries + 2 * keys, hidden, 1.0)
        matrices["o_proj"] = (hidden, queries, 1.0)
    width, gates = model.intermediate_size / tensor, model.mlp_matrices - 1
    if model.num_dense_layers:
        matrices["gate_up_proj"] = (gates * width, hidden, 1.0)
        matrices["down_proj"] = (hidden, width, 1.0)
        moved["act_fn"] = (gates + 1) * width
    if model.experts is not None:
        of_experts = model.experts.num_layers / model.num_layers
        matrices["router"] = (model.experts.num_experts, hidden, of_experts)
        shared = model.experts.shared_intermediate_size / tensor
        if shared:
            matrices["shared_gate_up_proj"] = (gates * shared, hidden, of_experts)
            matrices["shared_down_proj"] = (hidden, shared, of_experts)
    dense = {name: _traffic(figures, ACTIVATION_BYTES * size) for name, size in moved.items()}
    filled = set(dense)
    for name, (outputs, inputs, part) in matrices.items():
        samples, beyond = gemm.samples(outputs, inputs)
        dense[name] = Samples(samples.sizes, part * samples.times_us)
        if beyond:
            filled.add(name)
    return dense, frozenset(filled)


def _attention(tables: OperatorTables, model: ModelSpec, split: Split, precision: Precision, gemm: GemmTimes) -> Array:
    """Return rows of (chunk, its context, decodes, their context, microseconds)."""
    first, decodes = _mla(tables, model, split, precision) if model.latent else _gqa(tables, model, split, precision)
    lengths, causal = first
    one_decode = _decode_line(decodes)
    alone = np.array(
        [
            (chunk, context, _behind(lengths, causal, chunk, context, one_decode))
            for chunk, context in product(lengths.tolist(), CONTEXTS)
        ]
    )
    nothing = np.zeros((len(alone), 2))
    first_rows = np.concatenate([alone[:, :2], nothing, alone[:, 2:]], axis=1)
    decode_rows = np.concatenate([np.zeros((len(decodes), 2)), decodes], axis=1)
    # The tables have no calls with both a chunk and decodes: the time of such a call is the sum of the two times.
    both = np.repeat(first_rows, len(decodes), axis=0) + np.tile(decode_rows, (len(alone), 1))
    return np.concatenate([decode_rows, first_rows, both])


def _decode_line(decodes: Array) -> tuple[Array, Array]:
    """Return (contexts, microseconds) of the measurements with the smallest number of decodes."""
    fewest = decodes[decodes[:, 0] == decodes[:, 0].min()]
    order = np.argsort(fewest[:, 1])
    return fewest[order, 1], fewest[order, 2]


def _behind(lengths: Array, causal: Array, chunk: float, context: float, one_decode: tuple[Array, Array]) -> float:
    alone = _causal_us(lengths, causal, chunk)
    if not context:
        return alone
    beyond = _causal_us(lengths, causal, chunk + context) - _causal_us(lengths, causal, context)
    return max(alone, beyond, float(np.interp(context, *one_decode)))


def _causal_us(lengths: Array, causal: Array, tokens: float) -> float:
    """Return the microseconds of a causal prefill without context; above the measured lengths, the time grows with the
    square of the length.
    """
    if tokens > lengths[-1]:
        return float(causal[-1] * (tokens / lengths[-1]) ** 2)
    return float(np.interp(tokens, lengths, causal))


def _gqa(
    tables: OperatorTables, model: ModelSpec, split: Split, precision: Precision
) -> tuple[tuple[Array, Array], Array]:
    """Return (lengths, microseconds) of causal prefills, and rows of (decodes, context, microseconds), on one GPU."""
    heads, kv_heads = model.num_heads // split.tensor, max(1, model.num_kv_heads // split.tensor)
    where = f"model: attention of {tables.system} in {tables.engine}"
    common = ("num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "attn_dtype")
    wanted = {"head_dim": model.head_dim, "kv_cache_dtype": precision.kv, "window_size": 0}
    found = []
    for name in ("context_attention_perf", "generation_attention_perf"):
        table = tables.read("attention", name, (*common, "batch_size", "isl", "step"), optional=("window_size",))
        table = chosen(table, wanted, where)
        # For multi-head attention the tables have either 0 KV heads, or one KV head per attention head.
        kv = np.where(
            column(table, "num_key_value_heads") == 0, column(table, "num_heads"), column(table, "num_key_value_heads")
        )
        mask = kv == kv_heads
        if not mask.any():
            there = ", ".join(str(int(one)) for one in np.unique(kv))
            raise ConfigError(Problem(where, f"has no times for {kv_heads} KV heads on a GPU", f"There are: {there}"))
        table = chosen(table.filter(mask), {"num_heads": heads}, where)
        types = set(table.column("attn_dtype").to_pylist())
        found.append(table if len(types) == 1 else chosen(table, {"attn_dtype": "bfloat16"}, where))
    context, generation = found
    context = chosen(context, {"batch_size": 1, "step": 0}, where)
    lengths, causal = fastest(column(context, "isl"), column(context, "latency"))
    return (lengths, causal), _decode_rows(generation)


def _decode_rows(generation: object) -> Array:
    batch, step, times = (column(generation, name) for name in ("batch_size", "step", "latency"))
    keys, places = np.unique(np.stack([batch, step], axis=1), axis=0, return_inverse=True)
    best = np.full(len(keys), np.inf)
    np.minimum.at(best, places.ravel(), 1e3 * times)
    return np.concatenate([keys, best[:, None]], axis=1)


def _mla(
    tables: OperatorTables, model: ModelSpec, split: Split, precision: Precision
) -> tuple[tuple[Array, Array], Array]:
    """Return the same as `_gqa` for latent attention, which was measured as one module with its projections."""
    latent = model.latent
    assert latent is not None
    shape = (latent.kv_rank, latent.rope_head_dim, latent.nope_head_dim, latent.v_head_dim, latent.q_rank)
    if shape != MLA_SHAPE:
        message = f"has latent attention of another shape than was measured ({model.name})"
        raise ConfigError(Problem("model", message, "Allowed: DeepSeek-V3's: ranks 512 and 1536, heads of 128 + 64"))
    where = f"model: latent attention of {tables.system} in {tables.engine}"
    wanted = {
        "kv_cache_dtype": precision.kv,
        "gemm_type": precision.gemm,
        "num_heads": model.num_heads // split.tensor,
    }
    columns = ("num_heads", "kv_cache_dtype", "gemm_type", "batch_size", "isl", "step")
    context = chosen(
        tables.read("mla", "mla_context_module_perf", columns), wanted | {"batch_size": 1, "step": 0}, where
    )
    generation = chosen(tables.read("mla", "mla_generation_module_perf", columns), wanted, where)
    return fastest(column(context, "isl"), column(context, "latency")), _decode_rows(generation)


def _experts(tables: OperatorTables, model: ModelSpec, split: Split, precision: Precision) -> Array:
    """Return rows of (tokens of all ranks, 1, microseconds) for one layer's routed experts on one GPU.

    The 1 takes the place of the number of activated experts, which the tables do not have.
    """
    experts = model.experts
    assert experts is not None
    tensor, ranks = split.experts
    columns = ("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    table = tables.read("moe", "moe_perf", (*columns, "moe_tp_size", "moe_ep_size", "distribution"))
    where = f"model: experts of {tables.system} in {tables.engine}"
    wanted = {
        "moe_dtype": precision.moe or precision.gemm,
        "hidden_size": model.hidden_size,
        "inter_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "topk": experts.experts_per_token,
        "moe_tp_size": tensor,
        "moe_ep_size": ranks,
    }
    table = chosen(table, wanted, where)
    there = set(table.column("distribution").to_pylist())
    distribution = next((name for name in DISTRIBUTIONS if name in there), sorted(there)[0])
    table = chosen(table, {"distribution": distribution}, where)
    tokens, times = fastest(column(table, "num_tokens"), column(table, "latency"))
    return np.stack([tokens, np.ones_like(tokens), times], axis=1)


def _all_reduce(tables: OperatorTables, ranks: int) -> Samples:
    """Return the microseconds of an all-reduce over the GPUs, by bytes: those of the engine's own kernels in a CUDA
    graph if measured, else those of NCCL.
    """
    if tables.has("comm", "custom_allreduce_perf"):
        table = tables.read("comm", "custom_allreduce_perf", ("num_gpus", "message_size", "kernel_source"))
        table = chosen(table, {"num_gpus": ranks}, f"tensor_parallel: {tables.system}")
        element = 1.0
    else:
        table = tables.read("comm", "nccl_perf", ("op_name", "nccl_dtype", "num_gpus", "message_size"), "nccl")
        wanted = {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": ranks}
        table, element = chosen(table, wanted, f"tensor_parallel: {tables.system}"), 2.0
    sizes, times = fastest(column(table, "message_size"), column(table, "latency"))
    return Samples(element * sizes, times)
