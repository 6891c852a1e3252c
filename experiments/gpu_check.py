"""Everything that only a GPU can tell, in one run of less than six minutes: tests, kernels, captured steps, engines.

    python experiments/gpu_check.py
    python experiments/gpu_check.py --parts kernels --minutes 3
    python experiments/gpu_check.py --dry-run

The package must be installed; `pip install --no-deps --no-build-isolation --editable .` does so without a network, and
nothing here needs one. Parts run one after the other, each within its share of the time; what does not fit is listed as
skipped. All but the tests run in processes of their own: one that crashes or hangs costs its own row. Prints a table
and writes it as `gpu_check.json` with versions, device and ceilings, as `gpu_check.png`, and the tests' output as
`gpu_check_tests.txt`. Exits with 1 if anything of this project failed.

`--dry-run` runs the same code at tiny sizes on the CPU, with a clock that does not measure, and checks what it wrote;
without a GPU that is what happens anyway. With TRITON_INTERPRET=1 it runs the Triton kernels, else the references.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cbtriton.report import environment

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out.
from _gpu_engines import ENGINES, measure_engines
from _gpu_graphs import CHECKS, DRY_CHECKS, check_graphs
from _gpu_kernels import measure_kernels
from _gpu_report import Report, Row, Status, last_words

ROOT = Path(__file__).resolve().parents[1]
# Shares of the time.
PARTS = {"tests": 0.30, "kernels": 0.27, "graphs": 0.21, "engines": 0.22}
# A worker that reports nothing for so long hangs; compiling one kernel takes a few seconds.
STALL_SECONDS = 60.0
OUT_OF_TIME = "out of time"


@dataclass(slots=True)
class Run:
    """What the parts of this run share.

    Attributes:
        is_dry: Whether nothing is measured.
        output: Folder for results.
        deadline: When everything must have ended, on the monotonic clock.
        facts: What the kernels' worker found out about the device: its properties, clocks and ceilings.
    """

    is_dry: bool
    output: Path
    deadline: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


def main() -> int:
    """Runs the parts, writes what they found; 1 if anything failed."""
    arguments = parse_arguments()
    if arguments.worker:
        work(json.loads(arguments.worker), Path(arguments.output))
        return 0
    is_dry = arguments.dry_run or not torch.cuda.is_available()
    if not is_dry:
        # What is measured are the compiled kernels.
        os.environ.pop("TRITON_INTERPRET", None)
        return check(arguments, Path(arguments.output or default_output()), is_dry=False)
    if not arguments.dry_run:
        print("no GPU that torch can use: checking only that this script works (--dry-run)\n", flush=True)
    if arguments.output:
        return check(arguments, Path(arguments.output), is_dry=True)
    with tempfile.TemporaryDirectory() as folder:
        return check(arguments, Path(folder), is_dry=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all")
    parser.add_argument("--minutes", type=float, default=5.6, help="for everything (default: 5.6)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, nothing is measured")
    parser.add_argument("--output", help="folder of the results (default: $OUT or experiments/results/gpu_check)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def default_output() -> str:
    """Where results go when nobody says: `$OUT` where it is set."""
    return os.environ.get("OUT") or str(ROOT / "experiments" / "results" / "gpu_check")


def check(arguments: argparse.Namespace, output: Path, is_dry: bool) -> int:
    """Runs the parts that were asked for and reports them; 1 if any row failed."""
    output.mkdir(parents=True, exist_ok=True)
    run = Run(is_dry, output, time.monotonic() + 60 * arguments.minutes)
    parts = [part for part in PARTS if part in arguments.parts]
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor() as pool:
        # Where nothing is measured, nobody needs the machine alone.
        run_each = pool.map if is_dry else map
        rows = [row for found in run_each(partial(timed_part, run, parts, seconds), parts) for row in found]
    rows = with_ratios(rows)
    print(f"\n{headline(run.facts)}\n\n{markdown(rows)}\n")
    write_json(output / "gpu_check.json", arguments, run, rows, seconds)
    draw(output / "gpu_check.png", rows)
    if is_dry:
        validate(output, rows, arguments.parts)
    print(f"wrote {output / 'gpu_check.json'} and gpu_check.png beside it")
    return int(any(row.status == "failed" for row in rows))


def timed_part(run: Run, parts: Sequence[str], seconds: dict[str, float], part: str) -> list[Row]:
    """Rows of a part, which may take its share of what the parts before it have left; notes its `seconds`."""
    share = PARTS[part] / sum(PARTS[name] for name in parts[parts.index(part) :])
    limit = run.seconds_left * (1.0 if run.is_dry else share)
    print(f"{part}: at most {limit:.0f} s", flush=True)
    started = time.monotonic()
    rows = run_part(part, run, limit)
    seconds[part] = time.monotonic() - started
    print(f"{part}: {seconds[part]:.0f} s, {describe_statuses(rows)}", flush=True)
    return rows


def run_part(part: str, run: Run, limit: float) -> list[Row]:
    """Rows of one part; an exception becomes one, and ends nothing else."""
    if limit < 10:
        return [Row(part, "all", "", "skipped", note="no time left")]
    runners = {"tests": run_tests, "kernels": run_kernels, "graphs": run_graphs, "engines": run_engines}
    try:
        return runners[part](run, limit)
    except Exception as error:
        return [Row(part, "all", "", "failed", note=last_words(error))]


# ---------------------------------------------------------------------------------------------------------- tests

TEST_PATHS = ("tests/kernels", "tests/engine/test_gpu.py")
_OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# A test's outcome in the verbose output, without and with workers, and in the summary at its end.
_TEST_LINES = (
    re.compile(rf"^(?P<id>tests/\S+::.*?) (?P<outcome>{_OUTCOMES})\b"),
    re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<outcome>{_OUTCOMES}) (?P<id>tests/.*?)\s*$"),
    re.compile(r"^(?P<outcome>FAILED|ERROR) (?P<id>tests/\S+?::\w+(?:\[.*?\])?)(?: - (?P<message>.*))?$"),
)


def run_tests(run: Run, limit: float) -> list[Row]:
    """The tests marked `gpu`, in a process of their own; a dry run only collects them."""
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
    if run.is_dry:
        command += ["--collect-only"]
    else:
        command += ["-vv", *_test_workers()]
    log = run.output / "gpu_check_tests.txt"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*command, *TEST_PATHS],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=worker_environment(),
            start_new_session=True,
        )
        try:
            in_time = wait(process, limit - 8)
            if not in_time:
                # Once, politely: pytest then still tells what failed.
                process.send_signal(signal.SIGINT)
                wait(process, 6)
        finally:
            end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    if run.is_dry:
        num_tests = sum(line.startswith("tests/") and "::" in line for line in text.splitlines())
        is_fine = process.returncode == 0 and num_tests > 0
        note = f"{num_tests} tests collected" if is_fine else text[-2000:]
        return [Row("tests", "pytest -m gpu", "pytest", "ok" if is_fine else "failed", note=note)]
    rows = test_rows(text)
    ending = "" if in_time else f"; stopped after {limit - 8:.0f} s"
    is_fine = in_time and process.returncode == 0
    if not is_fine and len(rows) == 1:
        ending += "\n" + text[-1500:]
    summary = dataclasses.replace(rows[0], status="ok" if is_fine else "failed", note=rows[0].note + ending)
    return [summary, *rows[1:]]


def _test_workers() -> list[str]:
    """Several workers where pytest-xdist is there: most of the time goes into compiling kernels, on one core each."""
    cores = os.cpu_count() or 1
    if importlib.util.find_spec("xdist") is None or cores < 4:
        return []
    return ["-n", str(min(10, cores - 2))]


def test_rows(text: str) -> list[Row]:
    """A summary of pytest's verbose output, then a row for each test that failed."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for line in text.splitlines():
        for pattern in _TEST_LINES:
            if found := pattern.match(line):
                parts = found.groupdict()
                outcomes[parts["id"]] = parts["outcome"]
                if parts.get("message"):
                    messages[parts["id"]] = parts["message"]
                break
    counts = {outcome: list(outcomes.values()).count(outcome) for outcome in sorted(set(outcomes.values()))}
    note = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items()) or "no test was run"
    failed = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    return [
        Row("tests", "pytest -m gpu", "pytest", "ok", note=note),
        *(Row("tests", test, "pytest", "failed", note=messages.get(test, "")) for test in failed),
    ]


