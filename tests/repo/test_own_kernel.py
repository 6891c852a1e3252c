"""The README's section on writing a kernel, followed to the letter in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def section() -> str:
    return (ROOT / "README.md").read_text().partition("## Write your own kernel\n")[2].partition("\n## ")[0]


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the section's two files in it, importable in place of the installed package."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("kernels", "conf", "cbtriton", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    path, yaml_path = re.findall(r"`((?:kernels|conf)/[\w/]+\.(?:py|yaml))`", section())
    (tree / path).write_text(block("python"))
    (tree / yaml_path).write_text(block("yaml"))
    # What installing does: the folders at the top are packages of `cbtriton`.
    for name in ("kernels", "conf"):
        (tree / "cbtriton" / name).symlink_to(tree / name)
    return tree


def test_the_commands_of_the_section_run(tree: Path) -> None:
    pytest_command, sweep = block("sh").splitlines()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(tree),
        "PYTHONSAFEPATH": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    (num_cases,) = re.findall(r"kv_write mine (\d+)", run(pytest_command))
    assert int(num_cases) > 60
    assert run(sweep).count("result.json") == 2
