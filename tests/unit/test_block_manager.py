"""No block is lost, given twice or read by the wrong request, and a prefix is found exactly where it was computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cbtriton import block_manager
from cbtriton.block_manager import NULL_BLOCK, BlockManager, content_digest, root_digest
from cbtriton.cache_layout import GroupKind
from cbtriton.plan import BlockCopy, TableEntries

P = 4


def make(num_blocks: int = 8, *, share_blocks: bool = True) -> BlockManager:
    return BlockManager(num_blocks, (GroupKind(window=0, page_size=P, num_groups=1),), share_blocks)


def keys(salt: str | None) -> list[tuple[str, str]]:
    return [] if salt is None else [("cache_salt", salt)]


def compute(blocks: BlockManager, request_id: str, tokens: list[int], salt: str | None = None) -> int:
    """Starts a request, lets it run all its tokens; returns how many of them were in the cache."""
    num_cached = blocks.start(request_id, blocks.match_prefix(tokens, keys(salt)))
    blocks.extend(request_id, num_cached, len(tokens))
    blocks.index_blocks(request_id, tokens, len(tokens))
    blocks.check_invariants()
    return num_cached


def table(blocks: BlockManager, request_id: str) -> tuple[int, ...]:
    """The request's blocks in the first group."""
    return next((entries.block_ids for entries in blocks.entries(request_id)), ())


def num_cached(blocks: BlockManager, tokens: list[int], salt: str | None = None) -> int:
    return blocks.match_prefix(tokens, keys(salt)).num_tokens


# ------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("num_tokens", range(1, 3 * P + 1))
def test_a_request_holds_exactly_the_blocks_that_its_tokens_fill(num_tokens):
    blocks = make()
    blocks.start("a", blocks.match_prefix([]))
    for length in range(1, num_tokens + 1):
        added = blocks.extend("a", 0, length)
        assert len(added) == (length % P == 1)
        assert len(table(blocks, "a")) == blocks.num_in_use == -(-length // P)
        assert blocks.extend("a", 0, length) == ()
    for wanted in (0, 1, 8 * P - num_tokens, 8 * P - num_tokens + 1, 100):
        assert blocks.num_addable_tokens("a", num_tokens, wanted) == min(wanted, 8 * P - num_tokens)


def test_all_blocks_but_the_null_block_are_handed_out_once():
    blocks = make(5)
    blocks.start("a", blocks.match_prefix([]))
    blocks.start("b", blocks.match_prefix([]))
    blocks.extend("a", 0, 2 * P)
    blocks.extend("b", 0, 3 * P)
    assert sorted(table(blocks, "a") + table(blocks, "b")) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in table(blocks, "a") + table(blocks, "b")
    assert blocks.num_available == 0
    with pytest.raises(RuntimeError, match="all 5 blocks are in use"):
        blocks.extend("a", 0, 2 * P + 1)


def test_a_table_grows_into_the_neighbouring_block_while_that_is_free():
    blocks = make()
    for name in "ab":
        blocks.start(name, blocks.match_prefix([]))
    blocks.extend("a", 0, 2 * P)
    blocks.extend("b", 0, P)
    blocks.release("a")
    assert blocks.extend("b", 0, 3 * P) == (TableEntries(group=0, first_index=1, block_ids=(4, 5)),)
    blocks.check_invariants()


def test_released_blocks_can_be_used_again_and_only_once():
    blocks = make(3, share_blocks=False)
    for _ in range(10):
        blocks.start("a", blocks.match_prefix([]))
        blocks.extend("a", 0, 3 * P)
        blocks.release("a")
        blocks.check_invariants()
        assert blocks.num_available == 3
    with pytest.raises(KeyError):
        blocks.release("a")


def test_a_request_gets_one_table_only():
    blocks = make()
    compute(blocks, "a", [1])
    with pytest.raises(RuntimeError, match="'a' already has a block table"):
        blocks.start("a", blocks.match_prefix([1]))


# ------------------------------------------------------------------------------------------------ prefixes


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0), (P, 0), (P + 1, P), (2 * P, P), (2 * P + 1, 2 * P), (3 * P, 2 * P), (3 * P + 1, 3 * P)],
)
def test_a_cached_prompt_leaves_at_least_one_token_to_compute(length, expected):
    blocks = make(16)
    compute(blocks, "a", list(range(4 * P)))
    assert compute(blocks, "b", list(range(length))) == expected


