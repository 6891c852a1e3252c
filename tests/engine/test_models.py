"""Other architectures answer like plain `generate`; those that would answer wrongly are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PegasusConfig,
    Qwen2Config,
    RobertaConfig,
    SiglipVisionConfig,
    WhisperConfig,
)

import cbtriton
from cbtriton import UnsupportedModelError
from cbtriton.manager import ContinuousBatchingManager

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
ENCODER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
# The decoders of translation models, alone.
DECODER = {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "init_std": 0.3,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "forced_eos_token_id": None,
}
CONFIGS = {
    "mistral_window": MistralConfig(**SIZES, sliding_window=8, head_dim=24),
    "qwen2_bias": Qwen2Config(**SIZES),
    "gemma2_softcap_and_window": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    "gpt2_learned_positions": GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=256, initializer_range=0.3
    ),
    "gpt_oss_sinks": GptOssConfig(
        **SIZES, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None
    ),
    "llama_multi_query": None,
    "bart_positions_of_a_cache": BartConfig(**DECODER),
    "pegasus_positions_of_a_cache": PegasusConfig(**DECODER),
}


@pytest.fixture(scope="module", params=CONFIGS, ids=list(CONFIGS))
def variant(request, tools):
    config = CONFIGS[request.param] or tools.llama_config(num_key_value_heads=1)
    return cbtriton.enable(tools.build(config))


@pytest.mark.parametrize("config", [{"page_size": 16}, {"page_size": 4, "max_batch_tokens": 7, "num_blocks": 60}])
def test_the_architecture_answers_like_plain_generate(variant, tools, config):
    prompts = [tools.prompt(length) for length in (1, 7, 9, 33)]
    outputs = variant.generate_batch(prompts * 2, tools.options(), tools.small(**config), max_new_tokens=20)
    assert tools.tokens(outputs) == [tools.plain_greedy(variant, prompt, 20) for prompt in prompts] * 2


def test_positions_that_begin_behind_the_token_for_padding_are_those_of_the_plain_model(tools):
    """Not those of `generate`, which gives such a model positions from 0, where it was trained on others."""
    config = RobertaConfig(**ENCODER, is_decoder=True, pad_token_id=1, type_vocab_size=1)
    model = cbtriton.enable(tools.build(config))
    prompts, answers = [tools.prompt(length) for length in (5, 9, 33)], []
    prompts = [[token if token != 1 else 2 for token in prompt] for prompt in prompts]
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(16):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    assert not any(1 in answer for answer in answers), "a token for padding has no position in the plain model"
    manager = model.init_continuous_batching(tools.options(), tools.small(max_batch_tokens=7, page_size=4))
    # Two of the 256 positions are those of tokens for padding.
    assert manager.model_facts.max_position_embeddings == 254
    outputs = model.generate_batch(prompts, tools.options(), tools.small(max_batch_tokens=7), max_new_tokens=16)
    assert tools.tokens(outputs) == answers


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Models that also take images: their sizes are those of their text part.
COMPOSITES = {
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=Gemma3TextConfig(
                **SIZES | {"num_hidden_layers": 3},
                head_dim=16,
                sliding_window=8,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            ).to_dict(),
            vision_config=SiglipVisionConfig(**VISION).to_dict(),
            mm_tokens_per_image=4,
            image_token_index=120,
            boi_token_index=121,
            eoi_token_index=122,
        ),
    ),
    "llava": (
        LlavaForConditionalGeneration,
        LlavaConfig(
            text_config=LlamaConfig(**SIZES).to_dict(),
            vision_config=CLIPVisionConfig(**VISION).to_dict(),
            image_token_index=120,
        ),
    ),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_the_text_part_of_a_model_that_takes_images_answers_text(tools, name):
    torch.manual_seed(0)
    make, config = COMPOSITES[name]
    model = cbtriton.enable(make(config).eval())
    model.generation_config.pad_token_id = 0
    prompts = [[token % 100 for token in tools.prompt(length)] for length in (1, 7, 9, 33)]
    expected = [tools.plain_greedy(model, prompt, 12) for prompt in prompts]
    outputs = model.generate_batch(prompts, tools.options(), tools.small(page_size=4), max_new_tokens=12)
    assert tools.tokens(outputs) == expected


def test_positions_reach_a_part_of_the_model_that_alone_takes_them(tools):
    config = WhisperConfig(
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        vocab_size=128,
        max_target_positions=64,
        init_std=0.3,
        pad_token_id=0,
    )
    model = cbtriton.enable(tools.build(config))
    prompts = [tools.prompt(length) for length in (1, 7, 9, 33)]
    outputs = model.generate_batch(prompts, tools.options(), tools.small(page_size=4), max_new_tokens=12)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        # `generate` fails for this decoder where it stands alone.
        likeliest = tools.dense_logprobs(model, prompt, output.generated_tokens).argmax(-1)
        assert output.generated_tokens == likeliest.tolist()
        assert len(set(output.generated_tokens)) > 2


def test_a_bfloat16_model_stays_near_its_dense_log_probabilities(tools):
    model = cbtriton.enable(tools.build(tools.llama_config()).to(torch.bfloat16))
    prompts = [tools.prompt(length) for length in (5, 20)]
    config = tools.small(return_logprobs=True)
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=10)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        dense = tools.dense_logprobs(model, prompt, output.generated_tokens).float()
        chosen = dense[torch.arange(10), output.generated_tokens]
        # bf16 keeps 8 bits: logits of a size of about 20 are known to 0.1 or so.
        assert (torch.tensor(output.logprobs) - chosen).abs().max() < 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda tools, families: AutoModelForSeq2SeqLM.from_config(
                BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=128, max_position_embeddings=64)
            ),
            "BartForConditionalGeneration is an encoder-decoder",
        ),
        (
            lambda tools, families: families.build("recurrent_gemma"),
            "RecurrentGemmaForCausalLM has layers of type linear_attention, but none that keeps its state in a cache",
        ),
        (
            lambda tools, families: tools.build(
                BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
            ),
            "BertLMHeadModel|BertSelfAttention is not causal",
        ),
        (
            lambda tools, families: families.build("xlnet"),
            "XLNetLMHeadModel does not call transformers' attention interface",
        ),
    ],
    ids=["encoder_decoder", "states of its own", "bidirectional", "attention of its own"],
)
def test_a_model_that_cannot_be_run_is_refused_by_name_in_the_callers_thread(tools, families, make, message):
    model = cbtriton.enable(make(tools, families))
    before = (model.config._attn_implementation, model.training)
    with pytest.raises(UnsupportedModelError, match=message):
        model.init_continuous_batching(tools.options(), tools.small())
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate_batch([[1, 2]], tools.options(), tools.small(), max_new_tokens=1)
    assert (model.config._attn_implementation, model.training) == before


def test_a_model_whose_paged_logits_differ_is_refused_before_the_first_request(tools, model):
    attention = model.model.layers[1].self_attn
    # Depends on what else is in the batch, which no attention interface tells.
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"].cumsum(1)}),
        with_kwargs=True,
    )
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    with pytest.raises(UnsupportedModelError, match="gives other logits when its sequences are packed and paged"):
        manager.start()
    assert model.config._attn_implementation == "sdpa"
    hook.remove()
    manager.start()
    manager.destroy()
