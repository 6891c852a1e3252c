"""Runs the files in `native/`: kernels there are compiled, so in another process than those of the interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(file.name for file in (HERE / "native").glob("check_*.py"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(shutil.which(name) for name in ("g++", "clang++")), reason="needs a C++ compiler"),
]


def run_pytest(*arguments: str, **environment: str) -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONSAFEPATH": "1"}
    variables.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=variables | environment, capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", FILES)
def test_natively(file):
    run_pytest(str(HERE / "native" / file), "-o", "python_files=check_*.py")


# A few cases of each slot.
QUICK = {
    "kv_write": "vectorized and (24 or padding or slices)",
    "block_copy": "vectorized",
    "prepare_inputs": "per_row",
    "decode_attention": "(single_pass or split_kv) and (plain or sinks) and bfloat16",
    "varlen_attention": "flash and (plain or capped) and bfloat16",
    "sample": "fused and (exactly or normal-1003 or same_alone)",
    "logprobs": "fused",
    "processors": "fused and (combinations or chains or equal)",
}
MODES = {"fast": "0", "checked": "1"}


def run_contract(slot: str, mode: str, *arguments: str) -> None:
    file = ROOT / "tests" / "kernels" / f"test_{slot}.py"
    environment = {"PYTHONPATH": str(HERE / "plugins"), "CBTRITON_CPU_CHECK": MODES[mode]}
    run_pytest(str(file), "-p", "native_kernels", "-m", "not gpu", *arguments, **environment)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slot", QUICK)
def test_kernels_of_the_slots_keep_their_contracts(slot, mode):
    run_contract(slot, mode, "-k", QUICK[slot])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slot", QUICK)
def test_kernels_of_the_slots_keep_all_of_their_contracts(slot, mode):
    run_contract(slot, mode)