def test_blocks_after_a_cached_prefix_are_found_in_turn():
    blocks = make(16)
    tokens = list(range(5 * P))
    compute(blocks, "a", tokens[: 2 * P])
    assert compute(blocks, "b", tokens[: 4 * P]) == 2 * P
    assert compute(blocks, "c", tokens) == 4 * P
    assert table(blocks, "c")[:4] == table(blocks, "b")


def test_a_prefix_that_differs_in_one_token_shares_nothing_from_there_on():
    blocks = make(16)
    tokens = list(range(3 * P + 1))
    compute(blocks, "a", tokens)
    for position, expected in [(0, 0), (P, P), (2 * P - 1, P), (2 * P, 2 * P), (3 * P, 3 * P)]:
        changed = tokens.copy()
        changed[position] = 99
        assert num_cached(blocks, changed) == expected


def test_equal_blocks_after_different_beginnings_are_not_shared():
    blocks = make()
    compute(blocks, "a", [1] * P + [2] * P)
    assert num_cached(blocks, [3] * P + [2] * P + [0]) == 0
    assert num_cached(blocks, [2] * P + [0]) == 0


def test_only_whole_blocks_are_shared():
    blocks = make(16)
    compute(blocks, "a", list(range(2 * P + 3)))
    assert num_cached(blocks, list(range(3 * P))) == 2 * P


def test_a_prefix_outlives_its_request_until_memory_is_needed():
    blocks = make(3)
    compute(blocks, "a", list(range(2 * P)))
    blocks.release("a")
    assert (blocks.num_cached, blocks.num_in_use, blocks.num_available) == (2, 0, 3)
    assert compute(blocks, "b", list(range(2 * P + 1))) == 2 * P
    assert (blocks.num_cached, blocks.num_in_use, blocks.num_available) == (0, 3, 0)
    blocks.release("b")
    compute(blocks, "c", list(range(50, 50 + 3 * P)))
    assert num_cached(blocks, list(range(2 * P + 1))) == 0


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning():
    blocks = make(5)
    old, new = list(range(2 * P)), list(range(50, 50 + 2 * P))
    for name, tokens in (("a", old), ("b", new), ("again", old[: P + 1])):
        compute(blocks, name, tokens)
        blocks.release(name)
    found = []
    for taken in range(6):
        found.append((num_cached(blocks, [*old, 0]), num_cached(blocks, [*new, 0])))
        if taken < 5:
            blocks.start(f"taken {taken}", blocks.match_prefix([]))
            blocks.extend(f"taken {taken}", 0, 1)
        blocks.check_invariants()
    # First the free block; then the end of `old`, all of `new`, and last the beginning of `old`, which was used again.
    assert found == [(2 * P, 2 * P), (2 * P, 2 * P), (P, 2 * P), (P, P), (P, 0), (0, 0)]


def test_free_blocks_are_taken_before_cached_ones():
    blocks = make(4)
    compute(blocks, "a", list(range(2 * P)))
    blocks.release("a")
    compute(blocks, "b", [9] * (2 * P - 1))
    assert num_cached(blocks, list(range(2 * P + 1))) == 2 * P


def test_a_prefix_in_use_is_never_evicted():
    blocks = make(3)
    compute(blocks, "a", list(range(P + 1)))
    compute(blocks, "b", list(range(P + 1)))
    blocks.release("a")
    assert blocks.num_available == 1
    assert table(blocks, "b") == (1, 3)
    blocks.extend("b", 0, 2 * P + 1)
    with pytest.raises(RuntimeError):
        blocks.extend("b", 0, 3 * P + 1)


def test_two_requests_that_compute_the_same_block_leave_one_copy():
    blocks = make()
    tokens = list(range(2 * P + 1))
    for name in "ab":  # neither finds the other: both start before either has run
        blocks.start(name, blocks.match_prefix(tokens))
        blocks.extend(name, 0, len(tokens))
    for name in "ab":
        blocks.index_blocks(name, tokens, len(tokens))
        blocks.check_invariants()
    assert set(table(blocks, "a")).isdisjoint(table(blocks, "b"))
    blocks.start("c", blocks.match_prefix(tokens))
    assert table(blocks, "c") == table(blocks, "a")[:2]
    blocks.release("c")
    blocks.release("a")
    blocks.release("b")
    assert (blocks.num_cached, blocks.num_available) == (2, 8)
    blocks.check_invariants()


def test_a_copy_that_lost_the_race_can_be_continued_by_others():
    blocks = make(16)
    tokens = list(range(3 * P))
    for name in "ab":
        blocks.start(name, blocks.match_prefix(tokens))
        blocks.extend(name, 0, len(tokens))
    blocks.index_blocks("a", tokens, P)
    blocks.index_blocks("b", tokens, 3 * P)  # its first block is a copy, the next two are the only ones
    blocks.release("b")
    blocks.check_invariants()
    assert blocks.start("c", blocks.match_prefix([*tokens, 0])) == 3 * P
    assert table(blocks, "c")[0] == table(blocks, "a")[0]


