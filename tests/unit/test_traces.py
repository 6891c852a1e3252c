"""Replays of traces: each public format, its mistakes by their line, and the files that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtriton.traces import TraceReplay, example_trace
from cbtriton.workloads import Workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.4799600,396,109
2023-11-17 00:00:03.9799600,7,1
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [0, 1]}

{"timestamp": 4052, "input_length": 512, "output_length": 7, "hash_ids": [2]}
"""


def build(path: Path, text: str, **options: float) -> Workload:
    path.write_text(text, encoding="utf-8")
    return TraceReplay(str(path), **options).build(None, 1000)  # type: ignore[arg-type]


def lengths(workload: Workload) -> list[int]:
    return [len(prompt) for prompt in workload.prompts]


def test_azure_traces_have_dates_and_lengths(tmp_path: Path) -> None:
    workload = build(tmp_path / "a.csv", AZURE)
    assert lengths(workload) == [374, 396, 7]
    assert workload.max_new_tokens == (44, 109, 1)
    assert workload.arrival_times == pytest.approx((0, 0.5, 5 * 3600 + 43 * 60))
    assert workload.ignore_eos


def test_azure_times_may_have_a_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,1\n2024-05-10 02:00:01.5+02:00,1,1\n"
    assert build(tmp_path / "a.csv", text).arrival_times == (0, 1.5)


def test_burstgpt_traces_have_seconds_and_columns_to_ignore(tmp_path: Path) -> None:
    workload = build(tmp_path / "b.csv", BURSTGPT)
    assert lengths(workload) == [472, 1087]
    assert workload.max_new_tokens == (18, 230)
    assert workload.arrival_times == (0, 40.5)


def test_mooncake_traces_have_milliseconds_and_equal_blocks_where_hashes_are_equal(tmp_path: Path) -> None:
    workload = build(tmp_path / "m.jsonl", MOONCAKE)
    one, two, three = workload.prompts
    assert lengths(workload) == [1025, 700, 512]
    assert workload.max_new_tokens == (5, 6, 7)
    assert workload.arrival_times == pytest.approx((0, 0, 3.052))
    assert one[:700] == two
    assert one[1024] == three[0]
    assert one[:512] != one[512:1024]
    assert one[:512] != three


def test_a_replay_can_be_faster_shorter_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert build(path, AZURE, speed=2.0, num_requests=2).arrival_times == pytest.approx((0, 0.25))
    whole, again, other = build(path, AZURE), build(path, AZURE), build(path, AZURE, seed=1)
    assert whole == again
    assert whole.prompts != other.prompts
    assert build(path, AZURE, num_requests=2).prompts == whole.prompts[:2]
    mooncake = [build(tmp_path / "m.jsonl", MOONCAKE, seed=seed).prompts for seed in (0, 0, 1)]
    assert mooncake[0] == mooncake[1] != mooncake[2]


def test_rows_run_in_the_order_of_their_times(tmp_path: Path) -> None:
    rows = BURSTGPT.splitlines()
    assert lengths(build(tmp_path / "b.csv", "\n".join([rows[0], rows[2], rows[1]]))) == [472, 1087]


@pytest.mark.parametrize(
    ("text", "row", "complaint"),
    [
        (AZURE, "yesterday,1,1", "TIMESTAMP must be a date and a time, got 'yesterday'"),
        (AZURE, "2023-11-16 18:17:04,0,1", "ContextTokens must be an integer of at least 1, got '0'"),
        (AZURE, "2023-11-16 18:17:04,1", "GeneratedTokens must be .* got None"),
        (BURSTGPT, "x,GPT-4,1,1,2,API log", "Timestamp must be a number, got 'x'"),
        (BURSTGPT, "nan,GPT-4,1,1,2,API log", "Timestamp must be a number, got 'nan'"),
        (BURSTGPT, "9,GPT-4,1.5,1,2,API log", "Request tokens must be an integer"),
        (BURSTGPT, "9,GPT-4,1,0,1,API log", "Response tokens .* got '0'; leave failed requests out"),
        (MOONCAKE, "{", "not JSON"),
        (MOONCAKE, "[]", "must be an object with timestamp, input_length, output_length, hash_ids"),
        (MOONCAKE, '{"timestamp": 1, "input_length": 1, "output_length": 1}', "must be an object with"),
        (
            MOONCAKE,
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "hash_ids must be 2 integers",
        ),
        (
            MOONCAKE,
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids must be 1 integers",
        ),
        (
            MOONCAKE,
            '{"timestamp": null, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            "timestamp must be a number, got None",
        ),
        (
            MOONCAKE,
            '{"timestamp": 1, "input_length": true, "output_length": 1, "hash_ids": [1]}',
            "input_length must be an integer",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, text: str, row: str, complaint: str) -> None:
    path = tmp_path / ("t.jsonl" if text is MOONCAKE else "t.csv")
    bad_line = len(text.splitlines()) + 1
    with pytest.raises(ValueError, match=rf"{path.name}, line {bad_line}: {complaint}"):
        build(path, text + row + "\n")
    build(path, text + row + "\n", num_requests=1)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.csv", "a,b\n1,2\n", r"t\.csv, line 1: the columns must be .* or of Timestamp, .* got a, b"),
        ("t.csv", "", r"line 1: the columns must be"),
        ("t.csv", AZURE.splitlines()[0], "has no request"),
        ("t.jsonl", "\n", "has no request"),
        ("t.txt", "x", r"must end in \.csv or \.jsonl"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build(tmp_path / name, text)


def test_what_cannot_be_read_or_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the trace .*: No such file"):
        TraceReplay(str(tmp_path / "none.csv")).build(None, 1000)
    with pytest.raises(ValueError, match="speed must be above 0, got 0"):
        TraceReplay("t.csv", speed=0)
    with pytest.raises(ValueError, match="num_requests must be at least 1 or None, got 0"):
        TraceReplay("t.csv", num_requests=0)
    with pytest.raises(ValueError, match="one of azure, burstgpt, mooncake, got 'other'"):
        example_trace("other")


@pytest.mark.parametrize(("name", "shared"), [("azure", 1), ("burstgpt", 1), ("mooncake", 16)])
def test_the_traces_that_ship_fit_the_tiny_model_and_share_what_they_say(name: str, shared: int) -> None:
    workload = example_trace(name).build(None, 1000)
    assert len(workload.prompts) in (16, 24)
    assert max(lengths(workload)) < 2048
    assert workload.arrival_times[-1] < 30
    assert max(sum(p[:200] == q[:200] for p in workload.prompts) for q in workload.prompts) == shared
