"""What the compiler makes of the kernels keeps the bounds in `compile_bounds.yaml`. Needs no GPU.

Kernels are compiled in a process of their own: one that has decorated them for the interpreter cannot compile them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "experiments" / "compile_report.py"
BOUNDS = HERE / "compile_bounds.yaml"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compile_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled_rows(folder, *options):
    output = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--output", str(output), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr[-3000:]
    return json.loads(output.read_text())["rows"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return compiled_rows(tmp_path_factory.mktemp("compiled"), "--quick")


@pytest.fixture(scope="module")
def rules(script):
    return script.load_bounds(BOUNDS)


def test_kernels_keep_the_bounds(script, rules, rows):
    assert script.violations(rules, rows) == []


def test_every_triton_implementation_is_compiled(rows):
    # Found here by the text of its file, by the script in the module.
    slots = [file.parent for file in HERE.parents[1].glob("kernels/*/reference.py")]
    files = [file for slot in slots for file in slot.glob("*.py")]
    written = {(file.parent.name, file.stem) for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert written <= {(row["slot"], row["implementation"]) for row in rows}


def test_facts_agree_with_each_other(rows):
    # Loads of bulk data are counted in the assembly by their place in the source, all loads in the machine code.
    for row in rows:
        facts = row["facts"]
        wide = sum(count for bits, count in facts["loads"].items() if int(bits) >= 128)
        assert facts["bulk_loads"] <= wide, row
    assert any(row["facts"]["bulk_loads"] for row in rows)


def attention_row(rows):
    found = next(
        row
        for row in rows
        if row["slot"] == "decode_attention" and row["target"] == "sm_90" and row["facts"]["bulk_loads"]
    )
    return copy.deepcopy(found)


@pytest.mark.parametrize(
    ("fact", "value", "expected"),
    [
        ("spills", 3, "spills is 3, must be == 0"),
        ("stack_bytes", 56, "stack_bytes is 56, must be == 0"),
        ("registers", 255, "registers is 255, must be <= 128"),
        ("buffers", 1, "buffers is 1, must be >= 2"),
        ("wait", None, "wait is None, must be >= 2"),
        ("narrow_bulk_loads", 8, "narrow_bulk_loads is 8, must be == 0"),
        ("fits", False, "fits is False, must be == 1"),
    ],
)
def test_a_broken_bound_is_found(script, rules, rows, fact, value, expected):
    row = attention_row(rows)
    row["facts"][fact] = value
    found = script.violations([rule for rule in rules if script.matches(row, rule["where"])], [row])
    assert found == [f"{script.label(row)}: {expected}"]


def test_missing_matrix_instructions_are_found(script, rows):
    row = attention_row(rows)
    rule = {"where": {"target": "sm_90"}, "limits": {"matrix.HGMMA": ">= 1", "matrix.HMMA": "== 0"}}
    row["facts"]["matrix"] = {"HMMA": 16}
    assert len(script.violations([rule], [row])) == 2
    row["facts"]["matrix"] = {"HGMMA": 16}
    assert script.violations([rule], [row]) == []


def test_errors_and_rules_without_a_row_are_found(script, rows):
    failed = {**attention_row(rows), "facts": None, "error": "ValueError: no"}
    assert script.violations([], [failed]) == [f"{script.label(failed)}: ValueError: no"]
    rule = {"where": {"target": "sm_90", "kernel": "_gone"}, "limits": {"spills": "== 0"}}
    assert script.violations([rule], rows) == ["no kernel falls under the rule for " + str(rule["where"])]
    other_target = {"where": {"target": "sm_100", "kernel": "_gone"}, "limits": {"spills": "== 0"}}
    assert script.violations([other_target], rows) == []


@pytest.mark.parametrize("bound", ["128", "< many", "~ 3", 128])
def test_bounds_are_comparisons(script, bound):
    with pytest.raises(ValueError, match="expected a bound"):
        script.holds(1, bound)


@pytest.mark.slow
def test_all_targets_head_sizes_and_cases_keep_the_bounds(script, rules, tmp_path):
    assert script.violations(rules, compiled_rows(tmp_path, "--jobs", str(os.cpu_count()))) == []
