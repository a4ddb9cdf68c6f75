"""Roofline step time: every operator bound by arithmetic or by memory bandwidth.

Times of operators add up (one stream runs them in turn). Within an operator, arithmetic and memory overlap in part: its
time is the root of the sum of the squares of the two bounds, which is close to the larger bound away from the ridge,
and 1.4 times either bound where they are equal. Coefficients are computed once, so that a prediction costs a few dozen
multiplications. Times are non-decreasing in every feature of the batch. Method: Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009; formulas and values are in docs/reference/latency-models.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.latency.hardware.deployment import Deployment, Parallelism
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES, ModelSpec

_FEW_STEPS = 24
"""Number of steps up to which Python numbers are faster than numpy arrays."""

KERNELS_PER_LAYER = 10
"""Kernels per layer: two norms, four matrix products (QKV and gate-up are fused), rotary embedding, cache write,
attention, activation."""
KERNELS_PER_EXPERT_LAYER = 16
"""Kernels per layer with experts: those of a dense layer, and scores, selection, sorting, two permutations, weighted
sum."""


class LayerCoefficients(Struct, frozen=True):
    """Seconds per unit of work over all layers of the model, on one tensor-parallel rank."""

    dense_weights_s: float
    """Time to read the weights that every token uses, per step."""
    dense_token_s: float
    """Time to read and write the activations of the dense matrix products, per token."""
    dense_flops_s: float
    """Time of the arithmetic of the dense matrix products, per token."""
    expert_weights_s: float
    """Time to read all routed experts, per step."""
    expert_missed: float
    """Probability that one token does not use a given expert."""
    expert_flops_s: float
    expert_token_s: float
    elementwise_s: float
    """Time of norms, rotary embedding, activation function, cache writes and all-reduces over the tensor-parallel
    ranks, per token.
    """
    fixed_s: float
    """Sum of the fixed latencies of kernels and all-reduces, per step."""
    pair_s: float
    """Time of prefill attention's arithmetic, per query-key pair, in layers with full attention."""
    window_pair_s: float
    """Time of prefill attention's arithmetic, per query-key pair, in layers with a window."""
    key_s: float
    """Time to read one cached token for prefills, in layers with full attention."""
    window_key_s: float
    window: float
    """Window of the layers that have one, in tokens; 0 if all layers have full attention."""
    merge_fixed_s: float
    merge_token_s: float


class StepCoefficients(Struct, frozen=True):
    """Seconds per unit of work, for the work outside the layers and for decode attention."""

    decode_key_s: float
    """Time of decode attention per key, summed over the layers with full attention: the larger of the times of memory
    and arithmetic.
    """
    window_decode_key_s: float
    head_weights_s: float
    head_row_s: float
    head_flops_s: float
    step_overhead_s: float
    send_fixed_s: float
    send_token_s: float
    swap_byte_s: float


