"""fp32 SmolLM2-135M, greedy: every request's tokens equal `model.generate` of its prompt alone.

The quick test is a part of the slow ones, with fewer and shorter prompts and answers: `pytest -m slow` runs the whole
grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from transformers import GenerationConfig

import cbtriton
from cbtriton.model_zoo import ModelSpec, load_model
from cbtriton.workloads import ChatPrompts

NUM_NEW, NUM_NEW_QUICK = 64, 24
GREEDY = GenerationConfig(do_sample=False, eos_token_id=-1)


@dataclass(frozen=True)
class Case:
    page_size: int
    max_batch_tokens: int
    share: bool
    is_pool_small: bool

    @property
    def name(self) -> str:
        sharing = "shared" if self.share else "unshared"
        return f"page{self.page_size}-budget{self.max_batch_tokens}-{sharing}{'-smallpool' * self.is_pool_small}"

    def num_blocks(self, prompts: list[list[int]], num_new: int) -> int:
        longest = max(map(len, prompts)) + num_new
        total = sum(len(prompt) + num_new for prompt in prompts)
        # The small pool holds the longest request and a little more, far from all at once.
        tokens = max(longest + 2 * self.page_size, total // 4) if self.is_pool_small else 2 * total
        return -(-tokens // self.page_size) + (0 if self.is_pool_small else len(prompts))


@pytest.fixture(scope="module")
def loaded():
    return load_model(ModelSpec(source="smollm2_135m", dtype="fp32"))


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    """32 prompts of 1…700 tokens of English; every third one starts like the first long one."""
    tokens = [token for prompt in ChatPrompts().build(loaded.tokenizer, 49152).prompts for token in prompt]
    lengths = [1 + round(699 * (i / 31) ** 2) for i in range(32)]
    starts = [0 if i % 3 == 0 else 97 * i for i in range(32)]
    prompts = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert [len(prompt) for prompt in prompts] == lengths
    return prompts


class Expected:
    """Tokens of `model.generate`, one prompt at a time, computed once per prompt and number of tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tokens: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
        key = tuple(prompt), num_new
        if key not in self._tokens:
            ids = torch.tensor([prompt])
            options = {"generation_config": GREEDY, "max_new_tokens": num_new, "pad_token_id": 0}
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            self._tokens[key] = output[0, len(prompt) :].tolist()
        return self._tokens[key]


@pytest.fixture(scope="module")
def expected(loaded) -> Expected:
    return Expected(loaded.model)


def check(model, case: Case, prompts: list[list[int]], expected: Expected, num_new: int = NUM_NEW) -> None:
    config = cbtriton.ContinuousBatchingConfig(
        page_size=case.page_size,
        num_blocks=case.num_blocks(prompts, num_new),
        max_batch_tokens=case.max_batch_tokens,
        allow_block_sharing=case.share,
        # A reserve would let the small pool finish without ever being full.
        safety_margin=0.0,
    )
    with cbtriton.enable(model).continuous_batching_context_manager(
        GREEDY, continuous_batching_config=config
    ) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=num_new)
        outputs = [manager.get_result(request_id) for request_id in ids]
        stats = manager.stats()
    differing = [
        len(prompt)
        for prompt, output in zip(prompts, outputs, strict=True)
        if output is None or output.generated_tokens != expected(prompt, num_new)
    ]
    assert not differing, f"prompts of these lengths differ: {differing}"
    # A page of 256 tokens holds most of these requests whole: nothing need grow out of its block or be shared.
    if not case.is_pool_small:
        assert stats.preemptions == 0
    elif case.page_size < 256:
        assert stats.preemptions > 0
    if not case.share:
        assert stats.prefix_cached_tokens == 0
    elif case.page_size < 256:
        assert stats.prefix_cached_tokens > 0


QUICK = [
    Case(page_size=24, max_batch_tokens=64, share=True, is_pool_small=True),
    Case(page_size=256, max_batch_tokens=512, share=False, is_pool_small=False),
]
FULL = [Case(*values) for values in product((4, 24, 256), (64, 512), (True, False), (True, False))]
NARROW = [Case(page, 7, share, small) for page, share, small in product((4, 24, 256), (True, False), (True, False))]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_tokens_equal_generate_on_some_prompts(loaded, prompts, expected, case):
    # Of 4 to 165 tokens, four of which begin alike; and one that outgrows the larger page.
    some = [prompts[i] for i in (2, 6, 8, 9, 12, 14, 15)] + prompts[20:21] * (case.page_size == 256)
    check(loaded.model, case, some, expected, NUM_NEW_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_tokens_equal_generate_on_all_prompts(loaded, prompts, expected, case):
    check(loaded.model, case, prompts, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_tokens_equal_generate_with_a_budget_of_seven_tokens(loaded, prompts, expected, case):
    check(loaded.model, case, prompts[:9:2] + prompts[9:10], expected)


@pytest.mark.slow
@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_tokens_equal_generate_at_every_compile_level(loaded, prompts, expected, level, kernels, use_async_batching):
    config = cbtriton.ContinuousBatchingConfig(
        page_size=32,
        num_blocks=512,
        max_batch_tokens=64,
        max_requests_per_batch=8,
        default_compile_level=level,
        use_async_batching=use_async_batching,
    )
    torch._dynamo.reset()
    some = prompts[2:20:2] + prompts[3:20:6]
    with cbtriton.enable(loaded.model).continuous_batching_context_manager(
        GREEDY, continuous_batching_config=config, kernel_config=cbtriton.KernelConfig(default=kernels)
    ) as manager:
        ids = manager.add_requests(some, max_new_tokens=NUM_NEW)
        tokens = [manager.get_result(request_id).generated_tokens for request_id in ids]
        stats = manager.stats()
    assert tokens == [expected(prompt) for prompt in some]
    assert stats.compilations > 0
    assert stats.late_compilations == 0
