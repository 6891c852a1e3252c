"""Who owns which block of the KV cache, and which blocks hold a prefix that can be used again.

Owns every block table and the prefix index; nothing else changes them. It knows request ids, token ids and block
ids, but no tensor and no schedule. Called by the scheduler only, from one thread.

A block is in exactly one of three places:

    free     nobody's, contents meaningless
    cached   nobody's, holds an indexed prefix; evicted least recently used first when a free one is needed
    in use   referenced by one or more block tables

Block ids run from 1 to `num_blocks`: id 0 is the null block, which pads block tables and is never written.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cbtriton.plan import BlockCopy

NULL_BLOCK = 0


def content_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a block's contents given its parent's: equal in every process for equal prefixes.

    Args:
        parent: Digest of the block before it, or of the root (see `root_digest`).
        token_ids: The block's token ids.

    Returns:
        16 bytes of BLAKE2b.
    """
    return blake2b(struct.pack(f"<{len(token_ids)}q", *token_ids), key=parent, digest_size=16).digest()


def root_digest(extra_keys: Sequence[tuple[str, str]]) -> bytes:
    """Digest that all prefixes with the same extra keys start from.

    Args:
        extra_keys: (kind, value) pairs, for example `("cache_salt", "tenant-7")`. The kind is part of the digest, so
            that values of different kinds never meet.
    """
    digest = blake2b(b"cbtriton prefix", digest_size=16)
    for kind, value in sorted(extra_keys):
        for text in (kind, value):
            encoded = text.encode()
            digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """What an indexed block holds: its tokens and, through its parents, the whole prefix before them."""

    digest: bytes
    token_ids: tuple[int, ...]
    parent: BlockContent | None

    def holds(self, parent: BlockContent, token_ids: tuple[int, ...]) -> bool:
        """Whether this is the prefix `parent` followed by `token_ids`, compared by tokens and not by digest."""
        mine: BlockContent | None = self.parent
        theirs: BlockContent | None = parent
        if self.token_ids != token_ids:
            return False
        while mine is not theirs:
            if mine is None or theirs is None or mine.token_ids != theirs.token_ids:
                return False
            if mine.parent is None and theirs.parent is None:
                return mine.digest == theirs.digest
            mine, theirs = mine.parent, theirs.parent
        return True


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix of a token sequence: whole blocks, in order."""

    block_ids: tuple[int, ...]
    contents: tuple[BlockContent, ...]
    root: BlockContent


@dataclass(slots=True)
class _BlockTable:
    block_ids: list[int]
    # Root and contents of the leading blocks that were looked up or indexed; empty once the prefix cache was reset
    # under the request's feet: what it computes from then on rests on forgotten prefixes and is not passed on.
    contents: list[BlockContent] = field(default_factory=list)


class BlockManager:
    """Block tables, reference counts and the prefix index over one pool of blocks.

    Args:
        num_blocks: Blocks in the pool, at least 1.
        page_size: Tokens per block.
        share_blocks: Whether prefixes are indexed and reused.
    """

    def __init__(self, num_blocks: int, page_size: int, share_blocks: bool) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.share_blocks = share_blocks
        self._tables: dict[str, _BlockTable] = {}
        self._ref_counts = [0] * (num_blocks + 1)
        self._free = set(range(1, num_blocks + 1))
        # Lowest id first. A block taken out of its turn keeps its entry, which is skipped when it surfaces.
        self._free_heap = list(range(1, num_blocks + 1))
        self._in_heap = set(self._free_heap)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._contents: dict[int, BlockContent] = {}
        self._roots: dict[bytes, BlockContent] = {}

    # ------------------------------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a reusable prefix and belong to no request."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks referenced by at least one block table."""
        return self.num_blocks - self.num_available

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request, in order of position."""
        return tuple(self._tables[request_id].block_ids)

    def num_blocks_held(self, request_id: str) -> int:
        """Length of the request's block table."""
        return len(self._tables[request_id].block_ids)

    def is_outdated(self, request_id: str) -> bool:
        """Whether the prefix cache was reset since the request got its table: nobody may take over its contents."""
        return not self._tables[request_id].contents

    def num_addable_tokens(self, request_id: str, num_tokens: int) -> int:
        """How many tokens the request can hold beyond its first `num_tokens`, if it took all available blocks."""
        held = len(self._tables[request_id].block_ids)
        return (held + self.num_available) * self.page_size - num_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def match_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> PrefixMatch:
        """The longest cached prefix of `token_ids` that leaves at least one token to compute.

        Args:
            token_ids: All known tokens of the request.
            cache_salt: Only prefixes computed under the same salt match.
        """
        content = root = self._root(cache_salt)
        block_ids: list[int] = []
        contents: list[BlockContent] = []
        if self.share_blocks:
            for start in range(0, len(token_ids) - self.page_size, self.page_size):
                tokens = tuple(token_ids[start : start + self.page_size])
                block_id = self._index.get(content_digest(content.digest, tokens))
                if block_id is None or not self._contents[block_id].holds(content, tokens):
                    break
                content = self._contents[block_id]
                block_ids.append(block_id)
                contents.append(content)
        return PrefixMatch(tuple(block_ids), tuple(contents), root)

    # -------------------------------------------------------------------------------------------- changes

    def start(self, request_id: str, match: PrefixMatch) -> int:
        """Gives a request a block table that begins with the matched blocks.

        Returns:
            Number of tokens that the table already holds.
        """
        if request_id in self._tables:
            raise RuntimeError(f"request {request_id!r} already has a block table")
        for block_id in match.block_ids:
            self._acquire(block_id)
        self._tables[request_id] = _BlockTable(list(match.block_ids), [match.root, *match.contents])
        return len(match.block_ids) * self.page_size

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> BlockCopy | None:
        """Gives `child_id` the first `num_tokens` tokens of its parent: whole blocks shared, the rest copied.

        Returns:
            The copy that must run before the child's next step; None when only whole blocks are shared.

        Raises:
            RuntimeError: No block is available for the copy; check `num_available` first.
        """
        parent = self._tables[parent_id]
        num_shared, remainder = divmod(num_tokens, self.page_size)
        shared = parent.block_ids[:num_shared]
        for block_id in shared:
            self._acquire(block_id)
        self._tables[child_id] = child = _BlockTable(list(shared), parent.contents[: num_shared + 1])
        if remainder == 0:
            return None
        source = parent.block_ids[num_shared]
        target = self._take_block(after=None)
        child.block_ids.append(target)
        return BlockCopy(source, target)

    def extend(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Lets the request's table hold `num_tokens` tokens.

        Returns:
            The blocks that were added, in order.

        Raises:
            RuntimeError: Not enough blocks are available; check `num_addable_tokens` first.
        """
        block_ids = self._tables[request_id].block_ids
        num_held = len(block_ids)
        for _ in range(self.num_blocks_for(num_tokens) - num_held):
            block_ids.append(self._take_block(after=block_ids[-1] if block_ids else None))
        return tuple(block_ids[num_held:])

    def index_blocks(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Makes the request's whole blocks among its first `num_tokens` tokens available to others.

        To be called once it is certain that the step that computes those tokens runs: whoever shares them reads them
        in that step at the earliest, after they were written.
        """
        if not self.share_blocks:
            return
        table = self._tables[request_id]
        if not table.contents:
            return
        for index in range(len(table.contents) - 1, min(num_tokens, len(token_ids)) // self.page_size):
            parent = table.contents[-1]
            tokens = tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])
            digest = content_digest(parent.digest, tokens)
            block_id = self._index.get(digest)
            if block_id is not None and self._contents[block_id].holds(parent, tokens):
                # Somebody else computed the same block first: theirs stays the canonical one, ours is private.
                table.contents.append(self._contents[block_id])
                continue
            content = BlockContent(digest, tokens, parent)
            table.contents.append(content)
            if block_id is None:
                self._index[digest] = table.block_ids[index]
                self._contents[table.block_ids[index]] = content

    def release(self, request_id: str) -> None:
        """Takes a request's table away. Its indexed blocks stay cached, the others become free."""
        # Last blocks first: of one prefix, the end is evicted before the beginning.
        for block_id in reversed(self._tables.pop(request_id).block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._contents:
                self._cached[block_id] = None
            else:
                self._give_back(block_id)

    def reset_prefix_cache(self) -> int:
        """Forgets every indexed prefix, also those that running requests still use (they keep their blocks).

        Returns:
            Number of cached blocks that became free.
        """
        num_dropped = len(self._cached)
        for block_id in self._cached:
            self._give_back(block_id)
        self._cached.clear()
        self._index.clear()
        self._contents.clear()
        self._roots.clear()
        for table in self._tables.values():
            table.contents.clear()
        return num_dropped

    # ---------------------------------------------------------------------------------------------- inner

    def _root(self, cache_salt: str | None) -> BlockContent:
        digest = root_digest([] if cache_salt is None else [("cache_salt", cache_salt)])
        return self._roots.setdefault(digest, BlockContent(digest, (), None))

    def _acquire(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def _give_back(self, block_id: int) -> None:
        self._free.add(block_id)
        if block_id not in self._in_heap:
            self._in_heap.add(block_id)
            heapq.heappush(self._free_heap, block_id)

    def _take_block(self, after: int | None) -> int:
        """A block for one owner: the one right after `after` if it is free, so that contexts stay contiguous."""
        if not self._free:
            self._evict_one()
        if after is not None and after + 1 in self._free:
            block_id = after + 1
            self._free.remove(block_id)
        else:
            block_id = self._pop_lowest_free()
        self._ref_counts[block_id] = 1
        return block_id

    def _pop_lowest_free(self) -> int:
        while True:
            block_id = heapq.heappop(self._free_heap)
            self._in_heap.remove(block_id)
            if block_id in self._free:
                self._free.remove(block_id)
                return block_id

    def _evict_one(self) -> None:
        if not self._cached:
            raise RuntimeError(f"all {self.num_blocks} blocks are in use; the caller must check before it asks")
        block_id, _ = self._cached.popitem(last=False)
        del self._index[self._contents.pop(block_id).digest]
        self._give_back(block_id)

    # -------------------------------------------------------------------------------------------- checking

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance. For tests; linear in the number of blocks."""
        counts = [0] * (self.num_blocks + 1)
        for table in self._tables.values():
            assert len(set(table.block_ids)) == len(table.block_ids), "a table holds a block twice"
            for block_id in table.block_ids:
                counts[block_id] += 1
        assert counts[NULL_BLOCK] == 0, "the null block is in a table"
        assert counts == self._ref_counts, "reference counts differ from the live tables"
        in_use = {block_id for block_id, count in enumerate(counts) if count}
        cached = set(self._cached)
        assert not (in_use | cached) & self._free, "a free block is in use or cached"
        assert not in_use & cached, "a cached block is in use"
        assert len(in_use) + len(cached) + len(self._free) == self.num_blocks, "a block was lost"
        assert self._free <= set(self._free_heap), "a free block cannot be found"
        assert self._in_heap == set(self._free_heap), "the heap's members are not tracked"
        assert len(self._free_heap) == len(self._in_heap), "a block is in the heap twice"
        assert cached <= set(self._contents), "a cached block has no contents"
        for digest, block_id in self._index.items():
            assert self._contents[block_id].digest == digest, "the index points to other contents"
        assert len(self._index) == len(self._contents), "contents without an index entry"
        assert not (set(self._contents) & self._free), "a free block is indexed"
