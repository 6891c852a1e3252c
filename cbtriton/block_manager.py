"""Who owns which block of the KV cache, and which blocks hold a prefix that can be used again.

Owns every block table and the prefix index; nothing else changes them. It knows request ids, token ids and block
ids, but no tensor and no schedule. Called by the scheduler only, from one thread.

A block is in exactly one of three places:

    free     nobody's, contents meaningless
    cached   nobody's, holds an indexed prefix; evicted least recently used first when a free one is needed
    in use   referenced by one or more block tables

Groups of one kind (see `cache_layout`) see the same tokens, so their blocks are handed out, shared and given back
together, as a bundle: the blocks that hold the same page of tokens in all groups of a kind. Where a kind has a window,
requests give bundles back that no later token sees.

Block ids run from 1 to `num_blocks`: id 0 is the null block, which pads block tables and is never written.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import lcm
from weakref import WeakValueDictionary

from cbtriton.cache_layout import GroupKind
from cbtriton.plan import BlockCopy, TableEntries

NULL_BLOCK = 0

# One block per group of a kind; empty in place of a bundle that is not held.
Bundle = tuple[int, ...]
_NO_BUNDLE: Bundle = ()


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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
    """A cached prefix of a token sequence.

    Attributes:
        num_tokens: Its length, whole pages of every kind.
        bundles: For each kind, the bundles of its pages in order; empty ones for pages that no later token sees.
        chains: For each page size, what the pages of the prefix hold, behind the root.
    """

    num_tokens: int
    bundles: tuple[tuple[Bundle, ...], ...]
    chains: dict[int, tuple[BlockContent, ...]]


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A bundle that holds a prefix which can be used again."""

    kind: int
    bundle: Bundle
    content: BlockContent


@dataclass(slots=True)
class _KindTable:
    """A request's bundles of one kind, by page; the first `num_left` were given back."""

    bundles: list[Bundle]
    num_left: int
    num_indexed: int


@dataclass(slots=True)
class _BlockTable:
    kinds: list[_KindTable]
    # By page size: root and contents of the leading pages that were looked up or indexed. None at all once the prefix
    # cache was reset under the request's feet: what it computes from then on rests on forgotten prefixes and is not
    # passed on.
    chains: dict[int, list[BlockContent]] = field(default_factory=dict)