# ------------------------------------------------------------------------------------- kernels, graphs and engines


def run_kernels(run: Run, limit: float) -> list[Row]:
    """Rows of all kernels and their peers. A case that kills its worker is noted, and another worker goes on."""
    deadline = time.monotonic() + limit
    rows: list[Row] = []
    for _ in range(6):
        left = deadline - time.monotonic()
        if left < 12 and rows:
            break
        done = [[row.case, row.who] for row in rows]
        # The worker begins nothing in the last seconds. Both read the same monotonic clock.
        task = {"kind": "kernels", "is_dry": run.is_dry, "done": done, "deadline": deadline - 8}
        outcome = in_own_process(task, left, stall=STALL_SECONDS)
        rows += outcome.rows
        run.facts |= outcome.facts
        if outcome.ending == "done":
            return rows
        if outcome.doing is None and not outcome.rows:
            raise RuntimeError(f"the kernels' worker did not get to work: {outcome.ending}")
        if outcome.doing is not None:
            status: Status = "skipped" if outcome.ending.startswith(OUT_OF_TIME) else "failed"
            case, who = outcome.doing
            rows.append(Row("kernels", case, who, status, note=outcome.ending))
    return [*rows, Row("kernels", "the rest", "", "skipped", note="no time left after a worker had died")]


