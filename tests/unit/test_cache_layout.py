"""Which layers share blocks, and how many blocks a sequence takes at most."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbtriton.cache_layout import CachedLayer, CacheLayout, GroupKind, LayerPlace

FULL, SLIDING = CachedLayer(0, 64, 64), CachedLayer(512, 64, 64)


def test_layers_that_are_all_alike_are_one_group_with_the_page_size_that_was_asked_for():
    layout = CacheLayout.of([FULL] * 30, 16)
    assert layout.kinds == (GroupKind(window=0, page_size=16, num_groups=1),)
    assert layout.places == tuple(LayerPlace(0, index) for index in range(30))
    assert layout.block_bytes == 30 * 16 * 128


@pytest.mark.parametrize(
    ("num_sliding", "num_full", "num_groups", "per_block"),
    [
        (13, 13, (1, 1), 13),  # Gemma-2 2B
        (15, 3, (5, 1), 3),  # Gemma-3 270M
        (22, 4, (11, 2), 2),  # Gemma-3 1B
        (29, 5, (6, 1), 5),  # Gemma-3 4B: one page of 30 is empty
        (40, 8, (5, 1), 8),  # Gemma-3 12B
        (52, 10, (11, 2), 5),  # Gemma-3 27B
        (1, 1, (1, 1), 1),
    ],
)
def test_kinds_with_different_numbers_of_layers_become_groups_of_about_equal_size(
    num_sliding, num_full, num_groups, per_block
):
    layout = CacheLayout.of([SLIDING] * num_sliding + [FULL] * num_full, 16)
    assert tuple(kind.num_groups for kind in layout.kinds) == num_groups
    assert layout.layers_per_block == per_block
    held = layout.peak_blocks(16, 16) * layout.block_bytes
    needed = 16 * 128 * (num_sliding + num_full)
    assert needed <= held <= needed * 16 / 15


def test_kinds_with_fewer_bytes_per_token_have_more_tokens_per_page():
    # Gemma-4: 16 heads of 256 elements in sliding layers, 4 of 512 in full ones.
    sliding, full = CachedLayer(1024, 16 * 256, 16 * 256), CachedLayer(0, 4 * 512, 4 * 512)
    layout = CacheLayout.of([sliding] * 5 + [full], 16)
    assert layout.page_sizes == (16, 16, 16, 16, 16, 32)
    assert (layout.key_page_bytes, layout.value_page_bytes) == (16 * 16 * 256, 16 * 16 * 256)


def test_pages_hold_whole_tokens_of_every_kind():
    layout = CacheLayout.of([CachedLayer(0, 5 * 64, 5 * 32), CachedLayer(8, 3 * 64, 3 * 32)], 16)
    assert layout.page_sizes == (18, 30)
    assert 18 * 5 * 64 == 30 * 3 * 64 == layout.key_page_bytes


def test_keys_and_values_in_different_proportions_are_refused_with_the_sizes():
    with pytest.raises(ValueError, match=r"same proportions in all layers, got \[\(32, 64\), \(64, 64\)\]"):
        CacheLayout.of([CachedLayer(0, 64, 64), CachedLayer(8, 32, 64)], 16)


LAYERS = st.lists(
    st.builds(
        lambda window, heads: CachedLayer(window, heads * 32, heads * 16),
        st.sampled_from([0, 4, 100]),
        st.sampled_from([1, 2, 3, 4]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers=LAYERS, page_size=st.sampled_from([4, 16, 24]))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(layers, page_size):
    layout = CacheLayout.of(layers, page_size)
    assert len(set(layout.places)) == len(layers)
    kind_of_group = [kind for kind in layout.kinds for _ in range(kind.num_groups)]
    for layer, place in zip(layers, layout.places, strict=True):
        kind = kind_of_group[place.group]
        assert kind.window == layer.window
        assert kind.page_size * layer.key_bytes == layout.key_page_bytes
        assert kind.page_size * layer.value_bytes == layout.value_page_bytes
        assert kind.page_size >= page_size
        assert place.index < layout.layers_per_block
    used = Counter(place.group for place in layout.places)
    assert set(used) == set(range(len(kind_of_group)))


KINDS = st.builds(GroupKind, st.sampled_from([0, 1, 2, 5, 16, 17]), st.integers(1, 6), st.just(1))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(kind=KINDS, num_tokens=st.integers(1, 60), step_tokens=st.integers(1, 20), start=st.integers(0, 19))
def test_a_request_never_holds_more_pages_than_the_peak(kind, num_tokens, step_tokens, start):
    """Of what a token sees and one more, whatever the steps are; every page is counted by hand."""
    peak, computed = kind.peak_pages(num_tokens, step_tokens), min(start, num_tokens - 1)
    most = 0
    while computed < num_tokens:
        end = min(computed + step_tokens, num_tokens)
        first = max(0, computed - kind.window) if kind.window else 0
        most = max(most, len({position // kind.page_size for position in range(first, end)}))
        computed = end
    assert most <= peak


def test_the_longest_sequence_that_fits_is_the_one_before_the_first_that_does_not():
    layout = CacheLayout.of([SLIDING] * 5 + [FULL], 16)
    for num_blocks in (6, 12, 5 * 34 + 40, 1000):
        longest = layout.num_fitting_tokens(num_blocks, 100_000)
        assert layout.peak_blocks(longest, 1) <= num_blocks < layout.peak_blocks(longest + 1, 1)
    assert layout.num_fitting_tokens(5, 100_000) == 0
    assert CacheLayout.of([SLIDING], 16).num_fitting_tokens(34, 100_000) == 100_000
