"""The folder of a run: every field is there, nothing is ever half written, only the very same run is found again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cbtriton.report import Repeat, Summary, summarise
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.results import SCHEMA_VERSION, Asked, clear, finished_before, read_result, write_failed, write_finished
from cbtriton.stats import EngineStats, Preparation, StepRecord

ROOT = Path(__file__).resolve().parents[2]
STATS = EngineStats(steps=3, preemptions=2, run_time=0.5, preparations=(Preparation("compile", "decode:1", 1, 2.5),))
STEP = StepRecord(7, 5.0, "varlen", 3, 100, 2, "varlen:107x4x64", 5, 60, 4, 0, 4, 1, 2, 0.1, 0.1, 0.2, 0.1)
ASKED = Asked({"continuous_batching": {"page_size": 16}, "resume": False}, ("a=1",), {"workload": "W1"})


def repeat(tokens: int) -> Repeat:
    """One second in which so many tokens came out."""
    output = GenerationOutput(
        f"req_{tokens}", prompt_ids=[1], generated_tokens=[4] * tokens, status=RequestStatus.FINISHED, timestamps=[1.0]
    )
    return Repeat(summarise([output], STATS, 1.0), (output,), (STEP, dataclasses.replace(STEP, index=8)))


def write(folder: Path, asked: Asked = ASKED) -> dict[str, Any]:
    repeats = [repeat(5), repeat(3), repeat(4)]
    write_finished(folder, asked, repeats=repeats, stats=STATS, engine_config={"page_size": 16})
    return json.loads((folder / "result.json").read_text())


def test_a_finished_run_holds_every_field_of_what_was_measured(tmp_path: Path) -> None:
    result = write(tmp_path)
    assert (result["schema_version"], result["status"], result["error"]) == (SCHEMA_VERSION, "finished", None)
    assert result["stats"]["preparations"] == [{"kind": "compile", "bucket": "decode:1", "graphs": 1, "seconds": 2.5}]
    assert set(result["stats"]) == {f.name for f in dataclasses.fields(EngineStats)}
    assert [repeat["output_tokens_per_s"] for repeat in result["repeats"]] == [5.0, 3.0, 4.0]
    assert result["summary"] == result["repeats"][2]
    assert [request["request_id"] for request in result["requests"]] == ["req_4"]
    assert set(result["requests"][0]) == {f.name for f in dataclasses.fields(GenerationOutput)}
    assert result["requests"][0]["status"] == "FINISHED"
    assert result["engine_config"] == {"page_size": 16}
    assert (result["asked"], result["overrides"]) == (ASKED.configuration, ["a=1"])
    assert result["choices"] == {"workload": "W1"}
    assert set(result["environment"]["versions"]) == {"python", "cbtriton", "torch", "triton", "transformers"}
    assert result["environment"]["versions"]["torch"]
    assert set(result["environment"]) == {"versions", "git", "machine"}
    assert result["environment"]["machine"]["cores"] >= 1


def test_steps_are_one_record_a_line_with_the_number_of_their_repeat(tmp_path: Path) -> None:
    write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line.pop("repeat"), line["index"]) for line in lines] == [(n, i) for n in range(3) for i in (7, 8)]
    assert StepRecord(**lines[0]) == STEP


def test_a_failed_run_holds_its_error(tmp_path: Path) -> None:
    try:
        raise ValueError("page_size must be at least 4")
    except ValueError as error:
        write_failed(tmp_path, ASKED, error)
    result = read_result(tmp_path / "result.json")
    assert result["status"] == "failed"
    assert (result["error"]["type"], result["error"]["message"]) == ("ValueError", "page_size must be at least 4")
    assert "test_results.py" in result["error"]["traceback"]
    assert "summary" not in result


def test_a_writer_that_dies_leaves_no_half_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text.encode()[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", die)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    assert list(tmp_path.glob("[!.]*")) == []
    assert finished_before(tmp_path, ASKED) is None
    for name in ("trace.json.gz", "operators.csv", "memory.png", "timeline.png"):
        (tmp_path / name).touch()
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_a_finished_result_of_the_very_same_configuration_is_found_again(tmp_path: Path) -> None:
    assert finished_before(tmp_path, ASKED) is None
    write_failed(tmp_path, ASKED, RuntimeError("no"))
    assert finished_before(tmp_path, ASKED) is None
    result = write(tmp_path)
    again = Asked({"continuous_batching": {"page_size": 16}, "resume": True, "progress_bar": False})
    assert finished_before(tmp_path, again) == result
    with pytest.raises(ValueError, match="another configuration"):
        finished_before(tmp_path, Asked({"continuous_batching": {"page_size": 32}}))


def test_a_result_of_another_schema_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"schema_version": 0}))
    with pytest.raises(ValueError, match=f"schema_version {SCHEMA_VERSION}, got 0"):
        read_result(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        read_result(path)


def test_every_key_is_documented(tmp_path: Path) -> None:
    section = (ROOT / "experiments" / "README.md").read_text().split("## Results", 1)[1]
    names = {*write(tmp_path), *(f.name for f in dataclasses.fields(Summary))}
    assert {name for name in names if f"`{name}`" not in section} == set()
