"""Sources shaped like the traffic of services: arrivals at a rate, trees of prefixes, conversations, roll-outs.

Like those in `workloads`, each has a `build` that gives a `Workload`; the same description and vocabulary give the same
one everywhere. All tokens are random. Used by the command's configuration.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Protocol

from cbtriton.model_zoo import Tokenizer
from cbtriton.workloads import Lengths, Workload, draw_tokens


class Source(Protocol):
    """Anything that builds a workload."""

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """The workload for one tokenizer and vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """The prompts of another source, arriving at a rate that does not depend on how fast they are served.

    The gaps between arrivals, also the one before the first, follow a gamma distribution of shape 1 / cv² and scale
    cv² / rate: their mean is 1 / rate and their standard deviation cv / rate.

    Attributes:
        prompts: Where the prompts come from.
        rate: Mean arrivals per second.
        coefficient_of_variation: cv; 0 is a steady beat, 1 a Poisson process, more comes in bursts.
        seed: Of the arrivals.

    Raises:
        ValueError: If the rate is not positive or cv is negative.
    """

    prompts: Source
    rate: float
    coefficient_of_variation: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.coefficient_of_variation < 0:
            raise ValueError(
                f"rate must be above 0 and coefficient_of_variation at least 0, got {self.rate} and "
                f"{self.coefficient_of_variation}"
            )

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Builds the prompts and draws when they arrive.

        Raises:
            ValueError: If the prompts have arrival times of their own, or cannot be built.
        """
        workload = self.prompts.build(tokenizer, vocab_size)
        if workload.arrival_times:
            raise ValueError(f"prompts must have no arrival times of their own, those of {workload.name} have")
        rng = random.Random(self.seed)
        time, arrival_times = 0.0, []
        for _ in workload.prompts:
            time += self._draw_gap(rng)
            arrival_times.append(time)
        return replace(workload, arrival_times=tuple(arrival_times))

    def _draw_gap(self, rng: random.Random) -> float:
        variance = self.coefficient_of_variation**2
        return rng.gammavariate(1 / variance, variance / self.rate) if variance else 1 / self.rate


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts that share prefixes like paths in a tree: system prompt, tool descriptions, few-shot examples, question.

    Attributes:
        num_requests: Number of prompts; each takes a random path from the root to a leaf.
        depth: Levels of the tree below the root, which is empty.
        branching: Children of each node.
        tokens_per_level: Tokens of each node.
        prompt_lengths: Length of each prompt's own part, behind those of its path.
        new_tokens: Tokens to generate for each prompt.
        seed: Of the generator.

    Raises:
        ValueError: If a number is below 1.
    """

    num_requests: int = 32
    depth: int = 3
    branching: int = 2
    tokens_per_level: int = 64
    prompt_lengths: Lengths = field(default_factory=lambda: Lengths(8, 32))
    new_tokens: Lengths = field(default_factory=lambda: Lengths(16, 32))
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, "num_requests", "depth", "branching", "tokens_per_level")

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Draws the paths, and the tokens of those nodes that they visit."""
        rng = random.Random(self.seed)
        nodes: dict[tuple[int, ...], tuple[int, ...]] = {}
        prompts, new_tokens = [], []
        for _ in range(self.num_requests):
            prompt: tuple[int, ...] = ()
            path: tuple[int, ...] = ()
            for _ in range(self.depth):
                path += (rng.randrange(self.branching),)
                if path not in nodes:
                    nodes[path] = draw_tokens(rng, self.tokens_per_level, vocab_size)
                prompt += nodes[path]
            prompts.append(prompt + draw_tokens(rng, self.prompt_lengths.draw(rng), vocab_size))
            new_tokens.append(self.new_tokens.draw(rng))
        return Workload("prefix_tree", tuple(prompts), tuple(new_tokens), ignore_eos=True)


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations: the prompt of each turn is the whole conversation so far, answers included, and what is new.

    These answers are random tokens, as many as the engine generates, since a workload is known beforehand. A turn
    arrives some time after the one before, whether that has been answered or not.

    Attributes:
        num_conversations: Number of conversations.
        num_turns: Turns of each conversation.
        rate: Conversations that begin per second, on average (Poisson).
        seconds_between_turns: Mean time from one turn's arrival to the next one's (exponential).
        system_prompt: Tokens that all conversations begin with; 0 for none.
        user_tokens: Length of what the user says in a turn.
        new_tokens: Length of each answer.
        seed: Of the generator.

    Raises:
        ValueError: If a number is out of range.
    """

    num_conversations: int = 8
    num_turns: int = 4
    rate: float = 2.0
    seconds_between_turns: float = 2.0
    system_prompt: int = 64
    user_tokens: Lengths = field(default_factory=lambda: Lengths(8, 64, "lognormal"))
    new_tokens: Lengths = field(default_factory=lambda: Lengths(16, 64, "lognormal"))
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, "num_conversations", "num_turns")
        if self.rate <= 0 or self.seconds_between_turns <= 0 or self.system_prompt < 0:
            raise ValueError(
                "rate and seconds_between_turns must be above 0 and system_prompt at least 0, "
                f"got {self.rate}, {self.seconds_between_turns} and {self.system_prompt}"
            )

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Draws the conversations and puts their turns into the order in which they arrive."""
        rng = random.Random(self.seed)
        system_prompt = draw_tokens(rng, self.system_prompt, vocab_size)
        turns: list[tuple[float, tuple[int, ...], int]] = []
        beginning = 0.0
        for _ in range(self.num_conversations):
            beginning += rng.expovariate(self.rate)
            arrival, conversation = beginning, system_prompt
            for _ in range(self.num_turns):
                conversation += draw_tokens(rng, self.user_tokens.draw(rng), vocab_size)
                num_new = self.new_tokens.draw(rng)
                turns.append((arrival, conversation, num_new))
                conversation += draw_tokens(rng, num_new, vocab_size)
                arrival += rng.expovariate(1 / self.seconds_between_turns)
        arrival_times, prompts, new_tokens = zip(*sorted(turns), strict=True)
        return Workload("multi_turn", prompts, new_tokens, ignore_eos=True, arrival_times=arrival_times)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples for reinforcement learning: some requests for each prompt, most of them short and a few very long.

    Attributes:
        num_prompts: Number of different prompts.
        num_samples: Requests for each prompt, side by side.
        prompt_lengths: Length of each prompt.
        new_tokens: Tokens to generate for each request.
        seed: Of the generator.

    Raises:
        ValueError: If a number is below 1.
    """

    num_prompts: int = 8
    num_samples: int = 8
    prompt_lengths: Lengths = field(default_factory=lambda: Lengths(32, 128))
    new_tokens: Lengths = field(default_factory=lambda: Lengths(8, 512, "lognormal"))
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, "num_prompts", "num_samples")

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Draws the prompts and the lengths."""
        rng = random.Random(self.seed)
        prompts: list[tuple[int, ...]] = []
        for _ in range(self.num_prompts):
            prompts += [draw_tokens(rng, self.prompt_lengths.draw(rng), vocab_size)] * self.num_samples
        new_tokens = tuple(self.new_tokens.draw(rng) for _ in prompts)
        return Workload("rollouts", tuple(prompts), new_tokens, ignore_eos=True)


def _require_positive(source: object, *names: str) -> None:
    for name in names:
        if getattr(source, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(source, name)}")
