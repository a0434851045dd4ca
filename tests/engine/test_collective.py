"""The collective pass on vLLM's own modules: everything computed, it is vLLM's prefill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from td_serve.engine.collective import Group, run_pass
from td_serve.engine.model import VllmModel
from td_serve.engine.pages import PagedAttention
from td_serve.errors import ModelError
from td_serve.models.random_model import write_random
from td_serve.rows import Extent, layout
from td_serve.store.families import NOTHING, Run
from td_serve.store.kv import KV
from td_serve.types import Piece
from tests.plain import plain_engine

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-4


class Engine:
    """A plain engine in this process, and passes in its worker."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self._llm = plain_engine(path, max_model_len=1024, **arguments)

    def in_worker(self, work: Callable[[VllmModel, PagedAttention], Any]) -> Any:
        def run(worker: Any) -> Any:
            runner = worker.model_runner
            model = VllmModel(runner.get_model())
            builder = runner.attn_groups[0][0].get_metadata_builder()
            with torch.inference_mode():
                return work(model, PagedAttention(model.attention, builder, runner.kv_caches[0]))

        (result,) = self._llm.collective_rpc(run)
        return result

    def next_logprobs(self, prompts: Sequence[list[int]]) -> list[dict[int, float]]:
        """Of the token after each prompt: the likeliest ones."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=1, logprobs=20),
            use_tqdm=False,
        )
        found = [output.outputs[0].logprobs[0] for output in outputs]
        return [{token: one.logprob for token, one in each.items()} for each in found]


ORIGINAL = 128
"""Positions a scaled model was made for: fewer than prompts have here."""
SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "max_trained_positions": ORIGINAL},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
}


@pytest.fixture(
    scope="module",
    params=["llama", "qwen2.5", "qwen3", "mistral", *SCALED],
    ids=lambda like: str(like),
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("models") / "tiny"
    like = "llama" if request.param in SCALED else request.param
    write_random(path, like=like, layers=3, kv_heads=2, head_dim=64)
    if request.param in SCALED:
        config = json.loads((path / "config.json").read_text("utf-8"))
        theta = config["rope_parameters"]["rope_theta"]
        scaling = {"rope_type": request.param, "rope_theta": theta, **SCALED[request.param]}
        config["rope_parameters"] = scaling
        (path / "config.json").write_text(json.dumps(config), "utf-8")
    return Engine(path)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def finish(steps: Iterator[None]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


CANONICAL = tokens(150, 1)
"""A header of 30 tokens, and two segments of 70 and 50."""
SEGMENTS = ((30, 70), (100, 50))


def canonical(model: VllmModel, attention: PagedAttention) -> KV:
    extent = Extent(tokens=len(CANONICAL), history=0, pieces=[])
    rows = layout([extent], [[]], BLOCK)
    group = Group(rows, CANONICAL, KV(), [(NOTHING, 0)], unrotated=True)
    kv: KV = finish(run_pass(model, attention, group)).kv
    return kv


class Prompt:
    """History, both segments, something in between, and a task."""

    def __init__(self, seed: int, history: int, between: int, task: int) -> None:
        self.ids = tokens(history, seed)
        self.pieces = []
        for source, count in SEGMENTS:
            self.pieces.append(Piece(start=len(self.ids), tokens=count, source=source))
            self.ids += CANONICAL[source : source + count]
            self.ids += tokens(between, seed + 100)
        self.ids += tokens(task, seed + 200)

    def extent(self, history: int = 0) -> Extent:
        return Extent(tokens=len(self.ids), history=history, pieces=self.pieces)


PROMPTS = [Prompt(1, 40, 0, 9), Prompt(2, 17, 5, 1), Prompt(3, 0, 3, 30), Prompt(4, 131, 1, 64)]


def last_logits(
    model: VllmModel,
    attention: PagedAttention,
    prompts: Sequence[Prompt],
    chosen: list[bool],
    histories: Sequence[Run] = (),
) -> torch.Tensor:
    """Of each prompt's last token, by one pass for all."""
    kept = histories or [NOTHING] * len(prompts)
    extents = [
        prompt.extent(len(history.token_ids)) for prompt, history in zip(prompts, kept, strict=True)
    ]
    rows = layout(extents, [chosen] * len(extents), BLOCK)
    ids = [
        prompt.ids[position]
        for prompt, share in zip(prompts, rows.shares, strict=True)
        for position in rows.positions[share.first : share.last]
    ]
    group = Group(
        rows,
        ids,
        canonical(model, attention),
        [(history, len(history.token_ids)) for history in kept],
        logits_of=[share.last - 1 for share in rows.shares],
    )
    logits: torch.Tensor = finish(run_pass(model, attention, group)).logits
    return logits


def assert_same(logits: torch.Tensor, wanted: Sequence[dict[int, float]]) -> None:
    for row, likeliest in zip(logits.log_softmax(-1), wanted, strict=True):
        for token, logprob in likeliest.items():
            assert abs(row[token].item() - logprob) < CLOSE


ALL = [True] * len(CANONICAL)
NONE = [False] * len(CANONICAL)


