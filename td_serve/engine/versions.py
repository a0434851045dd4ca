"""The one place that knows vLLM versions.

td_serve leans on interfaces that vLLM does not promise to keep (EngineClient, the OpenAI serving
classes, KV connectors). Each supported minor version was read and tested; another one is refused.
"""

from __future__ import annotations

from importlib import metadata

from td_serve.errors import ConfigError

SUPPORTED = ("0.32", "0.33")


def check_vllm() -> str:
    """The installed vLLM's version. Raises ConfigError when td_serve does not support it."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise ConfigError("vLLM is not installed: run `make setup`") from None
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(f"vLLM {version} is not supported, expected {' or '.join(SUPPORTED)}")
    return version