def run_graphs(run: Run, limit: float) -> list[Row]:
    """Rows of captured and compiled steps, each check in a process of its own. Compilers may take too long."""
    deadline = time.monotonic() + limit
    rows: list[Row] = []
    # A dry run measures nothing, so its checks may share a process.
    for group in [list(DRY_CHECKS)] if run.is_dry else [[check] for check in CHECKS]:
        left = deadline - time.monotonic()
        if left < 10:
            rows += [Row("graphs", check, "cbtriton", "skipped", note="no time left") for check in group]
            continue
        outcome = in_own_process({"kind": "graphs", "checks": group, "is_dry": run.is_dry}, left, stall=left)
        rows += outcome.rows
        if outcome.ending != "done":
            case, who = outcome.doing or (group[0], "cbtriton")
            status: Status = "skipped" if outcome.ending.startswith(OUT_OF_TIME) else "failed"
            rows.append(Row("graphs", case, who, status, note=outcome.ending))
    return rows


def run_engines(run: Run, limit: float) -> list[Row]:
    """Output tokens per second of this engine and of transformers', each in a process of its own."""
    deadline = time.monotonic() + limit
    rows: list[Row] = []
    # A dry run measures nothing, so its engines may share a process.
    for group in [list(ENGINES)] if run.is_dry else [[engine] for engine in ENGINES]:
        left = deadline - time.monotonic()
        if left < 15:
            rows += [Row("engines", "all", name, "skipped", note="no time left") for name, _, _ in group]
            continue
        # One engine that is slow beyond measure must leave the others some time.
        task_limit = left if run.is_dry else min(left, 0.5 * limit)
        task = {"kind": "engines", "engines": group, "is_dry": run.is_dry}
        outcome = in_own_process(task, task_limit, stall=task_limit)
        rows += outcome.rows
        if outcome.ending != "done":
            case, who = outcome.doing or ("all", group[0][0])
            status: Status = "unavailable" if who == "transformers" else "failed"
            rows.append(Row("engines", case, who, status, note=outcome.ending))
    return rows


# ------------------------------------------------------------------------------------------------ worker processes


@dataclass(slots=True)
class Outcome:
    """What a worker reported, and how it ended.

    Attributes:
        rows: Finished rows.
        facts: Anything else it found out.
        doing: Case and name of what it was at; None when it was at nothing.
        ending: `done`, or what happened instead.
    """

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    doing: tuple[str, str] | None = None
    ending: str = "done"


