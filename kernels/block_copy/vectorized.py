"""`block_copy` as one Triton kernel: each program copies a piece of one block, keys and values."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._launch import ceil_div, launch, target_of
from cbtriton.kernels._op import kernel_op

# (elements per program, warps)
_LAUNCHES = {
    "sm_80": (4096, 4),
    "sm_90": (4096, 4),
    "sm_100": (4096, 4),
    "gfx942": (4096, 4),
    "cpu": (4096, 1),
    "interpreter": (65536, 1),
}


@triton.jit
def _copy_piece(cache_ptr, source, target, piece, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    elements = piece * BLOCK + tl.arange(0, BLOCK)
    mask = elements < ELEMENTS
    values = tl.load(cache_ptr + source * ELEMENTS + elements, mask=mask)
    tl.store(cache_ptr + target * ELEMENTS + elements, values, mask=mask)


@triton.jit
def _block_copy(
    key_cache_ptr,
    value_cache_ptr,
    sources_ptr,
    targets_ptr,
    KEY_ELEMENTS: tl.constexpr,
    VALUE_ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair, piece = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources_ptr + pair).to(tl.int64)
    target = tl.load(targets_ptr + pair).to(tl.int64)
    _copy_piece(key_cache_ptr, source, target, piece, KEY_ELEMENTS, BLOCK)
    _copy_piece(value_cache_ptr, source, target, piece, VALUE_ELEMENTS, BLOCK)


@kernel_op("block_copy_vectorized", mutates_args=("key_cache", "value_cache"))
def block_copy(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies block `sources[i]` onto block `targets[i]`; see `reference.block_copy`."""
    key_elements, value_elements = key_cache.stride(0), value_cache.stride(0)
    block, num_warps = _LAUNCHES[target_of(key_cache.device)]
    launch(
        _block_copy,
        (len(sources), ceil_div(max(key_elements, value_elements), block)),
        key_cache,
        value_cache,
        sources,
        targets,
        KEY_ELEMENTS=key_elements,
        VALUE_ELEMENTS=value_elements,
        BLOCK=block,
        num_warps=num_warps,
    )


@block_copy.register_fake
def _(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    return None
