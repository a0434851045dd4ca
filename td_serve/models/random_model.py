"""Small models of named architectures with seeded random weights.

For tests and measurements of code paths that differ by architecture (biases in qkv, norms on q and
k, one latent vector instead of keys and values), at a size that a CPU runs in no time. Their text
is noise; they tokenise, template and stop as the model whose tokenizer they carry.

All of them give the same greedy output in vLLM 0.32 on CPU, float32, as in transformers, `mla` with
a proviso: that build's rotary kernel is wrong for it (from the second token on), its plain torch
version right. Start the engine with `compilation_config={"custom_ops": ["-rotary_embedding"]}`.
vLLM itself then sets a block size of 16 and turns prefix caching and chunked prefill off.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from td_serve.errors import ModelError
from td_serve.models import cache
from td_serve.models.catalog import SMOLLM2_135M_INSTRUCT
from td_serve.models.resolve import resolve

if TYPE_CHECKING:
    import torch

LIKE = ("llama", "mistral", "qwen2.5", "qwen3", "mla")
"""The architectures. `mla` is DeepSeek V3's attention, with dense layers only: `kv_heads` is not
used, and `head_dim` is that of the values and of the keys' unrotated part."""

# MLA's latent vector, numbers per token. vLLM's CPU kernel is compiled for these two only.
MLA_LATENT = 512
MLA_ROTARY = 64

TOKENIZER_OF = SMOLLM2_135M_INSTRUCT.name


class RandomModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a random model looks like. Sizes are in numbers, not bytes; weights are float32."""

    like: str = "qwen2.5"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.like not in LIKE:
            raise ModelError(f"like is {self.like!r}; expected one of {', '.join(LIKE)}")
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"):
            value = getattr(self, field)
            if value < 1:
                raise ModelError(f"{field} is {value}; expected at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"kv_heads is {self.kv_heads}; expected a divisor of heads, which is {self.heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; expected an even number")
        if self.like == "qwen2.5" and self.heads * self.head_dim != self.hidden:
            # transformers would follow head_dim; vLLM ignores it and loads the weights askew.
            raise ModelError(
                f"head_dim is {self.head_dim}; expected hidden / heads for qwen2.5, which is"
                f" {self.hidden}/{self.heads}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ModelError(f"seed is {self.seed}; expected 0 to 2**63 - 1")


def write_random(
    out: Path | str,
    *,
    like: str = "qwen2.5",
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 512,
    seed: int = 0,
) -> Path:
    """Write a random model into the new directory `out`; returns its absolute path.

    The same arguments give the same bytes, on one release of torch and transformers. `out` appears
    complete or not at all.

    Raises:
        ModelNotFetched: the model that lends its tokenizer is not in the cache.
        ModelError: a field does not fit, or `out` exists.
    """
    model = RandomModel(
        like=like,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        seed=seed,
    )
    target = Path(out).expanduser().absolute()
    lender = resolve(TOKENIZER_OF)
    with cache.locked(target):
        if target.exists():
            raise ModelError(f"out is {str(target)!r}, which exists; expected a new directory")
        with cache.publishing(target) as partial:
            _write(model, lender, partial)
    return target


def _write(model: RandomModel, lender: str, into: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(lender)
    config = _config(model, tokenizer)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]
    weights = _weights(dict(skeleton.named_parameters()), model.seed)

    config.save_pretrained(into)
    GenerationConfig.from_model_config(config).save_pretrained(into)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(into)


def _config(model: RandomModel, tokenizer: Any) -> Any:
    from transformers import (
        DeepseekV3Config,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    classes: dict[str, Any] = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2.5": Qwen2Config,
        "qwen3": Qwen3Config,
        "mla": DeepseekV3Config,
    }
    own: dict[str, Any] = {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    if model.like == "mistral":
        own["sliding_window"] = None  # its configuration has one unless told otherwise
    if model.like == "mla":
        own = {
            "num_key_value_heads": model.heads,
            "kv_lora_rank": MLA_LATENT,
            "qk_rope_head_dim": MLA_ROTARY,
            "qk_nope_head_dim": model.head_dim,
            "v_head_dim": model.head_dim,
            "q_lora_rank": model.hidden // 2,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": model.layers,  # no layer is a mixture of experts
        }
    return classes[model.like](
        vocab_size=len(tokenizer),
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        max_position_embeddings=tokenizer.model_max_length,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=model.like != "mla",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **own,
    )


def _weights(shapes: dict[str, "torch.Tensor"], seed: int) -> dict[str, "torch.Tensor"]:
    """Random tensors of the names and shapes in `shapes`, which holds no data itself.

    Matrices have deviation 1/sqrt(inputs), so that every layer, its attention too, changes what
    follows: with the 0.02 that training starts from, a small model's output would hardly depend on
    its context, and tests of the KV cache would pass with a wrong one. Vectors (norm weights and
    biases) vary for the same reason. Names are filled in sorted order.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name in sorted(shapes):
        shape = shapes[name].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if len(shape) > 1:
            filled[name] = noise * shape[-1] ** -0.5
        elif name.endswith("bias"):
            filled[name] = noise * 0.5
        else:
            filled[name] = 1 + noise * 0.1
    return filled
