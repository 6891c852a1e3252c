"""The KV cache's memory: the pages of each attention call of the model, on the device and on the host.

Calls of different groups share their memory, since a block is one group's at a time. Owns the tensors and nothing else:
which block belongs to whom is the block manager's business. The kernels write.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.plan import BlockSwap


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

    def cached_layer(self, window: int) -> CachedLayer:
        """What such a layer keeps of each token, if queries see `window` tokens (0: all)."""
        head_bytes = self.num_kv_heads * self.dtype.itemsize
        return CachedLayer(window, key_bytes=head_bytes * self.key_dim, value_bytes=head_bytes * self.value_dim)


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
        layout: Which calls share blocks.
        geometries: One per call that keeps keys and values, in the order of `layout.places`.
        num_blocks: Blocks that can be handed out; the null block comes on top.
        device: Where the pages live.

    Attributes:
        layers: The pages of each call, in the same order.
        pools: All memory there is, once: the pages at each place of a block, as one of the calls there sees them.
    """

    def __init__(
        self, layout: CacheLayout, geometries: tuple[LayerGeometry, ...], num_blocks: int, device: torch.device
    ) -> None:
        memory = [
            LayerCache(
                _zeros((num_blocks + 1, layout.key_page_bytes), torch.uint8, device),
                _zeros((num_blocks + 1, layout.value_page_bytes), torch.uint8, device),
            )
            for _ in range(layout.layers_per_block)
        ]
        # Compilers refuse tensors that are changed and share memory with others: alike ones are the very same.
        views: dict[tuple[int, LayerGeometry], LayerCache] = {}
        for place, geometry in zip(layout.places, geometries, strict=True):
            if (place.index, geometry) not in views:
                key, value = memory[place.index].key, memory[place.index].value
                views[place.index, geometry] = LayerCache(
                    _pages(key, geometry.num_kv_heads, geometry.key_dim, geometry.dtype),
                    _pages(value, geometry.num_kv_heads, geometry.value_dim, geometry.dtype),
                )
        self.layers = tuple(
            views[place.index, geometry] for place, geometry in zip(layout.places, geometries, strict=True)
        )
        by_index = {place.index: layer for place, layer in zip(layout.places, self.layers, strict=True)}
        self.pools = tuple(by_index[index] for index in range(layout.layers_per_block))

    @property
    def num_bytes(self) -> int:
        """Address space of all pages; on a CPU, pages take memory only once they are written."""
        return sum(pool.key.nbytes + pool.value.nbytes for pool in self.pools)


class HostCache:
    """Pages in host memory for blocks of requests that do not run, pinned where the device copies by itself.

    Copies are enqueued behind what the device does already; nobody but the device looks at these pages.

    Args:
        cache: The cache on the device.
        num_blocks: Blocks; 0 takes no memory.

    Attributes:
        num_bytes: Size of all pages; on a CPU, pages take memory only once they are written.

    Raises:
        RuntimeError: The host has not that much memory.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._cache = cache
        self.num_bytes = num_blocks * sum(pool.key[0].nbytes + pool.value[0].nbytes for pool in cache.pools)
        try:
            self._pools = tuple(
                LayerCache(_host_pages(pool.key, num_blocks), _host_pages(pool.value, num_blocks))
                for pool in (cache.pools if num_blocks else ())
            )
        except (RuntimeError, OSError, OverflowError, MemoryError) as error:
            raise RuntimeError(
                f"no host memory for preempted requests: {num_blocks} blocks take {self.num_bytes} bytes ({error}); "
                "lower cpu_offload_space, or set it to 0"
            ) from error

    def store(self, swap: BlockSwap) -> None:
        """Copies `swap.device_blocks` of the cache to `swap.host_blocks`."""
        _copy_pages(self._cache.pools, swap.device_blocks, self._pools, swap.host_blocks)

    def load(self, swap: BlockSwap) -> None:
        """Copies `swap.host_blocks` to `swap.device_blocks` of the cache."""
        _copy_pages(self._pools, swap.host_blocks, self._cache.pools, swap.device_blocks)


def _copy_pages(
    sources: Sequence[LayerCache], source_blocks: Sequence[int], targets: Sequence[LayerCache], blocks: Sequence[int]
) -> None:
    for source, target, count in _runs(source_blocks, blocks):
        for from_pool, to_pool in zip(sources, targets, strict=True):
            for pages, copies in ((from_pool.key, to_pool.key), (from_pool.value, to_pool.value)):
                copies[target : target + count].copy_(pages[source : source + count], non_blocking=True)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, length) of the stretches in which both go up by one."""
    start = 0
    for end in range(1, len(sources) + 1):
        length = end - start
        if end == len(sources) or (sources[end], targets[end]) != (sources[start] + length, targets[start] + length):
            yield sources[start], targets[start], length
            start = end


def _pages(memory: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """`[num_blocks + 1, page_size, num_kv_heads, head_dim]` of `dtype` over `[num_blocks + 1, page_bytes]` uint8."""
    return memory.view(dtype).view(len(memory), -1, num_kv_heads, head_dim)


def _host_pages(pages: Tensor, num_blocks: int) -> Tensor:
    shape = (num_blocks, *pages.shape[1:])
    if pages.device.type == "cuda":
        return torch.empty(shape, dtype=pages.dtype, pin_memory=True)
    return _zeros(shape, pages.dtype, torch.device("cpu"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte, and a pool sized from free memory would then really take it. Anonymous pages are
    # zero when first touched and cost nothing before that.
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
