"""The shape of the repository: who imports whom, what lies where, what is documented, what must not appear."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

import cbtriton

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "cbtriton").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
PYTHON = [*MODULES, *KERNELS, *sorted((ROOT / "experiments").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
TEXTS = [
    path
    for pattern in ("*.md", "*.toml", "Makefile", "cbtriton/**/*.py", "kernels/**/*.py", "conf/**/*.yaml")
    for path in ROOT.glob(pattern)
] + [path for folder in ("experiments", "tests", "notebooks") for path in (ROOT / folder).rglob("*.[pmi][ydp]*")]
SLOTS = ("prepare_inputs", "kv_write", "varlen_attention", "decode_attention", "sample", "block_copy")


class Place(NamedTuple):
    """Where a module stands: a module may import those of its own side (and of `any`) with a lower level."""

    side: str
    level: int


PLACES = {
    **dict.fromkeys(("request", "stats", "cache_layout"), Place("any", 0)),
    **dict.fromkeys(("config", "plan"), Place("any", 1)),
    "padding": Place("any", 2),
    **dict.fromkeys(("block_manager", "swap", "resolve", "processors", "callbacks", "stopping"), Place("host", 3)),
    **dict.fromkeys(("sampling", "scheduler"), Place("host", 4)),
    "simulator": Place("host", 5),
    **dict.fromkeys(("kernel_set", "forward_context", "kv_cache", "request_table"), Place("device", 3)),
    **dict.fromkeys(("logprobs", "ranges", "replaced_forward", "row_states"), Place("device", 3)),
    **dict.fromkeys(
        ("attention", "step_inputs", "host_processing", "compile", "packed_linear", "recurrent", "positions", "rope"),
        Place("device", 4),
    ),
    **dict.fromkeys(("own_attention", "own_cache"), Place("device", 4)),
    **dict.fromkeys(("graphs", "model_adapter"), Place("device", 5)),
    "model_runner": Place("device", 6),
    "distributed": Place("top", 6),
    **dict.fromkeys(("engine", "router"), Place("top", 7)),
    **dict.fromkeys(("manager", "compatibility", "streaming"), Place("top", 8)),
    "mixin": Place("top", 9),
    "__init__": Place("top", 10),
    # Tools around the engine: they read its records (level 0 to 2) and never the engine itself.
    **dict.fromkeys(("model_zoo", "report", "compile_cache", "figures", "comparison"), Place("tool", 3)),
    **dict.fromkeys(("workloads", "results"), Place("tool", 4)),
    **dict.fromkeys(("traffic", "traces", "load_generator", "sweep", "profiling"), Place("tool", 5)),
    **dict.fromkeys(("measure", "sweep_report"), Place("tool", 6)),
    "cli": Place("top", 11),
}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every imported module by its full name, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who is imported"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imported_names(ast.parse(path.read_text(encoding="utf-8"))))


def own_modules(names: set[str]) -> set[str]:
    """Modules of the package among imported names; `kernels` stands for all kernels."""
    parts = (name.split(".") for name in names if name.split(".")[0] == "cbtriton")
    modules = {path.stem for path in MODULES} | {"kernels"}
    return {(p[1] if len(p) > 1 and p[1] in modules else "__init__") for p in parts}


def may_import(importer: str, imported: str) -> bool:
    here = PLACES[importer]
    if imported == "kernels":
        return here.side == "device"
    there = PLACES[imported]
    same_side = here.side == "top" or there.side in ("any", here.side)
    return same_side and there.level < here.level


def module_name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_import_strictly_downward_on_their_own_side(path: Path) -> None:
    assert path.stem in PLACES, "a new module needs a place in the table"
    wrong = {name for name in own_modules(imports_of(path)) if not may_import(path.stem, name)}
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_uses_only_the_libraries_of_its_side(path: Path) -> None:
    libraries = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names - {"cbtriton"}
    allowed = {
        "any": set[str](),
        "host": set[str](),
        "device": {"torch", "transformers"},
        "top": {"torch", "transformers", "tqdm"},
        "tool": {"torch", "transformers", "matplotlib", "numpy", "accelerate", "gguf", "tqdm"},
    }[PLACES[path.stem].side]
    extra = {
        "config": {"transformers"},
        "cli": {"hydra", "omegaconf"},
        "compile_cache": {"triton"},
    }.get(path.stem, set())
    assert libraries <= allowed | extra


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: "/".join(path.relative_to(ROOT / "kernels").parts))
def test_kernels_import_only_torch_triton_and_one_another(path: Path) -> None:
    names = imports_of(path)
    libraries = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert libraries <= {"torch", "triton", "cbtriton"}
    assert all(name.startswith("cbtriton.kernels") for name in names if name.startswith("cbtriton"))


def test_the_import_rule_notices_a_wrong_import() -> None:
    assert not may_import("request_table", "scheduler")
    assert not may_import("model_runner", "block_manager")
    assert not may_import("scheduler", "kv_cache")
    assert not may_import("engine", "manager")
    assert not may_import("report", "engine")
    assert may_import("engine", "scheduler")
    assert may_import("model_runner", "plan")
    assert own_modules(set(imported_names(ast.parse("def f():\n    from cbtriton.scheduler import X")))) == {
        "scheduler"
    }


@pytest.mark.parametrize("module", ["cbtriton", "cbtriton.scheduler", "cbtriton.simulator", "cbtriton.sampling"])
def test_the_host_side_runs_without_loading_torch_or_transformers(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'hydra'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_kernels_package_file_stays_empty() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


@pytest.mark.parametrize("slot", SLOTS)
def test_each_slot_has_a_reference_and_a_configuration_for_each_implementation(slot: str) -> None:
    implementations = {path.stem for path in (ROOT / "kernels" / slot).glob("*.py") if not path.stem.startswith("_")}
    assert "reference" in implementations
    assert implementations == {path.stem for path in (ROOT / "conf" / "kernels" / slot).glob("*.yaml")}


def test_packages_in_pyproject_are_the_folders_of_the_tree() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    kernel_folders = {p.parent for p in KERNELS if p.name == "__init__.py"}
    expected = {"cbtriton", "cbtriton.conf"} | {
        ".".join(["cbtriton", *folder.relative_to(ROOT).parts]) for folder in kernel_folders
    }
    assert set(setuptools["packages"]) == expected


def tracked_files() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_the_top_level_is_exactly_the_agreed_one() -> None:
    top = {name.split("/")[0] for name in tracked_files()}
    assert {name for name in top if not name.startswith(".")} == {
        "cbtriton",
        "conf",
        "constraints",
        "experiments",
        "kernels",
        "notebooks",
        "tests",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "pyproject.toml",
    }


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


FORBIDDEN = {
    "a path of one machine": re.compile(r"(^|[^\w.])/(work|home|farm|root|tmp)/", re.MULTILINE),
    "a loose end": re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"])),
    "code hidden from the compiler": re.compile(r"torch\.compiler" + r"\.disable"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str) -> None:
    assert len(TEXTS) > 30
    found = [str(p.relative_to(ROOT)) for p in TEXTS if FORBIDDEN[what].search(p.read_text(encoding="utf-8"))]
    assert not found


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_") or is_overload(child):
                continue
            if ast.get_docstring(child) is None:
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")

    if ast.get_docstring(tree) is None:
        yield "the module"
    yield from visit(tree, "")


def is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


@pytest.mark.parametrize(
    "path",
    [p for p in (*MODULES, *KERNELS) if p.stat().st_size],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_public_names_are_documented(path: Path) -> None:
    assert list(undocumented(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_documentation_rule_notices_a_gap() -> None:
    source = '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n'
    assert list(undocumented(ast.parse(source))) == ["A.f", "h"]


def test_the_change_log_knows_the_version() -> None:
    assert metadata.version("cbtriton") == cbtriton.__version__
    headings = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cbtriton.__version__ in headings


def test_documents_stay_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