def in_own_process(task: dict[str, Any], limit: float, stall: float) -> Outcome:
    """Runs `work(task)` in a new interpreter until it ends, reports nothing for `stall` seconds or takes `limit`."""
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder) / "report.jsonl", Path(folder) / "errors.txt"
        report.touch()
        command = [sys.executable, __file__, "--worker", json.dumps(task), "--output", str(report)]
        with errors.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=worker_environment(), start_new_session=True
            )
            try:
                ending = watch(process, report, limit, stall)
            finally:
                end(process)
        outcome = read_report(report)
        if ending != "done":
            words = errors.read_text(encoding="utf-8", errors="replace")[-1500:]
            outcome.ending = f"{ending}\n{words}".strip()
        return outcome


def watch(process: subprocess.Popen[bytes], report: Path, limit: float, stall: float) -> str:
    """Waits for a worker; `done`, or why it is to be ended."""
    started = changed = time.monotonic()
    size = 0
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if (new_size := report.stat().st_size) != size:
            size, changed = new_size, now
        if now - started > limit:
            return f"{OUT_OF_TIME} after {limit:.0f} s"
        if now - changed > stall:
            return f"nothing happened for {stall:.0f} s"
    return "done" if process.returncode == 0 else f"exit code {process.returncode}"


def read_report(report: Path) -> Outcome:
    """What a worker wrote, up to its last whole line."""
    outcome = Outcome()
    for line in report.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "row" in entry:
            outcome.rows.append(Row(**entry["row"]))
            outcome.doing = None
        elif "doing" in entry:
            outcome.doing = (entry["doing"][0], entry["doing"][1])
        else:
            outcome.facts |= entry
    return outcome


def worker_environment() -> dict[str, str]:
    """The environment of workers: the repository's root stays off their path, and no hub is asked for anything."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether the process ended within `limit` seconds."""
    try:
        process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def work(task: dict[str, Any], path: Path) -> None:
    """What a worker process does."""
    report = Report(path)
    {"kernels": measure_kernels, "graphs": check_graphs, "engines": measure_engines}[task["kind"]](task, report)


