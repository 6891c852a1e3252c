"""Models whose layers see different amounts of context, or keep different amounts of it, answer like plain `generate`.

Blocks that nobody holds are NaN before every step: whoever reads one answers nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
)

from cbtriton.engine import Engine
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.request import Request, SamplingParams, StopRules
from cbtriton.scheduler import _Draft

FULL, SLIDING = "full_attention", "sliding_attention"
NUM_TOKENS = 12
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def mistral(window: int) -> MistralConfig:
    return MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=window)


CONFIGS = {
    "llama": None,
    **{f"mistral_{window}": mistral(window) for window in (4, 8, 16, 17, 24)},
    "gemma3_hybrid": Gemma3TextConfig(
        **SIZES, head_dim=16, num_hidden_layers=6, sliding_window=8, layer_types=[SLIDING] * 5 + [FULL]
    ),
    # Sliding layers keep 2 heads of 16 elements of each token, full ones 1 of 32... times two.
    "gemma4_two_shapes": Gemma4TextConfig(
        **SIZES | {"num_key_value_heads": 4},
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_hidden_layers=6,
        sliding_window=8,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
    ),
    # The last two layers read what earlier ones keep.
    "gemma3n_shared": Gemma3nTextConfig(
        **SIZES | {"intermediate_size": [96] * 4},
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=8,
        layer_types=[SLIDING, FULL] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=None,
    ),
    "gpt_oss_sinks": GptOssConfig(
        **SIZES,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters=None,
    ),
    # Chunks that stand still, beside layers that see all and scale queries by their position.
    "llama4_chunks": Llama4TextConfig(
        **SIZES,
        head_dim=16,
        num_hidden_layers=4,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=8,
        no_rope_layers=[1, 1, 0, 1],
        floor_scale=4,
        attn_scale=0.5,
    ),
    "bloom_slopes": BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=128, initializer_range=0.3),
}


@dataclass(frozen=True, slots=True)
class Course:
    """How a workload is run.

    Attributes:
        chunk: Tokens per step.
        page_size: Tokens per page.
        preemption: What becomes of the newest request every few steps: nothing, computed again, or off-loaded.
        is_shared: Whether prefixes are cached.
        has_decode_path: Whether there is one.
    """

    chunk: int
    page_size: int
    preemption: str
    is_shared: bool
    has_decode_path: bool


ALL_COURSES = [
    Course(*values)
    for values in product((1, 5, 64), (4, 16, 24), ("none", "recompute", "offload"), (True, False), (True, False))
]
QUICK_COURSES = [
    Course(1, 4, "offload", True, True),
    Course(5, 16, "none", False, False),
    Course(5, 4, "recompute", True, False),
    Course(64, 16, "recompute", True, True),
    Course(64, 4, "none", True, False),
    Course(5, 24, "offload", False, True),
]
# So often one request is preempted, so that it gets to its end.
MAX_PREEMPTIONS = 3
QUICK_MODELS = (
    "llama",
    "mistral_8",
    "mistral_17",
    "gemma3_hybrid",
    "gemma4_two_shapes",
    "gemma3n_shared",
    "gpt_oss_sinks",
    "llama4_chunks",
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK_MODELS else pytest.mark.slow) for name in CONFIGS],
)
def model(request, tools) -> Any:
    return tools.build(CONFIGS[request.param] or tools.llama_config())


@pytest.fixture(scope="module")
def answers(model, tools) -> dict[int, list[int]]:
    """What plain `generate` says to `tools.prompt(length)`, for lengths around multiples of the window."""
    window = getattr(model.config, "sliding_window", None) or 8
    lengths = dict.fromkeys((1, window - 1, window, window + 1, 2 * window, 3 * window + 1))
    return {length: tools.plain_greedy(model, tools.prompt(length), NUM_TOKENS) for length in lengths}


@contextmanager
def stepped(tools, model, kernels: str = "reference", **config: Any) -> Iterator[Engine]:
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**config), None, {"default": kernels})
    try:
        manager.warmup()
        yield manager._engine
    finally:
        manager.destroy()


def poison_unheld(engine: Engine) -> None:
    """Makes NaN of everything in the cache that nobody holds."""
    unheld = torch.tensor([0, *engine._blocks._free])
    for pool in engine._cache.pools:
        pool.key[unheld] = torch.nan
        pool.value[unheld] = torch.nan


def run(engine: Engine, prompts: dict[str, list[int]], preempt_every: int = 0) -> dict[str, list[int]]:
    """Runs the prompts to their end; preempts the newest request every so many steps."""
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, SamplingParams(), StopRules(NUM_TOKENS)))
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_requests:
        poison_unheld(engine)
        running = list(engine._scheduler._running.values())
        if preempt_every and step % preempt_every == preempt_every - 1:
            for newest in running[-1:]:
                if newest.num_preemptions < MAX_PREEMPTIONS:
                    engine._scheduler._preempt(newest, _Draft(budget=0))
        outputs = engine.step()
        engine._blocks.check_invariants()
        tokens |= {output.request_id: output.generated_tokens for output in outputs if output.is_finished()}
        step += 1
        assert step < 5000, "the requests do not get on"
    assert engine.stats().blocks_in_use == 0
    return tokens


def check(tools, model, answers, course: Course, kernels: str = "reference") -> None:
    twins = ("one", "other") if course.chunk > 1 else ("one",)
    prompts = {f"{twin} {length}": tools.prompt(length) for length in answers for twin in twins}
    config = {
        "page_size": course.page_size,
        "num_blocks": 400,
        "max_batch_tokens": course.chunk,
        "allow_block_sharing": course.is_shared,
        "max_blocks_per_request": None if course.has_decode_path else 0,
        "cpu_offload_space": 0.01 if course.preemption == "offload" else 0,
    }
    with stepped(tools, model, kernels, **config) as engine:
        preempt_every = 0 if course.preemption == "none" else 7
        expected = {name: answers[len(prompt)] for name, prompt in prompts.items()}
        assert run(engine, prompts, preempt_every) == expected
        stats = engine.stats()
        if course.is_shared:
            # Once more, on what is cached by now.
            assert run(engine, prompts, preempt_every) == expected
            # A prompt has a page of every kind and a token more, or all that is found is what was preempted.
            if max(answers) > engine.config.cache_layout.alignment:
                assert engine.stats().prefix_cached_tokens > stats.prefix_cached_tokens
    assert (stats.preemptions > 0) == (course.preemption != "none")
    assert (stats.offloads > 0) == (course.preemption == "offload")
    assert (stats.decode_steps > 0) == course.has_decode_path


@pytest.mark.parametrize("course", QUICK_COURSES, ids=str)
def test_answers_are_those_of_plain_generate(tools, model, answers, course):
    # Steps of one token are many: the longest prompt goes through everything that they meet.
    lengths = answers if course.chunk > 1 else list(answers)[-1:]
    check(tools, model, {length: answers[length] for length in lengths}, course)


@pytest.mark.slow
@pytest.mark.parametrize("course", ALL_COURSES, ids=str)
def test_answers_are_those_of_plain_generate_on_every_course(tools, model, answers, course):
    check(tools, model, answers, course)


@pytest.mark.parametrize(
    "course", [Course(64, 16, "recompute", True, True), Course(5, 4, "offload", False, True)], ids=str
)
def test_triton_kernels_answer_like_plain_generate(tools, model, answers, course):
    check(tools, model, answers, course, "triton")


def test_pages_in_front_of_a_chunk_are_given_back(tools) -> None:
    model = tools.build(CONFIGS["llama4_chunks"])
    with tools.running(model, page_size=4, num_blocks=64) as manager:
        kinds = {kind.window: kind for kind in manager.engine_config.cache_layout.kinds}
        assert set(kinds) == {0, 8}
        name = manager.add_request(tools.prompt(60), max_new_tokens=8)
        manager.get_result(name, timeout=tools.patience)
        # All of the full layer's pages, and of the others' those that a window of a chunk's size sees.
        assert kinds[8].peak_pages(68, 1) < kinds[0].peak_pages(68, 1)
        assert manager.model_facts.cached_layers[0].window == 8
