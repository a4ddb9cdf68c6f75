"""Placement of a model on a replica's devices, and the memory left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES, ModelSpec

ACTIVATION_TOKENS = 8192
"""Tokens of one step that memory is set aside for."""
LOGIT_ROWS = 256
"""Rows of scores over the vocabulary that memory is set aside for, in float32 and twice."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Number of devices that share a replica's work, by axis."""

    tensor: int = 1
    pipeline: int = 1
    kv: int = 1
    """KV-parallel groups, each with all of the tensor and pipeline ranks."""
    data: int = 1
    """Data-parallel ranks that hold the routed experts together, each a part of them; of effect on memory alone."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One replica: a model on devices of one kind.

    Raises:
        ConfigError: the model cannot be split that way, or the device cannot multiply in the model's dtype.
    """

    model: ModelSpec
    device: DeviceSpec
    parallelism: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        """Raise `ConfigError` with all problems of a deployment that cannot be built."""
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
        """The dtype of hidden states: that of the weights, or bfloat16 for 8-bit weights."""
        return "bfloat16" if self.model.dtype == "fp8" else self.model.dtype

    @property
    def attention_dtype(self) -> str:
        """The dtype that attention multiplies in; an 8-bit cache is widened as it is read."""
        return self.activation_dtype

    @property
    def num_first_layers(self) -> int:
        """Layers of the fullest pipeline stage; the stages with one layer more come first."""
        return -(-self.model.num_layers // self.parallelism.pipeline)

    @property
    def num_last_layers(self) -> int:
        """Layers of the last pipeline stage, which also holds the head."""
        return self.model.num_layers // self.parallelism.pipeline

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Bytes that one device keeps of one token in one layer; heads are copied once there are more ranks than KV heads."""
        size = DTYPE_BYTES[self.model.kv_dtype]
        if self.model.latent is not None:
            return self.model.kv_values_per_token_per_layer * size
        heads = -(-self.model.num_kv_heads // self.parallelism.tensor)
        return 2 * heads * self.model.head_dim * size

    def weight_bytes(self, num_layers: int) -> float:
        """Bytes of weights on one device of the first or the last stage, when that stage has `num_layers` average layers.

        With one stage it holds its part of the embeddings and of the head, otherwise of one of the two.
        """
        model = self.model
        elsewhere = model.routed_weights * (self.parallelism.data - 1) // self.parallelism.data
        layers = (model.parameters - model.embedding_parameters - elsewhere) * num_layers / model.num_layers
        tables = model.embedding_parameters if self.parallelism.pipeline == 1 else model.head_weights
        return (layers + tables) / self.parallelism.tensor * DTYPE_BYTES[model.dtype]

    @property
    def activation_bytes(self) -> float:
        """Bytes set aside on each device for hidden states of a large step and for scores over the vocabulary."""
        model, split = self.model, self.parallelism.tensor
        width = model.intermediate_size
        if model.experts is not None:
            routed = model.experts.experts_per_token * model.experts.intermediate_size
            width = max(width, routed + model.experts.shared_intermediate_size)
        per_token = 4 * model.hidden_size + 3 * width / split
        scores = LOGIT_ROWS * 2 * model.vocab_size * 4 / split
        return ACTIVATION_TOKENS * per_token * DTYPE_BYTES[self.activation_dtype] + scores

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """KV blocks of `block_size` tokens that fit beside weights and activations on the fullest device, of one KV-parallel group.

        `memory_fraction` of the device's memory is used at all; the rest is for the driver, graphs and fragmentation.

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
    """KV blocks that a replica of `model` on tensor_parallel x pipeline_parallel devices can hold.

    Raises:
        ConfigError: the model cannot be split that way or does not fit.
    """
    deployment = Deployment(model, device, Parallelism(tensor_parallel, pipeline_parallel))
    return deployment.kv_blocks(block_size, memory_fraction)
