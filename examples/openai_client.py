"""The client's side: the unmodified `openai` client, alone, in a round, and by a path alone.

Needs a server: `serve run clusters/local.yaml`. Where it asks for API keys, set OPENAI_API_KEY.
"""

import asyncio
import os
import sys
import uuid

import openai

BASE = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
KEY = os.environ.get("OPENAI_API_KEY", "none")
AGENTS = ["Marta", "Osk", "Ines"]
SIM = f"example-{uuid.uuid4().hex[:8]}"


async def speak(agent: str, round_: int) -> str:
    """A member of a round: `td_round` says which one; the server waits for the others."""
    async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY) as client:
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"You are {agent}. What do you do today?"}],
            max_tokens=24,
            extra_body={
                "td_round": {"sim": SIM, "round": round_, "agent": agent, "n_agents": len(AGENTS)}
            },
        )
        return f"{agent}: {answer.choices[0].message.content}"


async def speak_unchanged(agent: str) -> str:
    """For frameworks that let you set a base URL and nothing else: the path names the agent."""
    url = f"{BASE}/sim/{SIM}-path/agent/{agent}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
        model = (await client.models.list()).data[0].id
        text = ""
        async for chunk in await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"You are {agent}. How is the river?"}],
            max_tokens=24,
            stream=True,
        ):
            text += chunk.choices[0].delta.content or ""
        return f"{agent}: {text}"


async def main() -> None:
    for lines in (
        await asyncio.gather(*(speak(agent, 0) for agent in AGENTS)),
        await asyncio.gather(*(speak_unchanged(agent) for agent in AGENTS)),
    ):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    asyncio.run(main())
