"""The KV cache's memory: one K and one V tensor per attention call of the model.

Owns the tensors and nothing else: which block belongs to whom is the block manager's business. The kernels write.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's keys and values.

    Attributes:
        num_kv_heads: Key and value heads.
        key_dim: Size of a key head.
        value_dim: Size of a value head.
        dtype: Element type of both.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages.

    Attributes:
        key: `[num_blocks + 1, page_size, num_kv_heads, key_dim]`; page 0 is the null page, never written.
        value: `[num_blocks + 1, page_size, num_kv_heads, value_dim]`, likewise.
    """

    key: Tensor
    value: Tensor


class KVCache:
    """Pages for all layers of a model.

    Args:
        geometries: One per cached attention call, in call order.
        num_blocks: Blocks that can be handed out; the null block comes on top.
        page_size: Tokens per page.
        device: Where the pages live.
    """

    def __init__(
        self, geometries: tuple[LayerGeometry, ...], num_blocks: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.layers = tuple(
            LayerCache(
                key=_zeros((num_blocks + 1, page_size, layer.num_kv_heads, layer.key_dim), layer.dtype, device),
                value=_zeros((num_blocks + 1, page_size, layer.num_kv_heads, layer.value_dim), layer.dtype, device),
            )
            for layer in geometries
        )

    @property
    def num_bytes(self) -> int:
        """Address space of all pages; on a CPU, pages take memory only once they are written."""
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte, and a pool sized from free memory would then really take it. Anonymous pages are
    # zero when first touched and cost nothing before that.
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
