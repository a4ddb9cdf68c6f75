"""Parameters, bytes and floating-point operations of a decoder-only transformer.

Counts are exact for the families in `hf_config` (they equal the parameter counts of the published checkpoints). For
other families, they omit only biases and unusual norms. Matrix products count two operations per weight.
"""

from __future__ import annotations

from msgspec import Struct

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes per number, by the dtype names of configurations."""


class LatentAttention(Struct, frozen=True):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): it caches one latent vector per token."""

    kv_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    q_rank: int | None


class Experts(Struct, frozen=True):
    """The mixture-of-experts layers of a model: their number and dimensions."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Total width of the shared experts, which every token uses; 0 without shared experts."""
    gates_shared: bool = False
    """True if a learned gate scales the output of the shared experts (Qwen2-MoE)."""


class ModelSpec(Struct, frozen=True):
    """Dimensions of one decoder-only transformer, and the arithmetic that follows from them.

    `dtype` is the dtype of the weights.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense feed-forward layers; 0 if every layer has experts."""
    max_model_len: int
    """Number of positions that the checkpoint supports."""
    tied_embeddings: bool = False
    mlp_matrices: int = 3
    """Number of matrices of a feed-forward layer: 3 if it is gated (SwiGLU, GeGLU), else 2."""
    extra_layer_parameters: int = 0
    """Number of parameters of one layer's norms and biases."""
    sliding_window: int | None = None
    num_sliding_layers: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def num_dense_layers(self) -> int:
        """Number of layers whose feed-forward part is dense, that is, has no experts."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def attention_weights_per_layer(self) -> int:
        """Number of weights of one layer's projections into and out of attention."""
        if self.latent is None:
            query, key_value = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
            return self.hidden_size * (query + key_value) + query * self.hidden_size
        latent = self.latent
        query = self.num_heads * (latent.nope_head_dim + latent.rope_head_dim)
        from_hidden = self.hidden_size * query
        if latent.q_rank is not None:
            from_hidden = self.hidden_size * latent.q_rank + latent.q_rank * query
        down = self.hidden_size * (latent.kv_rank + latent.rope_head_dim)
        up = latent.kv_rank * self.num_heads * (latent.nope_head_dim + latent.v_head_dim)
        return from_hidden + down + up + self.num_heads * latent.v_head_dim * self.hidden_size

    @property
    def dense_mlp_weights(self) -> int:
        """Number of weights of one dense feed-forward layer."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Number of weights of one routed expert; 0 without experts."""
        return self.mlp_matrices * self.hidden_size * self.experts.intermediate_size if self.experts else 0

    @property
    def always_used_expert_layer_weights(self) -> int:
        """Number of weights that every token uses in one expert layer: router, shared experts and their gate."""
        if self.experts is None:
            return 0
        shared = self.mlp_matrices * self.hidden_size * self.experts.shared_intermediate_size
        return self.hidden_size * (self.experts.num_experts + int(self.experts.gates_shared)) + shared

    @property
    def dense_weights(self) -> int:
        """Number of weights that every token uses in the matrices of all layers, without embeddings and head."""
        total = self.num_layers * self.attention_weights_per_layer + self.num_dense_layers * self.dense_mlp_weights
        return total + (self.experts.num_layers * self.always_used_expert_layer_weights if self.experts else 0)

    @property
    def routed_weights(self) -> int:
        """Number of weights of all routed experts of all layers."""
        return self.experts.num_layers * self.experts.num_experts * self.expert_weights if self.experts else 0

    @property
    def head_weights(self) -> int:
        """Number of weights of the output layer, which maps a hidden state to logits; the layer may share these weights
        with the embedding table.
        """
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding table and the head; counted once if the two are tied."""
        return self.head_weights * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Number of all parameters, as quoted for checkpoints."""
        extra = self.num_layers * self.extra_layer_parameters + self.hidden_size
        return self.dense_weights + self.routed_weights + extra + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses; of the routed experts, only those selected for the token count."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.num_experts - self.experts.experts_per_token
        return self.parameters - self.experts.num_layers * idle * self.expert_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in `dtype`."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    @property
    def kv_values_per_token_per_layer(self) -> int:
        """Number of values that the KV cache stores per token and layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token over all layers, in `kv_dtype`."""
        return self.num_layers * self.kv_values_per_token_per_layer * DTYPE_BYTES[self.kv_dtype]

    @property
    def decode_flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query token and one cached token, in a decode."""
        if self.latent is not None:
            # The up-projections are absorbed into query and output, so attention works on the compressed vectors.
            return 2 * self.num_heads * (2 * self.latent.kv_rank + self.latent.rope_head_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def prefill_flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query token and one key, in a prefill."""
        if self.latent is not None:
            query_key = self.latent.nope_head_dim + self.latent.rope_head_dim
            return 2 * self.num_heads * (query_key + self.latent.v_head_dim)
        return 4 * self.num_heads * self.head_dim
