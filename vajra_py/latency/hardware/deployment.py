"""Placement of a model on a replica's devices, and the memory left for the KV cache."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES, ModelSpec

ACTIVATION_TOKENS = 8192
"""Number of tokens in one step for which activation memory is reserved."""
LOGIT_ROWS = 256
"""Number of rows of logits for which memory is reserved: two float32 copies of each row."""


class Parallelism(Struct, frozen=True):
    """Number of devices that share a replica's work, by axis."""

    tensor: int = 1
    pipeline: int = 1
    kv: int = 1
    """Number of KV-parallel groups; each has its own tensor-parallel and pipeline ranks."""
    data: int = 1
    """Number of data-parallel ranks, each with its share of the routed experts; affects memory only."""


class Deployment(Struct, frozen=True):
    """One replica: a model on devices of one type.

    Raises:
        ConfigError: the model cannot be divided over the devices, or the device does not support the model's dtype.
    """

    model: ModelSpec
    device: DeviceSpec
    parallelism: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        """Check the deployment. Raises `ConfigError` with all problems."""
        model, device, split = self.model, self.device, self.parallelism
        problems = []
        if model.num_heads % split.tensor:
            message = f"does not divide the {model.num_heads} attention heads of {model.name} ({split.tensor})"
            problems.append(Problem("tensor_parallel", message))
        if split.pipeline > model.num_layers:
            message = f"is more than the {model.num_layers} layers of {model.name} ({split.pipeline})"
            problems.append(Problem("pipeline_parallel", message))
        for key, dtype in (("dtype", model.dtype), ("kv_dtype", model.kv_dtype)):
            if dtype not in DTYPE_BYTES:
                problems.append(Problem(key, f"is not known ({dtype!r})", f"Allowed: {', '.join(DTYPE_BYTES)}"))
        for dtype in {model.dtype, self.attention_dtype}:
            if dtype in DTYPE_BYTES and dtype not in device.peak_flops:
                allowed = f"It has figures for {', '.join(device.peak_flops)}"
                problems.append(Problem("dtype", f"{device.name} does not multiply in {dtype}", allowed))
        if problems:
            raise ConfigError(problems)

    @property
    def activation_dtype(self) -> str:
        """Dtype of hidden states: that of the weights, or bfloat16 for 8-bit weights."""
        return "bfloat16" if self.model.dtype == "fp8" else self.model.dtype

    @property
    def attention_dtype(self) -> str:
        """Dtype of attention's arithmetic; an 8-bit KV cache is converted to a wider dtype when it is read."""
        return self.activation_dtype

    @property
    def num_first_layers(self) -> int:
        """Number of layers of the first pipeline stage; stages with one layer more than others come first."""
        return -(-self.model.num_layers // self.parallelism.pipeline)

    @property
    def num_last_layers(self) -> int:
        """Number of layers of the last pipeline stage, which also holds the head."""
        return self.model.num_layers // self.parallelism.pipeline

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """KV bytes per token and layer on one device; with more ranks than KV heads, heads are replicated."""
        size = DTYPE_BYTES[self.model.kv_dtype]
        if self.model.latent is not None:
            return self.model.kv_values_per_token_per_layer * size
        heads = -(-self.model.num_kv_heads // self.parallelism.tensor)
        return 2 * heads * self.model.head_dim * size

    def weight_bytes(self, num_layers: int) -> float:
        """Return the bytes of weights on one device of the first or last stage, which has `num_layers` layers.

        With one pipeline stage, the device holds its part of both the embedding table and the head; with several
        stages, its part of only one of the two.
        """
        model = self.model
        elsewhere = model.routed_weights * (self.parallelism.data - 1) // self.parallelism.data
        layers = (model.parameters - model.embedding_parameters - elsewhere) * num_layers / model.num_layers
        tables = model.embedding_parameters if self.parallelism.pipeline == 1 else model.head_weights
        return (layers + tables) / self.parallelism.tensor * DTYPE_BYTES[model.dtype]

    @property
    def activation_bytes(self) -> float:
        """Bytes reserved on each device for hidden states of a large step and for logits."""
        model, split = self.model, self.parallelism.tensor
        width = model.intermediate_size
        if model.experts is not None:
            routed = model.experts.experts_per_token * model.experts.intermediate_size
            width = max(width, routed + model.experts.shared_intermediate_size)
        per_token = 4 * model.hidden_size + 3 * width / split
        scores = LOGIT_ROWS * 2 * model.vocab_size * 4 / split
        return ACTIVATION_TOKENS * per_token * DTYPE_BYTES[self.activation_dtype] + scores

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Return the number of KV blocks of `block_size` tokens that fit on a KV-parallel group's fullest device.

        Of the device's memory, the fraction `memory_fraction` is used for weights, activations and KV; the rest is left
        for the driver, graphs and fragmentation.

        Raises:
            ConfigError: not even one block fits.
        """
        pipeline = self.parallelism.pipeline
        budget = memory_fraction * self.device.memory_bytes - self.activation_bytes
        num_layers = self.num_first_layers
        free = budget - self.weight_bytes(num_layers)
        num_blocks = int(free // (num_layers * self.kv_bytes_per_token_per_layer * block_size))
        if num_blocks < 1:
            gib = 1 << 30
            needed = self.weight_bytes(num_layers) + self.activation_bytes
            message = (
                f"{self.model.name} in {self.model.dtype} does not fit {self.device.name} at tensor_parallel "
                f"{self.parallelism.tensor}, pipeline_parallel {pipeline}: weights and activations take {needed / gib:.1f} GiB "
                f"a device and leave no KV block ({memory_fraction:g} of {self.device.memory_bytes / gib:.1f} GiB)"
            )
            raise ConfigError(Problem("latency", message, "Use more or larger devices, or a smaller dtype"))
        return num_blocks


def kv_blocks_that_fit(
    model: ModelSpec,
    device: DeviceSpec,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    block_size: int = 16,
    memory_fraction: float = 0.9,
) -> int:
    """Return the number of KV blocks of a replica of `model` on tensor_parallel x pipeline_parallel devices.

    Raises:
        ConfigError: the model cannot be divided over the devices, or does not fit.
    """
    deployment = Deployment(model, device, Parallelism(tensor_parallel, pipeline_parallel))
    return deployment.kv_blocks(block_size, memory_fraction)
