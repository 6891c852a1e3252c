"""The command, end to end: what it answers, what it writes, and how it takes a user's mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_module

from cbtriton import cli, sweep_report
from cbtriton.model_zoo import CharTokenizer, ModelSpec, load_model

COMMAND = Path(sys.executable).with_name("cbtriton")
QUIET = ("model=tiny_random", "model.device=cpu", "progress_bar=false")
SMALL = ("workload=synthetic", "workload.num_requests=2", "workload.new_tokens.low=4", "workload.new_tokens.high=4")


def run_here(output_dir: Path, *overrides: str) -> dict[str, Any]:
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        cfg = compose("config", overrides=[*QUIET, *overrides])
    cli.run(cfg, output_dir)
    return json.loads((output_dir / "result.json").read_text())


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_the_answers_are_those_of_the_plain_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("What is it?\nHello!\n" + "A longer prompt. " * 20)
    result = run_here(tmp_path, "workload=file", f"workload.path={tmp_path / 'p.txt'}", "generation.max_new_tokens=12")
    model = load_model(ModelSpec("tiny_random", device="cpu")).model
    printed = capsys.readouterr().out
    assert len(result["requests"]) == 3
    for request in result["requests"]:
        ids = torch.tensor([request["prompt_ids"]])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert request["generated_tokens"] == expected
        assert CharTokenizer().decode(expected, skip_special_tokens=True).strip() in printed
    assert "> What is it?" in printed
    assert "time to first token" in printed


def test_the_result_tells_what_was_asked_what_was_decided_and_what_it_cost(tmp_path: Path) -> None:
    result = run_here(
        tmp_path,
        "workload=synthetic",
        "workload.num_requests=5",
        "workload.new_tokens.low=4",
        "workload.new_tokens.high=4",
        "continuous_batching.page_size=16",
        "kernels/sample=reference",
    )
    assert result["summary"]["output_tokens"] == 5 * 4
    assert result["summary"]["num_failed"] == 0
    assert result["summary"]["inter_token_latency"]["p50_ms"] > 0
    assert result["stats"]["steps"] >= 4
    assert result["asked"]["kernels"]["sample"] == "reference"
    assert result["engine_config"]["page_size"] == 16
    decided = {decision["field"] for decision in result["engine_config"]["decisions"]}
    assert {"num_blocks", "seed"} <= decided
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_sequences_of_one_prompt_stand_beside_each_other(tmp_path: Path) -> None:
    result = run_here(
        tmp_path,
        "workload=synthetic",
        "workload.num_requests=2",
        "generation=sampling",
        "+generation.num_return_sequences=2",
        "continuous_batching.seed=1",
    )
    ids = [request["request_id"] for request in result["requests"]]
    assert ids == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]


def test_an_overloaded_engine_queues_and_a_run_ends_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One request at a time, of 200 steps or more: no machine gets on with that.
    result = run_here(
        tmp_path,
        "workload=open_loop",
        "workload.rate=400",
        "workload.prompts.num_requests=2000",
        "workload.prompts.new_tokens.low=200",
        "workload.prompts.new_tokens.high=200",
        "continuous_batching.max_requests_per_batch=1",
        "load.max_seconds=1",
    )
    summary = result["summary"]
    assert summary["num_requests"] + summary["num_unsent"] == 2000
    assert summary["offered_requests_per_s"] == pytest.approx(400, rel=0.2)
    assert summary["goodput_requests_per_s"] < 40
    assert summary["num_cancelled"] > 250
    assert summary["queue_time"]["p95_ms"] > 500
    assert [r["created_time"] for r in result["requests"]] == sorted(r["created_time"] for r in result["requests"])
    assert "requests cancelled" in capsys.readouterr().out


def test_answers_to_prompts_that_arrive_at_a_rate_stand_under_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("What is it?\nNever asked\n")
    result = run_here(
        tmp_path,
        "workload=open_loop",
        "workload.coefficient_of_variation=0",
        "workload.rate=2",
        "load.max_seconds=0.7",
        "workload@workload.prompts=file",
        f"workload.prompts.path={tmp_path / 'p.txt'}",
        "generation=sampling",
        "generation.max_new_tokens=2",
        "+generation.num_return_sequences=2",
    )
    assert len(result["requests"]) == 2
    printed = capsys.readouterr().out
    assert printed.count("> What is it?") == 2
    assert "Never asked" not in printed


def test_a_seed_makes_a_run_repeatable(tmp_path: Path) -> None:
    def tokens(seed: int) -> list[list[int]]:
        result = run_here(
            tmp_path,
            "workload=synthetic",
            "workload.num_requests=3",
            "generation=sampling",
            f"continuous_batching.seed={seed}",
        )
        return [request["generated_tokens"] for request in result["requests"]]

    first = tokens(3)
    assert tokens(3) == first
    assert tokens(4) != first


def test_the_installed_command_writes_into_its_own_folder_and_says_where(tmp_path: Path) -> None:
    done = run_command(tmp_path, *QUIET, "workload=synthetic", "workload.num_requests=2", "hydra.run.dir=here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "result.json").exists()
    assert (tmp_path / "here" / "timeline.png").exists()
    assert "here/result.json" in done.stdout


def test_a_users_mistake_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run_command(tmp_path, *QUIET, "continuous_batching.page_size=2")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cbtriton: page_size must be at least 4, got 2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload=file", "workload.path=none.txt"], "cannot read the prompt file 'none.txt'"),
        (["+generation.num_beams=4"], "num_beams"),
        (["+generation.temprature=4"], "generation has no field temprature"),
        (["kernels.sample=fast"], "fast"),
        (["workload=file"], "workload.path has no default; add workload.path=VALUE"),
        (["warmup=perhaps"], "warmup must be true or false, got 'perhaps'"),
    ],
)
def test_mistakes_that_show_late_are_named_too(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_here(tmp_path, *overrides)


def command_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    """The whole command in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["cbtriton", *arguments, *QUIET, *SMALL])
    cli.command()


