"""The configuration records take what the reference takes, and refuse the rest by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings

import numpy as np
import pytest
import transformers
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching.utils import WorkloadHints as ReferenceHints

from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.config import (
    MAX_SEED,
    CompileSettings,
    ContinuousBatchingConfig,
    Decision,
    EngineConfig,
    KernelConfig,
    MemoryShare,
    WorkloadHints,
    check_integer,
    check_number,
)

ReferenceConfig = configuration_utils.ContinuousBatchingConfig
DEPRECATED = ("use_default_compile_configs", "max_cached_graphs", "block_size")


def test_fields_order_and_defaults_are_those_of_the_reference():
    reference = {field.name: field.default for field in dataclasses.fields(ReferenceConfig)}
    own = {field.name: field.default for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert list(own.items()) == list(reference.items())


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("page_size", 3, ValueError),
        ("page_size", 16.0, TypeError),
        ("page_size", True, TypeError),
        ("page_size", None, TypeError),
        ("page_size", "16", TypeError),
        ("num_blocks", 0, ValueError),
        ("num_blocks", 1.5, TypeError),
        ("max_batch_tokens", 0, ValueError),
        ("max_batch_tokens", True, TypeError),
        ("max_memory_percent", 0.0, ValueError),
        ("max_memory_percent", 1.01, ValueError),
        ("max_memory_percent", float("nan"), ValueError),
        ("max_memory_percent", True, TypeError),
        ("max_requests_per_batch", 0, ValueError),
        ("max_blocks_per_request", -1, ValueError),
        ("allow_block_sharing", 1, TypeError),
        ("allow_block_sharing", None, TypeError),
        ("use_async_batching", "yes", TypeError),
        ("use_cuda_graph", (True,), TypeError),
        ("use_cuda_graph", (True, 0), TypeError),
        ("use_cuda_graph", 1, TypeError),
        ("q_padding_interval_size", -1, ValueError),
        ("kv_padding_interval_size", -1, ValueError),
        ("varlen_compile_config", "default", TypeError),
        ("varlen_compile_config", {"modus": "default"}, ValueError),
        ("decode_compile_config", 3, TypeError),
        ("default_compile_level", 4, ValueError),
        ("default_compile_level", True, TypeError),
        ("scheduler_type", None, TypeError),
        ("safety_margin", -0.01, ValueError),
        ("safety_margin", 1.5, ValueError),
        ("return_logprobs", None, TypeError),
        ("return_logprobs", "all", ValueError),
        ("seed", -1, ValueError),
        ("seed", MAX_SEED + 1, ValueError),
        ("seed", 1.0, TypeError),
        ("auto_switch_to_flash", None, TypeError),
        ("cpu_offload_space", -0.5, ValueError),
        ("cpu_offload_space", float("inf"), ValueError),
        ("cpu_offload_space_safety_threshold", 1.1, ValueError),
        ("max_queue_size", -1, ValueError),
        ("per_request_processors", 0, TypeError),
        ("drop_unsupported_processors", "no", TypeError),
        ("disable_nccl_graph_mixing", None, TypeError),
        ("cpu_group_timeout", 0.0, ValueError),
        ("use_default_compile_configs", 1, TypeError),
        ("block_size", 2, ValueError),
        ("block_size", "2", TypeError),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_value(field, value, error):
    with pytest.raises(error) as raised:
        ContinuousBatchingConfig(**{field: value})
    assert field in str(raised.value)
    got = value[0] if isinstance(value, tuple) else next(iter(value)) if isinstance(value, dict) else value
    assert str(got) in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 4),
        ("page_size", 24),
        ("page_size", 2**33),
        ("max_batch_tokens", 1),
        ("max_memory_percent", 1),
        ("max_blocks_per_request", 0),
        ("safety_margin", 0),
        ("safety_margin", 1.0),
        ("cpu_offload_space", None),
        ("cpu_offload_space_safety_threshold", 0.0),
        ("cpu_group_timeout", None),
        ("seed", MAX_SEED),
        ("use_cuda_graph", (True, False)),
        ("scheduler_type", "mine"),
    ],
)
def test_the_edges_of_each_range_are_accepted(field, value):
    assert getattr(ContinuousBatchingConfig(**{field: value}), field) == value


def test_numpy_numbers_become_plain_ones():
    config = ContinuousBatchingConfig(page_size=np.int64(16), safety_margin=np.float32(0.5))  # type: ignore
    assert type(config.page_size) is int
    assert type(config.safety_margin) is float
    assert config == ContinuousBatchingConfig(page_size=16, safety_margin=0.5)


def test_a_misspelt_name_is_refused_at_construction_and_assignment():
    with pytest.raises(TypeError, match="page_sise"):
        ContinuousBatchingConfig(page_sise=16)  # type: ignore
    with pytest.raises(AttributeError):
        ContinuousBatchingConfig().page_sise = 16  # type: ignore


def test_compile_configs_may_be_dicts():
    config = ContinuousBatchingConfig(varlen_compile_config={"mode": "default", "dynamic": True})
    assert config.varlen_compile_config == transformers.CompileConfig(mode="default", dynamic=True)
    explicit = transformers.CompileConfig()
    assert ContinuousBatchingConfig(decode_compile_config=explicit).decode_compile_config is explicit


@pytest.mark.parametrize("asked", [None, True, False, (True, False), (False, True)])
def test_cuda_graph_booleans_mean_what_they_mean_in_the_reference(asked):
    own = ContinuousBatchingConfig(use_cuda_graph=asked)
    reference = ReferenceConfig(use_cuda_graph=asked)
    assert own.cuda_graph_booleans == reference.cuda_graph_booleans
    assert own.fallback_max_blocks_per_request == reference.fallback_max_blocks_per_request


def test_a_pair_of_graph_switches_may_be_a_list_as_yaml_writes_it():
    assert ContinuousBatchingConfig(use_cuda_graph=[True, False]).use_cuda_graph == (True, False)  # type: ignore


@pytest.mark.parametrize(
    ("deprecated", "field", "becomes"),
    [
        ({"block_size": 32}, "page_size", 32),
        ({"use_default_compile_configs": True}, "default_compile_level", 3),
        ({"use_default_compile_configs": False}, "default_compile_level", 0),
        ({"max_cached_graphs": 7}, "page_size", 256),
    ],
)
def test_deprecated_fields_warn_once_and_act(deprecated, field, becomes):
    with pytest.warns(FutureWarning, match=next(iter(deprecated))) as caught:
        config = ContinuousBatchingConfig(**deprecated)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert getattr(config, field) == becomes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = dataclasses.replace(config, num_blocks=8)
        assert getattr(copied, field) == becomes
        assert getattr(ContinuousBatchingConfig.from_any(config), field) == becomes


def test_a_deprecated_field_must_not_contradict_its_successor():
    with pytest.raises(ValueError, match=r"block_size=32 contradicts page_size=16"):
        ContinuousBatchingConfig(block_size=32, page_size=16)
    with pytest.warns(FutureWarning):
        assert ContinuousBatchingConfig(block_size=32, page_size=32).page_size == 32


def test_from_any_makes_a_checked_copy():
    assert ContinuousBatchingConfig.from_any(None) == ContinuousBatchingConfig()
    config = ContinuousBatchingConfig(page_size=16)
    copied = ContinuousBatchingConfig.from_any(config)
    assert copied == config
    assert copied is not config
    config.page_size = 2
    with pytest.raises(ValueError, match="page_size"):
        ContinuousBatchingConfig.from_any(config)


def test_from_any_takes_every_field_of_the_reference():
    values = {
        "page_size": 16,
        "num_blocks": 9,
        "max_batch_tokens": 33,
        "max_memory_percent": 0.4,
        "max_requests_per_batch": 5,
        "max_blocks_per_request": 6,
        "allow_block_sharing": False,
        "use_async_batching": True,
        "use_cuda_graph": (True, False),
        "q_padding_interval_size": 8,
        "kv_padding_interval_size": 64,
        "varlen_compile_config": transformers.CompileConfig(mode="default"),
        "decode_compile_config": transformers.CompileConfig(dynamic=True),
        "default_compile_level": 2,
        "scheduler_type": "prefill_first",
        "safety_margin": 0.25,
        "return_logprobs": True,
        "seed": 11,
        "auto_switch_to_flash": False,
        "cpu_offload_space": 1.5,
        "cpu_offload_space_safety_threshold": 0.5,
        "max_queue_size": 3,
        "per_request_processors": True,
        "drop_unsupported_processors": False,
        "disable_nccl_graph_mixing": False,
        "cpu_group_timeout": 12.0,
    }
    reference = ReferenceConfig(**values)
    before = copy.deepcopy(reference)
    own = ContinuousBatchingConfig.from_any(reference)
    assert {name: getattr(own, name) for name in values} == values
    assert set(values) | set(DEPRECATED) == {field.name for field in dataclasses.fields(own)}
    assert reference == before


def test_from_any_does_not_apply_the_deprecated_fields_of_the_reference_again():
    reference = ReferenceConfig(block_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ContinuousBatchingConfig.from_any(reference).page_size == 32


def test_from_any_ignores_fields_of_other_versions_only_at_their_defaults():
    newer = dataclasses.make_dataclass(
        "ContinuousBatchingConfig",
        [("novelty", int, 1), ("notes", list, dataclasses.field(default_factory=list))],
        bases=(ReferenceConfig,),
    )
    older = dataclasses.make_dataclass("ContinuousBatchingConfig", [("page_size", int, 256)])
    assert ContinuousBatchingConfig.from_any(newer(page_size=16)).page_size == 16
    assert ContinuousBatchingConfig.from_any(older(page_size=16)) == ContinuousBatchingConfig(page_size=16)
    with pytest.raises(ValueError, match="novelty"):
        ContinuousBatchingConfig.from_any(newer(novelty=2))
    with pytest.raises(ValueError, match="notes"):
        ContinuousBatchingConfig.from_any(newer(notes=["x"]))


def test_from_any_takes_dicts_and_names_unknown_keys_and_types():
    assert ContinuousBatchingConfig.from_any({"page_size": 8}) == ContinuousBatchingConfig(page_size=8)
    with pytest.raises(ValueError, match="page_sise"):
        ContinuousBatchingConfig.from_any({"page_sise": 8})
    with pytest.raises(TypeError, match="GenerationConfig"):
        ContinuousBatchingConfig.from_any(transformers.GenerationConfig())


def test_configs_survive_copy_and_pickle():
    config = ContinuousBatchingConfig(page_size=16, use_cuda_graph=(False, True))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_workload_hints_are_checked_and_taken_from_the_reference():
    hints = WorkloadHints.from_any(ReferenceHints(max_prompt_length=5, max_generated_length=7, num_requests=2))
    assert hints == WorkloadHints(5, 7, 2)
    assert hints.max_length == 12
    assert WorkloadHints(5, 0, 2).max_length == 0
    assert WorkloadHints.from_any(None) == WorkloadHints()
    assert WorkloadHints.from_any({"num_requests": 3}) == WorkloadHints(num_requests=3)
    with pytest.raises(ValueError, match="max_prompt_length must be at least 0, got -1"):
        WorkloadHints(max_prompt_length=-1)
    with pytest.raises(TypeError, match="num_requests"):
        WorkloadHints(num_requests=True)


def test_kernel_config_names_slots():
    config = KernelConfig(default="reference", varlen_attention="triton_split")
    assert config.slots() == {
        "prepare_inputs": None,
        "kv_write": None,
        "varlen_attention": "triton_split",
        "decode_attention": None,
        "sample": None,
        "block_copy": None,
    }
    assert KernelConfig.from_any({"kv_write": "reference"}) == KernelConfig(kv_write="reference")
    assert KernelConfig.from_any(None) == KernelConfig()
    with pytest.raises(ValueError, match="cuda"):
        KernelConfig(default="cuda")
    with pytest.raises(TypeError, match="kv_write"):
        KernelConfig(kv_write=1)  # type: ignore
    with pytest.raises(ValueError, match="softmax"):
        KernelConfig.from_any({"softmax": "reference"})


def test_engine_config_describes_its_decisions_in_aligned_columns_and_as_json():
    decisions = (
        Decision("num_blocks", None, 12, "memory"),
        Decision("use_cuda_graph", (True, True), (False, False), "no graphs"),
    )
    config = EngineConfig(
        page_size=16,
        cache_layout=CacheLayout.of([CachedLayer(window=0, key_bytes=32, value_bytes=32)], 16),
        num_blocks=12,
        num_host_blocks=0,
        max_batch_tokens=256,
        max_requests=8,
        max_blocks_per_request=4,
        max_decode_blocks=4,
        max_model_len=64,
        use_decode_path=True,
        share_blocks=True,
        keeps_states=False,
        least_prompt_piece=1,
        rope_switch_length=None,
        async_depth=0,
        varlen_compile=CompileSettings("inductor", None, True, True, {"a": print}),
        decode_compile=None,
        compile_region="layer",
        captured_paths=(),
        padded_paths=(),
        flexible_paths=("varlen",),
        q_interval=1,
        kv_interval=1,
        scheduler_type="fifo",
        safety_margin=0.15,
        logprobs=None,
        seed=3,
        max_queue_size=0,
        per_request_processors=False,
        has_processors=False,
        drop_unsupported_processors=True,
        memory_budget=(
            MemoryShare("cache", 3 * 2**30, "12 blocks"),
            MemoryShare("logits", 2**19, "8 rows"),
        ),
        available_memory_bytes=4 * 2**30,
        decisions=decisions,
    )
    assert config.describe().splitlines() == [
        "field           asked         resolved        why",
        "num_blocks      None          12              memory",
        "use_cuda_graph  (True, True)  (False, False)  no graphs",
        "",
        "memory  MiB      what",
        "cache   3,072.0  12 blocks",
        "logits  0.5      8 rows",
        "in all  3,072.5  of 4,096.0 available",
    ]
    loaded = json.loads(json.dumps(config.to_dict()))
    assert loaded["num_blocks"] == 12
    assert loaded["varlen_compile"]["options"] == {"a": repr(print)}
    assert loaded["decisions"][1] == {
        "field": "use_cuda_graph",
        "asked": [True, True],
        "resolved": [False, False],
        "why": "no graphs",
    }


def test_check_integer_and_number_tell_range_and_way_out():
    with pytest.raises(ValueError, match=r"n must be from 1 to 3, got 9; the nearest valid choice is n=3"):
        check_integer("n", 9, 1, 3)
    with pytest.raises(ValueError, match=r"n must be at least 1, got 0; the nearest valid choice is n=1"):
        check_integer("n", 0, 1)
    with pytest.raises(ValueError, match=r"x must be a finite number greater than 0 and at most 1, got 2.0"):
        check_number("x", 2, above=0.0, maximum=1.0)
    assert check_number("x", 1, above=0.0, maximum=1.0) == 1.0
