"""`block_copy` in torch: the definition that other implementations are tested against."""

from __future__ import annotations

from torch import Tensor

from cbtriton.kernels._op import kernel_op


@kernel_op("block_copy_reference", mutates_args=("key_cache", "value_cache"))
def block_copy(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies block `sources[i]` onto block `targets[i]`, for keys and values.

    Args:
        key_cache: `[N, P, Hkv, Dk]`, changed in place.
        value_cache: `[N, P, Hkv, Dv]`, changed in place.
        sources: `[n]` int64.
        targets: `[n]` int64, each once, none of them among `sources`.
    """
    key_cache.index_copy_(0, targets, key_cache.index_select(0, sources))
    value_cache.index_copy_(0, targets, value_cache.index_select(0, sources))


@block_copy.register_fake
def _(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    return None
