"""Parameters, bytes and floating-point operations of a decoder-only transformer.

Counts are exact for the families that `hf_config` has (they equal the parameter counts of the published checkpoints) and, for others,
miss at most their biases and unusual norms. Matrix products count two operations per weight.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number, by the names that configurations use."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention, whose cache holds one compressed vector a token (DeepSeek-V2, arXiv:2405.04434)."""

    kv_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    q_rank: int | None


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts layers of a model: how many there are and what one holds."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Width of the experts that every token passes through, together; 0 without shared experts."""
    gates_shared: bool = False
    """True where a learned gate weighs the shared experts (Qwen2-MoE)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one decoder-only transformer, and the arithmetic that follows from it. `dtype` is that of the weights."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense feed-forward layers; 0 when every layer has experts."""
    max_model_len: int
    """Positions that the checkpoint was made for."""
    tied_embeddings: bool = False
    mlp_matrices: int = 3
    """3 for gated feed-forward layers (SwiGLU, GeGLU), 2 for plain ones."""
    extra_layer_parameters: int = 0
    """Norms and biases of one layer."""
    sliding_window: int | None = None
    num_sliding_layers: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward part every token uses whole."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def attention_weights_per_layer(self) -> int:
        """Weights of one layer's projections into and out of attention."""
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
        """Weights of one dense feed-forward layer."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert; 0 without experts."""
        return self.mlp_matrices * self.hidden_size * self.experts.intermediate_size if self.experts else 0

    @property
    def always_used_expert_layer_weights(self) -> int:
        """Weights of an expert layer that every token uses: router, shared experts and their gate."""
        if self.experts is None:
            return 0
        shared = self.mlp_matrices * self.hidden_size * self.experts.shared_intermediate_size
        return self.hidden_size * (self.experts.num_experts + int(self.experts.gates_shared)) + shared

    @property
    def dense_weights(self) -> int:
        """Weights of all layers' matrices that every token uses, embeddings and head left out."""
        total = self.num_layers * self.attention_weights_per_layer + self.num_dense_layers * self.dense_mlp_weights
        return total + (self.experts.num_layers * self.always_used_expert_layer_weights if self.experts else 0)

    @property
    def routed_weights(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.experts.num_layers * self.experts.num_experts * self.expert_weights if self.experts else 0

    @property
    def head_weights(self) -> int:
        """Weights of the matrix that turns a hidden state into scores over the vocabulary (whether shared or not)."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding table and of the head, one table when they are tied."""
        return self.head_weights * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All parameters, as the sizes of checkpoints are quoted."""
        extra = self.num_layers * self.extra_layer_parameters + self.hidden_size
        return self.dense_weights + self.routed_weights + extra + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: all of them, less the experts that it is not routed to."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.num_experts - self.experts.experts_per_token
        return self.parameters - self.experts.num_layers * idle * self.expert_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters at `dtype`."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    @property
    def kv_values_per_token_per_layer(self) -> int:
        """Numbers that the cache keeps of one token in one layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token over all layers, at `kv_dtype`."""
        return self.num_layers * self.kv_values_per_token_per_layer * DTYPE_BYTES[self.kv_dtype]

    @property
    def decode_flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query token and one cached token, in a decode."""
        if self.latent is not None:
            # The up-projections are absorbed into the query and the output, so attention works on the compressed vectors.
            return 2 * self.num_heads * (2 * self.latent.kv_rank + self.latent.rope_head_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def prefill_flops_per_pair(self) -> int:
        """Operations of one layer's attention for one query token and one key, in a prefill."""
        if self.latent is not None:
            query_key = self.latent.nope_head_dim + self.latent.rope_head_dim
            return 2 * self.num_heads * (query_key + self.latent.v_head_dim)
        return 4 * self.num_heads * self.head_dim
