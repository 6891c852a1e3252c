"""How much longer than its matrix products alone does a decode step take?

    python experiments/decode_floor.py --running 1 4 16 64 --dtypes bf16 fp32

The products are those of the model's linear layers, on random inputs, in each form that torch has for them: plain or
packed by oneDNN, one by one or joined where layers share their input. The fastest form is the floor. Floor and engine
take turns in one process, a few steps each, so that a slow minute hits both.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cbtriton
from cbtriton.model_zoo import ModelSpec, load_model
from cbtriton.packed_linear import record_linear_groups
from cbtriton.workloads import Lengths, Synthetic

# oneDNN chooses a memory order for this many rows, as the engine has it do.
_ROWS_HINT = 16
# Passes of each form in a turn.
_PASSES = 3

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """A way to multiply with all linear layers of a model.

    Attributes:
        name: For the table.
        products: What multiplies, with the number of input features of each, in the order of a forward pass.
    """

    name: str
    products: tuple[tuple[Product, int], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over the turns, in seconds.

    Attributes:
        floors: Each form of the products, by its name.
        step: A decode step of the engine.
    """

    floors: dict[str, float]
    step: float

    @property
    def ratio(self) -> float:
        """The step over the fastest form."""
        return self.step / min(self.floors.values())


def main() -> None:
    """Prints one Markdown row for each type and number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[16], help="requests that decode (default: 16)")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--model", default="smollm2_135m", choices=["smollm2_135m", "tiny_random"])
    parser.add_argument("--context", type=int, default=150, help="tokens before the first step (default: 150)")
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="compile level (default: 0)")
    parser.add_argument("--turns", type=int, default=10, help="(default: 10)")
    parser.add_argument("--steps", type=int, default=8, help="of the engine in each turn (default: 8)")
    arguments = parser.parse_args()
    has_header = False
    for dtype in arguments.dtypes:
        model = load_model(ModelSpec(arguments.model, device="cpu", dtype=dtype)).model
        forms = forms_of(model)
        for num_running in arguments.running:
            found = compare(cbtriton.enable(model), forms, num_running, arguments)
            if not has_header:
                columns = ["dtype", "running", *found.floors, "step", "step / fastest"]
                print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
                has_header = True
            figures = [f"{1000 * seconds:.1f}" for seconds in (*found.floors.values(), found.step)]
            print(f"| {dtype} | {num_running} | {' | '.join(figures)} | {found.ratio:.2f} |", flush=True)


def forms_of(model: nn.Module) -> list[Form]:
    """Every form of the model's products."""
    calls: list[nn.Linear] = []

    def note(module: nn.Module, _: object) -> None:
        if isinstance(module, nn.Linear):
            calls.append(module)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    with torch.no_grad(), record_linear_groups(model) as groups:
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    for handle in handles:
        handle.remove()
    group_of = {module: group for group in groups for module in group}
    alone = [(module,) for module in calls]
    joined = list(dict.fromkeys(group_of.get(module, (module,)) for module in calls))
    return [
        Form("plain", tuple(map(plain, alone))),
        Form("plain, joined", tuple(map(plain, joined))),
        Form("packed", tuple(map(packed, alone))),
        Form("packed, joined", tuple(map(packed, joined))),
    ]


def weight_of(group: Sequence[nn.Linear]) -> Tensor:
    """The weights of layers that share their input, stacked."""
    weights = [module.weight.detach() for module in group]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def plain(group: Sequence[nn.Linear]) -> tuple[Product, int]:
    """The product as torch runs it."""
    weight = weight_of(group)
    return (lambda x: F.linear(x, weight)), weight.shape[1]


def packed(group: Sequence[nn.Linear]) -> tuple[Product, int]:
    """The product by oneDNN from packed weights; in float32 where the CPU has no instructions for the type."""
    weight = weight_of(group)
    is_native = weight.dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = weight.dtype if is_native else torch.float32
    ready = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _ROWS_HINT)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return (lambda x: multiply(x.to(dtype), ready, None, "none", [], "").to(x.dtype)), weight.shape[1]


def compare(model: Any, forms: Sequence[Form], num_running: int, arguments: argparse.Namespace) -> Comparison:
    """Lets the forms and the engine take turns."""
    inputs = {size: torch.randn(num_running, size, dtype=model.dtype) for form in forms for _, size in form.products}
    floors: dict[str, list[float]] = {form.name: [] for form in forms}
    steps: list[float] = []
    for turn in engine_turns(model, num_running, arguments):
        steps += turn
        for form in forms:
            floors[form.name] += seconds_of(form, inputs)
    # The first turn warms up what runs for the first time.
    medians = {name: median(seconds[_PASSES:]) for name, seconds in floors.items()}
    return Comparison(medians, median(steps[arguments.steps :]))


@torch.no_grad()
def seconds_of(form: Form, inputs: dict[int, Tensor]) -> list[float]:
    """Seconds of each of a turn's passes over all products."""
    passes = []
    for _ in range(_PASSES):
        started = time.perf_counter()
        for multiply, size in form.products:
            multiply(inputs[size])
        passes.append(time.perf_counter() - started)
    return passes


def engine_turns(model: Any, num_running: int, arguments: argparse.Namespace) -> Iterator[list[float]]:
    """Seconds of each of a turn's decode steps, from one start to the next; the engine rests between turns."""
    new_tokens = arguments.turns * arguments.steps + 2
    lengths = Lengths(arguments.context, arguments.context)
    workload = Synthetic("decode", num_running, lengths, Lengths(new_tokens, new_tokens)).build(
        None, model.config.vocab_size
    )
    config = cbtriton.ContinuousBatchingConfig(
        page_size=32,
        num_blocks=num_running * (2 + (arguments.context + new_tokens) // 32),
        max_requests_per_batch=num_running,
        default_compile_level=arguments.level,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(continuous_batching_config=config)
    try:
        manager.warmup()
        manager.start()
        requests = [
            manager.add_request(list(prompt), max_new_tokens=new_tokens, eos_token_id=-1, streaming=True)
            for prompt in workload.prompts
        ]
        outputs = manager.request_id_iter(requests[-1])
        next(outputs)
        for _ in range(arguments.turns):
            before = len(manager.step_records())
            for _ in range(arguments.steps):
                next(outputs)
            with manager.pause():
                records = [step for step in manager.step_records()[before:] if step.num_rows == num_running]
                starts = [step.start_time for step in records if step.path == "decode"]
                yield [later - start for start, later in itertools.pairwise(starts)]
    finally:
        manager.destroy()


if __name__ == "__main__":
    main()
