"""Tiny random models, what they answer without this package, and ways to hold an engine at a chosen step."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessorList,
    PreTrainedModel,
)

import cbtriton
from cbtriton import ContinuousBatchingConfig, GenerationOutput
from cbtriton.manager import ContinuousBatchingManager

VOCAB_SIZE = 128
# Long enough for the slowest machine; a test that gets here has a deadlock.
PATIENCE = 30.0


def build(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model with random weights that nothing stops from generating."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def llama_config(**overrides: Any) -> LlamaConfig:
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        # Large enough that greedy answers do not end in loops.
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(settings | overrides))


def hybrid_config(**overrides: Any) -> Gemma3TextConfig:
    """Five layers with a window, each in a group of its own, and one that sees everything."""
    settings = {
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "initializer_range": 0.3,
    }
    return Gemma3TextConfig(**(settings | overrides))


def plain_greedy(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, processors: Sequence[Any] = (), **options: Any
) -> list[int]:
    """What `model.generate` answers to one prompt; `processors` come behind those that the options ask for."""
    input_ids = torch.tensor([prompt])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, **({"eos_token_id": None, "pad_token_id": 0} | options)
    )
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
        )
    return output[0, len(prompt) :].tolist()


def dense_logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """`[len(answer), vocab_size]`, from one forward pass over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


class Oracle:
    """Answers of the tiny Llama through plain `generate`, each computed once."""

    def __init__(self) -> None:
        self.model = build(llama_config())
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        known = self._answers.get(tuple(prompt), [])
        if len(known) < num_tokens:
            known = self._answers[tuple(prompt)] = plain_greedy(self.model, prompt, num_tokens)
        return known[:num_tokens]

    def logprobs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        return dense_logprobs(self.model, prompt, answer)


