"""Predict steps from operator times that were measured on the same GPU and model, inside an engine.

A step is the sum of its operators: dense layers by the tokens that the engine computes (those of decode batches padded to the sizes of
its CUDA graphs), attention by chunk, contexts and decodes, experts by tokens and experts that they reach, the head by sequences,
all-reduces by a model of the link, and the host's overhead. Tables, rules at their rim and figures: docs/latency-models.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose, sqrt

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchShape
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.latency.attention_grid import AttentionGrid
from vajra_py.latency.bundle_files import ONCE_A_STEP, TWICE_A_LAYER, Bundle, SkewSample
from vajra_py.latency.deployment import Deployment, Parallelism
from vajra_py.latency.devices import DeviceSpec
from vajra_py.latency.expert_times import ExpertTimes, Routing
from vajra_py.latency.host_overhead import HostOverhead
from vajra_py.latency.model_spec import DTYPE_BYTES, ModelSpec
from vajra_py.latency.roofline import RooflineModel

CAPTURE_LIMIT = 512
"""Largest batch for which vLLM captures a CUDA graph, in tokens."""
SKEW_WINDOW = 0.2
"""Measured batches count towards the skew of one variation when theirs is within this."""
FEW_STEPS = 48
"""Up to here plain numbers are faster than arrays."""

SCALES = ("dense", "prefill_attention", "decode_attention", "experts", "head", "all_reduce")
"""Parts of a step that a calibration may scale."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the GPUs of one replica."""

    bytes_per_s: float
    """One way, as collectives reach it."""
    latency_s: float
    """Of one collective that carries nothing."""


@dataclass(frozen=True, slots=True)
class BundleOptions:
    """What the tables do not say."""

    link: Link | None = None
    """Needed with more than one GPU."""
    host: HostOverhead = HostOverhead()
    context_variation: float = 0.0
    """Standard deviation of the contexts of a batch's decodes over their mean."""
    cuda_graphs: bool = True
    capture_limit: int = CAPTURE_LIMIT
    reach: float = 4.0
    """How many times the largest measured size is still answered."""
    data_parallel: int = 1
    """Data-parallel ranks that step together and share the experts (vLLM's data and expert parallelism); the replica is all of them."""
    routing: Routing = Routing()
    scales: dict[str, float] = field(default_factory=dict)
    """Factors on the parts of a step, by name of `SCALES`; a part that is not named has 1."""
    fallback: RooflineModel | None = None
    """Answers where the tables do not reach; None: such a step is an error."""


