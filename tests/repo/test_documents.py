"""The commands, the example and the notebooks that readers are told to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hydra import compose, initialize_config_module
from nbclient import NotebookClient

from cbtriton import cli, sweep_report
from cbtriton.kernels.cpu_backend.availability import why_unavailable
from cbtriton.model_zoo import CharTokenizer, ModelSpec, load_model

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str, path: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
HYDRA_COMMANDS = [line for line in COMMANDS if line.startswith("cbtriton ")]
REPORT_COMMANDS = [line for line in COMMANDS if line.startswith("cbtriton-report ")]
SCRIPTS = [line for line in COMMANDS if line.startswith("python ")]
TARGETS = [line for line in COMMANDS if line.startswith("make ")]


def test_every_command_of_the_readme_is_of_a_kind_that_is_tested_here() -> None:
    assert sorted(COMMANDS) == sorted(HYDRA_COMMANDS + REPORT_COMMANDS + SCRIPTS + TARGETS)
    assert {"make demo", "make test"} <= set(TARGETS)
    assert len(HYDRA_COMMANDS) >= 6
    assert SCRIPTS
    assert REPORT_COMMANDS


@pytest.mark.parametrize("command", TARGETS)
def test_make_targets_of_the_readme_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    load_model(ModelSpec("tiny_random", device="cpu")).model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", HYDRA_COMMANDS)
def test_commands_of_the_readme_run(
    command: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, on the tiny model and with the first value of each sweep."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    given = [word for word in shlex.split(command)[1:] if word != "-m"]
    overrides = [word.replace("path/to/checkpoint", str(checkpoint)).split(",")[0] for word in given]
    overrides += ["model.device=cpu", "progress_bar=false"]
    if not any(word.startswith("model=") for word in given):
        overrides.append("model=tiny_random")
    if not any(word.startswith("generation.max_new_tokens=") for word in given):
        overrides.append("generation.max_new_tokens=4")
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    cli.run(cfg, tmp_path)
    assert (tmp_path / "result.json").exists()
    assert (tmp_path / "timeline.png").exists()


@pytest.mark.parametrize("command", REPORT_COMMANDS)
def test_reports_of_the_readme_are_about_what_the_line_before_wrote(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = shlex.split(command)[1:]
    assert f"hydra.sweep.dir={folder}" in COMMANDS[COMMANDS.index(command) - 1]
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        cfg = compose("config", overrides=["experiment=quick", "model.device=cpu", "measure.repeats=1"])
    (tmp_path / folder).mkdir(parents=True)
    cli.run(cfg, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    sweep_report.command()
    assert "1 runs, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_of_the_readme_know_their_options(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = blocks("python")[0]
    assert 'ModelSpec("smollm2_135m")' in example
    names: dict[str, Any] = {}
    exec(example.replace('"smollm2_135m"', '"tiny_random"'), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    expected = CharTokenizer().decode(names["output"].generated_tokens)
    assert printed[-1] == expected


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_the_kernel_in_the_readme_of_the_cpu_backend_runs_and_its_mistake_is_found(tmp_path: Path) -> None:
    (example,), (report,) = (blocks(language, "kernels/cpu_backend/README.md") for language in ("python", "text"))
    script = tmp_path / "add.py"

    def run(text: str, check: str) -> subprocess.CompletedProcess:
        script.write_text(text)
        # A cache of its own: Triton's does not know a kernel that moved to another file, and would report the old one.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"CBTRITON_CPU_CHECK": check, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    for check in ("0", "1"):
        done = run(example, check)
        assert done.returncode == 0, done.stderr
    broken = run(example.replace("x_ptr + i, mask=i < size", "x_ptr + i"), "1")
    assert " ".join(report.split()) in " ".join(broken.stderr.replace(f"{tmp_path}/", "").split())


def test_the_map_of_the_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"`(\w+)`", text))
    modules = {path.stem for path in (ROOT / "cbtriton").glob("*.py")} - {"__init__"}
    assert modules <= listed


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run_from_top_to_bottom(
    path: Path, tmp_path: Path, copy_tree: Callable[[Path], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the tree: one of them writes a kernel into it."""
    for name, value in copy_tree(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    notebook: Any = nbformat.read(tmp_path / "notebooks" / path.name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    # A figure that no backend draws is shown as a line of text.
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    assert not [data for data in shown if data.get("text/plain", "").startswith("<Figure") and "image/png" not in data]
    assert {file: content for file, content in files.items() if not file.exists() or file.read_bytes() != content} == {}
    left = {file for file in tmp_path.rglob("*.*") if file.is_file()} - set(files)
    caches = {"__pycache__", ".pytest_cache"}
    assert not [file for file in left if not caches & set(file.parts)], "a notebook leaves nothing in the checkout"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_short_listed_and_kept_without_outputs(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)
    assert len(notebook.cells) < 40
    assert f"`{path.stem}`" in (ROOT / "notebooks" / "README.md").read_text()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
