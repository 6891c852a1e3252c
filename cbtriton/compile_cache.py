"""Where compilers keep what they compiled, for every process on this machine to use again.

Inductor and Triton each fill a folder of their own, shared by all programs of the user; nothing here writes to them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One compiler's folder.

    Attributes:
        name: Whose it is.
        path: Where it is; it need not exist.
        num_files: Files in it.
        num_bytes: Their size.
    """

    name: str
    path: Path
    num_files: int
    num_bytes: int


def cache_folders() -> tuple[CacheFolder, ...]:
    """The folders that compiled steps and kernels are kept in, as they are now."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folders = [_measure("torch.compile", Path(cache_dir()))]
    # Triton has no wheels for some systems.
    if find_spec("triton") is not None:
        from triton import knobs

        folders.append(_measure("Triton kernels", Path(knobs.cache.dir)))
    return tuple(folders)


def clear(folders: Sequence[CacheFolder]) -> None:
    """Deletes the folders. Programs that run now are not disturbed: they have loaded what they use."""
    for folder in folders:
        shutil.rmtree(folder.path, ignore_errors=True)


def table(folders: Sequence[CacheFolder]) -> str:
    """One aligned line for each folder."""
    width = max(len(folder.name) for folder in folders)
    return "\n".join(
        f"{folder.name:<{width}}  {folder.num_bytes / 2**20:9.1f} MiB  {folder.num_files:6} files  {folder.path}"
        for folder in folders
    )


def _measure(name: str, path: Path) -> CacheFolder:
    sizes = []
    for file in path.rglob("*"):
        # Another process may be at work in there.
        try:
            if file.is_file():
                sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return CacheFolder(name, path, len(sizes), sum(sizes))
