"""Predict steps from operator times that were measured on the same GPU and model, inside an engine.

A step is the sum of its operators: dense layers by computed tokens (decode batches are padded to the sizes of CUDA
graphs), attention by chunk, contexts and decodes, experts by tokens and activated experts, the head by sequences,
all-reduces by bytes (measured, or by a model of the link), and the host's overhead. docs/reference/latency-models.md
describes tables, extrapolation and values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures, ModelDescription, Origin
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.latency.hardware.deployment import Deployment, Parallelism
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.host_overhead import CAPTURE_LIMIT, HostOverhead
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.models.roofline import RooflineModel
from vajra_py.latency.operators.attention_grid import AttentionGrid, DecodeRow
from vajra_py.latency.operators.bundle_files import MLP_LAYERS, Array, Bundle
from vajra_py.latency.operators.calibration_file import Calibration
from vajra_py.latency.operators.collectives import Collectives, Link
from vajra_py.latency.operators.dense_times import DenseTimes, interpolated, summed
from vajra_py.latency.operators.expert_times import ExpertTimes, Routing
from vajra_py.latency.operators.flash_decoding import DecodeKernel, UnequalContexts, fitted_peak_share
from vajra_py.latency.operators.measured_skew import skew_factors

FEW_STEPS = 48
"""Number of steps up to which Python numbers are faster than numpy arrays."""

SCALES = ("dense", "decode_attention", "mixed_attention", "experts", "head", "all_reduce")
"""Parts of a step that a calibration may scale; `mixed_attention` is the attention of steps with prompts."""


NO_OVERHEAD = HostOverhead()
UNIFORM = Routing()


@dataclass(frozen=True, slots=True)
class BundleOptions:
    """Settings of a bundle's model other than its tables."""

    link: Link | None = None
    """Link between the GPUs; required for the collectives of several GPUs, except for measured all-reduces."""
    host: HostOverhead = NO_OVERHEAD
    context_variation: float = 0.0
    """Standard deviation of the contexts of a batch's decodes divided by their mean."""
    cuda_graphs: bool = True
    capture_limit: int = CAPTURE_LIMIT
    reach: float = 4.0
    """Largest size that can be predicted, as a multiple of the largest measured size."""
    data_parallel: int = 1
    """Number of data-parallel ranks in the replica, which step together and share the experts (as in vLLM)."""
    routing: Routing = UNIFORM
    scales: dict[str, float] = field(default_factory=dict)
    """Factors by which the times of parts of a step are multiplied, by name in `SCALES`; the default is 1."""
    fallback: RooflineModel | None = None
    """Model for steps beyond the reach of the tables; None: such a step is an error."""
    calibration: Calibration | None = None
    """Calibration that `scales` and `host` come from."""


