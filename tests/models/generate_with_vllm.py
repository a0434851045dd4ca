"""Print, as JSON on the last line, vLLM's greedy continuations: PROMPT_TOKEN_IDS MODEL_DIR...

A process of its own: engines in the tests' process would keep its memory and thread settings.
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
)


def main(prompt: list[int], paths: list[str], new_tokens: int = 16) -> None:
    """Start an engine on each of `paths` in turn, float32, and continue `prompt`."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    continuations = []
    for path in paths:
        engine = LLM(
            path,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            compilation_config={"custom_ops": ["-rotary_embedding"]},
        )
        (output,) = engine.generate(
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(temperature=0, max_tokens=new_tokens),
            use_tqdm=False,
        )
        continuations.append(list(output.outputs[0].token_ids))
        del engine
    print(json.dumps(continuations))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
