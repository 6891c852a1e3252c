"""A Triton backend that compiles `@triton.jit` kernels to native code for CPUs.

Stages, each a module of its own: Triton's front end and its passes (`compiler`), the printed MLIR read back (`mlir`)
into a small typed IR (`ir`), rewrites and the plan of what is fused into which loop (`passes`), C++ text (`emit`,
`nest`, with `ops` as the table of element-wise operations and `runtime.h` for what is written by hand), a shared
object (`toolchain`), and its launch (`driver`).

The package knows nothing of particular kernels.
"""

# Triton imports this package while it is imported itself. It must begin first, or it would find a module half-way.
import triton  # noqa: F401
