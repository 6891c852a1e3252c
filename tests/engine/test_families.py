"""Every type of causal language model that transformers knows does what `tests/families.yaml` says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cbtriton import engine
from cbtriton.manager import ContinuousBatchingManager

EXPECTED = yaml.safe_load((Path(__file__).parents[1] / "families.yaml").read_text())
# Of every kind that differs to the engine: windows, sinks, soft caps, latent keys, shared keys, experts, positions that
# are passed on, one that generate itself cannot run, attention of their own, caches of their own, and refusals.
QUICK = (
    "bart",
    "blt",
    "bloom",
    "deepseek_v32",
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gpt_neo",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "moss_transcribe_diarize",
    "nemotron_h",
    "opt",
    "qwen3_moe",
    "qwen3_next",
    "roformer",
    "rwkv",
    "whisper",
    "xglm",
)


# Positions that are told, attention of their own, chunks, layers of several shapes, and two that cannot.
COMPILED = ("bart", "dbrx", "falcon", "gemma4_text", "llama4_text", "mamba")


def of_all_types(quick=QUICK):
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in types]


def expected_of(families, model_type):
    """The kind of outcome, and a pattern of its detail."""
    found = [("works", "^$")] * (model_type in EXPECTED["works"])
    found += [("works", detail) for name, detail in EXPECTED["works without generate"].items() if name == model_type]
    for kind in ("own cache", "refused"):
        found += [(kind, group["message"]) for group in EXPECTED[kind].values() if model_type in group["types"]]
    found += [("not built", "")] * (model_type in families.NOT_BUILT)
    assert found, f"{model_type} is untested: add it to tests/families.yaml"
    assert len(found) == 1, f"{model_type} is named {len(found)} times"
    return found[0]


@pytest.mark.parametrize("model_type", of_all_types())
def test_a_type_works_or_is_refused_as_written_down(families, model_type, caplog):
    kind, detail = expected_of(families, model_type)
    outcome = families.ours(model_type)
    said = caplog.text if kind == "own cache" else outcome.detail
    assert (outcome.kind, bool(re.search(detail, said))) == (kind, True), outcome


@pytest.mark.parametrize("model_type", of_all_types(COMPILED))
def test_a_type_that_works_compiles_without_graph_breaks_or_says_why_not(families, model_type):
    torch._dynamo.reset()
    kind, _ = expected_of(families, model_type)
    if kind != "works":
        pytest.skip(f"{model_type} is not paged")
    reasons = [group["message"] for group in EXPECTED["does not compile"].values() if model_type in group["types"]]
    # Its code generator, which takes most of the time, is the same for all of them.
    outcome = families.ours(model_type, level=1, backend="aot_eager")
    if reasons:
        assert outcome.kind in ("refused", "failed"), outcome
        assert re.search(reasons[0], outcome.detail, re.DOTALL), outcome
    else:
        assert outcome.kind == "works", outcome


@pytest.mark.parametrize("model_type", ["falcon", "bloom"])
def test_layers_with_forwards_of_ours_share_their_graphs(families, tools, model_type):
    torch._dynamo.reset()
    how = {"backend": "aot_eager", "fullgraph": True, "dynamic": True}
    config = tools.small(varlen_compile_config=how, decode_compile_config=how)
    manager = ContinuousBatchingManager(families.build(model_type), tools.options(), config)
    try:
        manager.warmup()
        # One for each path.
        assert manager.stats().compilations == 2
    finally:
        manager.destroy()


@pytest.mark.slow
def test_sizes_that_make_strides_equal_are_served_by_the_same_graph(families):
    """Three tokens of eight numbers lie as rows of twenty-four do: the code generator has another graph for that."""
    torch._dynamo.reset()
    outcome = families.ours("deepseek_v2", level=1)
    assert outcome.kind == "works", outcome


def test_settings_that_no_default_has_work(families):
    outcomes = {name: families.ours(name) for name in families.VARIANTS}
    assert {name: outcome for name, outcome in outcomes.items() if outcome.kind != "works"} == {}


def test_every_type_is_written_down_once(families):
    for model_type in families.TYPES:
        expected_of(families, model_type)
    with pytest.raises(AssertionError, match="made_up is untested: add it to"):
        expected_of(families, "made_up")


def test_tiny_models_have_every_kind_of_layer_of_the_default_configuration(families):
    for model_type in sorted(set(families.TYPES) - set(families.NOT_BUILT)):
        default, tiny = AutoConfig.for_model(model_type), families.tiny_config(model_type)
        kinds = [set(getattr(config.get_text_config(), "layer_types", None) or ()) for config in (default, tiny)]
        assert kinds[0] <= kinds[1], model_type


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "llama4_text", "mistral"])
def test_a_window_that_gets_lost_is_seen(families, monkeypatch, model_type):
    """The engine's own check is too short to see it."""
    attention = engine.PagedAttention

    def without_windows(kernels, layers, places, calls, modules):
        return attention(kernels, layers, places, tuple(replaced(call) for call in calls), modules)

    def replaced(call):
        return replace(call, window=0, chunk=0)

    monkeypatch.setattr(engine, "PagedAttention", without_windows)
    outcome = families.ours(model_type)
    assert outcome.kind == "differs"
    assert outcome.error > 10 * families.TOLERANCE
