"""What every rank of a distributed test does: started once for each, and once alone to compare with.

    python course.py MODEL OUTPUT COURSE

Writes what this rank saw to `OUTPUT.<rank>.json`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import cbtriton
from cbtriton.config import KernelConfig

RANK = int(os.environ.get("RANK", "0"))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
REFERENCE = KernelConfig(default="reference")
LENGTH = 12
PROMPTS = [[(7 * place + 3 * i) % 120 + 2 for i in range(length)] for place, length in enumerate((3, 19, 8, 40, 5, 26))]
# Of a record, what does not depend on the clock.
TIMES = ("start_time", "schedule_time", "prepare_time", "run_time", "update_time")


class Words:
    """A tokenizer that only the driver has."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def options(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**({"do_sample": False, "eos_token_id": -1} | fields))


def managed(model: Any, generation: GenerationConfig | None = None, **config: Any) -> Any:
    settings = cbtriton.ContinuousBatchingConfig(**({"page_size": 4, "num_blocks": 128, "seed": 3} | config))
    return cbtriton.ContinuousBatchingManager(model, generation or options(), settings, None, REFERENCE)


def log_of(manager: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in asdict(step).items() if name not in TIMES} for step in manager.step_records()
    ]


def results(manager: Any, ids: list[str]) -> list[list[int]]:
    return [manager.get_result(each, timeout=60).generated_tokens for each in ids]


def plain(model: Any) -> dict[str, Any]:
    cbtriton.enable(model)
    outputs = model.generate_batch(
        PROMPTS,
        options(),
        cbtriton.ContinuousBatchingConfig(page_size=4),
        max_new_tokens=LENGTH,
        kernel_config=REFERENCE,
    )
    again = model.generate_batch(
        PROMPTS[:2],
        options(),
        cbtriton.ContinuousBatchingConfig(page_size=4),
        max_new_tokens=3,
        kernel_config=REFERENCE,
    )
    return {"tokens": [output.generated_tokens for output in (*outputs.values(), *again.values())]}


def busy(model: Any, is_async: bool) -> dict[str, Any]:
    """Few blocks, host memory for some, sampling, streams, several sequences, and cancels at random."""
    generation = options(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2)
    manager = managed(
        model,
        generation,
        num_blocks=28,
        max_batch_tokens=16,
        safety_margin=0.0,
        cpu_offload_space=0.0001,
        use_async_batching=is_async,
        per_request_processors=True,
    )
    manager.start()
    chance, ids = random.Random(5), []
    for round_ in range(3):
        for place, prompt in enumerate(PROMPTS):
            ids.append(
                manager.add_request(
                    prompt, max_new_tokens=LENGTH, streaming=place % 2 == 0, seed=round_, repetition_penalty=1.3
                )
            )
        # Only the driver's clock says when; the others hear of it.
        time.sleep(0.05 * (RANK + 1))
        for victim in chance.sample(ids, 2):
            manager.cancel_request(victim)
    last = {}
    for name in (each for parent in ids for each in (parent, f"{parent}__child#0")):
        for output in manager.request_id_iter(name):
            last[name] = output
    manager.stop()
    stats = manager.stats()
    manager.destroy()
    return {
        "tokens": {name: [output.generated_tokens, output.finish_reason] for name, output in last.items()},
        "log": log_of(manager),
        "preemptions": stats.preemptions,
        "restores": stats.restores,
        "cancelled": stats.requests_cancelled,
    }


def update(model: Any) -> dict[str, Any]:
    """Weights change in a pause: cached prefixes of the old ones serve nobody."""
    manager = managed(model)
    manager.start()
    before = results(manager, manager.add_requests(PROMPTS[:3], max_new_tokens=LENGTH))
    with manager.pause(), torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(1.5)
    after = results(manager, manager.add_requests(PROMPTS[:3], max_new_tokens=LENGTH))
    pinned = manager.pin_prefix(PROMPTS[3][:16])
    with_pin = results(manager, [manager.add_request(PROMPTS[3], max_new_tokens=2)])
    manager.unpin(PROMPTS[3][:16])
    manager.stop()
    manager.start()
    again = results(manager, manager.add_requests(PROMPTS[:3], max_new_tokens=LENGTH))
    manager.stop()
    manager.destroy()
    return {"tokens": [before, after, with_pin, again], "pinned": pinned}


