"""Several ranks do what one process does, and end together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

COURSE = Path(__file__).with_name("course.py")
COURSES = ("plain", "busy", "busy-async", "update", "functions", "late")
# Heads, experts and sizes that two and three ranks can share.
BASE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "vocab_size": 126,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run(folder: Path, model: Path, num_ranks: int, *courses: str, survivors: int | None = None) -> list[dict[str, Any]]:
    """What each rank saw, of the first `survivors` where not all come to their end."""
    output = folder / f"seen-{num_ranks}-{courses[0]}"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(COURSE), str(model), str(output), *courses],
            env=os.environ | place | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        ends = [rank.communicate(timeout=240)[0] for rank in ranks[:survivors]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, end in zip(ranks, ends, strict=False):
        assert rank.returncode == 0, end[-3000:]
    return [json.loads(Path(f"{output}.{rank}.json").read_text()) for rank in range(len(ends))]


def saved(folder: Path, model_type: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **BASE | MODELS.get(model_type, {}) | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("alone"), checkpoint, 1, *courses_of(checkpoint, 2))[0]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request, checkpoint: Path, tmp_path_factory) -> list[dict[str, Any]]:
    courses = courses_of(checkpoint, request.param)
    return run(tmp_path_factory.mktemp("ranks"), checkpoint, request.param, *courses)


def courses_of(checkpoint: Path, num_ranks: int) -> tuple[str, ...]:
    """All of them once, and for the others those that show most."""
    return COURSES if checkpoint.name == "llama" and num_ranks == 2 else ("plain", "busy")


def skip_without(course: str, ranks: list[dict[str, Any]]) -> None:
    if course not in ranks[0]:
        pytest.skip("two ranks with a Llama show it")


def test_tokens_are_those_of_one_process(alone, ranks) -> None:
    for seen in ranks:
        assert seen["plain"] == alone["plain"]


def test_ranks_may_submit_before_and_after_the_driver(alone, ranks) -> None:
    skip_without("late", ranks)
    for seen in ranks:
        assert seen["late"] == alone["late"]


@pytest.mark.parametrize("course", ["busy", "busy-async"])
def test_all_ranks_take_the_same_steps_while_requests_are_cancelled_and_preempted(alone, ranks, course) -> None:
    skip_without(course, ranks)
    driver = ranks[0][course]
    assert min(driver["preemptions"], driver["restores"], driver["cancelled"]) > 0
    for seen in ranks[1:]:
        assert seen[course] == driver
    # What was cancelled, and when, is a matter of time; all else is not.
    compared = 0
    for name, (tokens, reason) in driver["tokens"].items():
        expected, expected_reason = alone[course]["tokens"][name]
        shorter = min(len(tokens), len(expected))
        assert tokens[:shorter] == expected[:shorter]
        compared += reason == expected_reason == "length"
    assert compared > 10


def test_weights_that_change_in_a_pause_are_picked_up_by_all(alone, ranks) -> None:
    skip_without("update", ranks)
    before, after, *_ = alone["update"]["tokens"]
    assert before != after
    for seen in ranks:
        assert seen["update"] == alone["update"]


def test_functions_of_callers_decide_on_the_driver(alone, ranks) -> None:
    skip_without("functions", ranks)
    for seen in ranks:
        mine, theirs = seen["functions"], alone["functions"]
        assert mine["tokens"] == theirs["tokens"][: len(mine["tokens"])]
        assert mine["errors"] == theirs["errors"][: len(mine["tokens"])]
        for some, expected in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            torch.testing.assert_close(torch.tensor(some), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert "not today" in alone["functions"]["errors"][1]
    assert len(ranks[0]["functions"]["tokens"][-1]) == 5, "stopped at a text that only the driver can read"


@pytest.mark.parametrize("course", ["killed", "stalled"])
def test_ranks_end_with_one_that_ends(tmp_path: Path, course: str) -> None:
    start = time.monotonic()
    for seen in run(tmp_path, saved(tmp_path / "model", "llama"), 3, course, survivors=2):
        assert seen[course]["error"] is not None
        assert "the engine died of RankError: rank" in seen[course]["error"]
        assert "is gone or did not answer within cpu_group_timeout=4 s" in seen[course]["error"]
        # The time limit of 4 s, and what it takes to notice.
        assert seen[course]["seconds"] < 8
    assert time.monotonic() - start < 60


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    for seen in run(tmp_path, tmp_path / "model", 3, "refused"):
        assert "got num_attention_heads=8 and num_key_value_heads=4 for 3 ranks" in seen["refused"]["error"]