def test_without_sharing_nothing_is_kept_or_found():
    blocks = make(share_blocks=False)
    assert compute(blocks, "a", list(range(2 * P))) == 0
    assert compute(blocks, "b", list(range(2 * P))) == 0
    blocks.release("a")
    assert blocks.num_cached == 0


def test_a_reset_forgets_prefixes_and_keeps_running_requests():
    blocks = make()
    tokens = list(range(3 * P))
    compute(blocks, "gone", tokens[:P])
    blocks.release("gone")
    compute(blocks, "running", [7] * (2 * P))
    assert not blocks.is_outdated("running")
    assert blocks.reset_prefix_cache() == 1
    blocks.check_invariants()
    assert blocks.num_in_use == 2
    assert num_cached(blocks, tokens) == num_cached(blocks, [7] * (2 * P)) == 0
    # What the running request computes from now on still rests on what was forgotten.
    assert blocks.is_outdated("running")
    blocks.extend("running", 0, 3 * P)
    blocks.index_blocks("running", [7] * (3 * P), 3 * P)
    assert num_cached(blocks, [7] * (4 * P)) == 0
    blocks.release("running")
    assert blocks.num_available == 8
    assert blocks.num_cached == 0
    compute(blocks, "new", tokens)
    assert num_cached(blocks, tokens) == 2 * P


# ---------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("salts", [(None, "x"), ("x", None), ("x", "y")])
def test_requests_of_different_salts_never_share(salts):
    blocks = make()
    compute(blocks, "a", [1] * (2 * P), salts[0])
    assert num_cached(blocks, [1] * (2 * P), salts[0]) == P
    assert compute(blocks, "b", [1] * (2 * P), salts[1]) == 0


def test_extra_keys_of_different_kinds_never_meet():
    keys = [
        [],
        [("cache_salt", "x")],
        [("adapter", "x")],
        [("cache_salt", "adapter"), ("adapter", "x")],
        [("cache_salt", "x"), ("adapter", "")],
        [("cache_saltx", "")],
        [("", "cache_saltx")],
        [("cache_salt", "x"), ("adapter", "y")],
        [("cache_salt", "y"), ("adapter", "x")],
    ]
    assert len({root_digest(pairs) for pairs in keys}) == len(keys)
    assert root_digest([("a", "1"), ("b", "2")]) == root_digest([("b", "2"), ("a", "1")])


def test_prompts_whose_digests_collide_never_get_each_others_blocks(monkeypatch):
    monkeypatch.setattr(block_manager, "content_digest", lambda parent, token_ids: b"same")
    blocks = make()
    compute(blocks, "a", [1] * (2 * P))
    assert num_cached(blocks, [2] * (2 * P)) == 0
    assert num_cached(blocks, [2] * P + [1] * (P + 1)) == 0
    # The same tokens once more at the next position are another prefix.
    assert num_cached(blocks, [1] * (4 * P)) == P
    assert compute(blocks, "b", [2] * (2 * P)) == 0
    assert num_cached(blocks, [2] * (2 * P), "salt") == 0
    assert num_cached(blocks, [1] * (2 * P), "salt") == 0
    blocks.release("a")
    blocks.release("b")
    blocks.check_invariants()


