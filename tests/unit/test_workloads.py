"""Workloads: that they are the ones described, the same everywhere, and that a bad file says where it is bad."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cbtriton.model_zoo import CharTokenizer
from cbtriton.workloads import (
    BENCHMARK_WORKLOADS,
    ChatPrompts,
    Lengths,
    PromptFile,
    Synthetic,
    Workload,
    benchmark_workload,
)

TOKENIZER = CharTokenizer()


def build_file(path: Path, content: str, **options: object) -> Workload:
    path.write_text(content, encoding="utf-8")
    return PromptFile(str(path), **options).build(TOKENIZER, 128)  # type: ignore[arg-type]


def test_chat_prompts_are_many_and_a_third_shares_its_beginning() -> None:
    workload = ChatPrompts().build(TOKENIZER, 128)
    beginnings = [prompt[:500] for prompt in workload.prompts if len(prompt) > 500]
    shared = max(beginnings.count(beginning) for beginning in beginnings)
    assert len(workload.prompts) >= 24
    assert shared >= len(workload.prompts) / 3
    assert "What is the capital of France?" in workload.titles
    assert workload.max_new_tokens == (64,) * len(workload.prompts)


def test_chat_prompts_go_through_the_chat_template_and_ask_for_an_answer() -> None:
    prompt = ChatPrompts(num_prompts=1).build(TOKENIZER, 128).prompts[0]
    assert TOKENIZER.decode(prompt) == "user: What is the capital of France?.assistant: "


def test_chat_prompts_without_a_tokenizer_or_template_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        ChatPrompts().build(None, 128)
    bare = CharTokenizer()
    bare.chat_template = ""
    with pytest.raises(ValueError, match="no chat template"):
        ChatPrompts().build(bare, 128)


def test_a_text_file_gives_a_prompt_for_each_line_that_is_not_blank(tmp_path: Path) -> None:
    workload = build_file(tmp_path / "p.txt", "first\n\n  \nsecond", max_new_tokens=5, chat=False)
    assert workload.titles == ("first", "second")
    assert workload.prompts == tuple(tuple(TOKENIZER.encode(t, add_special_tokens=True)) for t in workload.titles)
    assert workload.max_new_tokens == (5, 5)


def test_a_json_lines_file_takes_prompts_messages_and_limits(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    lines = [{"prompt": "one", "max_new_tokens": 3}, {"messages": messages}]
    workload = build_file(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)))
    assert workload.titles == ("one", "hello")
    assert workload.max_new_tokens == (3, 64)
    assert TOKENIZER.decode(workload.prompts[1]) == "system: be kind.user: hello.assistant: "


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ("{}", "either"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": "  "}', "not blank"),
        ('{"prompt": 3}', "not blank"),
        ('{"messages": []}', "at least one"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"prompt": "a", "temperature": 1}', "unknown keys .'temperature'."),
        ('{"prompt": "a", "max_new_tokens": 0}', "at least 1"),
        ('{"prompt": "a", "max_new_tokens": true}', "integer"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(ValueError, match=rf"p\.jsonl, line 3: .*{complaint}"):
        build_file(path, f'{{"prompt": "fine"}}\n\n{line}\n')


def test_bytes_that_are_no_utf8_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"line 2"):
        PromptFile(str(tmp_path / "p.txt")).build(TOKENIZER, 128)


@pytest.mark.parametrize(("name", "complaint"), [("none.txt", "No such file"), ("p.csv", "must end in")])
def test_a_file_that_cannot_be_read_is_a_users_error(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PromptFile(str(tmp_path / name)).build(TOKENIZER, 128)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no prompt"):
        build_file(tmp_path / "p.txt", "\n \n")


@pytest.mark.parametrize(
    ("name", "num_requests", "prompt_range", "new_range", "prefix"),
    [
        ("W1", 16, (10, 140), (64, 64), 0),
        ("W2", 64, (8, 512), (8, 128), 0),
        ("W3", 32, (400, 448), (32, 32), 384),
        ("W4", 4, (2048, 2048), (64, 64), 0),
    ],
)
def test_benchmark_workloads_have_their_described_shape(
    name: str, num_requests: int, prompt_range: tuple[int, int], new_range: tuple[int, int], prefix: int
) -> None:
    workload = benchmark_workload(name).build(None, 49152)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == num_requests
    assert prompt_range[0] <= min(lengths) <= max(lengths) <= prompt_range[1]
    assert new_range[0] <= min(workload.max_new_tokens) <= max(workload.max_new_tokens) <= new_range[1]
    assert len({prompt[:prefix] for prompt in workload.prompts}) == 1
    assert len({prompt[prefix] for prompt in workload.prompts}) > 1
    assert workload.ignore_eos
    assert all(4 <= token < 49152 for prompt in workload.prompts for token in prompt)


def test_log_uniform_lengths_have_as_many_short_as_long_ones() -> None:
    rng = random.Random(1)
    drawn = [Lengths(8, 512, "loguniform").draw(rng) for _ in range(4000)]
    below_geometric_mean = sum(length < 64 for length in drawn) / len(drawn)
    assert abs(below_geometric_mean - 0.5) < 0.03


def test_log_normal_lengths_gather_around_the_geometric_mean() -> None:
    rng = random.Random(1)
    drawn = [Lengths(8, 512, "lognormal").draw(rng) for _ in range(4000)]
    within_one_deviation = sum(64 / 8**0.5 <= length <= 64 * 8**0.5 for length in drawn) / len(drawn)
    assert abs(within_one_deviation - 0.683) < 0.03
    assert min(drawn) == 8
    assert max(drawn) == 512


def test_a_synthetic_workload_depends_on_its_seed_only() -> None:
    one, same, other = (Synthetic(seed=seed).build(None, 1000) for seed in (5, 5, 6))
    assert one == same
    assert one.prompts != other.prompts


def test_unknown_names_and_bounds_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="W1, W2, W3, W4"):
        benchmark_workload("W9")
    with pytest.raises(ValueError, match="1 <= low <= high"):
        Lengths(5, 4)
    with pytest.raises(ValueError, match="uniform, loguniform or lognormal"):
        Lengths(1, 4, "normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one entry for each prompt"):
        Workload("w", ((1,),), (1, 2))
    with pytest.raises(ValueError, match="empty or have one entry for each prompt, got 1 for 2 prompts"):
        Workload("w", ((1,), (2,)), (1, 2), arrival_times=(0.0,))
    for times in ((1.0, 0.5), (-1.0, 0.0), (0.0, float("inf")), (0.0, float("nan"))):
        with pytest.raises(ValueError, match="finite, at least 0 and never decrease"):
            Workload("w", ((1,), (2,)), (1, 2), arrival_times=times)
    assert set(BENCHMARK_WORKLOADS) == {"W1", "W2", "W3", "W4"}
