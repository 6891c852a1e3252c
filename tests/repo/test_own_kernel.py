"""The README's section on writing a kernel, followed to the letter in a copy of the tree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def section() -> str:
    return (ROOT / "README.md").read_text().partition("## Write your own kernel\n")[2].partition("\n## ")[0]


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)
    return text


def test_the_commands_of_the_section_run(tmp_path: Path, copy_tree: Callable[[Path], dict[str, str]]) -> None:
    environment = copy_tree(tmp_path)
    path, yaml_path = re.findall(r"`((?:kernels|conf)/[\w/]+\.(?:py|yaml))`", section())
    (tmp_path / path).write_text(block("python"))
    (tmp_path / yaml_path).write_text(block("yaml"))

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    pytest_command, sweep = block("sh").splitlines()
    (num_cases,) = re.findall(r"kv_write mine (\d+)", run(pytest_command))
    assert int(num_cases) > 60
    assert run(sweep).count("result.json") == 2