def test_with_everything_computed_it_is_an_ordinary_prefill(engine: Engine) -> None:
    found = engine.in_worker(lambda *parts: last_logits(*parts, PROMPTS, ALL))
    assert_same(found, engine.next_logprobs([prompt.ids for prompt in PROMPTS]))


def test_a_kept_history_is_as_good_as_a_computed_one(engine: Engine) -> None:
    def work(model: VllmModel, attention: PagedAttention) -> torch.Tensor:
        histories = []
        for prompt in PROMPTS:
            kept = prompt.pieces[0].start
            if not kept:
                histories.append(NOTHING)
                continue
            rows = layout([Extent(tokens=kept, history=0, pieces=[])], [[]], BLOCK)
            group = Group(rows, prompt.ids[:kept], KV(), [(NOTHING, 0)])
            kv = finish(run_pass(model, attention, group)).kv
            histories.append(Run(prompt.ids[:kept], kv))
        return last_logits(model, attention, PROMPTS, ALL, histories)

    assert_same(engine.in_worker(work), engine.next_logprobs([one.ids for one in PROMPTS]))


def test_the_canonical_sequence_itself_is_reused_without_any_error(engine: Engine) -> None:
    """Where a prompt begins with all of it, every key turns to where it was computed."""
    prompt = Prompt(5, 0, 0, 0)
    prompt.ids = CANONICAL + tokens(20, 6)
    prompt.pieces = [Piece(start=0, tokens=len(CANONICAL), source=0)]
    found = engine.in_worker(lambda *parts: last_logits(*parts, [prompt], NONE))
    assert_same(found, engine.next_logprobs([prompt.ids]))


@pytest.mark.parametrize("every", [2, 3, 7])
def test_together_and_one_by_one_are_the_same(engine: Engine, every: int) -> None:
    chosen = [number % every == 0 for number in range(len(CANONICAL))]

    def one_by_one(model: VllmModel, attention: PagedAttention) -> torch.Tensor:
        return torch.cat([last_logits(model, attention, [one], chosen) for one in PROMPTS])

    together = engine.in_worker(lambda *parts: last_logits(*parts, PROMPTS, chosen))
    assert (together - engine.in_worker(one_by_one)).abs().max() <= CLOSE


def test_reuse_is_not_for_nothing(engine: Engine) -> None:
    """Or the tests above would prove little: with nothing chosen, answers are others."""
    ordinary = engine.in_worker(lambda *parts: last_logits(*parts, PROMPTS, ALL))
    reused = engine.in_worker(lambda *parts: last_logits(*parts, PROMPTS, NONE))
    assert (ordinary - reused).abs().max() > 100 * CLOSE


def test_what_is_turned_back_is_what_it_was(engine: Engine) -> None:
    def work(model: VllmModel, attention: PagedAttention) -> list[float]:
        far = []
        for layer, one in enumerate(model.attention):
            keys = torch.randn(9, one.num_kv_heads * one.head_size)
            positions = torch.tensor([0, 1, 5, 100, 127, 128, 129, 500, 900])
            _, turned = model.rotate(layer, positions, torch.zeros_like(keys), keys.clone())
            assert turned is not None
            assert not torch.allclose(turned[1:], keys[1:]), "or nothing has been turned"
            far.append((model.unrotate(layer, positions, turned) - keys).abs().max().item())
        return far

    assert max(engine.in_worker(work)) <= CLOSE


def test_a_model_that_no_pass_computes_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_random(tmp_path / "mla", like="mla", layers=2)
    engine = Engine(tmp_path / "mla", compilation_config={"custom_ops": ["-rotary_embedding"]})
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM: no passes over its layers"):
        engine.in_worker(lambda *parts: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_what_is_written_to_pages_is_read_from_there(
    tmp_path: Path, dtype: str, head_dim: int
) -> None:
    """However the backend packs it for this CPU; over blocks in any order, the last one part full.

    What stands around it is NaN."""
    write_random(tmp_path / "tiny", like="llama", layers=1, kv_heads=2, head_dim=head_dim)

    def work(model: VllmModel, attention: PagedAttention) -> bool:
        blocks, count = [4, 1, 3], 2 * BLOCK + 5
        memory = attention.memory(6).fill_(float("nan"))
        wanted = torch.randn(2, count, 2 * head_dim).to(memory.dtype)
        at = torch.arange(count)
        slots = torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK
        attention.write(0, memory, wanted[0], wanted[1], slots)
        for first, last in ((0, count), (BLOCK - 1, BLOCK + 1), (BLOCK, count), (7, 7)):
            keys, values = attention.read(memory, blocks, first, last)
            assert torch.equal(keys, wanted[0, first:last])
            assert torch.equal(values, wanted[1, first:last])
        # As views, too: whoever writes through them writes what attention reads.
        assert attention.is_strided
        for plane, wanted_rows in zip(attention.planes(memory), wanted, strict=True):
            rows = plane[torch.tensor(blocks)].flatten(0, 1)[:count]
            assert torch.equal(rows.flatten(1), wanted_rows)
        return True

    assert Engine(tmp_path / "tiny", dtype=dtype).in_worker(work)
