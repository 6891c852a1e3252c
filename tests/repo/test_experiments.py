"""Scripts that time things: what they print follows from what they measured, and a wrong result cannot hide."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--decode", "2x40", "--prefill", "2x5", "1x3+9", "--sampled", "2", "--written", "3", "--prepared", "2x5")
SHAPE = ("--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--vocab", "101", "--page-sizes", "8", "--copied", "2")


def bench_kernels(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / "bench_kernels.py"), *SMALL, *SHAPE, *options]
    command += ["--threads", "1", "--seconds", "0.01", "--output", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_kernels_are_timed_checked_and_set_beside_what_the_machine_allows(tmp_path: Path) -> None:
    done = bench_kernels(tmp_path, "--kernels", "reference", "--dtypes", "fp32")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "bench_kernels.json").read_text())["runs"]
    rows = {row["case"]: row for row in run["rows"] if row["is_kernel"]}
    assert {row["slot"] for row in rows.values()} == {
        "prepare_inputs",
        "kv_write",
        "varlen_attention",
        "decode_attention",
        "sample",
        "block_copy",
    }
    assert all(row["note"] == "" and row["error"] <= 1e-3 for row in rows.values())
    written = rows["kv_write T=3"]
    # Keys and values of two heads of 16 in float32, read and written, and the slots.
    num_bytes = 2 * 3 * (2 * 2 * 16 * 4) + 8 * 3
    assert written["floor_us"] == pytest.approx(num_bytes / (1e3 * run["ceilings"]["copy_gb_per_s"]))
    assert written["gb_per_s"] == pytest.approx(num_bytes / (1e3 * written["time_us"]))
    chunk = rows["prefill 1×3 on 9 page=8"]
    # Each of three query tokens sees 10, 11 or 12 keys: two products of 16 numbers for each of four heads.
    num_flops = 4 * (10 + 11 + 12) * 4 * 16
    assert chunk["gflop_per_s"] == pytest.approx(num_flops / (1e3 * chunk["time_us"]))
    assert "| kv_write T=3 | kv_write/reference |" in done.stdout


def test_a_name_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    done = bench_kernels(tmp_path, "--slots", "kv_write", "--kernels", "mine")
    assert done.returncode == 2
    assert "no implementation of kv_write is called mine" in done.stderr


@pytest.mark.parametrize(
    ("error", "note"), [(0.0, ""), (1.0, "error 1, allowed 0"), (math.nan, "error nan, allowed 0")]
)
def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch, error: float, note: str) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script: Any = importlib.import_module("bench_kernels")
    case = script.Case(2e6, 4e6, bind=lambda module: module, check=lambda result: error, allowed=0.0, peers={})
    spec = script.Spec("kv_write", "kv_write T=3", lambda: case)
    timing = script.Timing(time_us=500.0, launch_us=500.0, first_call_s=1.0)
    row = script.row_of(spec, case, "fp32", 1, "mine", timing, script.Ceilings(10.0, 0.1, 1.0), error)
    assert row.note == note
    # 2 MB at 10 GB/s take longer than 4 MFLOP at 100 GFLOP/s.
    assert (row.floor_us, row.gb_per_s, row.gflop_per_s, row.flop_per_byte) == (200.0, 4.0, 8.0, 2.0)
    line = script.markdown(row, reference_us=1000.0)
    assert line.startswith("| kv_write T=3 | kv_write/mine | 0.500 | 0.200 | 40.0% | 4.00 | 8.0 | 2.00 |")
    assert line.endswith(f" **{note}**" if note else " |")


def test_engines_are_set_side_by_side_on_each_type_of_model(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "families.py"), "--output", str(tmp_path)]
    command += ["--only", "deepseek_v3", "llama", "recurrent_gemma", "musicgen"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "families.json").read_text())["rows"]
    kinds = {(row["model_type"], row["engine"]): row["kind"] for row in rows}
    expected = {"deepseek_v3": "works", "llama": "works", "musicgen": "not built", "recurrent_gemma": "refused"}
    assert {name: kind for (name, engine), kind in kinds.items() if engine == "reference"} == expected
    assert kinds["llama", "transformers"] == "works"
    text = (tmp_path / "families.md").read_text()
    # Whatever this version of transformers runs.
    both = sum(kinds[name, "transformers"] == kind == "works" for name, kind in expected.items())
    assert f"Run in both: {both}." in text
    assert f"Run in this engine only: {2 - both}" in text
    assert "| llama | **works** | **works** |" in text
    assert "| refused: it has layers of type linear_attention, but none that keeps its state in " in text


def test_a_type_that_hangs_or_crashes_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # By its path: a module of the tests has the same name.
    spec = importlib.util.spec_from_file_location("families_script", ROOT / "experiments" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "families_script", script)
    spec.loader.exec_module(script)

    def ours(model_type: str, kernels: str, level: int, backend: str) -> Any:
        if model_type == "hangs":
            time.sleep(60)
        if model_type == "crashes":
            os._exit(3)
        raise MemoryError(kernels)

    monkeypatch.setattr(script.families, "ours", ours)
    tasks = [(model_type, "reference") for model_type in ("hangs", "crashes", "raises")]
    rows = {row.model_type: row for row in script.run_all(tasks, num_processes=2, limit_s=1.5)}
    assert {row.kind for row in rows.values()} == {"failed"}
    assert rows["hangs"].detail.startswith("no result after")
    assert rows["crashes"].detail == "the process ended with exit code 3"
    assert rows["raises"].detail == "MemoryError: reference"
