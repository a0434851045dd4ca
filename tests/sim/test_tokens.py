"""Counting tokens without a server: the estimate, and a model directory's tokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from td_serve.errors import ReplayError
from td_serve.sim.tokens import Estimate, ModelTokenizer, load_counter

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[ {{ m.role }} ] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[ assistant ]{% endif %}"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory with a tokenizer that counts words and punctuation, and a chat template."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "begin"}, "eos_token": "end", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@given(st.text(), st.text())
def test_the_estimate_grows_with_the_text(one: str, two: str) -> None:
    count = Estimate().text
    assert count(one) <= count(one + "\n\n" + two)
    assert count(two) <= count(one + "\n\n" + two)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("storm", 2),  # letters by threes
        ("the storm", 3),  # a space before a word is free
        ("Day 12", 4),  # a space before a digit is not, and each digit counts
        ("a\n\nb", 4),
        ("暴风雨", 8),  # 2.4 each
    ],
)
def test_the_estimate_is_as_stated(text: str, tokens: int) -> None:
    assert Estimate().text(text) == tokens


def test_a_model_directory_counts_with_its_template(model_dir: Path) -> None:
    counter = load_counter(model_dir, None)
    assert counter.exact
    assert counter.text("a storm comes") == 3
    # begin [ user ] a storm [ assistant ]
    assert counter.chat([{"role": "user", "content": "a storm"}]) == 9


def test_a_separate_template_file_goes_before_the_configuration(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("just this")
    assert ModelTokenizer(model_dir).chat([{"role": "user", "content": "a storm"}]) == 2


def test_the_served_models_directory_is_used_when_it_can_be_read(model_dir: Path) -> None:
    assert load_counter(None, str(model_dir)).exact
    assert not load_counter(None, "someone/else").exact
    assert not load_counter(None, None).exact


def test_what_the_template_refuses_is_told(model_dir: Path) -> None:
    with pytest.raises(ReplayError, match=r"no tools"):
        ModelTokenizer(model_dir).chat([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_an_unusable_directory_is_refused_by_the_file(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("{")
    with pytest.raises(ReplayError, match=name):
        load_counter(model_dir, None)
    (model_dir / name).unlink()
    with pytest.raises(ReplayError, match=name):
        load_counter(model_dir, None)


def test_a_model_without_a_chat_template_is_refused(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ReplayError, match=r"chat_template"):
        load_counter(model_dir, None)