def functions(model: Any) -> dict[str, Any]:
    """Functions of callers, texts that only the driver can read, embeddings, log-probabilities, errors."""
    manager = managed(model, per_request_processors=True)
    if RANK == 0:
        manager.tokenizer = Words()
    manager.start()

    def draw(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Something else on every rank.
        return scores + torch.rand(scores.shape, generator=torch.Generator().manual_seed(RANK)) * 3

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("not today")

    embeds = torch.randn((5, model.config.hidden_size), generator=torch.Generator().manual_seed(1))
    ids = [
        manager.add_request(PROMPTS[0], max_new_tokens=LENGTH, logits_processor=draw),
        manager.add_request(PROMPTS[1], max_new_tokens=LENGTH, logits_processor=fail),
        manager.add_request(PROMPTS[2], max_new_tokens=LENGTH, logprobs="raw", top_logprobs=3, prompt_logprobs=True),
        manager.add_request(None, max_new_tokens=LENGTH, inputs_embeds=embeds),
        manager.add_request(PROMPTS[4], max_new_tokens=LENGTH, sequence_bias={(5,): 1.5}, suppress_tokens=[9, 11]),
    ]
    if RANK == 0:
        first = results(manager, [manager.add_request(PROMPTS[5], max_new_tokens=LENGTH, request_id="probe")])[0]
        ids.append(manager.add_request(PROMPTS[5], "stopped", max_new_tokens=LENGTH, stop_strings=[f"<{first[4]}>"]))
    outputs = [manager.get_result(each, timeout=60) for each in ids]
    manager.stop()
    manager.destroy()
    return {
        "tokens": [output.generated_tokens for output in outputs],
        "errors": [output.error for output in outputs],
        "logprobs": [outputs[2].logprobs, outputs[2].prompt_logprobs],
    }


def late(model: Any) -> dict[str, Any]:
    """Ranks submit at other times than the driver, before and after it has the answer."""
    manager = managed(model)
    manager.start()
    tokens = []
    for place, prompt in enumerate(PROMPTS[:4]):
        if (place + RANK) % 2:
            time.sleep(0.3)
        tokens.append(results(manager, [manager.add_request(prompt, max_new_tokens=4)])[0])
    manager.stop()
    manager.destroy()
    return {"tokens": tokens}


def end_of_others(model: Any, end: Callable[[], None]) -> dict[str, Any]:
    """The last rank ends in the middle; the others say what they were told, and when."""
    manager = managed(model, cpu_group_timeout=4.0)
    manager.start()
    name = manager.add_request(PROMPTS[0], max_new_tokens=400, streaming=True)
    for _ in range(5):
        manager.get_result(name, timeout=60)
    if RANK == NUM_RANKS - 1:
        threading.Timer(0.5, end).start()
        time.sleep(60)
    start, error = time.perf_counter() + 0.5, None
    try:
        for _ in manager.request_id_iter(name):
            pass
    except cbtriton.EngineDiedError as caught:
        error = f"{caught} <- {type(caught.__cause__).__name__}"
    return {"seconds": time.perf_counter() - start, "error": error}


def killed(model: Any) -> dict[str, Any]:
    return end_of_others(model, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stalled(model: Any) -> dict[str, Any]:
    return end_of_others(model, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def refused(model: Any) -> dict[str, Any]:
    try:
        managed(model)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


COURSES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": plain,
    "busy": lambda model: busy(model, is_async=False),
    "busy-async": lambda model: busy(model, is_async=True),
    "update": update,
    "functions": functions,
    "late": late,
    "killed": killed,
    "stalled": stalled,
    "refused": refused,
}


def main() -> None:
    path, output, *names = sys.argv[1:]
    plan = {"tp_plan": "auto"} if NUM_RANKS > 1 else {}
    seen = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plan)
        seen[name] = COURSES[name](model)
    with open(f"{output}.{RANK}.json", "w", encoding="utf-8") as file:
        json.dump(seen, file)
    # Groups of ranks that are gone would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
