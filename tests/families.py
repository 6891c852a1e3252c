"""A tiny random model of every type in transformers' mapping of causal language models.

Sizes follow from the names of a configuration's fields, so a type that transformers adds is built without an edit here.
Layers are chosen so that every kind of layer that the default configuration names is there once or more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cbtriton import ContinuousBatchingConfig, UnsupportedModelError
from cbtriton.compile import CompileError
from cbtriton.manager import ContinuousBatchingManager

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCAB_SIZE = 128
NUM_LAYERS = 4
WINDOW = 6

# Sizes of fields by their names, wherever a configuration has one of the name and it is set.
_NAMES = (
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size shape_vocab_size"),
    (VOCAB_SIZE, "pronunciation_vocab_size"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers"),
    (NUM_LAYERS - 1, "moe_layer_end_index"),
    (0, "num_nextn_predict_layers"),
    (1, "encoder_layers num_encoder_layers first_k_dense_replace num_dense_layers moe_layer_start_index"),
    (1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups mamba_n_groups mamba_ngroups"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads n_group num_expert_group"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (4, "num_attention_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    (4, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads"),
    (4, "linear_num_heads linear_num_key_heads linear_num_value_heads"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size"),
    (2 * WINDOW, "local_attention"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts attention_chunk_size index_topk patch_size"),
    (8, "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank time_step_rank"),
    (8, "mamba_chunk_size chunk_size"),
    (12, "v_head_dim"),
    (16, "head_dim kv_channels attention_head_dim attention_head_size global_head_dim swa_head_dim dim_head d_head"),
    (16, "qk_nope_head_dim kv_lora_rank index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (16, "mamba_head_dim mamba_d_head mamba_headdim mamba_d_state state_size ssm_state_size laurel_rank adapter_rank"),
    (16, "hidden_size_per_layer_input router_hidden_size pronunciation_embed_dim shape_embed_dim"),
    (16, "image_size num_mel_bins"),
    # With few of them, many keys get a score of exactly 0, and which of these is chosen is left to chance.
    (16, "index_n_heads"),
    (24, "q_lora_rank o_lora_rank"),
    (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size"),
    (64, "word_embed_proj_dim lru_width hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size"),
    (64, "out_hidden_size encoder_hash_byte_group_vocab"),
    (96, "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff dim_ff ffn_hidden_size intermediate_size_mlp"),
    (96, "dense_intermediate_size d_inner feed_forward_size n_inner"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length model_max_length"),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}

# Set where the default leaves them open, too: some types do not build otherwise.
OPEN = frozenset({"head_dim", "num_key_value_heads"})

# How much matrices enlarge what goes in: enough that greedy answers do not end in loops, and rounding stays small.
GAIN = 2.0

# What the names do not tell: fields of single types, each with its reason.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    # What it turns itself into as soon as it generates.
    "big_bird": {"attention_type": "original_full"},
    # The frequencies' base is read from a part that has no such field unless it is given.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    # Layers that are run several times each enlarge rounding: as few as there can be.
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "hrm_text": {"num_hidden_layers": 2},
    # Dense unless the experts are named.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    # Sliding layers have sizes of their own.
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "longcat_flash": {"zero_expert_num": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        # Two layers attend to the keys of the two before.
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "intermediate_size": [96] * 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # The first takes all layers for attention unless told, and the second has no default.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    # Without this it is an encoder that sees the whole text; others with the field are set alike, see `_shrunk`.
    "xmod": {"default_language": "en_XX"},
    # The shared block has to come twice for its weights to be tied.
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128}
    | {"attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Whose layers do something else with a single token than with several: `generate` has its prompt in one piece, and so
# has the reference.
OTHER_SINGLES = frozenset({"nemotron_h", "zamba2"})

# Types of which no tiny model is built, and why.
NOT_BUILT = {
    "gemma3n": "its image part needs the package timm; gemma3n_text is its text part",
    "gemma4_assistant": "a draft model, which attends to the keys of another model",
    "gemma4_unified_assistant": "a draft model, which attends to the keys of another model",
    "musicgen": "writes several codes of audio at a time, no text",
    "musicgen_melody": "writes several codes of audio at a time, no text",
}


# Settings that change what attention or positions do, and that no default has; a type, and fields over its tiny ones.
_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": _YARN}),
    "falcon, ALiBi": ("falcon", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "falcon, groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, a key for each query": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "gemma4_text, keys are values": ("gemma4_text", {"attention_k_eq_v": True}),
    "gemma4_text, shared keys": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    ),
    "gpt2, scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    # Queries are scaled by their position from the fourth token on.
    "llama4_text, tuned": ("llama4_text", {"floor_scale": 4, "attn_scale": 0.5}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "minimax_m2, window": ("minimax_m2", {"sliding_window": WINDOW}),
    "mixtral, window": ("mixtral", {"sliding_window": WINDOW}),
    # Its layers are told of a window that is not in its mask.
    "olmoe, window": ("olmoe", {"sliding_window": WINDOW}),
    "opt, projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 128},
    ),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "phimoe, longrope": (
        "phimoe",
        {"rope_parameters": _LONG_ROPE | {"short_mscale": 1.0, "long_mscale": 1.4}, "max_position_embeddings": 128},
    ),
    # Its window is in its mask, and its layers are not told.
    "phimoe, window": ("phimoe", {"sliding_window": WINDOW}),
    "qwen2, window": ("qwen2", _WINDOW),
    "qwen2_moe, window": ("qwen2_moe", _WINDOW),
    "qwen3, window": ("qwen3", _WINDOW),
    "starcoder2, window": ("starcoder2", {"sliding_window": WINDOW}),
}


def tiny_config(name: str) -> Any:
    """A tiny configuration of a type, that of its class in the mapping, or of a variant."""
    model_type, fields = VARIANTS.get(name, (name, {}))
    return _shrunk(AutoConfig.for_model(model_type), fields)


def _shrunk(default: Any, fields_over: Mapping[str, Any] = MappingProxyType({})) -> Any:
    parts = getattr(default, "sub_configs", {})
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_") and name not in parts}
    changes = _small_sizes(fields) | _few_layers(fields)
    for name in parts:
        part = getattr(default, name, None)
        if part is not None:
            changes[name] = _shrunk(part).to_dict()
    return type(default)(**(changes | EXCEPTIONS.get(default.model_type, {}) | dict(fields_over)))


def _small_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        name: size for name, size in SIZES.items() if fields.get(name) or (name in fields and name in OPEN)
    }
    if "is_decoder" in fields:
        changes["is_decoder"] = True
    if "kv_lora_rank" in fields:
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]
        if fields.get("head_dim") == fields.get("qk_rope_head_dim"):
            changes["head_dim"] = SIZES["qk_rope_head_dim"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(fields.get(name), int) and fields[name] >= VOCAB_SIZE:
            changes[name] = 0
    return changes


def _few_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says of each layer, for those that are chosen."""
    number = _num_layers(fields)
    lists = {
        name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == number > 0
    }
    layers = _chosen_layers(number, list(lists.values()))
    changes: dict[str, Any] = {name: len(layers) for name in _LAYER_FIELDS if layers and name in fields}
    for name, values in lists.items():
        changes[name] = list(range(len(layers))) if _counts(values) else [values[layer] for layer in layers]
    return changes