class RooflineModel:
    """Roofline of a model on one type of device; implements `LatencyModel`, `PredictsDecodeRuns` and `DescribesModel`.

    Raises:
        ConfigError: the model cannot be divided as configured, or the device does not support its dtype.
    """

    __slots__ = (
        "_decode_parts",
        "_first_share",
        "_last_share",
        "_layers",
        "_prefill",
        "_products",
        "_rows",
        "_step",
        "_window",
        "deployment",
        "num_stages",
    )

    def __init__(self, model: ModelSpec, device: DeviceSpec, parallelism: Parallelism | None = None) -> None:
        self.deployment = Deployment(model, device, parallelism or Parallelism())
        self.num_stages: int = self.deployment.parallelism.pipeline
        layers = layer_coefficients(self.deployment)
        self._layers: tuple[float, ...] = structs.astuple(layers)
        self._prefill = (layers.pair_s, layers.key_s, layers.window_pair_s, layers.window_key_s)
        self._step = step_coefficients(self.deployment)
        self._window = layers.window
        self._products: dict[int, float] = {}
        """Cache of `_products_s` by number of tokens; numbers repeat, since many steps use the whole token budget."""
        self._rows: dict[int, float] = {}
        """Cache of the time of head and step overhead together, by number of rows of logits."""
        self._decode_parts: dict[int, tuple[float, float]] = {}
        """Cache for steps of decodes only, by number of decodes: (time of the layers except attention, time outside the
        layers).
        """
        self._first_share = self.deployment.num_first_layers / model.num_layers
        self._last_share = self.deployment.num_last_layers / model.num_layers

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds from the batch's entry into the first stage until its tokens leave the last stage.

        For a batch without tokens, they are the seconds of copying the swapped bytes.
        """
        num_decodes = features.num_decodes
        num_tokens = num_decodes + features.prefill_tokens + features.num_draft_tokens
        if not num_tokens:
            return features.swap_bytes * self._step.swap_byte_s
        layers = self._layers_s(features, num_tokens)
        if num_decodes:
            layers += self._decode_s(num_decodes, features.decode_context_tokens)
        return layers + self._outside_s(features, num_tokens)

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds that the slowest stage is busy with this batch; with a single stage, the seconds of the
        whole step.
        """
        if self.num_stages == 1:
            return self.batch_time_s(features)
        num_tokens = features.num_tokens
        if not num_tokens:
            return self.batch_time_s(features)
        step = self._step
        layers = self._layers_s(features, num_tokens)
        if features.num_decodes:
            layers += self._decode_s(features.num_decodes, features.decode_context_tokens)
        slowest = max(
            layers * self._first_share,
            layers * self._last_share + self._head_s(features.num_requests + features.num_draft_tokens),
        )
        sending = step.send_fixed_s + num_tokens * step.send_token_s
        return slowest + sending + step.step_overhead_s + features.swap_bytes * step.swap_byte_s

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """Return the seconds of each of `num_steps` steps of `num_decodes` decodes.

        Their contexts sum to `first_context_tokens` in the first step, and each grows by one token per step. The result
        equals, bit for bit, the results of calling `batch_time_s` for each step.
        """
        if not num_decodes:
            return np.full(num_steps, self.batch_time_s(BatchFeatures()))
        parts = self._decode_parts.get(num_decodes)
        if parts is None:
            features = BatchFeatures(num_decodes)
            parts = self._layers_s(features, num_decodes), self._outside_s(features, num_decodes)
            self._decode_parts[num_decodes] = parts
        layers, outside = parts
        step = self._step
        last = first_context_tokens + num_decodes * num_steps
        if num_steps <= _FEW_STEPS and not self._window:
            numbers = range(first_context_tokens + num_decodes, last + 1, num_decodes)
            return [number * step.decode_key_s + layers + outside for number in numbers]
        keys = np.arange(first_context_tokens + num_decodes, last + 1, num_decodes, dtype=np.float64)
        times = keys * step.decode_key_s
        if self._window:
            times += np.minimum(keys, num_decodes * self._window) * step.window_decode_key_s
        times += layers
        times += outside
        return times

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Return the number of KV blocks that fit; see `Deployment.kv_blocks`."""
        return self.deployment.kv_blocks(block_size, memory_fraction)

    def describe(self) -> ModelDescription:
        """Describe the model and its devices; see `DescribesModel`."""
        model, device, split = self.deployment.model, self.deployment.device, self.deployment.parallelism
        return ModelDescription(
            "analytic",
            f"roofline of {model.name} on {device.name}",
            device=device.priced_as,
            num_devices=split.tensor * split.pipeline * split.kv,
            kv_blocks=self.kv_blocks,
            kv_bytes_per_token=model.kv_bytes_per_token,
            max_model_len=model.max_model_len,
            num_layers=model.num_layers,
        )

    def breakdown_s(self, features: BatchFeatures) -> dict[str, float]:
        """Return the seconds of a step by component; their sum is `batch_time_s`, up to rounding.

        `weights` is the time of the layers' matrix products (arithmetic or memory), `kernels` that of latencies,
        element-wise work and all-reduces.
        """
        num_tokens = features.num_tokens
        if not num_tokens:
            return {"swap": self.batch_time_s(features)}
        c, step = LayerCoefficients(*self._layers), self._step
        prefill = self._prefill_s(features)
        merge = c.merge_fixed_s + features.num_merged_tokens * c.merge_token_s if features.num_merged_tokens else 0.0
        kernels = c.fixed_s + num_tokens * c.elementwise_s
        decode = self._decode_s(features.num_decodes, features.decode_context_tokens) if features.num_decodes else 0.0
        return {
            "weights": self._layers_s(features, num_tokens) - prefill - merge - kernels,
            "prefill_attention": prefill,
            "decode_attention": decode,
            "kernels": kernels,
            "kv_merge": merge,
            "head": self._head_s(features.num_requests + features.num_draft_tokens),
            "pipeline": (self.num_stages - 1) * (step.send_fixed_s + num_tokens * step.send_token_s),
            "overhead": self.num_stages * step.step_overhead_s,
            "swap": features.swap_bytes * step.swap_byte_s,
        }

    def _layers_s(self, features: BatchFeatures, num_tokens: int) -> float:
        """Return the seconds of all layers, except those of decode attention."""
        time = self._products.get(num_tokens)
        if time is None:
            time = self._products[num_tokens] = self._products_s(num_tokens)
        if features.prefill_tokens:
            time += self._prefill_s(features)
        if features.num_merged_tokens:
            _, _, _, _, _, _, _, _, _, _, _, _, _, _, merge_fixed_s, merge_token_s = self._layers
            time += merge_fixed_s + features.num_merged_tokens * merge_token_s
        return time

    def _products_s(self, num_tokens: int) -> float:
        """Return the seconds of all work whose time depends only on the number of tokens.

        This work is matrix products with weights, element-wise kernels and latencies.
        """
        (
            dense_weights_s, dense_token_s, dense_flops_s, expert_weights_s, expert_missed, expert_flops_s, expert_token_s,
            elementwise_s, fixed_s, _, _, _, _, _, _, _,
        ) = self._layers  # fmt: skip
        memory = dense_weights_s + num_tokens * dense_token_s
        flops = num_tokens * dense_flops_s
        time = sqrt(memory * memory + flops * flops)
        if expert_weights_s:
            memory = expert_weights_s * (1.0 - expert_missed**num_tokens) + num_tokens * expert_token_s
            flops = num_tokens * expert_flops_s
            time += sqrt(memory * memory + flops * flops)
        return time + (fixed_s + num_tokens * elementwise_s)

    def _prefill_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the prefill chunks' attention over all layers."""
        pair_s, key_s, window_pair_s, window_key_s = self._prefill
        window = self._window
        keys = features.prefill_context_tokens + features.prefill_tokens
        flops, memory = features.prefill_attention_pairs * pair_s, keys * key_s
        time = sqrt(memory * memory + flops * flops)
        if window:
            # Only the sum of the contexts is known, so the window caps the sums. That is exact if all contexts are
            # longer than the window, or all are shorter.
            flops = min(features.prefill_attention_pairs, features.prefill_tokens * window) * window_pair_s
            memory = min(keys, features.num_prefills * window + features.prefill_tokens) * window_key_s
            time += sqrt(memory * memory + flops * flops)
        return time

    def _decode_s(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds of the decodes' attention over all layers."""
        keys = context_tokens + num_decodes
        time = keys * self._step.decode_key_s
        if self._window:
            time = time + min(keys, num_decodes * self._window) * self._step.window_decode_key_s
        return time

    def _head_s(self, num_rows: int) -> float:
        """Return the seconds of the output layer; `num_rows` is the number of requests plus that of draft tokens."""
        step = self._step
        memory, flops = step.head_weights_s + num_rows * step.head_row_s, num_rows * step.head_flops_s
        return sqrt(memory * memory + flops * flops)

    def _outside_s(self, features: BatchFeatures, num_tokens: int) -> float:
        """Return the total seconds of head, transfers between stages, overhead and swapping."""
        num_rows = features.num_decodes + features.num_prefills + features.num_draft_tokens
        time = self._rows.get(num_rows)
        if time is None:
            time = self._rows[num_rows] = self._head_s(num_rows) + self.num_stages * self._step.step_overhead_s
        if self.num_stages > 1:
            time += (self.num_stages - 1) * (self._step.send_fixed_s + num_tokens * self._step.send_token_s)
        if features.swap_bytes:
            time += features.swap_bytes * self._step.swap_byte_s
        return time


def layer_coefficients(deployment: Deployment) -> LayerCoefficients:
    """Return the coefficients of a model's layers on a device; symbols as in docs/reference/latency-models.md."""
    model, device, split = deployment.model, deployment.device, deployment.parallelism
    size, state = DTYPE_BYTES[model.dtype], DTYPE_BYTES[deployment.activation_dtype]
    flops, bandwidth = device.flops(model.dtype) * split.tensor, device.attainable_bandwidth * split.tensor
    experts = model.experts
    query = model.num_heads * (model.latent.v_head_dim if model.latent else model.head_dim)
    # Hidden states are replicated on all ranks; q, k, v, attention outputs and MLP activations are sharded.
    whole = model.num_layers * 4 * model.hidden_size * state / device.attainable_bandwidth
    inside = model.num_layers * (2 * query + model.num_kv_heads * model.head_dim * 2) + model.num_dense_layers * (
        model.mlp_matrices * model.intermediate_size
    )
    routed_width = experts.experts_per_token * experts.intermediate_size if experts else 0
    num_expert_layers = experts.num_layers if experts else 0
    kernels = KERNELS_PER_LAYER * model.num_dense_layers + KERNELS_PER_EXPERT_LAYER * num_expert_layers
    reduce_fixed, reduce_token = all_reduce_s(deployment)
    full, windowed = model.num_layers - model.num_sliding_layers, model.num_sliding_layers
    pair = model.prefill_flops_per_pair / (device.attention_flops(deployment.attention_dtype) * split.tensor)
    key = deployment.kv_bytes_per_token_per_layer / device.attainable_bandwidth
    merge_fixed, merge_token = _kv_merge(deployment)
    return LayerCoefficients(
        dense_weights_s=model.dense_weights * size / bandwidth,
        dense_token_s=whole + inside * state / bandwidth,
        dense_flops_s=2 * model.dense_weights / flops,
        expert_weights_s=model.routed_weights * size / bandwidth,
        expert_missed=1.0 - experts.experts_per_token / experts.num_experts if experts else 1.0,
        expert_flops_s=2 * num_expert_layers * routed_width * model.mlp_matrices * model.hidden_size / flops,
        expert_token_s=num_expert_layers * routed_width * model.mlp_matrices * state / bandwidth,
        elementwise_s=elementwise_token_s(deployment) + reduce_token,
        fixed_s=kernels * device.kernel_latency_s + reduce_fixed,
        pair_s=full * pair,
        window_pair_s=windowed * pair,
        key_s=full * key,
        window_key_s=windowed * key,
        window=float(model.sliding_window or 0),
        merge_fixed_s=merge_fixed,
        merge_token_s=merge_token,
    )


def step_coefficients(deployment: Deployment) -> StepCoefficients:
    """Return the coefficients of a step's work outside the layers, and of decode attention."""
    model, device, split = deployment.model, deployment.device, deployment.parallelism
    size, state = DTYPE_BYTES[model.dtype], DTYPE_BYTES[deployment.activation_dtype]
    bandwidth = device.attainable_bandwidth * split.tensor
    # A decode has one query row, so its memory time and its arithmetic time are both proportional to the number of
    # keys: which of the two is longer is the same for every batch.
    key = max(decode_key_s(deployment))
    between_stages = split.pipeline > 1
    return StepCoefficients(
        decode_key_s=(model.num_layers - model.num_sliding_layers) * key,
        window_decode_key_s=model.num_sliding_layers * key,
        head_weights_s=model.head_weights * size / bandwidth,
        # Logits are written once and read twice (maximum, sample), in float32.
        head_row_s=3 * 4 * model.vocab_size / bandwidth,
        head_flops_s=2 * model.head_weights / (device.flops(model.dtype) * split.tensor),
        step_overhead_s=device.step_overhead_s,
        send_fixed_s=device.link_latency_s if between_stages else 0.0,
        send_token_s=model.hidden_size * state / device.attainable_link_bandwidth if between_stages else 0.0,
        swap_byte_s=1.0 / (device.host_link_bandwidth * split.tensor * split.pipeline * split.kv),
    )


def decode_key_s(deployment: Deployment) -> tuple[float, float]:
    """Return (seconds of memory, seconds of arithmetic) per key of a decode's attention, in one layer."""
    model, device = deployment.model, deployment.device
    flops = device.attention_flops(deployment.attention_dtype) * deployment.parallelism.tensor
    return deployment.kv_bytes_per_token_per_layer / device.attainable_bandwidth, model.decode_flops_per_pair / flops


def elementwise_token_s(deployment: Deployment) -> float:
    """Return the seconds per token of element-wise kernels, which are bound by memory traffic.

    The kernels are norms with residuals, rotary embedding, activation and cache write.
    """
    model, device, tensor = deployment.model, deployment.device, deployment.parallelism.tensor
    state = DTYPE_BYTES[deployment.activation_dtype]
    width = model.num_dense_layers * model.intermediate_size
    if model.experts is not None:
        routed = model.experts.experts_per_token * model.experts.intermediate_size
        width += model.experts.num_layers * (routed + model.experts.shared_intermediate_size)
    heads = model.num_layers * (model.num_heads + model.num_kv_heads) * model.head_dim
    values = model.num_layers * 2 * 4 * model.hidden_size + (2 * heads + model.mlp_matrices * width) / tensor
    cache = 2 * model.num_layers * deployment.kv_bytes_per_token_per_layer
    return (values * state + cache) / device.attainable_bandwidth


def all_reduce_s(deployment: Deployment) -> tuple[float, float]:
    """Return (seconds per step, seconds per token) of all layers' all-reduces. Each layer has two; in each, every rank
    of a ring of t ranks sends 2 (t - 1) / t of the bytes.
    """
    model, device, tensor = deployment.model, deployment.device, deployment.parallelism.tensor
    if tensor == 1:
        return 0.0, 0.0
    state = DTYPE_BYTES[deployment.activation_dtype]
    per_token = 2 * (tensor - 1) / tensor * model.hidden_size * state / device.attainable_link_bandwidth
    return 2 * model.num_layers * device.link_latency_s, 2 * model.num_layers * per_token


def _kv_merge(deployment: Deployment) -> tuple[float, float]:
    """Return the time of merging partial attention over KV-parallel groups: (seconds per step with merged tokens,
    seconds per merged token).

    In every layer, the groups exchange a float32 output vector and a log-sum-exp per query head of a rank, at the cost
    of an all-reduce.
    """
    model, device, split = deployment.model, deployment.device, deployment.parallelism
    head = model.latent.v_head_dim if model.latent else model.head_dim
    groups = max(2, split.kv)
    per_group = model.num_heads / split.tensor * (head + 1) * 4
    exchange = 2 * (groups - 1) / groups * per_group / device.attainable_link_bandwidth
    combine = (groups + 1) * per_group / device.attainable_bandwidth
    fixed = model.num_layers * (device.link_latency_s + device.kernel_latency_s)
    return fixed, model.num_layers * (exchange + combine)
