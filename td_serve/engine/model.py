"""A model as the layers that a pass runs one by one, on vLLM's own modules.

Modules are called and weights never read: vLLM may have packed them. Layers run eagerly, outside of
any compiled or captured forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from td_serve.errors import ModelError
from td_serve.store.kv import Shape

_SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_ROTARY = (
    "RotaryEmbedding",
    "Llama3RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""Rotations by a token's own position alone, by one table for all lengths. Keys are kept before
rotation and turned once, by the model's own module, so that no scaling is ours to know."""


class Turning(NamedTuple):
    """Cosines, then sines, of each position, [positions, rotary size]; pairs are halves of a key if
    it is NeoX's way, else neighbours."""

    table: torch.Tensor
    is_neox: bool


class LayeredModel(Protocol):
    """Order, for each layer: `project`, `rotate`, attention, `finish`.

    Shapes: [rows, heads * head size]; `residual` is None before the first layer.
    """

    layers: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...

    def project(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value before any rotation, and the residual."""
        ...

    def rotate(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn from position 0 to `positions`. May change its arguments."""
        ...

    def unrotate(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Turn keys back from `positions` to position 0: what `rotate` does is undone."""
        ...

    def finish(
        self, layer: int, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logits(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of the given rows, [rows, vocabulary], float32."""
        ...

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, each of which has some of the heads; the same bits on each."""
        ...


class VllmModel:
    """`LayeredModel` on a model that vLLM has loaded. Raises ModelError where it does not fit."""

    def __init__(self, model: Any) -> None:
        _check(model)
        self._model = model
        self._layers = model.model.layers
        self.layers = len(self._layers)
        self.attention = [layer.self_attn.attn for layer in self._layers]
        some = self.attention[0]
        dtype = next(model.parameters()).dtype
        self.kv_shape = Shape(self.layers, some.num_kv_heads * some.head_size, dtype)
        """Of what this rank has of keys and values."""
        self.kv_bytes = self.layers * 2 * self.kv_shape.width * dtype.itemsize
        """Of one token's, all layers, on this rank."""

    @property
    def turning(self) -> Turning:
        """What all layers' rotations go by."""
        rotary = self._layers[0].self_attn.rotary_emb
        return Turning(rotary.cos_sin_cache, rotary.is_neox_style)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._model.model.embed_tokens(ids)
        return hidden

    def project(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        module = self._layers[layer]
        if residual is None:
            residual = hidden
            hidden = module.input_layernorm(hidden)
        else:
            hidden, residual = module.input_layernorm(hidden, residual)
        attention = module.self_attn
        packed, _ = attention.qkv_proj(hidden)
        query, key, value = packed.split(
            [attention.q_size, attention.kv_size, attention.kv_size], dim=-1
        )
        if (norm := getattr(attention, "q_norm", None)) is not None:
            query = _by_head(norm, query, attention.head_dim)
            key = _by_head(attention.k_norm, key, attention.head_dim)
        return query.contiguous(), key.contiguous(), value.contiguous(), residual

    def rotate(
        self, layer: int, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        turned: tuple[torch.Tensor, torch.Tensor | None] = self._layers[layer].self_attn.rotary_emb(
            positions, query, key
        )
        return turned

    def unrotate(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # A turn of a mirrored pair is a turn the other way, mirrored. Some scalings stretch keys,
        # too: by how much shows at position 0.
        mirror = self._mirror(layer).to(key.dtype)
        still = torch.zeros(1, dtype=torch.int64)
        _, stretched = self.rotate(layer, still, torch.ones_like(key[:1]), torch.ones_like(key[:1]))
        _, turned = self.rotate(layer, positions, torch.zeros_like(key), key * mirror)
        assert turned is not None, "a rotation gives back what it was given"
        assert stretched is not None, "a rotation gives back what it was given"
        return turned * mirror / stretched.square()

    def _mirror(self, layer: int) -> torch.Tensor:
        """1 or -1 for each number of a key, [KV heads * head size]: -1 for one of each pair that
        turns together."""
        rotary = self._layers[layer].self_attn.rotary_emb
        places = torch.arange(self.attention[layer].head_size)
        if rotary.is_neox_style:
            second = (places >= rotary.rotary_dim // 2) & (places < rotary.rotary_dim)
        else:
            second = (places % 2 == 1) & (places < rotary.rotary_dim)
        return (1 - 2 * second.int()).repeat(self.attention[layer].num_kv_heads)

    def finish(
        self, layer: int, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._layers[layer]
        hidden, _ = module.self_attn.o_proj(attended)
        hidden, residual = module.post_attention_layernorm(hidden, residual)
        return module.mlp(hidden), residual

    def logits(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, _ = self._model.model.norm(hidden, residual)
        logits: torch.Tensor = self._model.compute_logits(normed)
        return logits.float()

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = tensor_model_parallel_all_reduce(part)
        return total


def _by_head(norm: Any, rows: torch.Tensor, head_size: int) -> torch.Tensor:
    normed: torch.Tensor = norm(rows.contiguous().view(-1, head_size))
    return normed.view(rows.shape)


def _check(model: Any) -> None:
    """Raises ModelError, with the reason."""
    name = type(model).__name__
    if name not in _SUPPORTED:
        raise ModelError(f"{name}: no passes over its layers; expected {', '.join(_SUPPORTED)}")
    for number, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise ModelError(f"{name}: layer {number} is not here (pipeline parallel)")
        own = attention.attn.impl
        for feature, is_used in (
            ("a sliding window", getattr(own, "sliding_window", -1) not in (None, -1, (-1, -1))),
            ("capped logits", bool(getattr(own, "logits_soft_cap", 0))),
            ("attention sinks", getattr(own, "sinks", None) is not None),
            ("ALiBi", getattr(own, "alibi_slopes", None) is not None),
            ("Llama 4's scaling", getattr(attention, "do_llama_4_scaling", False)),
            ("a quantised KV cache", getattr(own, "kv_cache_dtype", "auto") != "auto"),
        ):
            if is_used:
                raise ModelError(f"{name}: layer {number} has {feature}, which no pass computes")
        rotary = type(attention.rotary_emb).__name__
        if rotary not in _ROTARY:
            raise ModelError(f"{name}: positions by {rotary}, expected {', '.join(_ROTARY)}")
