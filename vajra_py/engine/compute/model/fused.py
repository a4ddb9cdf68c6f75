"""Decoder forward pass with merged projections and fused operations.

On a CPU, transformers' modules take some 200 µs per layer beyond the arithmetic. This forward pass does the same
arithmetic with rearranged weights. It has one linear layer (class `Product`) for Q, K and V together, and one for gate
and up. On a CPU, weights are packed for oneDNN; on a GPU, linear layers add to the residual in place.

On devices with Triton kernels, `vajra_kernels.layer_ops` computes the operations between linear layers. On other
devices, the rotary embedding is one multiplication of complex numbers. For this, rows of W_q and W_k are reordered so
that the two members of a rotated pair are adjacent; scores do not change, since Q and K are reordered alike. On these
other devices, the weights of norms are also folded into the following linear layers if the dtype is float32.

Invariants:
    - With the self-check (the default), this forward pass is used only after a comparison with transformers' own on the
      same weights.
    - Building it moves the layers' weights out of transformers' model, so that memory holds them once.
    - After the attention of the last layer, only the requested rows are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from vajra_kernels import AttentionMetadata, uses_triton
from vajra_py.engine.compute.model.attention import LayerFacts
from vajra_py.engine.compute.model.forward import Caches
from vajra_py.engine.compute.model.fused_parts import (
    Activation,
    Mlp,
    ModuleMlp,
    Norm,
    Product,
    Rope,
    RopeTables,
    Rotation,
)
from vajra_py.engine.compute.model.kv_groups import Metadata, Scores, attend, write_and_attend
from vajra_py.engine.compute.model.lora import AdapterSlots, Part
from vajra_py.engine.compute.model.shard import Shard
from vajra_py.engine.compute.model.stage import Stage

if TYPE_CHECKING:
    from vajra_kernels.operands import Rotation as TableRotation

    StepRotation = Rotation | TableRotation

KNOWN_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"})
"""Architectures with this decoder structure; others run on transformers' modules."""
ADAPTED_TYPES = KNOWN_TYPES - {"phi3"}
"""Architectures whose modules adapters can change; Phi 3 is excluded, since its modules are merged."""


