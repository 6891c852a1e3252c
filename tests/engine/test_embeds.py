"""Prompts given as vectors: answers are those of the tokens that they stand for, and nobody is given another's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cbtriton
from cbtriton.config import KernelConfig

REFERENCE = KernelConfig(default="reference")
LENGTH = 8


def vectors_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.get_input_embeddings()(torch.tensor(prompt))


def noise(model: Any, length: int, seed: int = 0) -> torch.Tensor:
    """Vectors that no token has."""
    table = model.get_input_embeddings().weight
    return torch.randn(length, table.shape[1], generator=torch.Generator().manual_seed(seed)) * table.std()


def generated(model: Any, vectors: torch.Tensor, num_tokens: int = LENGTH) -> list[int]:
    """What `generate` answers to vectors alone."""
    output = model.generate(
        inputs_embeds=vectors[None],
        attention_mask=torch.ones(1, len(vectors), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0].tolist()


def answer(manager: Any, vectors: torch.Tensor, **options: Any) -> list[int]:
    name = manager.add_request(None, inputs_embeds=vectors, max_new_tokens=LENGTH, **options)
    return manager.get_result(name, timeout=60).generated_tokens


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_vectors_beside_tokens_in_chunks_and_with_preemption(model, oracle, tools, is_async: bool) -> None:
    lengths = (1, 5, 15, 16, 17, 40)
    vectors = [noise(model, length, seed=length) for length in lengths]
    prompts = [tools.prompt(length) for length in lengths]
    expected = [generated(oracle.model, each) for each in vectors]
    options = {"page_size": 4, "num_blocks": 26, "max_batch_tokens": 16, "use_async_batching": is_async}
    with tools.running(model, kernels=REFERENCE, safety_margin=0.0, **options) as manager:
        names = []
        for each, prompt in zip(vectors, prompts, strict=True):
            names.append(manager.add_request(None, inputs_embeds=each, max_new_tokens=LENGTH))
            names.append(manager.add_request(prompt, max_new_tokens=LENGTH))
        answers = [manager.get_result(name, timeout=tools.patience).generated_tokens for name in names]
        assert manager.stats().preemptions > 0
    assert answers[::2] == expected
    assert answers[1::2] == [oracle.greedy(prompt, LENGTH) for prompt in prompts]


def test_only_the_same_vectors_share_a_prefix(model, oracle, tools) -> None:
    one, other = noise(model, 20, seed=1), noise(model, 20, seed=2)
    changed = one.clone()
    changed[0, 0] += 0.5
    with tools.running(model, kernels=REFERENCE, page_size=4) as manager:
        for vectors in (one, other, changed):
            assert answer(manager, vectors) == generated(oracle.model, vectors)
        assert manager.stats().prefix_cached_tokens == 0
        assert answer(manager, one) == generated(oracle.model, one)
        assert manager.stats().prefix_cached_tokens == 16
        # The tokens that stand in for them are those of an ordinary prompt.
        padding = [0] * 20
        name = manager.add_request(padding, max_new_tokens=LENGTH)
        assert manager.get_result(name).generated_tokens == oracle.greedy(padding, LENGTH)
        assert answer(manager, one, cache_salt="tenant") == generated(oracle.model, one)
        assert manager.stats().prefix_cached_tokens == 16


def test_vectors_are_copied(model, oracle, tools) -> None:
    vectors = noise(model, 9)
    expected = generated(oracle.model, vectors)
    with tools.gated(model) as (manager, gate):
        name = manager.add_request(None, inputs_embeds=vectors, max_new_tokens=LENGTH)
        vectors.zero_()
        gate.open()
        assert manager.get_result(name, timeout=tools.patience).generated_tokens == expected


def test_tokens_beside_vectors_are_what_processors_and_log_probabilities_see(model, oracle, tools) -> None:
    prompt = tools.prompt(17)
    vectors = vectors_of(model, prompt)
    wish = {"max_new_tokens": LENGTH, "repetition_penalty": 1.7, "prompt_logprobs": True}
    with tools.running(model, kernels=REFERENCE, per_request_processors=True) as manager:
        names = [manager.add_request(prompt, **wish), manager.add_request(prompt, inputs_embeds=vectors, **wish)]
        plain, embedded = (manager.get_result(name, timeout=tools.patience) for name in names)
    assert embedded.generated_tokens == plain.generated_tokens
    assert embedded.prompt_ids == prompt
    torch.testing.assert_close(torch.tensor(embedded.prompt_logprobs), torch.tensor(plain.prompt_logprobs))


def test_several_sequences_share_vectors(model, oracle, tools) -> None:
    vectors = noise(model, 11)
    options = tools.options(num_return_sequences=3, do_sample=True, temperature=1e-6)
    with tools.running(model, options, kernels=REFERENCE, page_size=4) as manager:
        name = manager.add_request(None, inputs_embeds=vectors, max_new_tokens=LENGTH)
        answers = [
            manager.get_result(each, timeout=tools.patience).generated_tokens
            for each in (name, f"{name}__child#0", f"{name}__child#1")
        ]
        assert manager.stats().forks == 2
    assert answers == [generated(oracle.model, vectors)] * 3


@pytest.mark.parametrize("whole_step", [False, True], ids=["layer", "step"])
def test_vectors_in_compiled_steps(model, oracle, tools, monkeypatch, whole_step: bool) -> None:
    if whole_step:
        monkeypatch.setattr("cbtriton.model_adapter.ModelAdapter.repeated_layers", lambda self, layout: ())
    torch._dynamo.reset()
    how = {"backend": "aot_eager", "fullgraph": True, "dynamic": True}
    settings = {"varlen_compile_config": how, "decode_compile_config": how, "max_batch_tokens": 16}
    vectors = noise(model, 21)
    with tools.running(model, kernels=REFERENCE, **settings) as manager:
        assert answer(manager, vectors) == generated(oracle.model, vectors)
        assert manager.stats().compilations > 0


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "opt", "llama4_text", "roberta"])
def test_other_kinds_of_models_take_vectors(tools, families, name: str) -> None:
    model = families.build(name)
    prompt = random.Random(0).choices(range(8, families.VOCAB_SIZE), k=13)
    with tools.running(model, kernels=REFERENCE, page_size=4, max_batch_tokens=8) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=LENGTH),
            manager.add_request(None, inputs_embeds=vectors_of(model, prompt), max_new_tokens=LENGTH),
        ]
        plain, embedded = (manager.get_result(each, timeout=tools.patience).generated_tokens for each in names)
    assert embedded == plain


@pytest.mark.parametrize("name", ["gemma3n_text", "deepseek_v32"])
def test_models_that_look_at_tokens_refuse_vectors(tools, families, name: str) -> None:
    model = families.build(name)
    manager = cbtriton.ContinuousBatchingManager(model, tools.options(), tools.small(), None, REFERENCE)
    with pytest.raises(ValueError, match="cannot be given inputs_embeds here: it looks at tokens; give input_ids"):
        manager.add_request(None, inputs_embeds=noise(model, 3))
    manager.destroy()


def test_wrong_vectors_are_refused_and_harm_nobody(model, oracle, tools) -> None:
    size = model.config.hidden_size
    with tools.running(model, kernels=REFERENCE) as manager:
        for values, error, message in (
            ([[1.0] * size], TypeError, "must be a tensor of floating-point numbers, got list"),
            (torch.ones(3, size, dtype=torch.int64), TypeError, "got torch.int64"),
            (torch.ones(3, size + 1), ValueError, rf"must be \[num_tokens, {size}\] with one token at least"),
            (torch.ones(0, size), ValueError, "with one token at least"),
            (torch.ones(2, 3, size), ValueError, "with one token at least"),
        ):
            with pytest.raises(error, match=message):
                manager.add_request(None, inputs_embeds=values)
        with pytest.raises(ValueError, match="must have a vector for each token, got 3 for 2 tokens"):
            manager.add_request([1, 2], inputs_embeds=torch.ones(3, size))
        with pytest.raises(ValueError, match="give input_ids beside inputs_embeds"):
            manager.add_request(None, inputs_embeds=torch.ones(3, size), prompt_logprobs=True)
        with pytest.raises(TypeError, match="a prompt must be a list of token ids, got NoneType"):
            manager.add_request(None)
        broken = manager.add_request(None, inputs_embeds=torch.full((3, size), torch.nan), max_new_tokens=LENGTH)
        prompt = tools.prompt(16)
        healthy = manager.add_request(prompt, max_new_tokens=LENGTH)
        assert "no usable logits" in manager.get_result(broken, timeout=tools.patience).error
        assert manager.get_result(healthy, timeout=tools.patience).generated_tokens == oracle.greedy(prompt, LENGTH)
        # Nor whoever gets its blocks.
        assert answer(manager, noise(model, 30)) == generated(oracle.model, noise(model, 30))
