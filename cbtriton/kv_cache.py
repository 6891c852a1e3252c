"""The KV cache's memory: one K and one V tensor per attention call of the model, on the device and on the host.

Owns the tensors and nothing else: which block belongs to whom is the block manager's business. The kernels write.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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


class HostCache:
    """Pages in host memory for blocks of requests that do not run, pinned where the device copies by itself.

    Copies are enqueued behind what the device does already; nobody but the device looks at these pages.

    Args:
        geometries: Those of the cache.
        num_blocks: Blocks; 0 takes no memory.
        page_size: Tokens per page.
        device: Where the cache is.

    Attributes:
        num_bytes: Size of all pages; on a CPU, pages take memory only once they are written.

    Raises:
        RuntimeError: The host has not that much memory.
    """

    def __init__(
        self, geometries: tuple[LayerGeometry, ...], num_blocks: int, page_size: int, device: torch.device
    ) -> None:
        self.num_bytes = num_blocks * page_size * sum(layer.bytes_per_token for layer in geometries)
        try:
            self.layers = tuple(
                LayerCache(
                    key=_host_pages((num_blocks, page_size, layer.num_kv_heads, layer.key_dim), layer.dtype, device),
                    value=_host_pages(
                        (num_blocks, page_size, layer.num_kv_heads, layer.value_dim), layer.dtype, device
                    ),
                )
                for layer in (geometries if num_blocks else ())
            )
        except (RuntimeError, OSError, OverflowError, MemoryError) as error:
            raise RuntimeError(
                f"no host memory for preempted requests: {num_blocks} blocks take {self.num_bytes} bytes ({error}); "
                "lower cpu_offload_space, or set it to 0"
            ) from error

    def store(self, cache: KVCache, swap: BlockSwap) -> None:
        """Copies `swap.device_blocks` of the cache to `swap.host_blocks`."""
        _copy_pages(cache.layers, swap.device_blocks, self.layers, swap.host_blocks)

    def load(self, cache: KVCache, swap: BlockSwap) -> None:
        """Copies `swap.host_blocks` to `swap.device_blocks` of the cache."""
        _copy_pages(self.layers, swap.host_blocks, cache.layers, swap.device_blocks)


def _copy_pages(
    sources: Sequence[LayerCache], source_blocks: Sequence[int], targets: Sequence[LayerCache], blocks: Sequence[int]
) -> None:
    for source, target, count in _runs(source_blocks, blocks):
        for from_layer, to_layer in zip(sources, targets, strict=True):
            for pages, copies in ((from_layer.key, to_layer.key), (from_layer.value, to_layer.value)):
                copies[target : target + count].copy_(pages[source : source + count], non_blocking=True)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, length) of the stretches in which both go up by one."""
    start = 0
    for end in range(1, len(sources) + 1):
        length = end - start
        if end == len(sources) or (sources[end], targets[end]) != (sources[start] + length, targets[start] + length):
            yield sources[start], targets[start], length
            start = end


def _host_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return _zeros(shape, dtype, torch.device("cpu"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte, and a pool sized from free memory would then really take it. Anonymous pages are
    # zero when first touched and cost nothing before that.
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