_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _num_layers(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _LAYER_FIELDS if isinstance(fields.get(name), int)), 0)


def _chosen_layers(number: int, lists: Sequence[Sequence[Any]]) -> list[int]:
    """Numbers of layers that show every value that some list with one entry for each layer has."""
    if not lists:
        return []
    chosen = {values.index(value) for values in lists if not _counts(values) for value in values}
    others = (layer for layer in range(number) if layer not in chosen)
    return sorted(chosen | set(islice(others, max(0, NUM_LAYERS - len(chosen)))))


def _counts(values: Sequence[Any]) -> bool:
    """Whether a list names layers, and says nothing of each."""
    return list(values) == list(range(len(values)))


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights that nothing stops from generating."""
    config = tiny_config(model_type)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    draw(model)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def draw(model: PreTrainedModel) -> None:
    """Draws weights anew: many initial ones are zero or one, and hide norms, sinks, biases and positions."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=GAIN * max(parameter.shape[-1], 16) ** -0.5)
        else:
            # Some are stored at a scale of their own, that of all their values.
            scale = parameter.abs().mean().item() or 1.0
            parameter += 0.2 * scale * torch.randn_like(parameter)


# ------------------------------------------------------------------------------------------------ what an engine makes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one type.

    Attributes:
        kind: `works`: log-probabilities are the plain model's, and tokens are the likeliest. `own cache`: likewise, and
            the model runs on transformers' own cache, one sequence after the other. `differs`: it answers, and some
            of it is not so. `recompiles`: so it does, and something was compiled after the warm-up, or nothing at
            all. `refused`: the engine says beforehand that it cannot. `not built`: there is no tiny model. `failed`:
            anything else.
        detail: Why, where it does not work; what else there is to know, where it does.
        error: Largest difference of a log-probability, relative to the largest logit where that is above 1.
    """

    kind: str
    detail: str = ""
    error: float = 0.0


# Of a few blocks, one longer than a step's tokens by far: first chunks, later ones and decodes run side by side.
PROMPT_LENGTHS = (1, 5, 13, 22)
NUM_NEW = 8
TOLERANCE = 1e-4
PATIENCE = 60.0


def prompts() -> list[list[int]]:
    """The same for every type, of tokens that none gives a meaning."""
    return [random.Random(length).choices(range(8, VOCAB_SIZE), k=length) for length in PROMPT_LENGTHS]


def ours(model_type: str, kernels: str = "reference", level: int = 0, backend: str = "inductor") -> Outcome:
    """Runs prompts of a type through the engine, in chunks and in small pages, and compares with the plain model.

    Args:
        model_type: The type, or a variant.
        kernels: Which ones.
        level: The compile level. Above 0 all sizes are warmed up, and nothing may be compiled behind that.
        backend: Of the compiler.
    """
    if model_type in NOT_BUILT:
        return Outcome("not built", NOT_BUILT[model_type])
    model = build(model_type)
    config = ContinuousBatchingConfig(
        page_size=4, num_blocks=96, max_batch_tokens=8, seed=0, **_compiled(level, backend)
    )
    options = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        manager = ContinuousBatchingManager(model, options, config, None, {"default": kernels})
        try:
            if level:
                manager.warmup()
            manager.start()
            wish = {"max_new_tokens": NUM_NEW, "prompt_logprobs": True, "logprobs": "raw", "top_logprobs": 20}
            names = [manager.add_request(prompt, **wish) for prompt in prompts()]
            outputs = [manager.get_result(name, timeout=PATIENCE) for name in names]
            if level:
                # A step that somebody sees the scores of is never one graph: once more for the tokens alone.
                names = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in prompts()]
                tokens = [manager.get_result(name, timeout=PATIENCE).generated_tokens for name in names]
                if tokens != [output.generated_tokens for output in outputs]:
                    return Outcome("differs", "whole steps give other tokens than steps in parts")
            is_paged, stats = manager.model_facts.is_paged, manager.stats()
        finally:
            manager.destroy()
    except (UnsupportedModelError, CompileError) as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    for output in outputs:
        if output is None or output.error is not None:
            return Outcome("failed", "no answer in time" if output is None else str(output.error))
    if level and (stats.compilations == 0 or stats.late_compilations):
        detail = f"compiled {stats.compilations} graphs, {stats.late_compilations} of them late"
        return Outcome("recompiles", detail)
    outcome = _compared(model, outputs)
    return replace(outcome, kind="own cache") if outcome.kind == "works" and not is_paged else outcome


def _compiled(level: int, backend: str) -> dict[str, Any]:
    """Settings of a level: those of the configuration's own, and for another backend the same by hand."""
    if level == 0 or backend == "inductor":
        return {"default_compile_level": level}
    how = {"backend": backend, "fullgraph": True, "dynamic": True}
    return {"varlen_compile_config": how, "decode_compile_config": how}


