"""One round of three agents, without Ray: two engines in this process, KV between them by NIXL."""

import asyncio
import os

os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
from td_serve.config import CoordinatorSettings, EngineConfig, FrontendConfig, NixlConfig
from td_serve.coordinator import RoundCoordinator
from td_serve.engine.local import LocalEngines
from td_serve.engine.openai import OpenAIFrontend
from td_serve.metrics import silent_metrics
from td_serve.models.resolve import resolve
from td_serve.types import Membership, Origin


async def main() -> None:
    model = resolve("smollm2-135m-instruct")
    engine = EngineConfig(dtype="float32", max_model_len=2048, kv_cache_gib=0.5, enforce_eager=True)
    nixl = NixlConfig(host="127.0.0.1", env={"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"})
    engines = LocalEngines.start(model, engine, nixl)
    coordinator = RoundCoordinator(engines, CoordinatorSettings(), silent_metrics())
    openai = await OpenAIFrontend.start(model, engine, FrontendConfig(), "smol", coordinator.play)

    async def speak(agent: str) -> None:
        question = [{"role": "user", "content": f"You are {agent}. Greet the village."}]
        place = Membership(sim="village", round=0, agent=agent, n_agents=3)
        body = {"model": "smol", "messages": question, "max_tokens": 24, "temperature": 0}
        reply = await openai.chat(body, Origin(membership=place))
        print(f"{agent}: {reply.body['choices'][0]['message']['content']}")

    await asyncio.gather(*(speak(agent) for agent in ("Marta", "Osk", "Ines")))
    print((await coordinator.record("village", 0, patience_s=1)).outputs)
    openai.close()
    engines.close()


if __name__ == "__main__":
    asyncio.run(main())