@dataclass(slots=True)
class FusedLayer:
    """Weights and attention parameters of one decoder layer."""

    facts: LayerFacts
    rope: Rope
    attention_norm: Norm
    qkv: Product
    head_norm: Norm | None
    """Norm of each query and key head, before the rotary embedding (Qwen 3, Gemma 3)."""
    output: Product
    after_attention: Norm | None
    """Norm of attention's output before it is added to the residual (Gemma 2 and 3)."""
    mlp_norm: Norm
    mlp: Mlp | ModuleMlp
    after_mlp: Norm | None
    shard: Shard

    def attend(
        self,
        normed: torch.Tensor,
        rotation: StepRotation,
        metadata: Metadata,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return attention's result [T, Hq * D], before the output projection, for normalised hidden states [T, h]."""
        facts = self.facts
        qkv = self.qkv(normed)
        scores = Scores(facts.scale, facts.window, facts.softcap)
        if not isinstance(rotation, torch.Tensor | tuple):
            from vajra_kernels.layer_ops import rotate_and_write

            assert isinstance(metadata, AttentionMetadata)
            norm = None if self.head_norm is None else self.head_norm.parameters
            query = rotate_and_write(qkv, cache, metadata.slot_mapping, rotation, norm)
            return attend(query, cache, metadata, scores).view(query.shape[0], -1)
        num_tokens, dim = normed.shape[0], facts.key_dim
        num_rotated = facts.num_query_heads + facts.num_kv_heads
        rotated = qkv[:, : num_rotated * dim].view(num_tokens, num_rotated, dim)
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        rotated = self.rope.apply(rotated, rotation)
        value = qkv[:, num_rotated * dim :].view(num_tokens, facts.num_kv_heads, facts.value_dim)
        query, key = rotated[:, : facts.num_query_heads], rotated[:, facts.num_query_heads :]
        return write_and_attend((query, key, value), cache, metadata, scores).view(num_tokens, -1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor, following: Norm) -> torch.Tensor:
        """Add the results of attention and MLP to `hidden` [T, h] in place, and return `following(hidden)`."""
        mlp_input = self.shard.add_product(hidden, attended, self.output, self.after_attention, self.mlp_norm)
        if isinstance(self.mlp, ModuleMlp):
            return self.shard.add(hidden, self.mlp(mlp_input), self.after_mlp, following)
        return self.shard.add_product(hidden, self.mlp.inner(mlp_input), self.mlp.down, self.after_mlp, following)


class FusedForward:
    """A `Forward` with rearranged weights."""

    name = "fused"

    def __init__(
        self,
        model: Any,
        layers: list[LayerFacts],
        shard: Shard,
        device: torch.device,
        stage: Stage | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Move the layers' weights from `model` to `device`.

        `layers`: facts of the layers of this pipeline stage, with this rank's share of the heads. `adapters` need a
        single rank.

        Raises:
            AttributeError, ValueError: the model does not have the structure of its type.
        """
        body = model.model
        config = model.config
        self._stage = stage = stage or Stage()
        self.has_head = stage.is_last
        own = stage.layers(len(body.layers))
        if len(own) != len(layers):
            raise ValueError(f"{len(own)} layers, of which {len(layers)} attend")
        self._embedding: torch.Tensor = body.embed_tokens.weight.to(device)
        scale = getattr(body.embed_tokens, "embed_scale", None)
        self._embed_scale = None if scale is None else scale.to(device, self._embedding.dtype)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        dtype = self._embedding.dtype
        self._is_fused = uses_triton(device)
        self._adapters = adapters
        tables = RopeTables(body.rotary_emb.to(device), dtype)
        builder = _Builder(tables, shard, device, dtype, self._is_fused, adapters)
        self._layers: list[FusedLayer] = []
        for index, layer in enumerate(body.layers):
            if index in own:
                self._layers.append(builder.layer(index, layer, layers[index - own.start]))
            body.layers[index] = torch.nn.Identity()
        self._ropes = list(dict.fromkeys(layer.rope for layer in self._layers))
        self._shard = shard
        self._norm, self._head = builder.head(model, self._embedding)

    def set_layers(self, layers: list[LayerFacts]) -> None:
        """Replace the layers' attention parameters (windows), for the self-check."""
        for layer, facts in zip(self._layers, layers, strict=True):
            layer.facts = facts

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        metadata: Metadata,
        caches: Caches,
    ) -> torch.Tensor:
        """See `Forward`."""
        stage, adapters = self._stage, self._adapters
        if adapters is not None:
            adapters.use_all_rows()
        if stage.is_first:
            hidden = functional.embedding(token_ids, self._embedding)
            if self._embed_scale is not None:
                hidden *= self._embed_scale
        else:
            hidden = stage.receive(self._embedding.new_empty((token_ids.shape[0], self._embedding.shape[1])))
        # The kernel `rotate_and_write` indexes the whole table of rotations, and writes K and V of every row. With
        # `SplitMetadata` (requests spread over groups), this rank writes only some rows. The kernel is not used then,
        # and the rotations at the step's positions are needed instead.
        looks_up = self._is_fused and isinstance(metadata, AttentionMetadata)
        rotations: dict[Rope, StepRotation] = {
            rope: (rope.table if looks_up else rope.at)(positions, metadata.max_kv_len) for rope in self._ropes
        }
        normed = self._layers[0].attention_norm(hidden)
        for index, layer in enumerate(self._layers):
            attended = layer.attend(normed, rotations[layer.rope], metadata, caches[index])
            following = self._norm
            if index + 1 < len(self._layers):
                following = self._layers[index + 1].attention_norm
            # Drop the rows that are not requested. If as many are requested as exist, these are all rows, in order.
            elif stage.is_last and rows.shape[0] != token_ids.shape[0]:
                hidden, attended = hidden[rows], attended[rows]
                if adapters is not None:
                    adapters.use_rows(rows)
            normed = layer.finish(hidden, attended, following)
        if not stage.is_last:
            stage.send(hidden)
            return hidden.new_empty((0, self._embedding.shape[0]))
        logits = self._shard.gather_columns(self._head(normed), self._embedding.shape[0])
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits


@dataclass(frozen=True, slots=True)
class _Builder:
    tables: RopeTables
    shard: Shard
    device: torch.device
    dtype: torch.dtype
    is_fused: bool
    """True if `vajra_kernels.layer_ops` computes the operations between linear layers."""
    adapters: AdapterSlots | None

    @property
    def folds(self) -> bool:
        """True if norm weights are folded into the following linear layers: in float32, unless `is_fused`.

        In half precision, folding would add a rounding.
        """
        return self.dtype == torch.float32 and not self.is_fused

    def layer(self, index: int, layer: Any, facts: LayerFacts) -> FusedLayer:
        attention = layer.self_attn
        rope = self.tables.rope(getattr(attention, "layer_type", None), facts.key_dim, is_complex=not self.is_fused)
        qkv, bias = self._qkv(attention, facts, rope)
        attention_norm, qkv = self._before(layer.input_layernorm, qkv)
        four_norms = hasattr(layer, "pre_feedforward_layernorm")
        before_mlp = layer.pre_feedforward_layernorm if four_norms else layer.post_attention_layernorm
        mlp: Mlp | ModuleMlp
        if hasattr(layer.mlp, "down_proj"):
            gate_up = self._gate_up(layer.mlp)
            mlp_norm, gate_up = self._before(before_mlp, gate_up)
            down = self.shard.columns(layer.mlp.down_proj.weight)
            act = Activation(getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn, self.is_fused)
            inner = [Part(name, gate_up.shape[0] // 2) for name in ("gate_proj", "up_proj")]
            mlp = Mlp(
                self._adapted(self._product(gate_up, None), index, inner, gate_up, before_mlp),
                self._adapted(self._product(down, None), index, [Part("down_proj", down.shape[0])], down),
                act,
            )
        else:
            mlp_norm = self._norm(before_mlp)
            mlp = ModuleMlp(self.shard.experts(layer.mlp).to(self.device))
        output = self.shard.columns(attention.o_proj.weight)
        return FusedLayer(
            facts=facts,
            rope=rope,
            attention_norm=attention_norm,
            qkv=self._adapted(self._product(qkv, bias), index, _heads(facts, rope), qkv, layer.input_layernorm),
            head_norm=self._head_norm(attention, facts, rope),
            output=self._adapted(
                self._product(output, self.shard.once(attention.o_proj.bias)),
                index,
                [Part("o_proj", output.shape[0])],
                output,
            ),
            after_attention=self._norm(layer.post_attention_layernorm) if four_norms else None,
            mlp_norm=mlp_norm,
            mlp=mlp,
            after_mlp=self._norm(layer.post_feedforward_layernorm) if four_norms else None,
            shard=self.shard,
        )

    def head(self, model: Any, embedding: torch.Tensor) -> tuple[Norm, Product]:
        """Return the last norm and the output layer."""
        if model.lm_head.weight is model.model.embed_tokens.weight:
            # The output layer shares its weight with the embedding. The weight is used as it is, since a packed copy
            # would take the same memory again.
            return self._norm(model.model.norm), Product(self.shard.vocabulary_rows(embedding), None)
        weight = self.shard.vocabulary_rows(model.lm_head.weight)
        norm, weight = self._before(model.model.norm, weight)
        product = self._product(weight, None)
        model.lm_head = torch.nn.Identity()
        return norm, product

    def _before(self, module: Any, weight: torch.Tensor) -> tuple[Norm, torch.Tensor]:
        """Return the norm before a linear layer, and that layer's weight [outputs, inputs].

        If norms are folded, the layer's weight is multiplied by the norm's weight.
        """
        norm = self._norm(module)
        if not self.folds:
            return norm, weight
        assert norm.weight is not None
        return Norm(None, norm.eps, norm.width), weight * norm.weight

    def _norm(self, module: Any) -> Norm:
        return Norm.of(module.to(self.device), self.is_fused)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return Product.packed(weight.to(self.device), None if bias is None else bias.to(self.device))

    def _adapted(
        self, product: Product, index: int, parts: list[Part], weight: torch.Tensor, norm: Any = None
    ) -> Product:
        """Return the linear layer `product` with adapter slots; `product` itself if no adapter changes it.

        `norm`: module of the norm before the layer, whose weight may be folded into `weight`; None: no norm.
        """
        if self.adapters is None:
            return product
        folded = self._norm(norm).weight if norm is not None and self.folds else None
        return self.adapters.adapted(product, index, parts, weight.shape[1], folded)

    def _qkv(self, attention: Any, facts: LayerFacts, rope: Rope) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's rows of W_q, W_k and W_v, concatenated, with their biases."""
        heads = (facts.num_query_heads, facts.num_kv_heads, facts.num_kv_heads)
        if hasattr(attention, "qkv_proj"):
            sizes = [count * self.shard.size * facts.key_dim for count in heads]
            weights = torch.split(attention.qkv_proj.weight, sizes)
            biases = None if attention.qkv_proj.bias is None else torch.split(attention.qkv_proj.bias, sizes)
        else:
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            weights = tuple(part.weight for part in parts)
            biases = None if parts[0].bias is None else tuple(part.bias for part in parts)

        def joined(pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
            query, key, value = (self.shard.rows(piece) for piece in pieces)
            return torch.cat((rope.reorder(query, facts.key_dim), rope.reorder(key, facts.key_dim), value))

        return joined(weights), None if biases is None else joined(biases)

    def _gate_up(self, mlp: Any) -> torch.Tensor:
        if hasattr(mlp, "gate_up_proj"):
            gate, up = mlp.gate_up_proj.weight.chunk(2)
        else:
            gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
        return torch.cat((self.shard.rows(gate), self.shard.rows(up)))

    def _head_norm(self, attention: Any, facts: LayerFacts, rope: Rope) -> Norm | None:
        if not hasattr(attention, "q_norm"):
            return None
        query, key = self._norm(attention.q_norm), self._norm(attention.k_norm)
        assert query.weight is not None
        assert key.weight is not None
        rows = [rope.reorder(query.weight, facts.key_dim)] * facts.num_query_heads
        rows += [rope.reorder(key.weight, facts.key_dim)] * facts.num_kv_heads
        return Norm(torch.stack(rows), query.eps, facts.key_dim, query.is_wide)


def _heads(facts: LayerFacts, rope: Rope) -> list[Part]:
    """Return the parts (Q, K, V) of a decoder layer's merged linear layer before attention."""

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        return rope.reorder(rows, facts.key_dim)

    return [
        Part("q_proj", facts.num_query_heads * facts.key_dim, reorder),
        Part("k_proj", facts.num_kv_heads * facts.key_dim, reorder),
        Part("v_proj", facts.num_kv_heads * facts.value_dim),
    ]
