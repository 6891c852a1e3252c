"""The compiler that Triton calls: options, and the stages ttir → cpp → so."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget, Language

from cbtriton.kernels.cpu_backend import toolchain
from cbtriton.kernels.cpu_backend.emit import Source, emit
from cbtriton.kernels.cpu_backend.errors import UnsupportedError
from cbtriton.kernels.cpu_backend.mlir import parse_module

BACKEND = "cpu"


def is_checking() -> bool:
    """Whether kernels are compiled in checking mode (`CBTRITON_CPU_CHECK=1`); see `checking`."""
    return os.environ.get("CBTRITON_CPU_CHECK", "0") not in ("", "0")


@dataclass(frozen=True)
class CPUOptions:
    """Options of a launch. Those about warps, stages and clusters mean nothing here."""

    num_warps: int = 1
    num_ctas: int = 1
    num_stages: int = 1
    warp_size: int = 1
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    # None is, but what the parser says of them is more useful than what Triton's front end would say.
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple = ()
    debug: bool = False
    sanitize_overflow: bool = False
    backend_name: str = BACKEND
    arch: str = ""
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    ir_override: str | None = None
    check: bool = False

    def hash(self) -> str:
        """Identifies the options in Triton's cache."""
        text = "_".join(f"{name}-{value}" for name, value in sorted(self.__dict__.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def generic_text(module: Any) -> str:
    """A module printed in MLIR's generic form.

    The printer falls back to it for modules that are not valid, such as one with an attribute whose name has no
    dialect. Nothing documents that, so the parser refuses any other form.
    """
    module.set_attr("generic", ir.builder(module.context).get_bool_attr(True))
    return str(module)


def _inline_everything(module: Any) -> None:
    """Lets the inliner inline also what is marked `noinline`: kernels become one function."""
    names = []
    module.walk(lambda op: names.append(op.get_str_attr("sym_name")) if op.get_name() == "tt.func" else None)
    for name in names:
        module.get_function(name).set_attr("noinline", ir.builder(module.context).get_bool_attr(False))


class CPUBackend(BaseBackend):
    """Compiles for the processor that Python runs on."""

    binary_ext = "so"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether this is the backend for a target."""
        return target.backend == BACKEND

    @functools.lru_cache  # noqa: B019 (there are few instances, and Triton asks with every compilation)
    def hash(self) -> str:
        """Identifies this compiler in Triton's cache."""
        return f"{BACKEND}-{toolchain.fingerprint()}"

    def parse_options(self, opts: dict) -> CPUOptions:
        """Options of a launch."""
        known = {name: opts[name] for name in CPUOptions.__dataclass_fields__ if opts.get(name) is not None}
        known |= {"arch": str(self.target.arch), "check": is_checking()}
        return CPUOptions(**known)

    def pack_metadata(self, metadata: Any) -> tuple:
        """What launch hooks are told."""
        return metadata.num_warps, metadata.num_ctas, metadata.shared

    def get_codegen_implementation(self, options: CPUOptions) -> dict:
        """Limits of the language on this target: products may have sides of any length."""
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    # Vectors are loaded from any address at the same speed, so nothing is compiled anew for aligned ones.

    @staticmethod
    def get_int_specialization(arg: int, **_: Any) -> str:
        """Code does not depend on what divides an integer."""
        return ""

    @staticmethod
    def get_tensor_specialization(arg: Any, **_: Any) -> str:
        """Code does not depend on what divides an address."""
        return ""

    def get_module_map(self) -> dict[str, ModuleType]:
        """There is no library of device functions."""
        return {}

    def load_dialects(self, ctx: Any) -> None:
        """Only Triton's own dialects are used."""

    def add_stages(self, stages: dict, options: CPUOptions, language: Language) -> None:
        """Adds the stages, in order."""
        if language != Language.TRITON:
            raise UnsupportedError("Gluon")
        stages["ttir"] = lambda module, metadata: self._make_ttir(module)
        stages["cpp"] = lambda module, metadata: self._make_cpp(module, metadata, options)
        stages["so"] = lambda text, metadata: toolchain.sealed(toolchain.build(text, options.enable_fp_fusion))

    @staticmethod
    def _make_ttir(module: Any) -> Any:
        _inline_everything(module)
        manager = ir.pass_manager(module.context)
        manager.enable_debug()
        passes.common.add_inliner(manager)
        passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
        passes.common.add_canonicalizer(manager)
        passes.ttir.add_combine(manager)
        passes.ttir.add_reorder_broadcast(manager)
        passes.common.add_cse(manager)
        passes.ttir.add_triton_licm(manager)
        passes.common.add_symbol_dce(manager)
        passes.ttir.add_loop_unroll(manager)
        passes.common.add_canonicalizer(manager)
        passes.common.add_cse(manager)
        try:
            manager.run(module, "make_ttir")
        except TypeError:
            manager.run(module)
        return module

    @staticmethod
    def _make_cpp(module: Any, metadata: dict, options: CPUOptions) -> str:
        functions = parse_module(generic_text(module))
        if len(functions) != 1:
            names = ", ".join(function.name for function in functions)
            raise UnsupportedError(f"a call of a function that is not inlined (functions: {names})")
        source: Source = emit(functions[0], options.check)
        metadata["name"] = functions[0].name
        metadata["shared"] = 0
        metadata["arguments"] = list(source.arguments)
        metadata["accesses"] = [(a.kind, a.loc, a.arguments, a.elem) for a in source.accesses]
        metadata["cpp_sha256"] = hashlib.sha256(source.text.encode()).hexdigest()
        return source.text