def test_a_sweep_goes_on_after_a_run_that_failed_and_skips_what_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("-m", "continuous_batching.page_size=2,16,32", "hydra.sweep.dir=here")
    command_here(monkeypatch, tmp_path, *sweep)
    results = [json.loads((tmp_path / "here" / f"{n}" / "result.json").read_text()) for n in range(3)]
    assert [result["status"] for result in results] == ["failed", "finished", "finished"]
    assert results[0]["error"]["message"].startswith("page_size must be at least 4, got 2")
    assert results[1]["choices"]["workload"] == "synthetic"
    assert "continuous_batching.page_size=16" in results[1]["overrides"]
    printed = capsys.readouterr()
    assert "page_size must be at least 4" in printed.err
    assert "2 runs finished, 1 failed: cbtriton-report here" in printed.out
    sweep_report.write_report([tmp_path / "here"], tmp_path / "report")
    rows = [line.split("|") for line in (tmp_path / "report" / "report.md").read_text().splitlines()]
    found = [[cell.strip() for cell in row[1:3]] for row in rows if len(row) > 5 and row[1].strip().isdigit()]
    assert found == [["0", "2"], ["1", "16"], ["2", "32"]]

    finished = [(tmp_path / "here" / f"{n}" / "result.json") for n in (1, 2)]
    finished[1].unlink()
    left = finished[0].read_bytes()
    command_here(monkeypatch, tmp_path, *sweep, "resume=true")
    assert finished[0].read_bytes() == left
    assert finished[1].exists()
    skipped = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert skipped == [f"skipped {tmp_path / 'here' / '1'}: it has the result of this configuration"]


def test_a_sweep_that_goes_on_never_overwrites_what_another_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_here(monkeypatch, tmp_path, "hydra.run.dir=here")
    left = (tmp_path / "here" / "result.json").read_bytes()
    with pytest.raises(SystemExit):
        command_here(monkeypatch, tmp_path, "hydra.run.dir=here", "resume=true", "generation.do_sample=true")
    assert "result of another configuration" in capsys.readouterr().err
    assert (tmp_path / "here" / "result.json").read_bytes() == left
    command_here(monkeypatch, tmp_path, "hydra.run.dir=here")
    assert (tmp_path / "here" / "result.json").read_bytes() != left


def test_what_no_user_can_mend_ends_a_run_with_its_traceback_and_becomes_a_result_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cli, "load_model", break_down)
    with pytest.raises(SystemExit):
        command_here(monkeypatch, tmp_path, "hydra.run.dir=here")
    assert "Traceback" in capsys.readouterr().err
    command_here(monkeypatch, tmp_path, "-m", "hydra.sweep.dir=there")
    for folder in ("here", "there/0"):
        assert json.loads((tmp_path / folder / "result.json").read_text())["error"]["message"] == "out of memory"


