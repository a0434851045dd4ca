"""Print, as JSON on the last line, vLLM's greedy continuation: MODEL_DIR PROMPT_TOKEN_IDS.

A process of its own: an engine in the tests' process would keep its memory and thread settings.
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


def main(path: str, prompt: list[int], new_tokens: int = 16) -> None:
    """Start an engine on `path`, float32, and continue `prompt`."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

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
    print(json.dumps(list(output.outputs[0].token_ids)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
