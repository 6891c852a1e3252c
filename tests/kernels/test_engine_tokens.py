"""The engine gives the same tokens on the Triton kernels as on the references, whatever happens to its requests."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import cbtriton
from cbtriton import ContinuousBatchingConfig, KernelConfig

VOCAB_SIZE = 61
NUM_NEW = 5


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        vocab_size=VOCAB_SIZE,
        intermediate_size=32,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _prompts() -> list[list[int]]:
    """Some begin with the same two pages of four tokens."""
    rng = random.Random(5)
    shared = rng.choices(range(VOCAB_SIZE), k=9)
    return [shared + rng.choices(range(VOCAB_SIZE), k=n) for n in (1, 12)] + [
        rng.choices(range(VOCAB_SIZE), k=n) for n in (1, 17)
    ]


CASES = {
    # budget of 8 tokens: prompts run in chunks beside decodes
    "greedy, chunks, shared prefixes": ({"do_sample": False}, {"num_blocks": 64, "max_batch_tokens": 8}),
    "greedy, preemption": (
        {"do_sample": False},
        {"num_blocks": 10, "safety_margin": 0.0, "allow_block_sharing": False, "max_batch_tokens": 16},
    ),
    "sampled, preemption": (
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"num_blocks": 8, "safety_margin": 0.0, "max_batch_tokens": 16},
    ),
    "sampled, forks": (
        {"do_sample": True, "temperature": 1.3, "top_k": 0, "min_p": 0.02, "num_return_sequences": 2},
        {"num_blocks": 64, "max_batch_tokens": 16, "return_logprobs": True},
    ),
}


def _run(model: Any, kernels: str, options: dict[str, Any], config: dict[str, Any]) -> tuple[Any, Any]:
    with cbtriton.enable(copy.deepcopy(model)).continuous_batching_context_manager(
        GenerationConfig(eos_token_id=-1, max_new_tokens=NUM_NEW, **options),
        continuous_batching_config=ContinuousBatchingConfig(page_size=4, seed=11, **config),
        kernel_config=KernelConfig(default=kernels),
    ) as manager:
        ids = manager.add_requests(_prompts())
        outputs = {}
        expected = len(ids) * options.get("num_return_sequences", 1)
        while len(outputs) < expected:
            output = manager.get_result(timeout=300)
            outputs[output.request_id] = output
        return outputs, manager.stats()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_references(model, case) -> None:
    options, config = CASES[case]
    expected, _ = _run(model, "reference", options, config)
    got, stats = _run(model, "triton", options, config)
    assert {i: o.generated_tokens for i, o in got.items()} == {i: o.generated_tokens for i, o in expected.items()}
    assert all(len(output.generated_tokens) == NUM_NEW for output in got.values())
    if config.get("return_logprobs"):
        for request_id, output in got.items():
            assert output.logprobs == pytest.approx(expected[request_id].logprobs, abs=2e-5)
    assert ("preemption" in case) == (stats.preemptions > 0)
    assert ("shared" in case) <= (stats.prefix_cached_tokens > 0)
    assert ("forks" in case) == (stats.forks > 0)