def _compared(model: PreTrainedModel, outputs: list[Any]) -> Outcome:
    comparisons = [_compared_one(model, prompt, output) for prompt, output in zip(prompts(), outputs, strict=True)]
    error = max(difference for difference, _ in comparisons)
    if not error <= TOLERANCE:
        return Outcome("differs", f"log-probabilities differ by {error:.1g}", error)
    if not all(is_likeliest for _, is_likeliest in comparisons):
        return Outcome("differs", f"log-probabilities are right to {error:.1g}, tokens are not the likeliest", error)
    try:
        is_as_generated = [output.generated_tokens for output in outputs] == plain_answers(model)
    except Exception as raised:
        return Outcome("works", f"generate itself fails: {type(raised).__name__}: {raised}", error)
    return Outcome(
        "works", "" if is_as_generated else "generate answers otherwise than its model without a cache", error
    )


@torch.no_grad()
def _compared_one(model: PreTrainedModel, prompt: list[int], output: Any) -> tuple[float, bool]:
    """The error of the prompt's tokens and of the 20 likeliest behind each; whether the answer is the likeliest."""
    logits = reference_logits(model, prompt, output.generated_tokens)
    expected = logits.log_softmax(-1)
    scored = expected[range(len(prompt) - 1), prompt[1:]]
    differences = [torch.tensor(output.prompt_logprobs) - scored] if len(prompt) > 1 else []
    for row, likeliest in zip(expected[len(prompt) - 1 : -1], output.top_logprobs, strict=True):
        differences.append(torch.tensor(list(likeliest.values())) - row[list(likeliest)])
    error = torch.cat(differences).abs().max() / logits.abs().max().clamp(min=1.0)
    return error.item(), expected[len(prompt) - 1 : -1].argmax(-1).tolist() == output.generated_tokens


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Of a pass without a cache, but see `OTHER_SINGLES`; `[num_tokens, vocab_size]` float32."""
    input_ids = torch.tensor([prompt + answer])
    if model.config.model_type not in OTHER_SINGLES:
        return model(input_ids=input_ids, use_cache=False).logits[0].float()
    output = model(input_ids=input_ids[:, : len(prompt)], use_cache=True)
    logits = [output.logits[0]]
    for token in range(len(prompt), input_ids.shape[1]):
        output = model(
            input_ids=input_ids[:, token : token + 1], past_key_values=output.past_key_values, use_cache=True
        )
        logits.append(output.logits[0])
    return torch.cat(logits).float()


@torch.no_grad()
def plain_answers(model: PreTrainedModel) -> list[list[int]]:
    """What `generate` answers to each prompt alone."""
    answers = []
    for prompt in prompts():
        input_ids = torch.tensor([prompt])
        config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0)
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        answers.append(output[0, len(prompt) :].tolist())
    return answers
