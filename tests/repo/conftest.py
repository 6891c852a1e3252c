"""A copy of the tree, for whatever writes files into it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def copy_tree() -> Callable[[Path], dict[str, str]]:
    """Copies the repository into an empty folder; returns an environment in which it is the installed package."""

    def copy(tree: Path) -> dict[str, str]:
        for name in ("kernels", "conf", "cbtriton", "tests", "experiments", "notebooks"):
            unwanted = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted, dirs_exist_ok=True)
        shutil.copy(ROOT / "pyproject.toml", tree)
        # What installing does: the folders at the top are packages of `cbtriton`.
        for name in ("kernels", "conf"):
            (tree / "cbtriton" / name).symlink_to(tree / name)
        return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
            "PYTHONPATH": str(tree),
            "PYTHONSAFEPATH": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
        }

    return copy