class Gate:
    """Holds a model before each forward pass until told to go on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._turns = threading.Semaphore(0)
        self._is_open = False
        self._num_let = 0
        self._num_arrived = 0
        self._hook = model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        self._num_arrived += 1
        if not self._is_open:
            assert self._turns.acquire(timeout=PATIENCE), "nobody lets the model go on"

    def let(self, num_steps: int) -> None:
        self._num_let += num_steps
        for _ in range(num_steps):
            self._turns.release()

    def wait(self) -> None:
        """Returns when the model stands at the gate."""
        wait_until(lambda: self._num_arrived > self._num_let)

    def step(self, num_steps: int) -> None:
        """Lets so many steps run, and returns when the next one stands at the gate."""
        self.let(num_steps)
        self.wait()

    def open(self) -> None:
        self._is_open = True
        self._turns.release()
        self._hook.remove()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Calls `function` in a thread; the returned function waits for what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert outcome, "the call never returned"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


@contextmanager
def running(model: Any, options: Any = None, kernels: Any = None, **config: Any) -> Iterator[ContinuousBatchingManager]:
    """A started manager with a small cache; destroyed at the end, whatever happens."""
    manager = ContinuousBatchingManager(model, options or greedy_options(), small(**config), None, kernels)
    manager.start()
    try:
        yield manager
    finally:
        manager.destroy()


@contextmanager
def gated(
    model: Any,
    options: Any = None,
    before_start: Callable[[ContinuousBatchingManager], None] = lambda manager: None,
    **config: Any,
) -> Iterator[tuple[ContinuousBatchingManager, Gate]]:
    """A started manager whose steps wait for the gate."""
    manager = ContinuousBatchingManager(model, options or greedy_options(), small(**config))
    manager.warmup()
    before_start(manager)
    gate = Gate(model)
    try:
        manager.start()
        yield manager, gate
    finally:
        gate.open()
        manager.destroy()


def small(**settings: Any) -> ContinuousBatchingConfig:
    """A configuration with a cache of 64 blocks of 16 tokens."""
    return ContinuousBatchingConfig(**({"page_size": 16, "num_blocks": 64, "seed": 7} | settings))


def greedy_options(**options: Any) -> GenerationConfig:
    return GenerationConfig(**({"do_sample": False, "eos_token_id": -1} | options))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCAB_SIZE), k=length)


def sequences_of_one_prompt(
    manager: ContinuousBatchingManager, prompts: list[list[int]], answers: list[list[int]], length: int
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """What each of three sequences of each prompt answers, and what it should; both by request id."""
    parents = manager.add_requests(prompts, max_new_tokens=length)
    expected = {
        name: answer
        for parent, answer in zip(parents, answers, strict=True)
        for name in (parent, f"{parent}__child#0", f"{parent}__child#1")
    }
    return {name: manager.get_result(name).generated_tokens for name in expected}, expected


def random_setting(chance: random.Random, seed: int) -> dict[str, Any]:
    """Some blocks, steps and schedulers, every other time asynchronous."""
    return {
        "page_size": 4,
        "num_blocks": chance.choice([20, 28, 64]),
        "max_batch_tokens": chance.choice([6, 16, 64]),
        "max_requests_per_batch": chance.choice([2, 4, 8]),
        "scheduler_type": chance.choice(["fifo", "prefill_first"]),
        "use_async_batching": seed % 2 == 0,
        "safety_margin": 0.0,
    }


def assert_cancels_disturb_nobody(
    manager: ContinuousBatchingManager,
    prompts: list[list[int]],
    answers: list[list[int]],
    chance: random.Random,
    num_requests: int,
) -> None:
    """Requests of random lengths come, and some are cancelled: all tokens are the first ones of their answers."""
    added: dict[str, list[int]] = {}
    cancelled = set()
    planned = [
        (place, chance.randint(1, len(answers[place]))) for place in chance.choices(range(len(prompts)), k=num_requests)
    ]
    for place, length in planned:
        name = manager.add_request(prompts[place], max_new_tokens=length)
        added[name] = answers[place][:length]
        if chance.random() < 0.3:
            cancelled.add(victim := chance.choice(list(added)))
            manager.cancel_request(victim)
    outputs = {name: manager.get_result(name) for name in added}
    for name, expected in added.items():
        tokens = outputs[name].generated_tokens
        assert tokens == (expected[: len(tokens)] if name in cancelled else expected)
    assert any(len(outputs[name].generated_tokens) == len(added[name]) for name in added)


class Tools:
    """The helpers of this file, for tests that cannot import it."""

    build = staticmethod(build)
    llama_config = staticmethod(llama_config)
    hybrid_config = staticmethod(hybrid_config)
    plain_greedy = staticmethod(plain_greedy)
    dense_logprobs = staticmethod(dense_logprobs)
    Gate = Gate
    wait_until = staticmethod(wait_until)
    in_thread = staticmethod(in_thread)
    running = staticmethod(running)
    gated = staticmethod(gated)
    small = staticmethod(small)
    options = staticmethod(greedy_options)
    prompt = staticmethod(random_prompt)
    sequences_of_one_prompt = staticmethod(sequences_of_one_prompt)
    random_setting = staticmethod(random_setting)
    assert_cancels_disturb_nobody = staticmethod(assert_cancels_disturb_nobody)
    patience = PATIENCE

    @staticmethod
    def tokens(outputs: dict[str, GenerationOutput]) -> list[list[int]]:
        return [output.generated_tokens for output in outputs.values()]


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def model(oracle: Oracle) -> Any:
    """A tiny Llama with this package's methods, and the same weights as the oracle's."""
    return cbtriton.enable(copy.deepcopy(oracle.model))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Lengths around multiples of the page size of 16."""
    return [random_prompt(length) for length in (1, 5, 15, 16, 17, 32, 33, 70)]


@pytest.fixture(autouse=True)
def no_engine_survives() -> Iterator[None]:
    """Every test must leave no thread of an engine behind."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cbtriton-")]
