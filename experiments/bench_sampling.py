"""Times logits processors and filters on this CPU beside transformers' own, on the same logits and histories.

    python experiments/bench_sampling.py
    python experiments/bench_sampling.py --rows 16 --threads 2

Transformers twice: with a list of processors for each row, since requests differ, and with one list for the whole
batch, where all rows ask for the same. Ours: `process` and `truncate` of the slot `sample`, from torch and from Triton.
The draw is no part of either. Each distribution is first compared with transformers'. Contestants take turns; numbers
are medians, in ms per row. Prints Markdown.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.config import KernelConfig
from cbtriton.kernel_set import KernelSet, choose_kernels
from cbtriton.padding import Bucket
from cbtriton.plan import BatchPlan, RowStart, ScheduledRow
from cbtriton.request_table import RequestTable
from cbtriton.sampling import RequestLimits, SamplingDefaults, request_parameters
from cbtriton.step_inputs import StepInputsWriter

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out.
from _kernel_timing import CpuTimer

# The vocabulary of SmolLM2.
VOCAB = 49_152
PROMPT, MAX_NEW, TEMPERATURE = 100, 1_000, 0.8
# Everything that transformers has, with values that people use.
PROCESSORS: dict[str, Any] = {
    "eos_token_id": [0, 2],
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "sequence_bias": [[[11], 2.0], [[12, 13], -4.0], [[14, 15, 16], 1.0]],
    "bad_words_ids": [[20], [21, 22], [23, 24, 25]],
    "suppress_tokens": [30, 31, 32],
    "begin_suppress_tokens": [33],
    "forced_bos_token_id": 40,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (300, 1.001),
    "remove_invalid_values": True,
    "min_new_tokens": 600,
}
FILTERS: dict[str, float] = {
    "top_h": 0.9,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "typical_p": 0.95,
    "epsilon_cutoff": 1e-3,
    "eta_cutoff": 2e-3,
}
WISHES: dict[str, dict[str, Any]] = {
    "everything": PROCESSORS | FILTERS,
    "all processors": PROCESSORS,
    "all filters": FILTERS,
    **{name: {name: FILTERS[name]} for name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")},
    "top_p, typical_p": {name: FILTERS[name] for name in ("top_p", "typical_p")},
}


def main() -> None:
    """Prints one row for each combination of options."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    # Logits as of a language model: a few likely tokens and a long tail.
    logits = 2.5 * torch.randn(arguments.rows, VOCAB)
    # Half of each history repeats, so that n-grams come again.
    histories = torch.randint(0, VOCAB, (arguments.rows, arguments.history // 2)).repeat(1, 2)
    kernels = {
        name: choose_kernels(KernelConfig(default=name), torch.device("cpu")) for name in ("reference", "triton")
    }
    timer = CpuTimer(arguments.seconds)
    print("| options | transformers, a list per row | one list | ours, torch | Triton | faster than lists, than one |")
    print("|---|---|---|---|---|---|")
    for name, wish in WISHES.items():
        if arguments.only not in name:
            continue
        with torch.no_grad():
            calls = contestants(kernels, wish, histories, logits)
            same(calls)
            timings = timer.in_turns({str(place): call for place, call in enumerate(calls)})
            times = [timing.time_us / 1e3 / arguments.rows for timing in timings.values()]
        lists, one, torch_ms, _ = times
        cells = " | ".join(f"{ms:.2f}" for ms in times)
        print(f"| {name} | {cells} | {lists / torch_ms:.1f}×, {one / torch_ms:.1f}× |", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--history", type=int, default=500, help="tokens of prompt and output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="part of the names of the options to run")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each number")
    return parser.parse_args()


def contestants(
    kernels: Mapping[str, KernelSet], wish: dict[str, Any], histories: Tensor, logits: Tensor
) -> list[Callable[[], Tensor]]:
    """Calls that each give the scores `[rows, VOCAB]` at the temperature."""
    config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, max_length=PROMPT + MAX_NEW, **neutral(wish))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    lists = [processors(model, config) for _ in histories]

    def by_row() -> Tensor:
        return torch.cat([lists[i](histories[i : i + 1], logits[i : i + 1]) for i in range(len(lists))])

    ours = [partial(Step(config, histories).scores, kernel_set, logits) for kernel_set in kernels.values()]
    return [by_row, partial(processors(model, config), histories, logits), *ours]


def neutral(wish: dict[str, Any]) -> dict[str, Any]:
    """The wish without the filters that a config has by itself."""
    return {"top_k": 0, "top_p": 1.0} | wish


def processors(model: Any, config: GenerationConfig) -> Any:
    """Transformers' list for a request; the model only tells its vocabulary."""
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=PROMPT, device="cpu")


class Step:
    """A step in which every row samples its next token, as the engine prepares it."""

    def __init__(self, config: GenerationConfig, histories: Tensor) -> None:
        rows, length = histories.shape
        layout = CacheLayout.of([CachedLayer(window=0, key_bytes=32, value_bytes=32)], 16)
        max_len = PROMPT + MAX_NEW
        limits = RequestLimits(
            vocab_size=VOCAB,
            max_model_len=max_len,
            cache_layout=layout,
            num_blocks=10**6,
            logprobs=None,
            per_request_processors=True,
            drop_unsupported=False,
        )
        defaults = SamplingDefaults.from_generation_config(
            config, model_eos=None, vocab_size=VOCAB, drop_unsupported=False, warn=print
        )
        sampling, stop = request_parameters(
            defaults,
            prompt_length=PROMPT,
            max_new_tokens=MAX_NEW,
            eos_token_id=None,
            kwargs={},
            ordinal=0,
            engine_seed=0,
            limits=limits,
            warn=print,
        )
        self._table = RequestTable(rows, max_len, 1, 1, VOCAB, torch.device("cpu"))
        writer = StepInputsWriter(self._table, VOCAB, torch.device("cpu"))
        starts = tuple(
            RowStart(row, history, PROMPT, sampling, stop.eos_token_ids)
            for row, history in enumerate(histories.tolist())
        )
        scheduled = tuple(ScheduledRow(str(row), 1, row, length - 1, 1, samples=True) for row in range(rows))
        plan = BatchPlan("decode", scheduled, starts, (), (), num_tokens=rows, max_seq_len=length)
        self._inputs = writer.fill(plan, Bucket("decode", rows, rows, rows, max_len))

    def scores(self, kernels: KernelSet, logits: Tensor) -> Tensor:
        """What the draw gets, at the temperature."""
        rows, positions = self._inputs.sample_rows, self._inputs.sample_positions
        named = {**vars(self._table), "rows": rows, "positions": positions}
        scores = call_by_name(kernels.process, {**named, "logits": logits})
        if self._inputs.features.use_truncation:
            call_by_name(kernels.truncate, {**named, "scores": scores})
        return scores.div_(TEMPERATURE)


def call_by_name(function: Any, named: Mapping[str, Any]) -> Any:
    """Calls a kernel with the columns that it asks for."""
    return function(*(named[name] for name in inspect.signature(function.launcher).parameters))


def same(calls: list[Callable[[], Tensor]]) -> None:
    """Raises if the calls do not give the same distributions.

    Raises:
        AssertionError: They do not.
    """
    expected, *others = (call().softmax(-1) for call in calls)
    for probs in others:
        difference = float((probs - expected).abs().sum(-1).max())
        if not difference < 1e-3:
            raise AssertionError(f"distributions differ by {difference:.3g}, allowed 0.001")


if __name__ == "__main__":
    main()
