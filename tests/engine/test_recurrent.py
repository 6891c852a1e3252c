"""Recurrent layers: states of requests are never mixed up, lost or left over, whatever happens to their requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import cbtriton
from cbtriton.config import KernelConfig
from cbtriton.model_adapter import UnsupportedModelError
from cbtriton.recurrent import RecurrentLayout, RecurrentStates

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# One for each way in which a layer goes on from a state: gated delta nets, Mamba-2, Mamba-1 (one token at a time),
# short convolutions, lightning attention (never batched), a layer with both, a model without attention, and one whose
# single tokens differ.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, **DELTA_NET, **EXPERTS},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2, **MAMBA_2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "num_local_experts": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "expand": 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "adapter_rank": 8,
        # A high bound, so that it is reached.
        "time_step_min": 0.05,
    },
}
ONE_AT_A_TIME, NEVER_BATCHED, OTHER_SINGLES = {"jamba"}, {"minimax"}, {"zamba2"}
PROMPTS = [[5, 9, 3, 7, 11, 2, 4] * n for n in (1, 3, 2, 4)] + [[4], [8, 8, 1]]
LENGTH = 14
REFERENCE = KernelConfig(default="reference")


class Family:
    """A model with recurrent layers, and what it answers alone."""

    def __init__(self, tools: Any, name: str) -> None:
        self.name = name
        base = {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "intermediate_size": 96,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
        }
        self.model = tools.build(AutoConfig.for_model(name, **{**base, **FAMILIES[name]}))
        self.answers = [tools.plain_greedy(self.model, prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tools) -> Family:
    return Family(tools, request.param)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_requests_answer_as_alone_while_prompts_come_in_chunks_and_requests_are_preempted(
    tools, family: Family, is_async: bool
) -> None:
    # Sixteen tokens a step cut prompts; so few blocks cannot hold all of them to their ends.
    options = {"page_size": 4, "num_blocks": 13, "max_batch_tokens": 16, "use_async_batching": is_async}
    with tools.running(family.model, kernels=REFERENCE, safety_margin=0.0, **options) as manager:
        ids = manager.add_requests(PROMPTS, max_new_tokens=LENGTH)
        assert [manager.get_result(each).generated_tokens for each in ids] == family.answers
        stats = manager.stats()
    has_pages = family.name != "mamba2"
    assert (stats.preemptions > 0) == has_pages, "a model without attention keeps the pages of its last token only"
    assert stats.prefix_cached_tokens == stats.prefix_queried_tokens == 0
    assert stats.bytes_by_purpose["states"] > 0


def test_padding_reaches_no_state(tools, family: Family) -> None:
    options = {"page_size": 4, "max_batch_tokens": 16, "q_padding_interval_size": 8, "kv_padding_interval_size": 32}
    with tools.running(family.model, kernels=REFERENCE, **options) as manager:
        ids = manager.add_requests(PROMPTS, max_new_tokens=LENGTH)
        assert [manager.get_result(each).generated_tokens for each in ids] == family.answers
        assert manager.stats().padding_tokens > 0


def test_layers_are_asked_for_no_more_than_they_can_do(tools, family: Family) -> None:
    manager = cbtriton.ContinuousBatchingManager(family.model, tools.options(), tools.small(), None, REFERENCE)
    mixers = manager._layout.recurrent.mixers
    assert len(mixers) == (4 if family.name in ("falcon_h1", "mamba2", "zamba2") else 2)
    assert all(mixer.continues_in_chunks == (family.name not in ONE_AT_A_TIME) for mixer in mixers)
    assert all(mixer.batches == (family.name not in NEVER_BATCHED) for mixer in mixers)
    assert all(mixer.has_other_singles == (family.name in OTHER_SINGLES) for mixer in mixers)
    manager.destroy()
    assert not [module for module in family.model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_several_sequences_of_one_prompt_begin_with_copies_of_its_state(tools, family: Family, is_async: bool) -> None:
    options = tools.options(num_return_sequences=3, do_sample=True, temperature=1e-6)
    settings = {"page_size": 4, "max_batch_tokens": 16, "use_async_batching": is_async}
    with tools.running(family.model, options, kernels=REFERENCE, **settings) as manager:
        answers, expected = tools.sequences_of_one_prompt(manager, PROMPTS[:3], family.answers[:3], LENGTH)
        assert answers == expected
        stats = manager.stats()
        (name,) = manager.add_requests(PROMPTS[4:5], max_new_tokens=1)
        manager.get_result(name)
        with manager.pause():
            left = manager.stats().bytes_by_purpose["states"]
    # The last piece of a prompt is never a single token where those differ, so nobody can begin before it.
    assert stats.forks == (0 if family.name in OTHER_SINGLES else 6)
    state = manager.model_facts.state_bytes_per_request
    assert state <= left <= 3 * state, "states go with their requests"


def test_sequences_that_differ_behind_their_prompt_keep_states_of_their_own(tools, family: Family) -> None:
    if family.name in OTHER_SINGLES:
        pytest.skip("a pass without a cache gives something else")
    options = tools.options(num_return_sequences=4, do_sample=True, temperature=1.0)
    settings = {"page_size": 4, "max_batch_tokens": 16, "return_logprobs": True}
    with tools.running(family.model, options, kernels=REFERENCE, **settings) as manager:
        name = manager.add_request(PROMPTS[1], max_new_tokens=LENGTH)
        names = (name, *(f"{name}__child#{child}" for child in range(3)))
        outputs = [manager.get_result(each, timeout=tools.patience) for each in names]
        assert manager.stats().forks == 3
    assert len({tuple(output.generated_tokens) for output in outputs}) > 1
    for output in outputs:
        expected = tools.dense_logprobs(family.model, PROMPTS[1], output.generated_tokens)
        chosen = expected[range(LENGTH), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), chosen, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h"])
@pytest.mark.parametrize(("num_blocks", "step_tokens"), [(96, 3), (96, 4), (96, 5), (12, 5)])
def test_prompts_run_in_pieces_and_answers_one_by_one_where_that_differs(
    tools, families, name, num_blocks, step_tokens
) -> None:
    model = families.build(name)
    settings = {"num_blocks": num_blocks, "max_batch_tokens": step_tokens, "max_requests_per_batch": 3}
    wish = {"max_new_tokens": LENGTH, "prompt_logprobs": True, "logprobs": "raw"}
    with tools.running(model, kernels=REFERENCE, page_size=4, safety_margin=0.0, **settings) as manager:
        ids = [manager.add_request(prompt, **wish) for prompt in PROMPTS]
        outputs = [manager.get_result(each, timeout=tools.patience) for each in ids]
        assert (manager.stats().preemptions > 0) == (num_blocks < 96)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = families.reference_logits(model, prompt, output.generated_tokens).log_softmax(-1)
        tokens = [*prompt, *output.generated_tokens][1:]
        actual = torch.tensor([*output.prompt_logprobs, *output.logprobs])
        torch.testing.assert_close(actual, expected[range(len(tokens)), tokens], rtol=1e-3, atol=1e-3)


def test_steps_too_small_for_such_pieces_are_refused(tools, families) -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens must be at least 3 for this model, .* got 2"):
        cbtriton.ContinuousBatchingManager(
            families.build("zamba2"), tools.options(), tools.small(max_batch_tokens=2), None, REFERENCE
        )


@pytest.fixture(scope="module")
def delta_net(tools) -> Family:
    return Family(tools, "qwen3_next")


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_are_cancelled_disturb_nobody(tools, delta_net: Family, seed: int) -> None:
    chance = random.Random(seed)
    with tools.running(delta_net.model, kernels=REFERENCE, **tools.random_setting(chance, seed)) as manager:
        tools.assert_cancels_disturb_nobody(manager, PROMPTS, delta_net.answers, chance, 24)


def test_new_weights_in_a_pause_and_a_second_session_begin_with_empty_states(tools) -> None:
    family = Family(tools, "lfm2")
    with tools.running(family.model, kernels=REFERENCE, page_size=4) as manager:
        (name,) = manager.add_requests(PROMPTS[:1], max_new_tokens=LENGTH)
        assert manager.get_result(name).generated_tokens == family.answers[0]
        with manager.pause(), torch.no_grad():
            family.model.get_input_embeddings().weight.mul_(-1)
            expected = tools.plain_greedy(family.model, PROMPTS[1], LENGTH)
        (name,) = manager.add_requests(PROMPTS[1:2], max_new_tokens=LENGTH)
        assert manager.get_result(name).generated_tokens == expected


def test_what_recurrent_layers_cannot_have_is_refused_or_explained(tools, delta_net: Family) -> None:
    def made(**settings: Any) -> cbtriton.ContinuousBatchingManager:
        config = tools.small(**settings)
        return cbtriton.ContinuousBatchingManager(delta_net.model, tools.options(), config, None, REFERENCE)

    for settings in (
        {"default_compile_level": 1},
        {"use_cuda_graph": True},
        {"decode_compile_config": {"dynamic": True}},
    ):
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name} must be left out for a model with recurrent layers"):
            made(**settings)
    config = made(cpu_offload_space=1.0).engine_config
    assert not config.share_blocks
    assert config.num_host_blocks == 0
    reasons = {decision.field: decision.why for decision in config.decisions}
    assert "recurrent layers" in reasons["allow_block_sharing"]
    assert "recurrent layers" in reasons["cpu_offload_space"]
    (states,) = (share for share in config.memory_budget if share.purpose == "states")
    assert states.num_bytes == config.max_requests * delta_net_bytes(delta_net)
    with (
        tools.running(delta_net.model, kernels=REFERENCE) as manager,
        pytest.raises(ValueError, match="recurrent layers"),
    ):
        manager.pin_prefix(PROMPTS[1])


def delta_net_bytes(family: Family) -> int:
    """Two layers: a state for each value head, and what the convolution sees of queries, keys and values."""
    config = family.model.config
    channels = 2 * 2 * 16 + 4 * 16
    return 2 * 4 * (4 * 16 * 16 + channels * config.linear_conv_kernel_dim)


def test_layers_whose_state_nobody_can_keep_are_refused_by_name(tools) -> None:
    family = Family(tools, "lfm2")
    for module in family.model.modules():
        if type(module).__name__ == "Lfm2ShortConv":
            del module.layer_idx
            # They see the tokens before, and keep nothing of them.
            module.forward = lambda hidden_states, **_: hidden_states.cumsum(1)
    with pytest.raises(UnsupportedModelError, match="layers of type conv, but none that keeps its state in a cache"):
        cbtriton.ContinuousBatchingManager(family.model, tools.options(), tools.small(), None, REFERENCE)


def test_a_forward_that_somebody_put_on_a_layer_is_used_and_given_back(tools) -> None:
    family = Family(tools, "lfm2")
    (mixer, _) = (module for module in family.model.modules() if type(module).__name__ == "Lfm2ShortConv")
    original, calls = mixer.forward, []

    def own(hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        calls.append(hidden_states.shape[1])
        return original(hidden_states, cache, attention_mask, **kwargs)

    mixer.forward = own
    with tools.running(family.model, kernels=REFERENCE, page_size=4) as manager:
        calls.clear()
        name = manager.add_request(PROMPTS[0], max_new_tokens=LENGTH)
        assert manager.get_result(name).generated_tokens == family.answers[0]
    assert calls == [len(PROMPTS[0])] + [1] * (LENGTH - 1)
    assert mixer.forward is own


def test_a_layer_outside_a_step_says_so(tools) -> None:
    family = Family(tools, "lfm2")
    manager = cbtriton.ContinuousBatchingManager(family.model, tools.options(), tools.small(), None, REFERENCE)
    states = RecurrentStates(manager._layout.recurrent)
    states.attach()
    try:
        mixer = manager._layout.recurrent.mixers[0].module
        with pytest.raises(RuntimeError, match="outside an engine step"):
            mixer(torch.zeros(1, 2, 64))
    finally:
        states.detach()
        manager.destroy()
    assert RecurrentStates(RecurrentLayout()).num_bytes == 0