class BlockManager:
    """Block tables, reference counts and the prefix index over one pool of blocks.

    Args:
        num_blocks: Blocks in the pool, at least one for each group.
        kinds: The kinds of groups, in the order in which groups are numbered.
        share_blocks: Whether prefixes are indexed and reused.
    """

    def __init__(self, num_blocks: int, kinds: Sequence[GroupKind], share_blocks: bool) -> None:
        self.num_blocks = num_blocks
        self.share_blocks = share_blocks
        self._kinds = tuple(kinds)
        self._page_sizes = tuple(dict.fromkeys(kind.page_size for kind in kinds))
        self._alignment = lcm(*self._page_sizes)
        self._first_group = [
            sum(kind.num_groups for kind in self._kinds[:number]) for number in range(len(self._kinds))
        ]
        self._tables: dict[str, _BlockTable] = {}
        # Of a bundle, its first block stands for all: counts, index and order of eviction go by that.
        self._ref_counts = [0] * (num_blocks + 1)
        self._free = set(range(1, num_blocks + 1))
        # Lowest id first. A block taken out of its turn keeps its entry, which is skipped when it surfaces.
        self._free_heap = list(range(1, num_blocks + 1))
        self._in_heap = set(self._free_heap)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_cached = 0
        self._pinned: dict[str, frozenset[int]] = {}
        # Blocks of all pins together, kept since every admission asks for them.
        self._num_pinned = 0
        self._indexed: dict[int, _Indexed] = {}
        # For each kind, the bundle of each digest; the content behind a digest is the same for all kinds.
        self._indexes: list[dict[bytes, Bundle]] = [{} for _ in self._kinds]
        self._known: dict[bytes, BlockContent] = {}
        # Only as long as anybody holds something that was computed under them: there may be one for each request.
        self._roots: WeakValueDictionary[bytes, BlockContent] = WeakValueDictionary()

    # ------------------------------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that hold a reusable prefix and belong to no request."""
        return self._num_cached

    @property
    def num_in_use(self) -> int:
        """Blocks referenced by at least one block table."""
        return self.num_blocks - self.num_available

    @property
    def num_pinned(self) -> int:
        """Blocks that stay in use although no request needs them; see `pin`."""
        return self._num_pinned

    @property
    def num_unpinned(self) -> int:
        """Blocks that requests can have when they are alone."""
        return self.num_blocks - self.num_pinned

    @property
    def num_groups(self) -> int:
        """Groups: the fewest blocks that a request can hold, one page of each kind."""
        return sum(kind.num_groups for kind in self._kinds)

    def block_ids(self, request_id: str) -> frozenset[int]:
        """The blocks that the request holds."""
        tables = self._tables[request_id].kinds
        return frozenset(block_id for table in tables for bundle in table.bundles for block_id in bundle)

    def entries(self, request_id: str) -> tuple[TableEntries, ...]:
        """The request's block tables, from the first block on that it holds in each."""
        tables = self._tables[request_id].kinds
        return tuple(
            entries
            for number, table in enumerate(tables)
            for entries in self._entries(number, table.num_left, table.bundles[table.num_left :])
        )

    def seen_blocks(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """The blocks that the token behind the request's first `num_tokens` sees of these.

        Two requests have as many of them for the same number of tokens, and in the same order.
        """
        return tuple(
            block_id
            for kind, table in zip(self._kinds, self._tables[request_id].kinds, strict=True)
            for bundle in table.bundles[kind.first_seen_page(num_tokens) : kind.num_pages(num_tokens)]
            for block_id in bundle
        )

    def is_outdated(self, request_id: str) -> bool:
        """Whether the prefix cache was reset since the request got its table: nobody may take over its contents."""
        return not self._tables[request_id].chains

    def completes_page(self, num_before: int, num_tokens: int) -> bool:
        """Whether a page of any kind is whole with `num_tokens` tokens that was not with `num_before`."""
        return any(num_tokens // size > num_before // size for size in self._page_sizes)

    def num_addable_tokens(self, request_id: str, num_tokens: int, wanted: int) -> int:
        """How many tokens, up to `wanted`, the request can hold beyond its first `num_tokens`.

        All available blocks are counted. Blocks that the request has yet to give back are not: see `leave_window`.
        """
        tables = self._tables[request_id].kinds
        held = [len(table.bundles) for table in tables]

        def fits(number: int) -> bool:
            return self._num_blocks_beyond(held, num_tokens + number) <= self.num_available

        if fits(wanted):
            return wanted
        low, high = 0, wanted - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time, if a step runs `step_tokens` at most."""
        return sum(kind.num_groups * kind.peak_pages(num_tokens, step_tokens) for kind in self._kinds)

    def num_missing_blocks(self, request_id: str, num_tokens: int, step_tokens: int) -> int:
        """Blocks that the request needs beyond those it holds to run all of `num_tokens` tokens.

        Args:
            request_id: The request.
            num_tokens: Its tokens at the end.
            step_tokens: Most of them that run in one step; fewer do where the whole pool is too small for that.
        """
        tables = self._tables[request_id].kinds
        needed = min(self.peak_blocks(num_tokens, step_tokens), self.num_unpinned)
        return needed - sum(len(bundle) for table in tables for bundle in table.bundles)

    def match_prefix(self, token_ids: Sequence[int], extra_keys: Sequence[tuple[str, str]] = ()) -> PrefixMatch:
        """The longest cached prefix of `token_ids` that leaves at least one token to compute.

        Of a kind with a window, only those pages have to be there that the next token sees.

        Args:
            token_ids: All known tokens of the request.
            extra_keys: Only prefixes computed under the same ones match; see `root_digest`.
        """
        root = self._root(extra_keys)
        chains = {page_size: [root] for page_size in self._page_sizes}
        limit = len(token_ids) - 1 if self.share_blocks else 0
        found: list[list[Bundle]] = [[] for _ in self._kinds]
        # Those that see everything come first: the others need not look further than these reach.
        for number, kind in sorted(enumerate(self._kinds), key=lambda item: item[1].window > 0):
            found[number] = bundles = list(self._lookup(number, token_ids, limit, chains[kind.page_size]))
            if not kind.window:
                limit = len(bundles) * kind.page_size
        num_tokens = self._longest_seen(limit, found)
        return PrefixMatch(
            num_tokens,
            tuple(
                (_NO_BUNDLE,) * (first := kind.first_seen_page(num_tokens))
                + tuple(bundles[first : num_tokens // kind.page_size])
                for kind, bundles in zip(self._kinds, found, strict=True)
            ),
            {page_size: tuple(chain[: num_tokens // page_size + 1]) for page_size, chain in chains.items()},
        )

    def _lookup(self, number: int, token_ids: Sequence[int], limit: int, chain: list[BlockContent]) -> Iterator[Bundle]:
        """The cached bundles of the pages of `token_ids[:limit]`, empty ones where there is none.

        A kind that sees everything ends at the first that is missing. `chain` is continued as far as needed.
        """
        kind, index = self._kinds[number], self._indexes[number]
        for page in range(limit // kind.page_size):
            if page + 1 == len(chain):
                tokens = tuple(token_ids[page * kind.page_size : (page + 1) * kind.page_size])
                chain.append(self._content(chain[-1], tokens))
            content = chain[page + 1]
            bundle = index.get(content.digest, _NO_BUNDLE)
            if self._known.get(content.digest) is not content:
                bundle = _NO_BUNDLE
            if not bundle and not kind.window:
                return
            yield bundle

    def _longest_seen(self, limit: int, found: Sequence[Sequence[Bundle]]) -> int:
        """The longest prefix of at most `limit` tokens behind which every kind has all that the next token sees."""
        last_missing = []
        for bundles in found:
            last_missing.append(missing := [-1])
            for page, bundle in enumerate(bundles):
                missing.append(missing[-1] if bundle else page)
        for num_tokens in range(limit - limit % self._alignment, 0, -self._alignment):
            if all(
                missing[num_tokens // kind.page_size] < kind.first_seen_page(num_tokens)
                for kind, missing in zip(self._kinds, last_missing, strict=True)
            ):
                return num_tokens
        return 0

    def can_fork(self, parent_id: str, num_tokens: int) -> bool:
        """Whether the parent still holds all that the token behind its first `num_tokens` sees."""
        tables = self._tables[parent_id].kinds
        return all(
            table.num_left <= kind.first_seen_page(num_tokens) for kind, table in zip(self._kinds, tables, strict=True)
        )

    # -------------------------------------------------------------------------------------------- changes

    def start(self, request_id: str, match: PrefixMatch) -> int:
        """Gives a request block tables that begin with the matched bundles.

        Returns:
            Number of tokens that the tables already hold.
        """
        if request_id in self._tables:
            raise RuntimeError(f"request {request_id!r} already has a block table")
        tables = [
            self._shared(number, bundles, match.num_tokens, num_indexed=len(bundles))
            for number, bundles in enumerate(match.bundles)
        ]
        chains = {page_size: list(chain) for page_size, chain in match.chains.items()}
        self._tables[request_id] = _BlockTable(tables, chains)
        return match.num_tokens

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Gives `child_id` the first `num_tokens` tokens of its parent: whole pages shared, the rest copied.

        The parent must hold what these need; see `can_fork`.

        Returns:
            The copies that must run before the child's next step; none when only whole pages are shared.

        Raises:
            RuntimeError: No block is available for a copy; `num_groups` available ones are always enough.
        """
        parent = self._tables[parent_id]
        tables, copies = [], []
        for number, (kind, theirs) in enumerate(zip(self._kinds, parent.kinds, strict=True)):
            num_whole, remainder = divmod(num_tokens, kind.page_size)
            num_indexed = min(theirs.num_indexed, num_whole)
            table = self._shared(number, theirs.bundles[:num_whole], num_tokens, num_indexed)
            tables.append(table)
            if remainder:
                target = self._take_bundle(kind, after=_NO_BUNDLE)
                table.bundles.append(target)
                copies += map(BlockCopy, theirs.bundles[num_whole], target)
        chains = {page_size: chain[: num_tokens // page_size + 1] for page_size, chain in parent.chains.items()}
        self._tables[child_id] = _BlockTable(tables, chains)
        return tuple(copies)

    def extend(self, request_id: str, num_computed: int, num_tokens: int) -> tuple[TableEntries, ...]:
        """Lets the request hold its tokens up to `num_tokens`, as far as those behind `num_computed` see them.

        Returns:
            What was added to each block table.

        Raises:
            RuntimeError: Not enough blocks are available; check `num_addable_tokens` first.
        """
        added: list[TableEntries] = []
        for number, (kind, table) in enumerate(zip(self._kinds, self._tables[request_id].kinds, strict=True)):
            bundles = table.bundles
            num_unseen = kind.first_seen_page(num_computed) - len(bundles)
            if num_unseen > 0:
                bundles += [_NO_BUNDLE] * num_unseen
                table.num_left = len(bundles)
            first = len(bundles)
            for _ in range(kind.num_pages(num_tokens) - first):
                bundles.append(self._take_bundle(kind, after=bundles[-1] if bundles else _NO_BUNDLE))
            if len(bundles) > first:
                added += self._entries(number, first, bundles[first:])
        return tuple(added)

    def leave_window(self, request_id: str, num_computed: int) -> None:
        """Takes away what no token behind the request's first `num_computed - 1` sees: indexed bundles stay cached."""
        for kind, table in zip(self._kinds, self._tables[request_id].kinds, strict=True):
            if not kind.window:
                continue
            end = min(kind.first_kept_page(num_computed), len(table.bundles))
            for page in range(table.num_left, end):
                self._let_go(table.bundles[page])
                table.bundles[page] = _NO_BUNDLE
            table.num_left = max(table.num_left, end)

    def index_blocks(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Makes the request's whole pages among its first `num_tokens` tokens available to others.

        To be called once it is certain that the step that computes those tokens runs: whoever shares them reads them
        in that step at the earliest, after they were written.
        """
        table = self._tables[request_id]
        if not self.share_blocks or not table.chains:
            return
        num_tokens = min(num_tokens, len(token_ids))
        for page_size, chain in table.chains.items():
            for page in range(len(chain) - 1, num_tokens // page_size):
                tokens = tuple(token_ids[page * page_size : (page + 1) * page_size])
                chain.append(self._content(chain[-1], tokens))
        for number, (kind, mine) in enumerate(zip(self._kinds, table.kinds, strict=True)):
            num_whole = num_tokens // kind.page_size
            for page in range(mine.num_indexed, num_whole):
                self._index(number, mine.bundles[page], table.chains[kind.page_size][page + 1])
            mine.num_indexed = max(mine.num_indexed, num_whole)

    def release(self, request_id: str) -> None:
        """Takes a request's tables away. Its indexed blocks stay cached, the others become free."""
        table = self._tables.pop(request_id)
        held = [
            ((page + 1) * kind.page_size, number, bundle)
            for number, (kind, mine) in enumerate(zip(self._kinds, table.kinds, strict=True))
            for page, bundle in enumerate(mine.bundles)
            if bundle
        ]
        # Last tokens first: of one prefix, the end is evicted before the beginning.
        for _, _, bundle in sorted(held, reverse=True):
            self._let_go(bundle)

    def pin(self, name: str, match: PrefixMatch) -> None:
        """Keeps a cached prefix, as far as later tokens see it, until `unpin`.

        Args:
            name: Whose prefix it is; no request may have that name meanwhile.
            match: The prefix.
        """
        self.start(name, match)
        self._pinned[name] = self.block_ids(name)
        self._count_pinned()

    def unpin(self, name: str) -> None:
        """Gives up a pinned prefix: from now on its blocks are cached like others."""
        del self._pinned[name]
        self._count_pinned()
        self.release(name)

    def reset_prefix_cache(self) -> int:
        """Forgets every indexed prefix, also those that running requests still use (they keep their blocks).

        Returns:
            Number of cached blocks that became free.
        """
        num_dropped = self._num_cached
        for block_id in self._cached:
            self._give_back(self._indexed[block_id].bundle)
        self._cached.clear()
        self._num_cached = 0
        self._indexed.clear()
        for index in self._indexes:
            index.clear()
        self._known.clear()
        self._roots.clear()
        for table in self._tables.values():
            table.chains.clear()
        return num_dropped

    # ---------------------------------------------------------------------------------------------- inner

    def _count_pinned(self) -> None:
        self._num_pinned = len(frozenset[int]().union(*self._pinned.values()))

    def _root(self, extra_keys: Sequence[tuple[str, str]]) -> BlockContent:
        digest = root_digest(extra_keys)
        return self._roots.setdefault(digest, BlockContent(digest, (), None))

    def _content(self, parent: BlockContent, token_ids: tuple[int, ...]) -> BlockContent:
        """What a page with these tokens after `parent` holds: the indexed one, if there is one."""
        digest = content_digest(parent.digest, token_ids)
        known = self._known.get(digest)
        return (
            known if known is not None and known.holds(parent, token_ids) else BlockContent(digest, token_ids, parent)
        )

    def _index(self, number: int, bundle: Bundle, content: BlockContent) -> None:
        # Where somebody else computed the same page first, theirs stays the canonical one and ours is private.
        if not bundle or content.digest in self._indexes[number]:
            return
        # Another prefix may have the same digest: the one that came first stays.
        if self._known.setdefault(content.digest, content) is content:
            self._indexes[number][content.digest] = bundle
            self._indexed[bundle[0]] = _Indexed(number, bundle, content)

    def _entries(self, number: int, first_index: int, bundles: Sequence[Bundle]) -> Iterator[TableEntries]:
        """What `bundles` are in the block tables of a kind's groups."""
        for group, block_ids in enumerate(zip(*bundles, strict=True), start=self._first_group[number]):
            yield TableEntries(group, first_index, block_ids)

    def _num_blocks_beyond(self, held: Sequence[int], num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take beyond the first `held` pages of each kind."""
        return sum(
            kind.num_groups * max(0, kind.num_pages(num_tokens) - number)
            for kind, number in zip(self._kinds, held, strict=True)
        )

    def _shared(self, number: int, bundles: Sequence[Bundle], num_tokens: int, num_indexed: int) -> _KindTable:
        """A table of somebody else's bundles, as far as the token behind `num_tokens` sees them."""
        num_unseen = min(self._kinds[number].first_seen_page(num_tokens), len(bundles))
        seen = list(bundles[num_unseen:])
        for bundle in seen:
            self._acquire(bundle)
        return _KindTable([_NO_BUNDLE] * num_unseen + seen, num_unseen, num_indexed)

    def _acquire(self, bundle: Bundle) -> None:
        if self._ref_counts[bundle[0]] == 0:
            del self._cached[bundle[0]]
            self._num_cached -= len(bundle)
        self._ref_counts[bundle[0]] += 1

    def _let_go(self, bundle: Bundle) -> None:
        self._ref_counts[bundle[0]] -= 1
        if self._ref_counts[bundle[0]] > 0:
            return
        if bundle[0] in self._indexed:
            self._cached[bundle[0]] = None
            self._num_cached += len(bundle)
        else:
            self._give_back(bundle)

    def _give_back(self, bundle: Bundle) -> None:
        self._free.update(bundle)
        for block_id in bundle:
            if block_id not in self._in_heap:
                self._in_heap.add(block_id)
                heapq.heappush(self._free_heap, block_id)

    def _take_bundle(self, kind: GroupKind, after: Bundle) -> Bundle:
        """A bundle for one owner: right behind `after` if that is free, so that contexts stay contiguous."""
        while len(self._free) < kind.num_groups:
            self._evict_one()
        block_ids: list[int] = []
        neighbour = after[-1] + 1 if after else NULL_BLOCK
        for _ in range(kind.num_groups):
            block_ids.append(self._take_block(neighbour))
            neighbour = block_ids[-1] + 1
        self._ref_counts[block_ids[0]] = 1
        return tuple(block_ids)

    def _take_block(self, preferred: int) -> int:
        if preferred in self._free:
            self._free.remove(preferred)
            return preferred
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
        evicted = self._indexed.pop(block_id)
        self._num_cached -= len(evicted.bundle)
        digest = evicted.content.digest
        del self._indexes[evicted.kind][digest]
        if not any(digest in index for index in self._indexes):
            del self._known[digest]
        self._give_back(evicted.bundle)

    # -------------------------------------------------------------------------------------------- checking

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance. For tests; linear in the number of blocks."""
        counts = [0] * (self.num_blocks + 1)
        in_use: set[int] = set()
        owners: dict[int, Bundle] = {}
        for table in self._tables.values():
            held = [bundle for mine in table.kinds for bundle in mine.bundles if bundle]
            assert len(set(held)) == len(held), "a table holds a bundle twice"
            for mine in table.kinds:
                assert all(bool(bundle) == (page >= mine.num_left) for page, bundle in enumerate(mine.bundles))
            for bundle in held:
                counts[bundle[0]] += 1
                in_use.update(bundle)
                for block_id in bundle:
                    assert owners.setdefault(block_id, bundle) == bundle, "a block is in two bundles"
        assert NULL_BLOCK not in in_use, "the null block is in a table"
        assert counts == self._ref_counts, "reference counts differ from the live tables"
        cached = {block_id for leader in self._cached for block_id in self._indexed[leader].bundle}
        assert len(cached) == self._num_cached, "cached blocks are miscounted"
        assert not (in_use | cached) & self._free, "a free block is in use or cached"
        assert not in_use & cached, "a cached block is in use"
        assert len(in_use) + len(cached) + len(self._free) == self.num_blocks, "a block was lost"
        assert self._free <= set(self._free_heap), "a free block cannot be found"
        assert self._in_heap == set(self._free_heap), "the heap's members are not tracked"
        assert len(self._free_heap) == len(self._in_heap), "a block is in the heap twice"
        for number, index in enumerate(self._indexes):
            for digest, bundle in index.items():
                indexed = self._indexed[bundle[0]]
                assert (indexed.kind, indexed.bundle) == (number, bundle), "the index points to another bundle"
                assert self._known[digest] is indexed.content, "the index points to other contents"
                assert indexed.content.digest == digest
        assert sum(map(len, self._indexes)) == len(self._indexed), "contents without an index entry"
        assert set(self._known) == {digest for index in self._indexes for digest in index}, "contents of no bundle"
        assert not (set(self._indexed) & self._free), "a free block is indexed"