def capture_sizes(limit: int) -> tuple[int, ...]:
    """Batch sizes for which vLLM captures CUDA graphs: 1, 2, 4, then every 8 up to 256 and every 16 up to `limit`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)]
    return tuple(size for size in sizes if size <= limit)


def skew_ratio(samples: Sequence[SkewSample], variation: float, counts: Sequence[float], *, mixed: bool) -> list[float]:
    """How much longer attention takes for decode contexts of this variation than for equal ones, by number of decodes.

    The median of the measured batches of that number whose variation is near; numbers that were not measured take their neighbours'
    mean. No batches: 1.
    """
    by_count: dict[float, list[float]] = {}
    for one in samples:
        if (one.prefill_chunk > 0) == mixed and abs(one.variation - variation) <= SKEW_WINDOW:
            by_count.setdefault(one.num_decodes, []).append(one.ratio)
    if not by_count or variation <= 0:
        return [1.0] * len(counts)
    known = sorted(by_count)
    medians = [max(1.0, float(np.median(by_count[count]))) for count in known]
    return [1.0 if count <= 1 else float(np.interp(count, known, medians)) for count in counts]


class ProfileBundleModel:
    """A `LatencyModel` of one replica from a profile bundle; also answers `breakdown_s` and runs of decodes.

    Raises:
        ConfigError: several GPUs without a link, an unknown scale, or a bundle of another model than `model`.
    """

    num_stages = 1

    def __init__(
        self, bundle: Bundle, model: ModelSpec, options: BundleOptions | None = None, device: DeviceSpec | None = None
    ) -> None:
        options = options or BundleOptions()
        _check(bundle, model, options)
        self.bundle = bundle
        self.model = model
        self.options = options
        self.device = device
        self._scale = {name: options.scales.get(name, 1.0) for name in SCALES}
        self._attention = AttentionGrid(bundle.attention)
        self._experts = None if bundle.experts is None else ExpertTimes(bundle.experts, model, options.routing)
        limit = options.capture_limit if options.cuda_graphs else 0
        self._captured = capture_sizes(limit)
        self._ranks = options.data_parallel
        counts = range(1025)
        self._decode_skew = skew_ratio(bundle.skew, options.context_variation, counts, mixed=False)
        self._mixed_skew = skew_ratio(bundle.skew, options.context_variation, counts, mixed=True)
        self._by_tokens: dict[tuple[int, int], float] = {}
        """Dense layers, experts, collectives: by tokens of one rank and of all."""
        self._by_requests: dict[int, float] = {}
        """Head, by sequences."""
        self._largest_tokens = float(bundle.dense["qkv_proj"].sizes[-1])

    @property
    def source(self) -> str:
        """Where the step times come from, in a few words."""
        degree = f", TP {self.bundle.tensor_parallel}" if self.bundle.tensor_parallel > 1 else ""
        return f"operators measured on {self.bundle.gpu} inside {self.bundle.engine} ({self.bundle.model}{degree})"

    def batch_time_s(self, shape: BatchShape) -> float:
        """Seconds of the step; 0 for an empty batch.

        Raises:
            ExecutorError: a size is beyond the reach of the tables, and there is no fallback.
        """
        num_decodes, decode_context, num_prefills, prefill_tokens = shape[:4]
        if not prefill_tokens and not shape.swap_bytes:
            if not num_decodes:
                return 0.0
            fixed, scale = self._decode_parts(num_decodes)
            row, mean = self._attention.decodes(self._per_rank(num_decodes)), decode_context / num_decodes
            if self._covers_decodes(num_decodes, mean):
                return fixed + scale * row.at(mean)
            return self._beyond(shape)
        if not self.covers(shape):
            return self._beyond(shape)
        return self.options.host.step_s(sum(self._parts(shape).values()), shape.num_requests)

    def stage_time_s(self, shape: BatchShape) -> float:
        """Seconds of the step: there is one stage."""
        return self.batch_time_s(shape)

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """Seconds of each step of a run of decodes; see `PredictsDecodeRuns`."""
        last = first_context_tokens + num_decodes * (num_steps - 1)
        if not num_decodes or not self._covers_decodes(num_decodes, last / num_decodes):
            contexts = range(first_context_tokens, last + 1, num_decodes) if num_decodes else [0] * num_steps
            return [self.batch_time_s(BatchShape(num_decodes, context)) for context in contexts]
        fixed, scale = self._decode_parts(num_decodes)
        row = self._attention.decodes(self._per_rank(num_decodes))
        if num_steps <= FEW_STEPS:
            contexts = range(first_context_tokens, last + 1, num_decodes)
            return [fixed + scale * row.at(context / num_decodes) for context in contexts]
        means = np.arange(first_context_tokens, last + 1, num_decodes, dtype=np.float64) / num_decodes
        times: npt.NDArray[np.float64] = fixed + scale * row.at_each(means)
        return times

    def breakdown_s(self, shape: BatchShape) -> dict[str, float]:
        """Seconds of a step by what they are spent on; they add up to `batch_time_s` but for rounding."""
        if not shape.num_tokens:
            return {"swap": self.batch_time_s(shape)}
        if not self.covers(shape):
            return {"fallback": self._beyond(shape)}
        parts = self._parts(shape)
        gpu = sum(parts.values())
        return {**parts, "host": self.options.host.step_s(gpu, shape.num_requests) - gpu}

    def covers(self, shape: BatchShape) -> bool:
        """Whether every size of the step is within `reach` times the largest that was measured."""
        reach, largest = self.options.reach, self._attention.largest
        mean = shape.decode_context_tokens / max(1, shape.num_decodes)
        prefill = shape.prefill_context_tokens / max(1, shape.num_prefills)
        return (
            shape.num_tokens <= reach * self._ranks * self._largest_tokens
            and prefill <= reach * largest["kv_prefill"]
            and self._covers_decodes(shape.num_decodes, mean)
        )

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """KV blocks that the replica's GPUs hold beside the weights.

        Raises:
            ConfigError: no device is known.
        """
        if self.device is None:
            message = "cannot be worked out: nothing says how much memory the GPU has"
            raise ConfigError(Problem("replica.memory.num_blocks", message, "Give it, or name a device"))
        split = Parallelism(tensor=self.bundle.tensor_parallel)
        return self._ranks * Deployment(self.model, self.device, split).kv_blocks(block_size, memory_fraction)

    # Parts

    def _beyond(self, shape: BatchShape) -> float:
        if self.options.fallback is not None:
            return self.options.fallback.batch_time_s(shape)
        largest = {name: int(size) for name, size in self._attention.largest.items()}
        raise ExecutorError(
            f"profile_bundle: {self.bundle.folder} does not reach a step of {shape.num_decodes} decodes with a mean context of "
            f"{shape.decode_context_tokens // max(1, shape.num_decodes)} and {shape.prefill_tokens} prompt tokens. "
            f"Measured up to {largest}, {int(self._largest_tokens)} tokens a step; answered up to {self.options.reach:g} times "
            "that (`reach`), or by the roofline with `fallback: roofline`."
        )

    def _covers_decodes(self, num_decodes: int, mean_context: float) -> bool:
        reach, largest = self.options.reach, self._attention.largest
        return (
            num_decodes <= reach * self._ranks * largest["n_decode"] and mean_context <= reach * largest["kv_decode"]
        )

    def _per_rank(self, num_decodes: int) -> int:
        """Decodes of the fullest data-parallel rank."""
        return -(-num_decodes // self._ranks)

    def _decode_parts(self, num_decodes: int) -> tuple[float, float]:
        """(seconds that do not depend on the context, seconds per microsecond of one layer's attention)."""
        fixed = self._by_requests.get(-num_decodes)
        rank = self._per_rank(num_decodes)
        skew = self._decode_skew[min(rank, len(self._decode_skew) - 1)]
        scale = 1e-6 * self.model.num_layers * skew * self._scale["decode_attention"]
        if fixed is None:
            host = self.options.host
            fixed = self._tokens_s(rank, num_decodes) + self._head_s(rank)
            fixed = host.step_s(fixed, num_decodes) if not host.asynchronous else fixed + host.exposed_s
            self._by_requests[-num_decodes] = fixed
        return fixed, scale

    def _parts(self, shape: BatchShape) -> dict[str, float]:
        """Seconds of the GPU's work, by part."""
        if shape.num_merged_tokens:
            raise ExecutorError(
                "profile_bundle: the tables have no times for attention merged over KV-parallel groups. Allowed: kv_parallel 1."
            )
        decodes, decode_context, prefills, tokens = shape[:4]
        rank_decodes = self._per_rank(decodes)
        rank_tokens = tokens if self._ranks == 1 or not prefills else tokens * (-(-prefills // self._ranks)) / prefills
        parts = self._token_parts(rank_decodes + round(rank_tokens), decodes + tokens)
        parts["head"] = self._head_s(min(rank_decodes + -(-prefills // self._ranks), decodes + prefills))
        mean = decode_context / decodes if decodes else 0.0
        if tokens:
            chunk, context = _one_chunk(rank_tokens, shape.prefill_attention_pairs * rank_tokens / tokens)
            alone, both = self._chunk_us(chunk, context, rank_decodes, mean)
            per_us = 1e-6 * self.model.num_layers
            parts["prefill_attention"] = per_us * alone * self._scale["prefill_attention"]
            if decodes:
                skew = self._mixed_skew[min(rank_decodes, len(self._mixed_skew) - 1)]
                parts["decode_attention"] = per_us * max(0.0, both * skew - alone) * self._scale["decode_attention"]
        elif decodes:
            _, scale = self._decode_parts(decodes)
            parts["decode_attention"] = scale * self._attention.decodes(rank_decodes).at(mean)
        if shape.swap_bytes:
            if self.device is None:
                raise ExecutorError("profile_bundle: nothing says how fast KV blocks are swapped. Name a device.")
            parts["swap"] = shape.swap_bytes / (self.device.host_link_bandwidth * self.bundle.tensor_parallel)
        return parts

    def _chunk_us(self, chunk: float, context: float, decodes: int, mean: float) -> tuple[float, float]:
        """Attention of one layer in microseconds: (the chunk alone, the chunk beside the decodes)."""
        largest = self._attention.largest["prefill_chunk"]
        if chunk > largest:
            # Longer than any that was measured: as many equal chunks, each behind what was computed before.
            number = -(-int(chunk) // int(largest))
            part, middle = chunk / number, context + (chunk - chunk / number) / 2.0
            alone = number * self._attention.prefill_us(part, middle)
            if not decodes:
                return alone, alone
            beside = self._attention.mixed(decodes).at(part, middle, mean) - self._attention.prefill_us(part, middle)
            return alone, alone + max(0.0, beside)
        alone = self._attention.prefill_us(chunk, context)
        return alone, alone if not decodes else max(alone, self._attention.mixed(decodes).at(chunk, context, mean))

    def _tokens_s(self, rank_tokens: int, all_tokens: int) -> float:
        """Everything but attention and head, of so many tokens on the fullest rank and on all of them."""
        key = (rank_tokens, all_tokens)
        found = self._by_tokens.get(key)
        if found is None:
            found = self._by_tokens[key] = sum(self._token_parts(rank_tokens, all_tokens).values())
        return found

    def _token_parts(self, rank_tokens: int, all_tokens: int) -> dict[str, float]:
        padded = self._padded(rank_tokens)
        layers = self.model.num_layers
        dense = 0.0
        for name, samples in self.bundle.dense.items():
            times = 1 if name in ONCE_A_STEP else 2 * layers if name in TWICE_A_LAYER else layers
            dense += times * interpolated(samples.sizes, samples.times_us, padded)
        parts = {"dense": 1e-6 * dense * self._scale["dense"]}
        if self._experts is not None:
            tokens = padded * self._ranks if self._ranks > 1 else padded
            parts["experts"] = 1e-6 * self._experts.num_layers * self._experts.layer_us(tokens) * self._scale["experts"]
        exchanged = self._exchange_s(padded)
        if exchanged:
            parts["all_reduce"] = exchanged * self._scale["all_reduce"]
        return parts

    def _exchange_s(self, tokens: int) -> float:
        """Collectives of a step: two sums a layer over the tensor-parallel ranks, and gathering tokens for shared experts."""
        link, tensor, ranks = self.options.link, self.bundle.tensor_parallel, self._ranks
        if link is None or (tensor == 1 and ranks == 1 and self.options.routing.ranks == 1):
            return 0.0
        state = self.model.hidden_size * (2 if self.model.dtype == "fp8" else DTYPE_BYTES[self.model.dtype])
        seconds = 0.0
        if tensor > 1:
            # After attention and after the feed-forward part of every layer, and once for the embedding.
            number = 2 * self.model.num_layers + 1
            ring = 2 * (tensor - 1) / tensor * tokens * state / link.bytes_per_s
            seconds += number * (link.latency_s + ring)
        if ranks > 1 and self._experts is not None:
            # An all-gather before the experts and a reduce-scatter behind them, over the tokens of all ranks.
            moved = (ranks - 1) / ranks * tokens * ranks * state / link.bytes_per_s
            seconds += 2 * self._experts.num_layers * (link.latency_s + moved)
        return seconds

    def _head_s(self, sequences: int) -> float:
        found = self._by_requests.get(sequences)
        if found is None:
            times = self.bundle.per_sequence.values()
            found = sum(interpolated(one.sizes, one.times_us, max(1, sequences)) for one in times)
            found = self._by_requests[sequences] = 1e-6 * found * self._scale["head"]
        return found

    def _padded(self, tokens: int) -> int:
        """Tokens that are computed for so many that are asked for."""
        captured = self._captured
        if not captured or tokens > captured[-1]:
            return tokens
        return captured[bisect_left(captured, tokens)]


def interpolated(sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64], size: float) -> float:
    """The time of one size: linear between samples; above them along the line from half the largest size to it."""
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, times))
    middle = int(np.searchsorted(sizes, sizes[-1] / 2.0))
    if middle == len(sizes) - 1:
        return float(times[-1] * size / sizes[-1])
    slope = max(0.0, (times[-1] - times[middle]) / (sizes[-1] - sizes[middle]))
    return float(times[-1] + slope * (size - sizes[-1]))


def _one_chunk(tokens: float, pairs: float) -> tuple[float, float]:
    """The chunk and its context with as many query-key pairs as a step's chunks have together.

    It has all their tokens where they have context enough; short chunks side by side have the pairs of one shorter chunk.
    """
    context = pairs / tokens - (tokens + 1.0) / 2.0
    if context >= 0.0:
        return tokens, context
    return (sqrt(8.0 * pairs + 1.0) - 1.0) / 2.0, 0.0


def _check(bundle: Bundle, model: ModelSpec, options: BundleOptions) -> None:
    problems = []
    several = bundle.tensor_parallel * options.data_parallel
    if several > 1 and options.link is None:
        message = f"is needed for the collectives of {several} GPUs"
        problems.append(Problem("link", message, "Name a device, or give link_bandwidth_gb_s and link_latency_us"))
    unknown = [name for name in options.scales if name not in SCALES]
    if unknown:
        problems.append(Problem("scales", f"are not known ({', '.join(unknown)})", f"Allowed: {', '.join(SCALES)}"))
    if (bundle.experts is not None) != (model.experts is not None):
        has = "has" if bundle.experts is not None else "has no"
        message = f"{bundle.folder} {has} times of experts, which does not fit the model {model.name}"
        problems.append(Problem("model", message))
    if options.data_parallel > 1 and model.experts is None:
        message = f"ranks share experts, and {model.name} has none (got {options.data_parallel})"
        problems.append(Problem("data_parallel", message, "Allowed: 1; simulate replicas instead (num_replicas)"))
    if problems:
        raise ConfigError(problems)