def test_digests_are_the_same_in_every_process_and_version():
    expected = ["3005b5077bc563915c248686614daa05", "55dec90f201727786414f3663e50b464"]
    code = (
        "from cbtriton.block_manager import content_digest, root_digest\n"
        "first = content_digest(root_digest([('cache_salt', 'tenant')]), [1, 2, 3, 2**40])\n"
        "print(first.hex(), content_digest(first, range(100)).hex())"
    )
    for hash_seed in ("0", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected


def test_a_digest_depends_on_every_token_their_order_and_the_parent():
    root = root_digest([])
    digests = {
        content_digest(root, [1, 2, 3, 4]),
        content_digest(root, [1, 2, 4, 3]),
        content_digest(root, [1, 2, 3]),
        content_digest(root, [1, 2, 3, 4 + 2**32]),
        content_digest(root, [1, 2, 3, -4]),
        content_digest(content_digest(root, [1, 2, 3, 4]), [1, 2, 3, 4]),
        content_digest(root_digest([("cache_salt", "")]), [1, 2, 3, 4]),
    }
    assert len(digests) == 7


# ------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("num_tokens", [0, 1, P - 1, P, P + 1, 2 * P, 2 * P + 3])
@pytest.mark.parametrize("share_blocks", [True, False])
def test_a_fork_shares_whole_blocks_and_copies_the_last_partial_one(num_tokens, share_blocks):
    blocks = make(16, share_blocks=share_blocks)
    compute(blocks, "parent", list(range(3 * P)))
    copies = blocks.fork("parent", "child", num_tokens)
    blocks.check_invariants()
    parent, child = table(blocks, "parent"), table(blocks, "child")
    num_whole, remainder = divmod(num_tokens, P)
    assert child[:num_whole] == parent[:num_whole]
    if remainder:
        assert copies == (BlockCopy(source=parent[num_whole], target=child[num_whole]),)
        assert child[num_whole] not in parent
    else:
        assert copies == ()
        assert len(child) == num_whole
    blocks.release("parent")
    blocks.check_invariants()
    assert blocks.num_in_use == len(child)
    blocks.release("child")
    assert blocks.num_available == 16
    blocks.check_invariants()


def test_what_a_fork_computes_is_indexed_under_its_own_tokens():
    blocks = make(16)
    compute(blocks, "parent", [1] * (P + 2))
    blocks.fork("parent", "child", P + 1)
    tokens = [1] * (P + 2) + [5] * (P - 2)
    blocks.extend("child", 0, 2 * P)
    blocks.index_blocks("child", tokens, 2 * P)
    assert num_cached(blocks, [*tokens, 0]) == 2 * P
    assert num_cached(blocks, [1] * (2 * P + 1)) == P


def test_a_fork_of_forgotten_contents_is_forgotten_too():
    blocks = make(16)
    compute(blocks, "parent", [1] * (2 * P))
    blocks.reset_prefix_cache()
    blocks.fork("parent", "child", P)
    blocks.extend("child", 0, 2 * P)
    blocks.index_blocks("child", [1] * (2 * P), 2 * P)
    assert blocks.is_outdated("child")
    assert num_cached(blocks, [1] * (2 * P + 1)) == 0


def test_a_fork_without_room_for_its_copy_is_refused():
    blocks = make(2)
    compute(blocks, "parent", [1] * (2 * P))
    with pytest.raises(RuntimeError, match="all 2 blocks are in use"):
        blocks.fork("parent", "child", P + 1)


# ---------------------------------------------------------------------------------------- windows and groups

W = 6


def hybrid(num_blocks: int = 60, *, share_blocks: bool = True) -> BlockManager:
    """Two groups that see `W` tokens, in pages of P; one that sees everything, in pages twice as large."""
    return BlockManager(num_blocks, (GroupKind(W, P, 2), GroupKind(0, 2 * P, 1)), share_blocks)


def run_through(blocks: BlockManager, request_id: str, tokens: list[int], chunk: int = 1) -> int:
    """Runs all tokens in chunks, as the scheduler does it; returns how many were in the cache."""
    num_cached = computed = blocks.start(request_id, blocks.match_prefix(tokens))
    while computed < len(tokens):
        blocks.leave_window(request_id, computed)
        end = min(computed + chunk, len(tokens))
        assert blocks.num_addable_tokens(request_id, computed, end - computed) == end - computed
        blocks.extend(request_id, computed, end)
        blocks.index_blocks(request_id, tokens, end)
        blocks.check_invariants()
        computed = end
    return num_cached


@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
@pytest.mark.parametrize("share_blocks", [True, False])
def test_blocks_that_left_the_window_are_given_back(chunk, share_blocks):
    blocks = hybrid(share_blocks=share_blocks)
    run_through(blocks, "a", list(range(50)), chunk)
    first = max(0, 50 - min(chunk, 50 % chunk or chunk) - W) // P
    expected = [
        TableEntries(group, first, ids) for group, ids in enumerate(zip(*_bundles(blocks, "a", 0), strict=True))
    ]
    assert [entries.first_index for entries in blocks.entries("a")] == [first, first, 0]
    assert list(blocks.entries("a"))[:2] == expected
    num_held = 2 * (-(-50 // P) - first) + -(-50 // (2 * P))
    assert blocks.num_in_use == num_held
    assert (blocks.num_cached > 0) == (share_blocks and first > 0)
    blocks.release("a")
    assert blocks.num_available == 60


def _bundles(blocks: BlockManager, request_id: str, kind: int) -> list[tuple[int, ...]]:
    return [bundle for bundle in blocks._tables[request_id].kinds[kind].bundles if bundle]


def test_blocks_of_a_bundle_follow_one_another():
    blocks = hybrid()
    blocks.start("a", blocks.match_prefix([]))
    blocks.extend("a", 0, 3 * P)
    assert _bundles(blocks, "a", 0) == [(1, 2), (3, 4), (5, 6)]
    assert _bundles(blocks, "a", 1) == [(7,), (8,)]


@pytest.mark.parametrize("length", range(1, 6 * P + 2))
def test_a_prefix_hit_needs_only_what_the_next_token_sees(length):
    blocks = hybrid()
    tokens = list(range(6 * P))
    run_through(blocks, "a", tokens)
    blocks.release("a")
    # Whole pages of every kind, and at least one token to compute.
    assert blocks.start("b", blocks.match_prefix([*tokens, 0][:length])) == (length - 1) // (2 * P) * 2 * P
    seen = [entries.first_index for entries in blocks.entries("b")]
    num_cached = (length - 1) // (2 * P) * 2 * P
    assert seen == ([max(0, num_cached - W + 1) // P] * 2 + [0] if num_cached else [])
    blocks.check_invariants()


def test_a_prefix_is_as_long_as_the_kind_that_has_least_of_it():
    tokens = list(range(6 * P))
    for kind, expected in ((0, 4 * P), (1, 4 * P)):
        blocks = hybrid()
        run_through(blocks, "a", tokens, chunk=100)
        blocks.release("a")
        digest = blocks.match_prefix([*tokens, 0]).chains[P if kind == 0 else 2 * P][-1].digest
        bundle = blocks._indexes[kind][digest]
        # Evict just this one: it is the least recently used.
        blocks._cached.move_to_end(bundle[0], last=False)
        blocks._evict_one()
        blocks.check_invariants()
        assert blocks.match_prefix([*tokens, 0]).num_tokens == expected


def test_pages_in_front_of_the_window_may_be_evicted_without_losing_the_prefix():
    blocks = hybrid()
    tokens = list(range(6 * P))
    run_through(blocks, "a", tokens)
    blocks.release("a")
    while len(blocks._indexes[0]) > 2:
        oldest = next(leader for leader in blocks._cached if blocks._indexed[leader].kind == 0)
        blocks._cached.move_to_end(oldest, last=False)
        blocks._evict_one()
    assert blocks.match_prefix([*tokens, 0]).num_tokens == 6 * P
    assert blocks.match_prefix(tokens[: 5 * P]).num_tokens == 0


@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_a_fork_of_a_window_shares_what_it_sees_and_copies_what_it_shares_in_part(num_tokens):
    blocks = hybrid()
    run_through(blocks, "parent", list(range(num_tokens + 1)))
    assert blocks.can_fork("parent", num_tokens)
    copies = blocks.fork("parent", "child", num_tokens)
    blocks.check_invariants()
    assert len(copies) == 2 * (num_tokens % P > 0) + (num_tokens % (2 * P) > 0)
    parent, child = blocks.seen_blocks("parent", num_tokens), blocks.seen_blocks("child", num_tokens)
    copied = {copy.source: copy.target for copy in copies}
    assert tuple(copied.get(block_id, block_id) for block_id in parent) == child


def test_a_parent_that_has_left_what_its_child_sees_cannot_be_forked():
    blocks = hybrid()
    tokens = list(range(40))
    run_through(blocks, "parent", tokens)
    blocks.leave_window("parent", 40)
    assert [n for n in range(40) if blocks.can_fork("parent", n)] == list(range((40 - W) // P * P + W - 1, 40))


def test_what_is_restored_holds_what_the_next_token_sees_and_no_more():
    blocks = hybrid()
    tokens = list(range(40))
    run_through(blocks, "a", tokens)
    before = blocks.seen_blocks("a", 38)
    blocks.release("a")
    blocks.reset_prefix_cache()
    blocks.start("a", blocks.match_prefix(tokens))
    blocks.extend("a", 38, 38)
    assert len(blocks.seen_blocks("a", 38)) == len(before) == len(blocks.block_ids("a"))


def test_kinds_never_get_each_others_blocks():
    """Two kinds with pages of the same size, and so the same contents: what one lost is not found at the other."""
    blocks = BlockManager(20, (GroupKind(W, P, 1), GroupKind(0, P, 1)), share_blocks=True)
    tokens = list(range(2 * P + 1))
    run_through(blocks, "a", tokens)
    mine = [set(entries.block_ids) for entries in blocks.entries("a")]
    blocks.release("a")
    blocks.start("b", blocks.match_prefix(tokens))
    assert [set(entries.block_ids) <= known for entries, known in zip(blocks.entries("b"), mine, strict=True)] == [
        True
    ] * 2
