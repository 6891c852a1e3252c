"""`kv_write` in torch: the definition that other implementations are tested against."""

from __future__ import annotations

from torch import Tensor

from cbtriton.kernels._op import kernel_op


@kernel_op("kv_write_reference", mutates_args=("key_cache", "value_cache"))
def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes each token's key and value to its slot; tokens with a negative slot are not written.

    Args:
        key: `[T, Hkv, Dk]`, last stride 1, otherwise any strides.
        value: `[T, Hkv, Dv]`, as `key`.
        key_cache: `[N, P, Hkv, Dk]`, contiguous, changed in place.
        value_cache: `[N, P, Hkv, Dv]`, contiguous, changed in place.
        slots: `[T]` int64, block * page_size + offset, each at most once.
    """
    is_real = slots >= 0
    if not is_real.all():
        key, value, slots = key[is_real], value[is_real], slots[is_real]
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


@kv_write.register_fake
def _(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    return None
