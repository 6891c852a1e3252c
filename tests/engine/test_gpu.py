"""What only a GPU shows: compiled and captured kernels, whole engines on them; and that `gpu_check.py` works."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import cbtriton
from cbtriton import KernelConfig, WorkloadHints
from cbtriton.kernel_set import REFERENCE, choose_kernels, implementations
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.stats import EngineStats

ROOT = Path(__file__).resolve().parents[2]
SLOTS = ("prepare_inputs", "kv_write", "varlen_attention", "decode_attention", "sample", "block_copy")
TRITON = [(slot, name) for slot in SLOTS for name in implementations(slot) if name != REFERENCE]
PAGE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 2, 64
MAX_KV, VOCAB = 200, 1000
PROMPT_LENGTHS = (1, 5, 16, 17, 64, 200, 500, 900)
NUM_NEW = 32


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


def module_of(slot: str, name: str) -> Any:
    return importlib.import_module(f"cbtriton.kernels.{slot}.{name}")


# ---------------------------------------------------------------------------------------------------------- kernels


class Inputs:
    """Arguments of a slot without the plan: for one slot and number of rows, the same shapes whatever the seed."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks_per_row = -(-MAX_KV // PAGE)
        self._num_blocks = num_rows * self._blocks_per_row + 1

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def integers(self, low: int, high: int, num: int) -> Tensor:
        """`low` to `high`, both included."""
        return torch.randint(low, high + 1, (num,), generator=self._generator, dtype=torch.int32)

    def rows(self) -> Tensor:
        return torch.randperm(self.num_rows, generator=self._generator).to(torch.int32)

    def tables(self) -> Tensor:
        blocks = torch.randperm(self._num_blocks - 1, generator=self._generator) + 1
        return blocks.to(torch.int32).view(self.num_rows, self._blocks_per_row)

    def caches(self) -> list[Tensor]:
        return [self.normal(self._num_blocks, PAGE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]

    def attention(self, counts: Tensor, num_tokens: int) -> tuple:
        """Rows of any context length that leaves room for their tokens; those without tokens are padding."""
        contexts = (self.integers(0, MAX_KV, self.num_rows) - counts).clamp(min=0)
        seq_lens = torch.where(counts > 0, contexts + counts, 0).to(torch.int32)
        cu_seqlens_q = torch.cat([torch.zeros(1), counts]).cumsum(0).to(torch.int32)
        query = self.normal(num_tokens, NUM_HEADS, HEAD_DIM)
        where = (query, *self.caches(), self.tables(), self.rows(), cu_seqlens_q, seq_lens)
        return (*where, HEAD_DIM**-0.5, 0, 0, 0.0, self.normal(NUM_HEADS), None, MAX_KV)

    def decode_attention(self) -> tuple:
        return self.attention(torch.ones(self.num_rows, dtype=torch.int32), self.num_rows)

    def varlen_attention(self) -> tuple:
        return self.attention(self.integers(0, 40, self.num_rows), 40 * self.num_rows)

    def kv_write(self) -> tuple:
        num_tokens = 3 * self.num_rows
        slots = torch.randperm(self._num_blocks * PAGE, generator=self._generator)[:num_tokens]
        slots[self.integers(0, num_tokens - 1, self.num_rows).long()] = -1
        new = [self.normal(num_tokens, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
        return (*new, *self.caches(), slots)

    def prepare_inputs(self) -> tuple:
        counts = self.integers(0, 4, self.num_rows)
        starts = self.integers(0, MAX_KV - 4, self.num_rows)
        tokens = self.integers(0, VOCAB - 1, self.num_rows * MAX_KV).view(self.num_rows, MAX_KV)
        page_sizes = torch.tensor([PAGE], dtype=torch.int32)
        return (tokens, self.tables()[None], self.rows(), starts, counts, page_sizes, 4 * self.num_rows)

    def sample(self) -> tuple:
        num = self.num_rows
        temperature = torch.where(self.integers(0, 2, num) == 0, 0.0, 0.8)
        return (
            3 * self.normal(num, VOCAB),
            self.rows(),
            self.integers(0, MAX_KV - 1, num),
            torch.zeros(num, MAX_KV, dtype=torch.int32),
            temperature,
            self.integers(0, 1, num) * 50,
            torch.where(self.integers(0, 1, num) == 0, 1.0, 0.9),
            torch.where(self.integers(0, 1, num) == 0, 0.0, 0.05),
            self.integers(0, 2**30, num).long(),
            self.integers(0, MAX_KV, num),
            self.integers(0, VOCAB - 1, 16 * num).view(num, 16),
            *(False, True, True, True, True, True),
        )

    def block_copy(self) -> tuple:
        blocks = torch.randperm(self._num_blocks, generator=self._generator)[: 2 * self.num_rows]
        return (*self.caches(), *(half.contiguous() for half in blocks.chunk(2)))


def make(slot: str, num_rows: int, seed: int, device: str | torch.device) -> tuple:
    args = getattr(Inputs(num_rows, seed), slot)()
    return tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)


def with_plan(module: Any, slot: str, args: tuple) -> tuple:
    """The arguments of the slot's function."""
    if not slot.endswith("_attention"):
        return args
    query, key_cache, value_cache, tables, rows, cu_seqlens_q, seq_lens, *options = args
    plan = module.plan(tables, rows, cu_seqlens_q, seq_lens, PAGE, options[-1])
    lengths = (seq_lens,) if slot == "decode_attention" else (cu_seqlens_q, seq_lens)
    return (query, key_cache, value_cache, tables, rows, *lengths, plan, *options)


def run(module: Any, slot: str, args: tuple) -> tuple:
    result = getattr(module, slot)(*with_plan(module, slot, args))
    return result if isinstance(result, tuple) else (result,)


def check(slot: str, result: tuple, args: tuple, seed: int, num_rows: int) -> None:
    """Compares results, and arguments that may have been changed, with the reference on the CPU."""
    expected_args = make(slot, num_rows, seed, "cpu")
    expected = run(module_of(slot, REFERENCE), slot, expected_args)
    for got, right in zip((*result, *args), (*expected, *expected_args), strict=True):
        if isinstance(right, Tensor):
            is_exact = not right.is_floating_point()
            tolerance = 0.0 if is_exact else 1e-3 if slot == "sample" else 2e-5
            torch.testing.assert_close(got.cpu(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("slot", "name"), TRITON)
@pytest.mark.parametrize("num_rows", [1, 8, 48])
def test_a_captured_launch_follows_what_its_tensors_hold_at_replay(device, slot, name, num_rows) -> None:
    module = module_of(slot, name)
    args = make(slot, num_rows, 1, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(module, slot, args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(module, slot, args)
    for seed in (2, 3):
        for held, new in zip(args, make(slot, num_rows, seed, device), strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(slot, result, args, seed, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("slot", "name"), TRITON)
def test_the_compiler_takes_the_operator_whole(device, slot, name) -> None:
    module = module_of(slot, name)
    function = getattr(module, slot)
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def compiled(*args: Any) -> Any:
        return function(*args)

    args = make(slot, 5, 4, device)
    result = compiled(*with_plan(module, slot, args))
    check(slot, result if isinstance(result, tuple) else (result,), args, 4, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for slot, name in TRITON if slot == "decode_attention"])
def test_compiled_code_makes_no_copy_of_the_cache(device, name) -> None:
    module = module_of("decode_attention", name)
    kernels = choose_kernels(KernelConfig(decode_attention=name), device)
    assert dict(kernels.names)["kv_write"] != REFERENCE, "on a GPU the default is Triton"
    num_rows, num_blocks, length = 4, 4096, 300
    # Not two views of one tensor: the compiler would have to copy those.
    shape = (num_blocks, PAGE, 8, 128)
    key_cache, value_cache = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_rows, -1)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    seq_lens = torch.full_like(rows, length)
    cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    plan = module.plan(tables, rows, cu_seqlens_q, seq_lens, PAGE, length)
    slots = tables[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernels.kv_write(key, value, key_cache, value_cache, slots)
        where = (key_cache, value_cache, tables, rows, seq_lens, plan)
        return kernels.decode_attention(query, *where, 128**-0.5, 0, 0, 0.0, None, None, length) * 2

    query = torch.randn(num_rows, 32, 128, device=device, dtype=torch.bfloat16)
    key, value = (torch.randn(num_rows, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    layer(query, key, value)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(query, key + 1, value)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < key_cache.nbytes / 4
    torch.testing.assert_close(key_cache.flatten(0, 1)[slots], key + 1, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def large_model() -> Any:
    """A Llama with a billion random weights in fp32, where rounding decides next to nothing."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=32_000,
        max_position_embeddings=2048,
        # Large enough that greedy answers do not end in loops.
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to("cuda").eval().requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def large_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 32_000, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def large_answers(large_model, large_prompts) -> list[list[int]]:
    """What `model.generate` answers to each prompt alone."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0)
    answers = []
    for prompt in large_prompts:
        input_ids = torch.tensor([prompt], device=large_model.device)
        output = large_model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=greedy)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def is_near_tie(model: Any, prompt: list[int], answer: list[int], expected: list[int]) -> bool:
    """Whether the first token that differs was as good as the expected one, but for rounding."""
    first = next(i for i, (got, right) in enumerate(zip(answer, expected, strict=True)) if got != right)
    input_ids = torch.tensor([prompt + expected[:first]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids).logits[0, -1]
    return (logits[expected[first]] - logits[answer[first]]).item() < 1e-4 * logits.abs().max().item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernels", "config"),
    [
        ("triton", {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256}),
        ("triton", {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256, "use_cuda_graph": False}),
        ("triton", {"page_size": 256, "num_blocks": 32, "use_cuda_graph": False, "use_async_batching": True}),
        ("reference", {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 256, "use_cuda_graph": False}),
    ],
    ids=["captured", "triton page 16", "triton page 256 async", "reference"],
)
def test_a_billion_weights_answer_like_generate(
    large_model, large_prompts, large_answers, tools, kernels, config
) -> None:
    model = cbtriton.enable(large_model)
    outputs = model.generate_batch(
        large_prompts,
        tools.options(),
        cbtriton.ContinuousBatchingConfig(**config),
        max_new_tokens=NUM_NEW,
        kernel_config=KernelConfig(default=kernels),
    )
    pairs = list(zip(large_prompts, tools.tokens(outputs), large_answers, strict=True))
    assert all(len(answer) == NUM_NEW for _, answer, _ in pairs)
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    assert all(is_near_tie(model, *pair) for pair in differing)
    assert len(differing) <= 1


# --------------------------------------------------------------------------------------------------- captured steps

SIZES = {"max_batch_tokens": 64, "q_padding_interval_size": 32, "max_requests_per_batch": 8}
HINTS = WorkloadHints(max_prompt_length=80, max_generated_length=NUM_NEW, num_requests=8)
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9}


@pytest.fixture
def small_model(device, tools) -> Any:
    return cbtriton.enable(tools.build(tools.llama_config()).to(device))


@pytest.fixture
def answers(small_model, tools):
    """What a manager of the small model answers, and its last counters."""

    def run(sampling: dict[str, Any], hints: WorkloadHints | None = None, **config: Any) -> tuple[list, EngineStats]:
        options = tools.options(**sampling)
        manager = ContinuousBatchingManager(small_model, options, tools.small(**SIZES, **config), hints)
        try:
            if hints is not None:
                manager.warmup()
            manager.start()
            ids = manager.add_requests([tools.prompt(1 + 7 * i) for i in range(11)], max_new_tokens=NUM_NEW)
            outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
            return [output.generated_tokens for output in outputs], manager.stats()
        finally:
            manager.destroy()

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("hints", [HINTS, None], ids=["prepared", "when it comes"])
def test_captured_steps_give_the_tokens_of_steps_that_are_not(answers, sampling, use_async_batching, hints) -> None:
    expected, eager = answers(sampling, use_cuda_graph=False)
    found, stats = answers(sampling, hints, use_async_batching=use_async_batching)
    assert found == expected
    assert eager.captures == eager.replays == stats.capture_failures == 0
    assert stats.replays == stats.steps
    assert stats.graph_bytes > 0


@pytest.mark.gpu
def test_steps_that_cannot_be_captured_run_as_they_are_and_leave_nothing_broken(answers, small_model, caplog) -> None:
    expected, _ = answers({}, use_cuda_graph=False)

    def wait_for_the_device_in_some_steps(module: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[1] == 4:
            args[0].sum().item()

    hook = small_model.model.layers[1].mlp.register_forward_pre_hook(wait_for_the_device_in_some_steps)
    found, stats = answers({}, HINTS)
    hook.remove()
    assert found == expected
    # Larger steps are captured before, smaller ones after these, greedy and not.
    assert stats.capture_failures == 2 < stats.captures
    assert 0 < stats.replays < stats.steps
    assert sum("cannot be captured" in record.message for record in caplog.records) == 1
    again, stats = answers({}, HINTS)
    assert again == expected
    assert (stats.capture_failures, stats.replays) == (0, stats.steps)


@pytest.mark.gpu
def test_graphs_give_their_memory_back(answers) -> None:
    answers({}, HINTS)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        answers({}, HINTS)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_weights_that_were_replaced_in_a_pause_are_captured_anew(small_model, tools) -> None:
    other, prompt = tools.build(tools.llama_config(), seed=1), tools.prompt(20)
    with tools.running(small_model, **SIZES) as manager:
        first = manager.get_result(manager.add_request(prompt, max_new_tokens=NUM_NEW), timeout=tools.patience)
        captures = manager.stats().captures
        with manager.pause(reset_prefix_cache=True):
            for parameter, wanted in zip(small_model.parameters(), other.parameters(), strict=True):
                parameter.data = wanted.detach().to(parameter.device)
        second = manager.get_result(manager.add_request(prompt, max_new_tokens=NUM_NEW), timeout=tools.patience)
        assert manager.stats().captures == 2 * captures > 0
    assert first.generated_tokens != second.generated_tokens == tools.plain_greedy(other, prompt, NUM_NEW)


# ------------------------------------------------------------------------------------------------------- the script


def test_the_script_for_a_gpu_passes_its_dry_run(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "gpu_check.py"), "--dry-run", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["is_dry"]
    assert result["num_failed"] == 0
    assert result["environment"]["versions"]["torch"] == torch.__version__
    rows = result["rows"]
    assert {row["part"] for row in rows} == {"tests", "kernels", "graphs", "engines"}
    assert {row["status"] for row in rows} <= {"ok", "unavailable"}
    assert {row["case"].split(",")[0] for row in rows if row["part"] == "graphs"} == {
        "captured tokens",
        "decode steps",
        "memory",
        "level 1",
    }
    assert {row["who"] for row in rows if row["part"] == "engines"} >= {"cbtriton", "transformers"}
    kernels = [row for row in rows if row["part"] == "kernels" and row["who"] == "reference"]
    assert {row["case"].split()[0] for row in kernels} == {
        "block_copy",
        "decode",
        "kv_write",
        "prefill",
        "prepare_inputs",
        "sample",
    }
    assert all(row["time_us"] > 0 and row["error"] is not None for row in kernels)
    assert (tmp_path / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
    assert f"| {rows[0]['part']} | {rows[0]['case']} |" in done.stdout
