"""Where fetched models lie, and how a directory gets there whole or not at all.

A directory is built beside its final place, flushed to disk, and renamed: whoever finds it under
its name finds it complete. A lock per directory makes concurrent builders one builder; the
kernel frees it with the process, so a killed builder blocks nobody, and the next holder of the lock
knows that every unfinished directory it sees is a dead one's.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_root() -> Path:
    """`$TD_SERVE_CACHE`, else `td_serve` in the user's cache directory; may not exist yet."""
    if chosen := os.environ.get("TD_SERVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "td_serve"


def model_dir(name: str) -> Path:
    """Where the catalogue's model `name` is, or would be, kept."""
    return cache_root() / "models" / name


def is_model(path: Path) -> bool:
    """Whether `path` is a directory in Hugging Face's layout."""
    return os.path.isfile(path / "config.json")  # noqa: PTH113 - Path's raises for some paths


@contextlib.contextmanager
def locked(target: Path) -> Iterator[int]:
    """Hold the lock of `target`, waiting for it; yields the lock's file descriptor.

    A child process that inherits the descriptor holds the lock too, until it ends. Creates
    `target`'s parent. Lock files lie in the cache, not beside `target`, and stay: removing one
    would let two processes hold "the" lock, on two files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    locks = cache_root() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    with (locks / f"{target.name}-{digest}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextlib.contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Yield an empty directory; on a clean exit it becomes `target`, else it is removed.

    The caller holds `locked(target)`, and `target` does not exist. Whatever earlier builders of
    `target` left unfinished is removed first.
    """
    prefix = f".{target.name}.partial-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield partial
        for path in [partial, *partial.rglob("*")]:
            # Temporary files are for their owner alone; a cache may be shared.
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush(path)  # a rename must not reach the disk before what it names
        partial.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def size_on_disk(path: Path) -> int:
    """Bytes in the files below `path`; 0 if there is none."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
