"""Random models: same seed same bytes, and every architecture as an engine has to see it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.errors import ModelError, ModelNotFetched
from td_serve.models.random_model import LIKE, RandomModel, write_random

SMALL = {"layers": 2, "hidden": 128, "heads": 4, "head_dim": 32, "intermediate": 128}
PROMPT = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]


def digests(path: Path) -> dict[str, str]:
    """The SHA-256 of each file in a directory."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


def test_the_seed_decides_every_byte(real_cache: Any, tmp_path: Path) -> None:
    first = digests(write_random(tmp_path / "a", seed=7, **SMALL))
    again = digests(write_random(tmp_path / "b", seed=7, **SMALL))
    other = digests(write_random(tmp_path / "c", seed=8, **SMALL))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("like", LIKE)
def test_every_architecture_loads_and_heeds_its_context(
    like: str, real_cache: Any, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = write_random(tmp_path / like, like=like, **SMALL)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        whole = model(torch.tensor([PROMPT])).logits[0, -1]
        changed = model(torch.tensor([[PROMPT[0] + 1, *PROMPT[1:]]])).logits[0, -1]
    assert torch.isfinite(whole).all()
    # A first token that did not matter would let a test pass on a wrong KV cache.
    assert (whole - changed).abs().max() > 0.01 * whole.std()


def test_the_chat_template_and_tokenizer_are_the_real_ones(real_cache: Any, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m", **SMALL)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (path / name).read_bytes() == (real_cache.model / name).read_bytes()


@pytest.mark.engine
def test_vllm_and_transformers_agree(real_cache: Any, tmp_path: Path) -> None:
    """For `mla` this is what the module's docstring promises, and only with that option."""
    import torch
    from transformers import AutoModelForCausalLM

    paths = [write_random(tmp_path / like, like=like, **SMALL) for like in ("mla", "qwen2.5")]
    expected = []
    for path in paths:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            output = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
        expected.append(output[0, len(PROMPT) :].tolist())
    engine = Path(__file__).with_name("generate_with_vllm.py")
    child = subprocess.run(
        [sys.executable, str(engine), json.dumps(PROMPT), *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert json.loads(child.stdout.splitlines()[-1]) == expected


def test_an_existing_directory_is_not_touched(real_cache: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="which exists; expected a new directory"):
        write_random(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_without_the_tokenizer_nothing_is_written(empty_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFetched, match="td-serve model fetch"):
        write_random(tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("like", "gpt2", r"like is 'gpt2'; expected one of llama, .*mla"),
        ("layers", 0, r"layers is 0; expected at least 1"),
        ("hidden", -1, r"hidden is -1; expected at least 1"),
        ("kv_heads", 3, r"kv_heads is 3; expected a divisor of heads, which is 4"),
        ("head_dim", 32, r"head_dim is 32; expected hidden / heads for qwen2\.5, which is 256/4"),
        ("head_dim", 33, r"head_dim is 33; expected an even number"),
        ("seed", -1, r"seed is -1; expected 0 to 2\*\*63 - 1"),
        ("seed", 1 << 63, r"seed is 9223372036854775808; expected 0 to 2\*\*63 - 1"),
    ],
)
def test_what_does_not_fit_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RandomModel(**{field: value})


@given(st.integers(-2, 40), st.integers(-2, 40))
def test_heads_are_shared_evenly_or_refused(heads: int, kv_heads: int) -> None:
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    try:
        RandomModel(like="qwen3", heads=heads, kv_heads=kv_heads)
    except ModelError:
        assert not fits
    else:
        assert fits
