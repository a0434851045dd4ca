"""An engine in this process that plays rounds, as it is or by passes, and says how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from td_serve.bench.authors import Authors
from td_serve.bench.trace_rounds import Round
from td_serve.errors import TdServeError
from td_serve.reuse import Reuse
from td_serve.types import (
    AgentId,
    PassResult,
    PassSpec,
    PassTokens,
    RequestId,
    Rule,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from td_serve.bench.restore_worker import Restored
    from td_serve.bench.scoring import Score
    from td_serve.store.codecs import Codecs
    from td_serve.store.sizes import FamilySize

BLOCK_SIZE = 32
_BYTES_OF_STORE = 4 * 2**30
_WHOLE_PASS_S = 3600.0


@dataclass
class Played:
    """A round: seconds until its last first token, of which `spent` in the phases of passes; the
    tokens that were computed for it, by whatever way; and the answers by agent."""

    seconds: float
    computed: int
    spent: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    counted: list[PassTokens] = field(default_factory=list)


class PassEngine:
    """Made once in a process. `pool_tokens` is how many tokens its KV pool holds."""

    def __init__(self, model: str, dtype: str, window: int, pool_tokens: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from td_serve.engine.restoring import STORE_BYTES

        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=window,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
            enable_prefix_caching=True,
            # Or vLLM would measure how much memory there is.
            kv_cache_memory_bytes=2**29,
            num_gpu_blocks_override=-(-pool_tokens // BLOCK_SIZE),
            worker_extension_cls="td_serve.bench.restore_worker.BenchWorker",
            kv_transfer_config=KVTransferConfig(
                kv_connector="RoundConnector",
                kv_connector_module_path="td_serve.engine.restoring",
                kv_role="kv_both",
                kv_connector_extra_config={STORE_BYTES: _BYTES_OF_STORE},
            ),
        )

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()

    def play_plain(self, round_: Round, salt: str, max_tokens: int = 1) -> Played:
        """Every member as an ordinary request."""
        return self._answer(round_, dict.fromkeys(map(str, round_), salt), {}, max_tokens)

    def bring(self, reuse: Reuse, authors: Authors) -> None:
        """Have what was said there, as it was decoded, for a round's passes to take over.

        It is computed as a prefill of the author's turn, which gives the KV of a turn that was not
        blended; the time for that does not count, nor would that for a read.
        """
        from td_serve.engine.restoring import Output, output_parameters

        written = {one.name: one for spec in reuse.passes for one in spec.written}
        new = [written[name] for name in self._call("td_bring", list(written))]
        for one in new:
            piece = one.piece
            output = Output(one.name, piece.start, piece.tokens, piece.start)
            # One token more: the engine would compute the last one anew.
            self._step([*authors.read_by(one), 0], output_parameters(output))
        if new:
            self._step([0], {})  # each is taken out of the pages in the step that follows
            if missing := self._call("td_bring", [one.name for one in new]):
                raise TdServeError(f"what was said in {missing} is not kept")

    def _step(self, prompt: list[int], parameters: dict[str, Any]) -> None:
        """Have a prompt prefilled."""
        from vllm import SamplingParams

        self._llm.generate(
            {"prompt_token_ids": prompt, "cache_salt": "authors"},
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                extra_args={"kv_transfer_params": parameters},
            ),
            use_tqdm=False,
        )

    def prepare(self, reuse: Reuse) -> None:
        """Compute what the members of a round share, before it comes."""
        for spec in reuse.passes:
            self._run(msgspec.structs.replace(spec, members=[]))

    def play_passes(
        self,
        round_: Round,
        reuse: Reuse,
        salt: str,
        together: bool,
        max_tokens: int = 1,
        *,
        release: bool = True,
    ) -> Played:
        """Members by passes, all of one at once or one by one; the others as they are. What was
        made for them to load is released, or is to be."""
        specs = reuse.passes
        if not together:
            specs = [
                msgspec.structs.replace(spec, members=[member])
                for spec in reuse.passes
                for member in spec.members
            ]
        from td_serve.engine.restoring import keep_parameters, ready_parameters

        self._call("td_spent")
        began = time.perf_counter()
        counted: dict[str, PassTokens] = {}
        canonical = 0
        for spec in specs:
            result = self._run(spec)
            counted |= result.members
            canonical += result.canonical
        passed = time.perf_counter() - began
        names = {str(agent): str(one.request_id) for agent, one in round_.items()}
        salts = {agent: f"{salt}-{name}" for agent, name in names.items()}
        ready = {
            agent: {
                **ready_parameters(name, _prompt(round_, agent)[: counted[name].prompt]),
                **keep_parameters(reuse.histories[RequestId(name)]),
            }
            for agent, name in names.items()
            if name in counted
        }
        played = self._answer(round_, salts, ready, max_tokens)
        spent = self._call("td_spent")
        self._step([0], {})  # what requests leave is taken out of their pages in the next step
        if release:
            self.release(reuse)
        spared = sum(one.local + one.reused for one in counted.values())
        return Played(
            seconds=passed + played.seconds,
            computed=played.computed + canonical - spared,
            spent=spent,
            answers=played.answers,
            counted=list(counted.values()),
        )

    def score(
        self,
        spec: PassSpec,
        prompts: list[list[int]],
        asked: Sequence[tuple[Rule, bool]],
        last: int,
    ) -> list[Score]:
        """Of rules, or of as many tokens at random; see `scoring.ScoringWorker.td_score`."""
        from td_serve.bench.scoring import Asked, Score

        named = msgspec.json.encode([Asked(*one) for one in asked])
        found = self._call("td_score", pack(spec), prompts, named, last)
        return msgspec.json.decode(found, type=list[Score])

    def keep_by(self, codecs: Codecs) -> None:
        """Have histories kept by these codecs from now on."""
        self._call("td_keep_by", codecs.diffs.value, codecs.private.value)

    def release(self, reuse: Reuse) -> None:
        """What was made of a round's members to be loaded is not needed any more."""
        members = [member.request_id for spec in reuse.passes for member in spec.members]
        self._call("td_release", members)

    def is_kept_exactly(self, reuse: Reuse) -> bool:
        """Whether the histories of a round that has been played, and not been released, are what
        was made to be loaded, bit for bit."""
        names = {one.request_id: one.history for spec in reuse.passes for one in spec.members}
        exactly: bool = self._call("td_kept_exactly", names)
        return exactly

    def restored(self, reuse: Reuse, repeats: int) -> Restored:
        """How long it takes to bring what was made of a round's members into pages."""
        from td_serve.bench.restore_worker import Restored

        requests = [member.request_id for spec in reuse.passes for member in spec.members]
        return msgspec.json.decode(self._call("td_restore", requests, repeats), type=Restored)

    def restored_below(self, reuse: Reuse, url: str, repeats: int) -> list[float]:
        """See `restore_worker.BenchWorker.td_restore_below`."""
        requests = [member.request_id for spec in reuse.passes for member in spec.members]
        found: list[float] = self._call("td_restore_below", requests, url, repeats)
        return found

    def sizes(self, reuse: Reuse) -> FamilySize:
        """What the histories of a round that has been played take."""
        from td_serve.store.sizes import FamilySize

        names = [member.history for spec in reuse.passes for member in spec.members]
        return msgspec.json.decode(self._call("td_sizes", names), type=FamilySize)

    def added(self, spec: PassSpec, prompts: list[list[int]], last: int) -> list[list[float]]:
        """See `scoring.ScoringWorker.td_added`."""
        found: list[list[float]] = self._call("td_added", pack(spec), prompts, last)
        return found

    def _run(self, spec: PassSpec) -> PassResult:
        self._call("td_begin", pack(spec))
        while (packed := self._call("td_step", _WHOLE_PASS_S)) is None:
            pass
        return unpack(packed, PassResult)

    def _answer(
        self,
        round_: Round,
        salts: Mapping[str, str],
        ready: Mapping[str, dict[str, Any]],
        max_tokens: int,
    ) -> Played:
        from vllm import SamplingParams

        agents = [str(agent) for agent in round_]
        prompts = [
            {"prompt_token_ids": one.prompt_token_ids, "cache_salt": salts[agent]}
            for agent, one in zip(agents, round_.values(), strict=True)
        ]
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": ready[agent]} if agent in ready else None,
            )
            for agent in agents
        ]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        took = time.perf_counter() - began
        cached = sum(
            output.num_cached_tokens or 0
            for agent, output in zip(agents, outputs, strict=True)
            if agent not in ready
        )
        return Played(
            seconds=took,
            computed=sum(len(one.prompt_token_ids) for one in round_.values()) - cached,
            answers={
                agent: list(output.outputs[0].token_ids)
                for agent, output in zip(agents, outputs, strict=True)
            },
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        (answer,) = self._llm.collective_rpc(method, args=arguments)
        return answer


def _prompt(round_: Round, agent: str) -> list[int]:
    return round_[AgentId(agent)].prompt_token_ids
