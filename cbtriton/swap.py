"""Which blocks of host memory hold the cache of which preempted request.

Owns these blocks and the copies between device and host that the next plan has to make. It knows request ids and block
ids, but no tensor and no schedule. Called by the scheduler only, from one thread.

Every request has copies of its own, also of blocks that it shares with others on the device: those may be evicted while
it waits. Nothing here is evicted: what does not fit is not taken in.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass

from cbtriton.plan import BlockSwap


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """What a request has in host memory: its first `num_tokens` tokens, in these blocks."""

    block_ids: tuple[int, ...]
    num_tokens: int


class HostBlocks:
    """A pool of host blocks, numbered from 0.

    Args:
        num_blocks: Blocks in the pool; with 0 nothing is ever taken in.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Lowest id first: neighbours are copied together.
        self._free = list(range(num_blocks))
        self._offloaded: dict[str, _Offloaded] = {}
        self._swaps_out: dict[str, BlockSwap] = {}
        self._swaps_in: list[BlockSwap] = []

    @property
    def num_in_use(self) -> int:
        """Blocks that hold something, or that a copy of the next plan reads."""
        return self.num_blocks - len(self._free)

    def num_tokens(self, request_id: str) -> int:
        """How many of the request's tokens are here."""
        offloaded = self._offloaded.get(request_id)
        return 0 if offloaded is None else offloaded.num_tokens

    def offload(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> bool:
        """Takes a request's cache in.

        Args:
            request_id: Whose it is; it must have nothing here.
            block_ids: The device blocks that hold what it needs of its first `num_tokens` tokens. They may be given to
                others at once: the next plan copies them before anything else.
            num_tokens: Tokens, at least 1.

        Returns:
            Whether there was room.
        """
        if request_id in self._offloaded:
            raise RuntimeError(f"request {request_id!r} is off-loaded already")
        if len(block_ids) > len(self._free):
            return False
        host_blocks = tuple(heapq.heappop(self._free) for _ in block_ids)
        self._offloaded[request_id] = _Offloaded(host_blocks, num_tokens)
        self._swaps_out[request_id] = BlockSwap(request_id, tuple(block_ids), host_blocks)
        return True

    def restore(self, request_id: str, block_ids: Sequence[int], written: Container[int]) -> None:
        """Gives a request's cache back; the next plan copies it.

        Args:
            request_id: Whose it is.
            block_ids: Its new device blocks, as many as it had and in the same order.
            written: Those of them that hold their tokens already: they are not copied.
        """
        host_blocks = self._offloaded.pop(request_id).block_ids
        pairs = list(zip(block_ids, host_blocks, strict=True))
        copied = [pair for pair in pairs if pair[0] not in written]
        device_blocks = tuple(block_id for block_id, _ in copied)
        self._swaps_in.append(BlockSwap(request_id, device_blocks, tuple(host_block for _, host_block in copied)))
        self._give_back([host_block for block_id, host_block in pairs if block_id in written])

    def free(self, request_id: str) -> None:
        """Forgets what the request has here, if anything."""
        offloaded = self._offloaded.pop(request_id, None)
        if offloaded is not None:
            self._swaps_out.pop(request_id, None)
            self._give_back(offloaded.block_ids)

    def clear(self) -> None:
        """Forgets what all requests have here."""
        for request_id in list(self._offloaded):
            self.free(request_id)

    def take_swaps_out(self) -> tuple[BlockSwap, ...]:
        """The copies to host memory that the plan being frozen makes."""
        swaps = tuple(self._swaps_out.values())
        self._swaps_out.clear()
        return swaps

    def take_swaps_in(self) -> tuple[BlockSwap, ...]:
        """The copies back that the plan being frozen makes. Later plans may use the host blocks that they read."""
        swaps = tuple(self._swaps_in)
        self._swaps_in.clear()
        for swap in swaps:
            self._give_back(swap.host_blocks)
        return swaps

    def _give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            heapq.heappush(self._free, block_id)

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance. For tests; linear in the number of blocks."""
        held = [block_id for offloaded in self._offloaded.values() for block_id in offloaded.block_ids]
        read = [block_id for swap in self._swaps_in for block_id in swap.host_blocks]
        assert sorted(held + read + self._free) == list(range(self.num_blocks)), "a block was lost or is held twice"
        assert set(self._swaps_out) <= {*self._offloaded, *(swap.request_id for swap in self._swaps_in)}
        for swap in (*self._swaps_out.values(), *self._swaps_in):
            assert len(swap.device_blocks) == len(swap.host_blocks), "a copy without a source or a target"
