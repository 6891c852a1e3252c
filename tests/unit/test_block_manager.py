"""No block is lost, given twice or read by the wrong request, and a prefix is found exactly where it was computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cbtriton import block_manager
from cbtriton.block_manager import NULL_BLOCK, BlockManager, content_digest, root_digest
from cbtriton.plan import BlockCopy

P = 4


def make(num_blocks: int = 8, *, share_blocks: bool = True) -> BlockManager:
    return BlockManager(num_blocks, P, share_blocks)


def compute(blocks: BlockManager, request_id: str, tokens: list[int], salt: str | None = None) -> int:
    """Starts a request, lets it run all its tokens; returns how many of them were in the cache."""
    num_cached = blocks.start(request_id, blocks.match_prefix(tokens, salt))
    blocks.extend(request_id, len(tokens))
    blocks.index_blocks(request_id, tokens, len(tokens))
    blocks.check_invariants()
    return num_cached


def num_cached(blocks: BlockManager, tokens: list[int], salt: str | None = None) -> int:
    return len(blocks.match_prefix(tokens, salt).block_ids) * P


# ------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("num_tokens", range(1, 3 * P + 1))
def test_a_request_holds_exactly_the_blocks_that_its_tokens_fill(num_tokens):
    blocks = make()
    blocks.start("a", blocks.match_prefix([]))
    for length in range(1, num_tokens + 1):
        added = blocks.extend("a", length)
        assert len(added) == (length % P == 1)
        assert blocks.num_blocks_held("a") == blocks.num_in_use == -(-length // P)
        assert blocks.extend("a", length) == ()
    assert blocks.num_addable_tokens("a", num_tokens) == 8 * P - num_tokens


def test_all_blocks_but_the_null_block_are_handed_out_once():
    blocks = make(5)
    blocks.start("a", blocks.match_prefix([]))
    blocks.start("b", blocks.match_prefix([]))
    blocks.extend("a", 2 * P)
    blocks.extend("b", 3 * P)
    assert sorted(blocks.block_ids("a") + blocks.block_ids("b")) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in blocks.block_ids("a") + blocks.block_ids("b")
    assert blocks.num_available == 0
    with pytest.raises(RuntimeError, match="all 5 blocks are in use"):
        blocks.extend("a", 2 * P + 1)


def test_a_table_grows_into_the_neighbouring_block_while_that_is_free():
    blocks = make()
    for name in "ab":
        blocks.start(name, blocks.match_prefix([]))
    blocks.extend("a", 2 * P)
    blocks.extend("b", P)
    blocks.release("a")
    assert blocks.extend("b", 3 * P) == (4, 5)
    blocks.check_invariants()


def test_released_blocks_can_be_used_again_and_only_once():
    blocks = make(3, share_blocks=False)
    for _ in range(10):
        blocks.start("a", blocks.match_prefix([]))
        blocks.extend("a", 3 * P)
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
    assert blocks.block_ids("c")[:4] == blocks.block_ids("b")


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
            blocks.extend(f"taken {taken}", 1)
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
    assert blocks.block_ids("b") == (1, 3)
    blocks.extend("b", 2 * P + 1)
    with pytest.raises(RuntimeError):
        blocks.extend("b", 3 * P + 1)


def test_two_requests_that_compute_the_same_block_leave_one_copy():
    blocks = make()
    tokens = list(range(2 * P + 1))
    for name in "ab":  # neither finds the other: both start before either has run
        blocks.start(name, blocks.match_prefix(tokens))
        blocks.extend(name, len(tokens))
    for name in "ab":
        blocks.index_blocks(name, tokens, len(tokens))
        blocks.check_invariants()
    assert set(blocks.block_ids("a")).isdisjoint(blocks.block_ids("b"))
    assert blocks.match_prefix(tokens).block_ids == blocks.block_ids("a")[:2]
    blocks.release("a")
    blocks.release("b")
    assert (blocks.num_cached, blocks.num_available) == (2, 8)
    blocks.check_invariants()


def test_a_copy_that_lost_the_race_can_be_continued_by_others():
    blocks = make(16)
    tokens = list(range(3 * P))
    for name in "ab":
        blocks.start(name, blocks.match_prefix(tokens))
        blocks.extend(name, len(tokens))
    blocks.index_blocks("a", tokens, P)
    blocks.index_blocks("b", tokens, 3 * P)  # its first block is a copy, the next two are the only ones
    blocks.release("b")
    blocks.check_invariants()
    match = blocks.match_prefix([*tokens, 0])
    assert len(match.block_ids) == 3
    assert match.block_ids[0] == blocks.block_ids("a")[0]


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
    blocks.extend("running", 3 * P)
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
    copy = blocks.fork("parent", "child", num_tokens)
    blocks.check_invariants()
    parent, child = blocks.block_ids("parent"), blocks.block_ids("child")
    num_whole, remainder = divmod(num_tokens, P)
    assert child[:num_whole] == parent[:num_whole]
    if remainder:
        assert copy == BlockCopy(source=parent[num_whole], target=child[num_whole])
        assert copy.target not in parent
    else:
        assert copy is None
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
    blocks.extend("child", 2 * P)
    blocks.index_blocks("child", tokens, 2 * P)
    assert num_cached(blocks, [*tokens, 0]) == 2 * P
    assert num_cached(blocks, [1] * (2 * P + 1)) == P


def test_a_fork_of_forgotten_contents_is_forgotten_too():
    blocks = make(16)
    compute(blocks, "parent", [1] * (2 * P))
    blocks.reset_prefix_cache()
    blocks.fork("parent", "child", P)
    blocks.extend("child", 2 * P)
    blocks.index_blocks("child", [1] * (2 * P), 2 * P)
    assert blocks.is_outdated("child")
    assert num_cached(blocks, [1] * (2 * P + 1)) == 0


def test_a_fork_without_room_for_its_copy_is_refused():
    blocks = make(2)
    compute(blocks, "parent", [1] * (2 * P))
    with pytest.raises(RuntimeError, match="all 2 blocks are in use"):
        blocks.fork("parent", "child", P + 1)