def capture_sizes(limit: int) -> tuple[int, ...]:
    """Return batch sizes of vLLM's CUDA graphs: 1, 2, 4, then every 8 up to 256 and every 16 up to `limit`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)]
    return tuple(size for size in sizes if size <= limit)


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Precomputed terms of steps with a fixed number of decodes and nothing else."""

    fixed_s: float
    least_s: float
    """Lower bound of the step's time: the host's time if it overlaps with the GPU's time, else 0."""
    per_us_s: float
    """Factor from microseconds of one layer's attention to seconds of all layers' attention."""
    row: DecodeRow
    longest_context: float

    def time_s(self, mean_context: float) -> float:
        return max(self.fixed_s + self.per_us_s * self.row.at(mean_context), self.least_s)

    def run_times_s(self, contexts: range, num_decodes: int) -> list[float]:
        """Return the seconds for each of several ascending sums of contexts, bit for bit equal to the results of
        `time_s`.
        """
        row, fixed, scale, least = self.row, self.fixed_s, self.per_us_s, self.least_s
        knots, values, slopes, last = row.knots, row.values, row.slopes, len(row.slopes) - 1
        index = min(bisect_right(knots, contexts[0] / num_decodes), last + 1) - 1 if contexts[0] else 0
        index, times = max(index, 0), []
        for context in contexts:
            mean = max(context / num_decodes, knots[0])
            while index < last and mean >= knots[index + 1]:
                index += 1
            time = fixed + scale * (values[index] + slopes[index] * (mean - knots[index]))
            times.append(time if time > least else least)
        return times

    def times_s(self, mean_contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the seconds for each mean context, bit for bit equal to the results of `time_s`."""
        times: npt.NDArray[np.float64] = self.fixed_s + self.per_us_s * self.row.at_each(mean_contexts)
        return np.maximum(times, self.least_s)


class ProfileBundleModel:
    """A `LatencyModel` of one replica from a profile bundle; also provides `breakdown_s` and runs of decodes.

    Raises:
        ConfigError: several GPUs without a link, an unknown scale, a bundle whose experts or MLP layers do not fit
            `model`, or data-parallel ranks of a model without experts.
    """

    num_stages = 1

    def __init__(
        self, bundle: Bundle, model: ModelSpec, options: BundleOptions | None = None, device: DeviceSpec | None = None
    ) -> None:
        options = options or BundleOptions()
        _check(bundle, model, options)
        self.bundle = bundle
        self.model = model
        self.num_fallback = 0
        """Number of predictions made by the fallback model; results do not depend on this count."""
        self.options = options
        self.device = device
        self._scale = {name: options.scales.get(name, 1.0) for name in SCALES}
        self._attention = self._attention_grid()
        self._longest_chunk = self._attention.largest["prefill_chunk"]
        self._unequal = self._unequal_contexts()
        self._mixed_us_s = 1e-6 * model.num_layers * self._scale["mixed_attention"]
        """Factor from microseconds of one layer's attention to seconds of all layers', for steps with prompts."""
        self._experts = None if bundle.experts is None else ExpertTimes(bundle.experts, model, options.routing)
        limit = options.capture_limit if options.cuda_graphs else 0
        self._captured = capture_sizes(limit)
        self._ranks = options.data_parallel
        self._decode_batches: dict[int, _DecodeBatch] = {}
        self._dense = DenseTimes(bundle.dense, model.num_layers, model.num_dense_layers)
        self._collectives = Collectives(
            model, bundle.tensor_parallel, options.data_parallel, options.link, bundle.all_reduce
        )
        self._head = summed(bundle.per_sequence, 1)
        self._of_tokens_s: dict[int, float] = {}
        """Seconds of everything except attention and the terms of `_of_sequences`, by number of tokens."""
        self._of_sequences_s: dict[int, tuple[float, float]] = {}
        """Results of `_of_sequences`, by number of sequences."""
        self._largest_tokens = min(float(one.sizes[-1]) for one in bundle.dense.values())
        reach, largest = options.reach, self._attention.largest
        self._reached = (
            reach * self._ranks * self._largest_tokens,
            reach * self._ranks * largest["n_decode"],
            reach * largest["kv_prefill"],
            reach * largest["kv_decode"],
        )
        """Limits of predictable steps: tokens, decodes, and mean contexts of chunks and of decodes."""

    @property
    def source(self) -> str:
        """Origin of the operator times, in a few words."""
        degree = f", TP {self.bundle.tensor_parallel}" if self.bundle.tensor_parallel > 1 else ""
        measured = f"operators measured on {self.bundle.gpu} inside {self.bundle.engine} ({self.bundle.model}{degree})"
        cut = self.options.routing.cut
        return (
            measured
            if cut == 1
            else f"{measured}; experts were not measured in this split, 1/{cut} of what was is assumed"
        )

    @property
    def host(self) -> HostOverhead:
        """Overhead of the engine's host per step and request."""
        return self.options.host

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the step; without tokens, the seconds of copying the swapped bytes.

        Raises:
            ExecutorError: a size is beyond the reach of the tables, and there is no fallback.
        """
        num_decodes = features.num_decodes
        if features.prefill_tokens or features.num_draft_tokens or (features.swap_bytes and num_decodes):
            return self._mixed_s(features) if self.covers(features) else self._beyond(features)
        if not num_decodes:
            return self._swap_s(features.swap_bytes) if features.swap_bytes else 0.0
        mean, batch = features.decode_context_tokens / num_decodes, self._decodes(num_decodes)
        return batch.time_s(mean) if mean <= batch.longest_context else self._beyond(features)

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the step; there is one stage."""
        return self.batch_time_s(features)

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """Return the seconds of the steps of a run of decodes, up to the last step within reach; the first step is
        always included. See `PredictsDecodeRuns`.
        """
        last = first_context_tokens + num_decodes * (num_steps - 1)
        if not num_decodes:
            return [0.0] * num_steps
        batch, contexts = self._decodes(num_decodes), range(first_context_tokens, last + 1, num_decodes)
        if last / num_decodes > batch.longest_context:
            within = bisect_right(contexts, batch.longest_context, key=lambda context: context / num_decodes)
            if not within:
                return [self._fallback_s(BatchFeatures(num_decodes, first_context_tokens))]
            contexts = contexts[:within]
        if len(contexts) <= FEW_STEPS:
            return batch.run_times_s(contexts, num_decodes)
        return batch.times_s(np.array(contexts, dtype=np.float64) / num_decodes)

    def breakdown_s(self, features: BatchFeatures) -> dict[str, float]:
        """Return the seconds of a step by component; their sum is `batch_time_s`, up to rounding."""
        if not features.num_tokens:
            return {"swap": self.batch_time_s(features)}
        if not self.covers(features):
            return {"fallback": self._beyond(features)}
        parts = self._parts(features)
        gpu, (added, least) = sum(parts.values()), self._host_s(features.num_requests)
        return {**parts, "host": max(gpu + added, least) - gpu}

    def covers(self, features: BatchFeatures) -> bool:
        """Return True if every size of the step is within `reach` times the largest measured size."""
        decodes, decode_context, prefills, prefill_tokens, _, prefill_context, _, _, _, drafts = features
        tokens, most_decodes, longest_prefill_context, longest_context = self._reached
        return (
            decodes + prefill_tokens + drafts <= tokens
            and prefill_context / max(1, prefills) <= longest_prefill_context
            and decode_context / max(1, decodes) <= longest_context
            and decodes <= most_decodes
        )

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Return the number of KV blocks that fit on the replica's GPUs beside the weights.

        Raises:
            ConfigError: the device is unknown, or not even one block fits.
        """
        if self.device is None:
            message = "cannot be computed: the memory size of the GPU is unknown"
            raise ConfigError(Problem("replica.memory.num_blocks", message, "Give it, or name a device"))
        split = Parallelism(tensor=self.bundle.tensor_parallel, data=self._ranks)
        return self._ranks * Deployment(self.model, self.device, split).kv_blocks(block_size, memory_fraction)

    def describe(self) -> ModelDescription:
        """Describe the measurements, their calibration, and the replica's GPUs; see `DescribesModel`."""
        calibration = self.options.calibration
        origin: Origin = "measured" if calibration is None else "calibrated"
        return ModelDescription(
            origin,
            self.source if calibration is None else f"{self.source}, fitted on {calibration.fitted_on}",
            {} if calibration is None else {name: abs(value) for name, value in calibration.errors.items()},
            num_fallback=self.num_fallback,
            device=self.bundle.hardware or None if self.device is None else self.device.priced_as,
            num_devices=self.bundle.tensor_parallel * self._ranks,
            max_kv_groups=1,
            kv_blocks=self.kv_blocks,
            kv_bytes_per_token=self.model.kv_bytes_per_token,
            max_model_len=self.model.max_model_len,
            num_layers=self.model.num_layers,
        )

    # Parts of a step's time

    def _beyond(self, features: BatchFeatures) -> float:
        seconds = self._fallback_s(features)
        self.num_fallback += 1
        return seconds

    def _fallback_s(self, features: BatchFeatures) -> float:
        """Return the fallback's seconds without counting the prediction; raise `ExecutorError` without a fallback."""
        if self.options.fallback is not None:
            return self.options.fallback.batch_time_s(features)
        largest = {name: int(size) for name, size in self._attention.largest.items()}
        raise ExecutorError(
            f"profile_bundle: {self.bundle.folder} does not reach a step of {features.num_decodes} decodes with a mean context of "
            f"{features.decode_context_tokens // max(1, features.num_decodes)} and {features.prefill_tokens} prompt tokens. "
            f"Measured up to {largest}, {int(self._largest_tokens)} tokens a step; extrapolated up to {self.options.reach:g} times "
            "that (`reach`), or computed by the roofline model with `fallback: roofline`."
        )

    def _host_s(self, num_requests: int) -> tuple[float, float]:
        """Return (seconds that the host adds to a step, minimum seconds of the step)."""
        host = self.options.host
        busy = host.step_base_s + host.step_per_request_s * self._per_rank(num_requests)
        return (host.exposed_s, busy) if host.asynchronous else (busy, 0.0)

    def _per_rank(self, number: int) -> int:
        """Return the share of `number` on the fullest data-parallel rank."""
        return -(-number // self._ranks)

    def _decodes(self, num_decodes: int) -> _DecodeBatch:
        batch = self._decode_batches.get(num_decodes)
        if batch is None:
            rank, reach, largest = self._per_rank(num_decodes), self.options.reach, self._attention.largest
            parts = self._token_parts(rank, num_decodes)
            added, least = self._host_s(num_decodes)
            skew = 1.0 if self._unequal is None else self._unequal.factor(self._padded(rank))
            scale = self._scale["decode_attention"] * skew
            batch = self._decode_batches[num_decodes] = _DecodeBatch(
                fixed_s=sum(parts.values()) + self._head_s(rank) + self._gathered_s(rank) + added,
                least_s=least,
                per_us_s=1e-6 * self.model.num_layers * scale,
                row=self._attention.decodes(rank),
                longest_context=reach * largest["kv_decode"] if rank <= reach * largest["n_decode"] else -1.0,
            )
        return batch

    def _mixed_s(self, features: BatchFeatures) -> float:
        """Return the seconds of a step with prompts, with drafts, or with KV blocks to swap."""
        if self._is_sum_of_parts(features):
            gpu, (added, least) = sum(self._parts(features).values()), self._host_s(features.num_requests)
            return max(gpu + added, least)
        decodes, context, prefills, tokens, _, _, pairs, _, _, _ = features
        of_tokens = self._of_tokens_s.get(decodes + tokens)
        if of_tokens is None:
            of_tokens = sum(self._token_parts(decodes + tokens, decodes + tokens).values())
            self._of_tokens_s[decodes + tokens] = of_tokens
        of_sequences, least = self._of_sequences_s.get(decodes + prefills) or self._of_sequences(decodes + prefills)
        chunk, behind = one_chunk(tokens, pairs)
        if decodes:
            microseconds = self._attention.mixed(decodes).at(chunk, behind, context / decodes)
        else:
            microseconds = self._attention.prefill_us(chunk, behind)
        return max(self._mixed_us_s * microseconds + of_tokens + of_sequences, least)

    def _is_sum_of_parts(self, features: BatchFeatures) -> bool:
        """Return True if the time of a step with prompts must be summed over `_parts`.

        Otherwise, the time is the sum of attention and the cached terms `_of_tokens_s` and `_of_sequences_s`.
        """
        _, _, _, tokens, _, _, _, merged, swap_bytes, drafts = features
        return bool(merged or swap_bytes or drafts) or self._ranks > 1 or tokens > self._longest_chunk

    def _of_sequences(self, sequences: int) -> tuple[float, float]:
        """Return (seconds of head, gather of the logits and host together, minimum seconds of the step)."""
        added, least = self._host_s(sequences)
        added += self._head_s(sequences) + self._gathered_s(sequences)
        found = self._of_sequences_s[sequences] = (added, least)
        return found

    def _parts(self, features: BatchFeatures) -> dict[str, float]:
        """Return the seconds of the GPU's work, by part."""
        if features.num_merged_tokens:
            raise ExecutorError(
                "profile_bundle: the tables have no times for attention merged over KV-parallel groups. Allowed: kv_parallel 1."
            )
        decodes, decode_context, prefills, tokens = features[:4]
        rank_decodes, rank_prefills = self._per_rank(decodes), self._per_rank(prefills)
        # A prompt is not divided over ranks, so the fullest rank has `rank_prefills` whole prompts.
        rank_tokens = tokens * rank_prefills / prefills if prefills else 0
        drafts = features.num_draft_tokens
        rank_verified = rank_decodes + (-(-drafts * rank_decodes // decodes) if drafts else 0)
        parts = self._token_parts(rank_verified + round(rank_tokens), decodes + tokens + drafts)
        parts["head"] = self._head_s(rank_verified + rank_prefills)
        gathered = self._gathered_s(rank_decodes + rank_prefills)
        if gathered:
            parts["all_reduce"] += gathered
        mean = decode_context / decodes if decodes else 0.0
        if tokens:
            chunk, context = one_chunk(rank_tokens, features.prefill_attention_pairs * rank_tokens / tokens)
            alone, both = self._chunk_us(chunk, context, rank_decodes, mean)
            parts["prefill_attention"] = self._mixed_us_s * min(alone, both)
            if decodes:
                parts["decode_attention"] = self._mixed_us_s * max(0.0, both - alone)
        elif decodes:
            batch = self._decodes(decodes)
            parts["decode_attention"] = batch.per_us_s * batch.row.at(mean)
        if features.swap_bytes:
            parts["swap"] = self._swap_s(features.swap_bytes)
        return parts

    def _chunk_us(self, chunk: float, context: float, decodes: int, mean: float) -> tuple[float, float]:
        """Return the microseconds of one layer's attention: (for the chunk alone, for the chunk together with the
        decodes).
        """
        # A chunk longer than all measured ones counts as several equal chunks, each with the earlier ones as context.
        number = max(1, -(-int(chunk) // int(self._longest_chunk)))
        part, middle = chunk / number, context + (chunk - chunk / number) / 2.0
        one = self._attention.prefill_us(part, middle)
        if not decodes:
            return number * one, number * one
        return number * one, (number - 1) * one + self._attention.mixed(decodes).at(part, middle, mean)

    def _token_parts(self, rank_tokens: int, all_tokens: int) -> dict[str, float]:
        """Return the seconds of dense layers, experts and collectives (except the gather of the logits), by part.

        `rank_tokens` is the number of tokens on the fullest rank, `all_tokens` that on all ranks.
        """
        padded = self._padded(rank_tokens)
        parts = {"dense": 1e-6 * self._dense.at(padded) * self._scale["dense"]}
        # Either all ranks replay CUDA graphs of the same padded size, or each rank computes only its own tokens.
        is_captured = bool(self._captured) and rank_tokens <= self._captured[-1]
        tokens = padded * self._ranks if is_captured else all_tokens
        if self._experts is not None:
            parts["experts"] = 1e-6 * self._experts.num_layers * self._experts.layer_us(tokens) * self._scale["experts"]
        exchanged = self._collectives.layers_s(padded, tokens)
        if exchanged:
            parts["all_reduce"] = exchanged * self._scale["all_reduce"]
        return parts

    def _head_s(self, sequences: int) -> float:
        microseconds = interpolated(self._head.sizes, self._head.times_us, max(1, sequences))
        return 1e-6 * microseconds * self._scale["head"]

    def _swap_s(self, num_bytes: int) -> float:
        if self.device is None:
            raise ExecutorError("profile_bundle: the bandwidth of swapping KV blocks is unknown. Set `device`.")
        return num_bytes / (self.device.host_link_bandwidth * self.bundle.tensor_parallel)

    def _gathered_s(self, sequences: int) -> float:
        return self._collectives.scores_s(sequences) * self._scale["all_reduce"]

    def _attention_grid(self) -> AttentionGrid:
        """Return the attention times of batches whose contexts vary as much as the options state."""

        def factors(axes: tuple[Array, ...], *, mixed: bool) -> Array | None:
            return skew_factors(self.bundle.skew, self.options.context_variation, axes, mixed=mixed)

        rows, beside_chunks = self.bundle.attention, partial(factors, mixed=True)
        if self._has_flash_attention_2:
            return AttentionGrid(rows, mixed_factor=beside_chunks)
        return AttentionGrid(rows, partial(factors, mixed=False), beside_chunks)

    @property
    def _has_flash_attention_2(self) -> bool:
        return self.device is not None and self.device.uses_flash_attention_2 and self.model.latent is None

    def _unequal_contexts(self) -> UnequalContexts | None:
        """Return the kernel model for unequal decode contexts; None if the bundle's own measurements of unequal
        contexts are used instead.
        """
        device = self.device
        if device is None or not self._has_flash_attention_2:
            return None
        kv_heads = max(1, self.model.num_kv_heads // self.bundle.tensor_parallel)
        kernel = DecodeKernel.of(device, kv_heads, self.model.head_dim)
        kernel = replace(kernel, peak_share=fitted_peak_share(self.bundle.skew, kernel))
        return UnequalContexts(kernel, self.options.context_variation, self._attention.decode_counts.tolist())

    def _padded(self, tokens: int) -> int:
        """Return the number of tokens computed for a batch of `tokens` tokens, including the padding of CUDA graphs."""
        captured = self._captured
        if not captured or tokens > captured[-1]:
            return tokens
        return captured[bisect_left(captured, tokens)]


def one_chunk(tokens: float, pairs: float) -> tuple[float, float]:
    """Return (tokens, context) of a single chunk with as many query-key pairs as all chunks of a step.

    The chunk has the tokens of all chunks, unless these tokens alone give more pairs; then it is shorter and has no
    context.
    """
    context = pairs / tokens - (tokens + 1.0) / 2.0
    if context >= 0.0:
        return tokens, context
    return (sqrt(8.0 * pairs + 1.0) - 1.0) / 2.0, 0.0


def _check(bundle: Bundle, model: ModelSpec, options: BundleOptions) -> None:
    problems = []
    several = (1 if bundle.all_reduce is not None else bundle.tensor_parallel) * options.data_parallel
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
    missing = [name for name in MLP_LAYERS if name not in bundle.dense]
    if bundle.experts is not None and model.num_dense_layers and missing:
        message = f"has no times of {', '.join(missing)}, and {model.name} has {model.num_dense_layers} layers without experts"
        problems.append(Problem(f"{bundle.folder}/dense.csv", message))
    if options.data_parallel > 1 and model.experts is None:
        message = f"ranks share experts, and {model.name} has none (got {options.data_parallel})"
        problems.append(Problem("data_parallel", message, "Allowed: 1; simulate replicas instead (num_replicas)"))
    if problems:
        raise ConfigError(problems)
