"""Which attention calls of a model share blocks of the KV cache, and how many blocks a sequence needs.

Attention calls with the same window and the same bytes per token are of one kind: their pages come and go together.
A block holds one page for each of `layers_per_block` calls of a kind; a kind with more calls than that consists of
several groups, each with a block table of its own. All blocks have the same number of bytes, whatever they hold, so
one pool of block ids serves all groups: where a kind has fewer bytes per token, its pages hold more tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

# A group that is not full wastes the rest of its blocks: at most this share of what its kind holds, else groups are
# smaller.
_MAX_WASTE = 1 / 16


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What one attention call keeps of each token.

    Attributes:
        window: Tokens that a query sees, itself included; 0 means all.
        key_bytes: Bytes of a token's keys.
        value_bytes: Bytes of a token's values.
    """

    window: int
    key_bytes: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Groups whose pages come and go together.

    Attributes:
        window: Tokens that a query sees, itself included; 0 means all.
        page_size: Tokens per page.
        num_groups: Groups of this kind: a page takes one block in each.
    """

    window: int
    page_size: int
    num_groups: int

    def num_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens reach into."""
        return -(-num_tokens // self.page_size)

    def first_seen_page(self, position: int) -> int:
        """The first page that the query at `position` sees."""
        return max(0, position - self.window + 1) // self.page_size if self.window else 0

    def first_kept_page(self, num_computed: int) -> int:
        """The first page that a request with `num_computed` tokens in the cache keeps.

        It is what the token before the next one sees: a fork of a prompt, and a request whose latest token gets lost,
        go on from there.
        """
        return self.first_seen_page(num_computed - 1)

    def peak_pages(self, num_tokens: int, step_tokens: int) -> int:
        """Most pages that a request of `num_tokens` tokens holds at a time.

        Args:
            num_tokens: Its tokens at the end.
            step_tokens: Most of them that run in one step.
        """
        if not self.window:
            return self.num_pages(num_tokens)
        # The tokens of the window and those of a step, as unfavourably as they can lie in pages.
        return min(self.num_pages(num_tokens), (self.window + step_tokens - 2) // self.page_size + 2)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where an attention call's pages are.

    Attributes:
        group: Number of its group, which is the number of its block table.
        index: Which page of each block is its own.
    """

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model, and what a block is.

    Attributes:
        kinds: The kinds. Groups are numbered through all of them in this order.
        places: Where each attention call's pages are, in the order of the calls.
        layers_per_block: Pages of a block.
        key_page_bytes: Bytes of a page of keys.
        value_page_bytes: Bytes of a page of values.
    """

    kinds: tuple[GroupKind, ...]
    places: tuple[LayerPlace, ...]
    layers_per_block: int
    key_page_bytes: int
    value_page_bytes: int

    @classmethod
    def of(cls, layers: Sequence[CachedLayer], page_size: int) -> CacheLayout:
        """The layout for these attention calls.

        Args:
            layers: The calls that keep keys and values, in their order.
            page_size: Tokens per page of the kind with the most bytes per token. It is exceeded, by as little as
                possible, where pages of the kinds would not come out at whole tokens.

        Raises:
            ValueError: Keys and values have other proportions in some layers than in others.
        """
        numbers = Counter(layers)
        key_page_bytes = _page_bytes([layer.key_bytes for layer in numbers], page_size)
        value_page_bytes = _page_bytes([layer.value_bytes for layer in numbers], page_size)
        sizes = {layer: key_page_bytes // layer.key_bytes for layer in numbers}
        for layer, size in sizes.items():
            if size * layer.value_bytes != value_page_bytes:
                raise ValueError(
                    "keys and values must have the same proportions in all layers, got "
                    f"{sorted({(each.key_bytes, each.value_bytes) for each in numbers})} bytes per token"
                )
        per_block = _layers_per_block(list(numbers.values()))
        kinds, first_group = [], {}
        for layer, number in numbers.items():
            first_group[layer] = sum(kind.num_groups for kind in kinds)
            kinds.append(GroupKind(layer.window, sizes[layer], -(-number // per_block)))
        placed: Counter[CachedLayer] = Counter()
        places = []
        for layer in layers:
            group, index = divmod(placed[layer], per_block)
            places.append(LayerPlace(first_group[layer] + group, index))
            placed[layer] += 1
        return cls(tuple(kinds), tuple(places), per_block, key_page_bytes, value_page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layers_per_block * (self.key_page_bytes + self.value_page_bytes)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Tokens per page of each group."""
        return tuple(kind.page_size for kind in self.kinds for _ in range(kind.num_groups))

    @property
    def alignment(self) -> int:
        """Cached prefixes are multiples of so many tokens: whole pages of every kind."""
        return lcm(*(kind.page_size for kind in self.kinds))

    def max_pages(self, num_tokens: int) -> int:
        """Most pages that `num_tokens` tokens reach into in any group: the width of a block table."""
        return max(kind.num_pages(num_tokens) for kind in self.kinds)

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time; see `GroupKind.peak_pages`."""
        return sum(kind.num_groups * kind.peak_pages(num_tokens, step_tokens) for kind in self.kinds)

    def pinned_blocks(self, num_tokens: int) -> int:
        """Blocks that hold what later tokens see of a prefix of `num_tokens` tokens, whole pages of every kind."""
        return sum(
            kind.num_groups * (kind.num_pages(num_tokens) - kind.first_seen_page(num_tokens)) for kind in self.kinds
        )

    def num_fitting_tokens(self, num_blocks: int, at_most: int) -> int:
        """Tokens of the longest sequence up to `at_most` that can run alone in `num_blocks` blocks."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            # Steps of a request that is short of blocks get as short as they must.
            low, high = (middle, high) if self.peak_blocks(middle, 1) <= num_blocks else (low, middle - 1)
        return low


def _page_bytes(bytes_per_token: Sequence[int], page_size: int) -> int:
    """Bytes of a page that holds whole tokens of every kind, and at least `page_size` of the largest."""
    unit = lcm(*bytes_per_token)
    return -(-page_size * max(bytes_per_token) // unit) * unit


def _layers_per_block(numbers: Sequence[int]) -> int:
    """Pages of a block for kinds of so many layers: as many as possible without much waste; each group has a table."""

    def num_groups(per_block: int) -> int:
        return sum(-(-number // per_block) for number in numbers)

    def is_frugal(per_block: int) -> bool:
        return all(1 - number / (-(-number // per_block) * per_block) <= _MAX_WASTE for number in numbers)

    # One page a block wastes nothing. Of equally few groups, smaller blocks leave less of themselves empty.
    return min(filter(is_frugal, range(1, max(numbers) + 1)), key=lambda per_block: (num_groups(per_block), per_block))