def test_every_repeat_keeps_its_figures_and_none_profits_from_the_one_before(tmp_path: Path) -> None:
    result = run_here(tmp_path, *SMALL, "continuous_batching.page_size=4", "measure.repeats=3", "measure.warmup_runs=1")
    repeats = result["repeats"]
    assert len(repeats) == 3
    assert len({repeat["seconds"] for repeat in repeats}) == 3
    assert {repeat["prefix_hit_rate"] for repeat in repeats} == {0.0}
    assert {(repeat["output_tokens"], repeat["steps"]) for repeat in repeats} == {(2 * 4, 4)}
    assert result["stats"]["generated_tokens"] == 4 * 2 * 4
    numbers = [json.loads(line)["repeat"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert numbers == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("mistake", ["measure.repeats=0", "measure.warmup_runs=-1"])
def test_a_measurement_that_cannot_be_is_refused(tmp_path: Path, mistake: str) -> None:
    with pytest.raises(ValueError, match=f"{mistake.split('=')[0]} must be at least"):
        run_here(tmp_path, *SMALL, mistake)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("continuous_batching.pagesize=16", "continuous_batching.page_size"),
        ("workloads=chat", "workload"),
        ("workload.num_request=3", "workload.num_requests"),
        ("kernels/smple=reference", "kernels/sample"),
    ],
)
def test_a_wrong_key_is_told_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, nearest: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command_here(monkeypatch, tmp_path, wrong)
    assert end.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"cbtriton: there is no {wrong.split('=')[0]!r}; did you mean {nearest!r}?"


def test_a_wrong_option_is_told_the_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_here(monkeypatch, tmp_path, "sweep=page_sise")
    assert "Available options in 'sweep'" in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "package"), [("joblib", "joblib"), ("submitit_local", "submitit")])
def test_launchers_run_a_sweep_in_processes_of_their_own(tmp_path: Path, launcher: str, package: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{package}_launcher", reason=f"needs the extra {package}")
    sweep = ("continuous_batching.page_size=2,16", "hydra.sweep.dir=here", f"hydra/launcher={launcher}")
    done = run_command(tmp_path, "-m", *sweep, *QUIET, *SMALL)
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / "here" / f"{n}" / "result.json").read_text()) for n in range(2)]
    assert [result["status"] for result in results] == ["failed", "finished"]
    assert "1 runs finished, 1 failed" in done.stdout


def test_a_search_sees_throughput_and_latency_and_survives_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")
    space = ("sweep=search", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1", "measure=default")
    grid = "continuous_batching.page_size=choice(2, 16)"
    command_here(monkeypatch, tmp_path, "-m", *space, grid, "hydra.sweep.dir=here")
    results = [json.loads(path.read_text()) for path in (tmp_path / "here").rglob("result.json")]
    finished = [result["summary"] for result in results if result["status"] == "finished"]
    assert 0 < len(finished) < len(results) == 4
    found = yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())["solutions"]
    seen = {(summary["output_tokens_per_s"], summary["inter_token_latency"]["p95_ms"]) for summary in finished}
    assert {tuple(solution["values"]) for solution in found} <= seen


def test_help_shows_groups_and_examples(tmp_path: Path) -> None:
    done = run_command(tmp_path, "--help")
    assert done.returncode == 0
    for expected in ("model: hub, smollm2_135m, tiny_random", "workload=file workload.path=", "page_size: 256"):
        assert expected in done.stdout


def test_the_cache_command_shows_what_compilers_kept_and_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "inductor", "TRITON_CACHE_DIR": tmp_path / "triton"}
    for folder in folders.values():
        (folder / "ab").mkdir(parents=True)
        (folder / "ab" / "kernel").write_bytes(b"x" * (3 << 20))
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(folder))

    def cache(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cbtriton", "cache", *arguments])
        cli.command()
        return capsys.readouterr().out

    shown = cache().splitlines()
    assert [line.split()[-1] for line in shown] == [str(folder) for folder in folders.values()]
    assert all(re.search(r" 3\.0 MiB +1 files ", line) for line in shown)
    assert all(folder.exists() for folder in folders.values())
    assert cache("--clear").splitlines()[-1] == "deleted"
    assert not any(folder.exists() for folder in folders.values())
    assert all(re.search(r" 0\.0 MiB +0 files ", line) for line in cache().splitlines())