# --------------------------------------------------------------------------------------------------------- results


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, engines' throughput also as a multiple of transformers'."""
    theirs = {row.case: row.tokens_per_s for row in rows if row.who == "transformers" and row.tokens_per_s}
    compared = []
    for row in rows:
        base = theirs.get(row.case)
        if row.part == "engines" and row.tokens_per_s and base and row.who != "transformers":
            row = dataclasses.replace(row, note=f"{row.tokens_per_s / base:.2f} × transformers; {row.note}")
        compared.append(row)
    return compared


_COLUMNS = ("part", "case", "who", "µs", "GB/s", "TFLOP/s", "roofline", "launch µs", "plan µs", "tokens/s", "result")


def markdown(rows: Sequence[Row]) -> str:
    """All rows as one table; failed ones also stand first."""
    ordered = sorted(rows, key=lambda row: row.status != "failed")
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for row in ordered:
        figures = [
            _figure(row.time_us),
            _figure(row.gb_per_s),
            _figure(row.tflop_per_s),
            "" if row.roofline is None else f"{row.roofline:.0%}",
            _figure(row.launch_us),
            _figure(row.plan_us),
            _figure(row.tokens_per_s),
        ]
        cells = [row.part, row.case, row.who, *figures, _result(row)]
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    return "\n".join(lines)


def _result(row: Row) -> str:
    """One line: the end of what went wrong, or else what there is to say."""
    if row.status != "ok":
        return f"{row.status}: {(row.note.strip().splitlines() or [''])[-1][-200:]}"
    if row.error is not None:
        return f"error {row.error:.1e}"
    return " ".join(row.note.split())


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def headline(facts: dict[str, Any]) -> str:
    """The device and what it reaches at best."""
    device, ceilings = facts.get("device"), facts.get("ceilings")
    if device is None or ceilings is None:
        return "the device's ceilings were not measured"
    return (
        f"{device['name']}: copies {ceilings['copy_gb_per_s']:.4g} GB/s, multiplies "
        f"{ceilings['matmul_tflop_per_s']:.3g} TFLOP/s; a call that does nothing takes {ceilings['empty_us']:.1f} µs"
    )


def describe_statuses(rows: Sequence[Row]) -> str:
    """How many rows ended how."""
    statuses = [row.status for row in rows]
    return ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))


def write_json(
    path: Path, arguments: argparse.Namespace, run: Run, rows: Sequence[Row], seconds: dict[str, float]
) -> None:
    """Writes everything that was found, what was asked for and where it ran."""
    result = {
        "is_dry": run.is_dry,
        "asked": {"parts": arguments.parts, "minutes": arguments.minutes},
        "environment": environment(),
        **run.facts,
        "seconds": seconds,
        "num_failed": sum(row.status == "failed" for row in rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# Okabe and Ito's colours; references and torch in greys.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9")
_PEER_COLOURS = {"sdpa flash": "#999999", "sdpa cudnn": "#666666", "flex": "#CCCCCC", "torch": "#BBBBBB"}
_PANELS = {"decode": ("decode",), "prefill": ("prefill",), "the rest": ("sample", "kv_write", "prepare", "block")}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draws each kernel's share of its roofline, where it has one."""
    from matplotlib.figure import Figure

    bars = [row for row in rows if row.roofline is not None]
    own = sorted({row.who for row in bars} - _PEER_COLOURS.keys())
    colours = {who: _COLOURS[i % len(_COLOURS)] for i, who in enumerate(own)} | _PEER_COLOURS
    panels = {title: [row for row in bars if row.case.startswith(starts)] for title, starts in _PANELS.items()}
    tallest = max(4, *map(len, panels.values()))
    figure = Figure(figsize=(18, 1.5 + 0.2 * tallest), layout="constrained")
    for axes, (title, panel) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        cases = list(dict.fromkeys(row.case for row in panel))
        panel = sorted(panel, key=lambda row: cases.index(row.case))
        shares = [100 * (row.roofline or 0.0) for row in panel]
        axes.barh(range(len(panel)), shares, color=[colours[row.who] for row in panel])
        axes.set_yticks(range(len(panel)), [f"{row.case} · {row.who}" for row in panel], fontsize=7)
        for place, row in enumerate(panel):
            axes.text(shares[place] + 1, place, f"{_figure(row.time_us)} µs", va="center", fontsize=7)
        axes.set(title=title, xlabel="% of the roofline", xlim=(0, max([115.0, *(1.15 * share for share in shares)])))
        axes.axvline(100, color="#999999", linewidth=0.8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Time at the measured ceilings over the time taken; higher is better")
    figure.savefig(path, dpi=100)


def validate(output: Path, rows: Sequence[Row], parts: Sequence[str]) -> None:
    """Checks what a dry run wrote.

    Raises:
        RuntimeError: It is not what this script promises.
    """
    result = json.loads((output / "gpu_check.json").read_text(encoding="utf-8"))
    complaints = []
    if [Row(**row) for row in result["rows"]] != list(rows):
        complaints.append("the rows in the file differ from those in the table")
    if {row["part"] for row in result["rows"]} != set(parts):
        complaints.append("a part has no row")
    if len(markdown(rows).splitlines()) != len(rows) + 2:
        complaints.append("the table has another number of lines")
    if not (output / "gpu_check.png").read_bytes().startswith(b"\x89PNG"):
        complaints.append("the picture is no PNG")
    if "kernels" in parts:
        measured = {row.case.split()[0] for row in rows if row.part == "kernels" and row.time_us}
        missing = {"decode", "prefill", "sample", "kv_write", "prepare_inputs", "block_copy"} - measured
        if missing:
            complaints.append(f"no kernel was run for {', '.join(sorted(missing))}")
        if not {"device", "ceilings", "device_afterwards"} <= result.keys():
            complaints.append("facts about the device are missing")
    if complaints:
        raise RuntimeError("the dry run wrote something else than it should: " + "; ".join(complaints))


if __name__ == "__main__":
    sys.exit(main())
