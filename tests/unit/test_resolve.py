"""`resolve` turns open settings into numbers, by rules that a table of cases holds."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import transformers

from cbtriton.cache_layout import CachedLayer
from cbtriton.config import CompileSettings, ContinuousBatchingConfig, EngineConfig, ModelFacts, WorkloadHints
from cbtriton.resolve import available_memory_bytes, resolve

SCHEDULERS = {"fifo": 0.15, "prefill_first": 0.0}
# In bytes: a block of 16 tokens 160,000; a token of a step 76 + 24 = 100; a row of logits 100 * (4 + 4) = 800.
FACTS = ModelFacts(
    vocab_size=100,
    num_embeddings=100,
    max_position_embeddings=1024,
    cached_layers=(CachedLayer(0, 3000, 2000), CachedLayer(0, 3000, 2000)),
    activation_bytes_per_token=76,
    device_type="cuda",
    available_memory_bytes=100_000_000,
)


def run(
    facts: ModelFacts = FACTS,
    hints: WorkloadHints | None = None,
    has_logits_processing: bool = False,
    **settings,
) -> EngineConfig:
    config = ContinuousBatchingConfig(**{"page_size": 16, "seed": 1, **settings})
    return resolve(
        config,
        hints or WorkloadHints(),
        facts,
        has_logits_processing=has_logits_processing,
        scheduler_types=SCHEDULERS,
    )


def facts(**changes) -> ModelFacts:
    return dataclasses.replace(FACTS, **changes)


def decision(config: EngineConfig, field: str):
    found = [d for d in config.decisions if d.field == field]
    assert len(found) == 1, f"{field} decided {len(found)} times"
    return found[0]


@pytest.mark.parametrize(
    ("device_type", "has_logits_processing", "asked", "share"),
    [
        ("cuda", False, None, 0.9),
        ("cuda", True, None, 0.8),
        ("cpu", False, None, 0.6),
        ("cpu", True, None, 0.6),
        ("mps", False, None, 0.6),
        ("cpu", True, 0.25, 0.25),
    ],
)
def test_the_cache_takes_the_documented_share_of_memory(device_type, has_logits_processing, asked, share):
    config = run(
        facts(device_type=device_type),
        has_logits_processing=has_logits_processing,
        max_memory_percent=asked,
    )
    assert config.num_blocks == int(share * 100_000_000) // 160_000
    if asked is None:
        assert decision(config, "max_memory_percent").resolved == share


@pytest.mark.parametrize(
    ("settings", "hints", "blocks"),
    [
        ({}, WorkloadHints(), 562),  # 0.9 of the memory
        ({"max_requests_per_batch": 3}, WorkloadHints(), 3 * 64),  # three requests of all positions
        ({}, WorkloadHints(100, 100, 10), 10 * (13 + 1)),  # what the hints need and one spare block each
        ({}, WorkloadHints(1, 1, 1), 64),  # hints do not forbid one request of all positions
        ({}, WorkloadHints(100, 0, 10), 562),  # unknown lengths bound nothing
        ({"num_blocks": 5}, WorkloadHints(100, 100, 10), 5),
        (
            {"num_blocks": 10**6},
            WorkloadHints(),
            10**6,
        ),  # asked for explicitly: honoured, whatever the memory
    ],
)
def test_num_blocks_holds_what_can_be_used(settings, hints, blocks):
    assert run(hints=hints, **settings).num_blocks == blocks


def tables(requests: int, length: int, width: int) -> int:
    """Bytes of the tokens, blocks, parameters and masks of 100 tokens of so many requests and a row of padding."""
    return (requests + 1) * (4 * (length + 1 + width) + 12_544 + 16)


def total(config: EngineConfig) -> int:
    return sum(share.num_bytes for share in config.memory_budget)


# One block, the tables of one request of 16 tokens, one row of logits, 256 tokens.
LEAST = 160_000 + tables(1, 16, 1) + 800 + 256 * 100


@pytest.mark.parametrize("available", [0, LEAST - 1, -5])
def test_no_room_for_a_block_is_an_error_with_the_numbers(available):
    message = (
        rf"1 of the {available} bytes available may be cache, and 1 blocks of 160000 bytes with steps of 256 tokens "
    )
    with pytest.raises(ValueError, match=rf"no memory for the cache: {message}take {LEAST} bytes") as raised:
        run(facts(available_memory_bytes=available), max_memory_percent=1.0)
    table = str(raised.value).splitlines()[1:]
    assert [line.split()[0] for line in table] == ["memory", "cache", "tables", "logits", "activations", "in"]


def test_one_block_of_room_is_enough():
    config = run(facts(available_memory_bytes=LEAST), max_memory_percent=1.0)
    assert (config.num_blocks, config.max_batch_tokens, total(config)) == (1, 256, LEAST)


@pytest.mark.parametrize(
    ("available", "device_type", "tokens"),
    [
        (10**9, "cuda", 8192),
        (10**9, "cpu", 2048),
        # 10 requests of 64 blocks, their tables and rows of logits, and 1000 tokens.
        (640 * 160_000 + tables(10, 1024, 64) + 10 * 800 + 100 * 1000, "cuda", 1000),
        (640 * 160_000 + tables(10, 1024, 64) + 10 * 800 + 100 * 1000 - 1, "cuda", 999),
    ],
)
def test_max_batch_tokens_comes_from_the_memory_that_the_cache_leaves(available, device_type, tokens):
    roomy = facts(available_memory_bytes=available, device_type=device_type)
    config = run(roomy, max_memory_percent=1.0, max_requests_per_batch=10)
    assert (config.num_blocks, config.max_batch_tokens) == (640, tokens)
    assert decision(config, "max_batch_tokens").resolved == tokens
    assert available - total(config) in range(100) or tokens in (2048, 8192)


@pytest.mark.parametrize("available", [3_000_000, 30_000_000, 100_000_000])
@pytest.mark.parametrize("max_batch_tokens", [None, 1, 5000])
@pytest.mark.parametrize("has_graphs", [True, False])
def test_all_purposes_together_stay_within_what_is_available(available, max_batch_tokens, has_graphs):
    asked = {"max_memory_percent": 1.0, "max_batch_tokens": max_batch_tokens}
    config = run(facts(available_memory_bytes=available, has_graphs=has_graphs), **asked)
    assert total(config) <= available == config.available_memory_bytes
    shares = {share.purpose: share.num_bytes for share in config.memory_budget}
    rows, length = config.max_requests, config.max_model_len
    sampled = min(rows, config.max_batch_tokens)
    step = sampled * 800 + config.max_batch_tokens * 100
    assert shares == {
        "cache": config.num_blocks * 160_000,
        "tables": tables(rows, length, config.max_blocks_per_request),
        "logits": sampled * 800,
        "activations": config.max_batch_tokens * 100,
        **({"graphs": step} if has_graphs else {}),
    }
    # One more block would not fit.
    asked = {**asked, "num_blocks": config.num_blocks + 1, "max_batch_tokens": max_batch_tokens or 256}
    assert total(run(facts(available_memory_bytes=available, has_graphs=has_graphs), **asked)) > available


def test_numbers_that_were_asked_for_are_honoured_and_the_budget_tells():
    config = run(facts(available_memory_bytes=1000), num_blocks=50, max_batch_tokens=300)
    assert (config.num_blocks, config.max_batch_tokens) == (50, 300)
    *_, last = config.describe().splitlines()
    assert last.split() == ["in", "all", f"{total(config) / 2**20:.1f}", "of", "0.0", "available"]


def test_a_model_of_many_groups_needs_a_block_in_each():
    layers = (CachedLayer(8, 3000, 2000),) * 5 + (CachedLayer(0, 3000, 2000),)
    with pytest.raises(ValueError, match=r"at least 6 for this model, .* in 6 groups with a block each, got 5"):
        run(facts(cached_layers=layers), num_blocks=5)
    config = run(facts(cached_layers=layers), num_blocks=60)
    # A window of 8 reaches into two pages; the other 50 blocks are for the layer that sees everything.
    assert (config.max_requests, config.max_model_len) == (10, 50 * 16)


@pytest.mark.parametrize("tokens", [1, 7, 100_000])
def test_an_explicit_max_batch_tokens_is_honoured(tokens):
    assert run(max_batch_tokens=tokens).max_batch_tokens == tokens


@pytest.mark.parametrize(
    ("settings", "hints", "requests"),
    [
        ({"num_blocks": 5000}, WorkloadHints(), 1024),
        ({"num_blocks": 5000}, WorkloadHints(num_requests=7), 7),
        ({"num_blocks": 5000}, WorkloadHints(num_requests=5000), 1024),
        ({"num_blocks": 40}, WorkloadHints(), 40),  # every running request needs a block
        ({"num_blocks": 40, "max_requests_per_batch": 64}, WorkloadHints(num_requests=7), 64),
    ],
)
def test_max_requests_comes_from_hints(settings, hints, requests):
    assert run(hints=hints, **settings).max_requests == requests


@pytest.mark.parametrize(
    ("positions", "num_blocks", "length", "width"),
    [(1024, 100, 1024, 64), (1000, 100, 1000, 63), (1024, 10, 160, 10), (None, 10, 160, 10)],
)
def test_block_tables_are_wide_enough_for_the_longest_sequence(positions, num_blocks, length, width):
    config = run(facts(max_position_embeddings=positions), num_blocks=num_blocks)
    assert config.max_model_len == length
    assert config.max_blocks_per_request == width


@pytest.mark.parametrize(
    ("asked", "hints", "decode_blocks"),
    [
        (None, WorkloadHints(), 64),
        (None, WorkloadHints(30, 20, 0), 4),
        (None, WorkloadHints(5000, 20, 0), 64),
        (3, WorkloadHints(30, 20, 0), 3),
        (1000, WorkloadHints(), 64),
        (0, WorkloadHints(30, 20, 0), 0),
    ],
)
def test_max_blocks_per_request_limits_the_decode_path_only(asked, hints, decode_blocks):
    config = run(hints=hints, num_blocks=100, max_blocks_per_request=asked)
    assert config.max_decode_blocks == decode_blocks
    assert config.use_decode_path is (decode_blocks > 0)
    assert config.max_blocks_per_request == 64


@pytest.mark.parametrize(
    ("scheduler_type", "asked", "margin"),
    [("fifo", None, 0.15), ("prefill_first", None, 0.0), ("fifo", 0.0, 0.0), ("prefill_first", 0.3, 0.3)],
)
def test_the_safety_margin_defaults_to_the_schedulers_own(scheduler_type, asked, margin):
    config = run(scheduler_type=scheduler_type, safety_margin=asked)
    assert (config.scheduler_type, config.safety_margin) == (scheduler_type, margin)


def test_an_unknown_scheduler_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"fifo, prefill_first.*'lifo'"):
        run(scheduler_type="lifo")


@pytest.mark.parametrize(("asked", "interval"), [(0, 1), (1, 1), (48, 48)])
def test_steps_run_at_exact_sizes_unless_an_interval_is_asked_for(asked, interval):
    config = run(q_padding_interval_size=asked, kv_padding_interval_size=asked)
    assert (config.q_interval, config.kv_interval) == (interval, interval)
    decided = [d for d in config.decisions if d.field == "q_padding_interval_size"]
    assert len(decided) == (1 if asked == 0 else 0)
    assert config.padded_paths == (("varlen", "decode") if interval > 1 else ())


@pytest.mark.parametrize(
    ("settings", "intervals"),
    [
        ({"q_padding_interval_size": 32}, (32, 16384)),
        ({"kv_padding_interval_size": 4096}, (64, 4096)),
        ({"q_padding_interval_size": 1, "kv_padding_interval_size": 4096}, (1, 4096)),
    ],
)
def test_an_interval_left_open_beside_one_that_was_asked_for_is_the_preset(settings, intervals):
    config = run(**settings)
    assert (config.q_interval, config.kv_interval) == intervals


@pytest.mark.parametrize(("asked", "depth"), [(None, 0), (False, 0), (True, 1)])
def test_async_batching_is_a_depth(asked, depth):
    assert run(use_async_batching=asked).async_depth == depth


@pytest.mark.parametrize(
    ("asked", "captured", "depth"),
    [
        (None, ("varlen", "decode"), 1),
        (True, ("varlen", "decode"), 1),
        ((False, True), ("decode",), 1),
        ((True, False), ("varlen",), 1),
        (False, (), 0),
    ],
)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_where_there_are_graphs_captured_paths_are_padded_and_steps_asynchronous(asked, captured, depth, level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = run(facts=facts(has_graphs=True), use_cuda_graph=asked, default_compile_level=level)
    assert (config.captured_paths, config.async_depth) == (captured, depth)
    assert config.padded_paths == (("varlen", "decode") if level == 3 else captured)
    others = [path for path in ("varlen", "decode") if path not in captured]
    assert config.flexible_paths == (tuple(others) if level == 1 else ())
    assert config.q_interval == (64 if captured or level == 3 else 1)
    assert ("use_cuda_graph" in {d.field for d in config.decisions}) == (asked is None)


def test_asynchronous_steps_can_be_had_without_graphs_and_graphs_without_them():
    with_graphs = facts(has_graphs=True)
    assert run(facts=with_graphs, use_async_batching=False).async_depth == 0
    assert run(facts=with_graphs, use_cuda_graph=False, use_async_batching=True).async_depth == 1


LEVELS = {
    0: None,
    1: CompileSettings("inductor", "default", dynamic=True, fullgraph=True),
    2: CompileSettings("inductor", "max-autotune-no-cudagraphs", dynamic=True, fullgraph=True),
    3: CompileSettings("inductor", "max-autotune-no-cudagraphs", dynamic=False, fullgraph=True),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_compile_level_means_the_same_on_both_paths(level):
    config = run(default_compile_level=level)
    assert config.varlen_compile == config.decode_compile == LEVELS[level]


def test_a_compile_config_wins_over_the_level_on_its_path():
    explicit = transformers.CompileConfig(dynamic=True, backend="aot_eager", fullgraph=True)
    config = run(default_compile_level=3, decode_compile_config=explicit)
    assert config.varlen_compile == LEVELS[3]
    # Modes are Inductor's own; other backends complain about them.
    assert config.decode_compile == CompileSettings("aot_eager", None, dynamic=True, fullgraph=True)
    assert (config.padded_paths, config.flexible_paths) == (("varlen",), ("decode",))


def test_a_compile_config_has_a_mode_or_options():
    with_mode = run(varlen_compile_config={"mode": "max-autotune"}).varlen_compile
    with_options = run(varlen_compile_config={"options": {"epilogue_fusion": True}}).varlen_compile
    assert (with_mode.mode, with_mode.options) == ("max-autotune", None)
    assert (with_options.mode, with_options.options) == (None, {"epilogue_fusion": True})
    assert run(varlen_compile_config={}).decode_compile is None


@pytest.mark.parametrize(
    ("level", "padded", "flexible", "intervals"),
    [
        (0, (), (), (1, 1)),
        (1, (), ("varlen", "decode"), (1, 16384)),
        (2, (), ("varlen", "decode"), (1, 16384)),
        (3, ("varlen", "decode"), (), (64, 16384)),
    ],
)
def test_only_graphs_of_fixed_sizes_need_padding(level, padded, flexible, intervals):
    config = run(default_compile_level=level)
    assert (config.padded_paths, config.flexible_paths) == (padded, flexible)
    assert (config.q_interval, config.kv_interval) == intervals


def test_asked_for_intervals_hold_at_any_level():
    config = run(default_compile_level=1, q_padding_interval_size=16)
    assert (config.padded_paths, config.flexible_paths) == (("varlen", "decode"), ())
    assert (config.q_interval, config.kv_interval) == (16, 16384)


def test_layers_are_compiled_one_by_one_where_the_model_has_them():
    repeated = facts(has_repeated_layers=True)
    assert run(default_compile_level=1).compile_region == "step"
    assert run(facts=repeated, default_compile_level=1).compile_region == "layer"
    assert decision(run(facts=repeated, default_compile_level=1), "compile_region").resolved == "layer"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph=True has no effect: cuda has no graphs"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph"),
    ],
)
def test_what_is_not_there_warns_once_and_is_recorded(settings, message):
    with pytest.warns(UserWarning, match=message) as caught:
        config = run(**settings)
    assert len(caught) == 1
    (field, asked), *_ = settings.items()
    assert decision(config, field).asked == asked
    assert config.captured_paths == ()


def test_the_defaults_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        run(use_cuda_graph=(False, False), cpu_offload_space=0)


# On a host with 20 GiB, and blocks of 1 MiB: 16 tokens of 64 KiB.
GIB, MIB = 2**30, 2**20
HOST = {
    "available_host_memory_bytes": 20 * GIB,
    "cached_layers": (CachedLayer(0, MIB // 32, MIB // 32),),
    "available_memory_bytes": 50 * GIB,
}


@pytest.mark.parametrize(
    ("asked", "threshold", "device_type", "num_blocks"),
    [
        (0.0, 0.8, "cuda", 0),
        (0, 1.0, "cuda", 0),
        (1.5, 0.8, "cuda", 1536),
        (1.5 / 1024, 0.8, "cuda", 1),
        (16, 0.8, "cuda", 16 * 1024),
        (30.0, 1.0, "cuda", 30 * 1024),
        # The cache of 100 blocks has taken its part of the same memory.
        (1.0, 0.8, "cpu", 1024),
        (20.0, 1.0, "cpu", 20 * 1024),
    ],
)
def test_an_asked_host_space_is_whole_blocks_and_needs_no_decision(asked, threshold, device_type, num_blocks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = run(
            facts(**HOST, device_type=device_type),
            num_blocks=100,
            cpu_offload_space=asked,
            cpu_offload_space_safety_threshold=threshold,
        )
    assert config.num_host_blocks == num_blocks
    assert not [d for d in config.decisions if d.field == "cpu_offload_space"]


@pytest.mark.parametrize(
    ("threshold", "device_type", "available", "num_blocks"),
    [
        (0.8, "cuda", 20 * GIB, 16 * 1024),
        (1.0, "cuda", 20 * GIB, 20 * 1024),
        (0.0, "cuda", 20 * GIB, 0),
        (0.5, "cpu", 20 * GIB - 100 * MIB, 10 * 1024 - 50),
        (0.5, "mps", 20 * GIB - 100 * MIB, 10 * 1024 - 50),
    ],
)
def test_an_open_host_space_is_the_threshold_s_share(threshold, device_type, available, num_blocks):
    config = run(
        facts(**HOST, device_type=device_type),
        num_blocks=100,
        cpu_offload_space=None,
        cpu_offload_space_safety_threshold=threshold,
    )
    assert config.num_host_blocks == num_blocks
    made = decision(config, "cpu_offload_space")
    assert (made.asked, made.resolved) == (None, num_blocks / 1024)
    assert f"{threshold:g} of {available} bytes" in made.why


def test_a_host_space_above_the_threshold_is_capped_with_both_numbers():
    with pytest.warns(UserWarning, match=r"=25.0 GiB is capped at 16 GiB, .*=0.8 of the 20 GiB") as caught:
        config = run(facts(**HOST), num_blocks=100, cpu_offload_space=25)
    assert len(caught) == 1
    assert config.num_host_blocks == 16 * 1024
    made = decision(config, "cpu_offload_space")
    assert (made.asked, made.resolved) == (25, 16)


def test_a_cache_that_takes_all_memory_leaves_none_for_host_blocks():
    config = run(facts(**HOST, device_type="cpu"), num_blocks=30 * 1024, cpu_offload_space=None)
    assert config.num_host_blocks == 0


def test_a_host_space_of_less_than_a_block_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"cpu_offload_space=0.0009 GiB holds no block: .* 16 tokens takes 1048576"):
        run(facts(**HOST), num_blocks=100, cpu_offload_space=0.0009)


def test_an_open_seed_is_drawn_and_recorded():
    first, second = run(seed=None), run(seed=None)
    assert first.seed != second.seed
    assert decision(first, "seed").resolved == first.seed
    assert 0 <= first.seed < 2**63
    assert run(seed=0).seed == 0


def test_every_inferred_field_has_its_decision_and_explicit_ones_have_none():
    inferred = {d.field for d in run().decisions}
    assert inferred == {
        "use_cuda_graph",
        "max_memory_percent",
        "num_blocks",
        "max_requests_per_batch",
        "max_model_len",
        "max_blocks_per_request",
        "max_batch_tokens",
        "use_async_batching",
        "padded_paths",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "safety_margin",
    }
    explicit = run(
        num_blocks=9,
        max_requests_per_batch=3,
        max_blocks_per_request=2,
        max_batch_tokens=50,
        use_async_batching=False,
        q_padding_interval_size=2,
        kv_padding_interval_size=2,
        safety_margin=0.1,
    )
    assert {d.field for d in explicit.decisions} == {"use_cuda_graph", "max_model_len"}


def test_plain_settings_are_passed_on_and_the_config_is_left_alone():
    config = ContinuousBatchingConfig(
        page_size=16,
        allow_block_sharing=False,
        return_logprobs=True,
        max_queue_size=4,
        per_request_processors=True,
        drop_unsupported_processors=False,
    )
    before = copy.deepcopy(config)
    resolved = resolve(config, WorkloadHints(), FACTS, has_logits_processing=False, scheduler_types=SCHEDULERS)
    assert config == before
    assert not resolved.share_blocks
    assert resolved.logprobs == "processed"
    assert resolved.max_queue_size == 4
    assert resolved.per_request_processors
    assert not resolved.drop_unsupported_processors


def test_a_config_made_wrong_by_assignment_is_refused():
    config = ContinuousBatchingConfig()
    config.page_size = 1
    with pytest.raises(ValueError, match="page_size"):
        resolve(config, WorkloadHints(), FACTS, has_logits_processing=False, scheduler_types=SCHEDULERS)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/memory.max": "1000\n",
                "sys/fs/cgroup/a/memory.current": "900\n",
                "sys/fs/cgroup/a/memory.stat": "anon 500\ninactive_file 300\n",
            },
            400,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/host/path\n3:cpuset:/\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7\n",
            },
            3007,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "500\n",
                "sys/fs/cgroup/memory.current": "600\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5\n",
            },
            4000 * 1024,
        ),
    ],
    ids=["no groups", "v2 parent limit", "v1 limit at the mount", "v2 over its limit", "v1 without limit"],
)
def test_available_memory_respects_every_enclosing_limit(tmp_path, files, expected):
    write(tmp_path, MEMINFO | files)
    assert available_memory_bytes(tmp_path) == expected


def test_available_memory_of_this_host_is_plausible(tmp_path):
    assert 0 < available_memory_bytes() < 2**50
    assert available_memory_bytes(tmp_path) > 0
