"""The command `cbtriton-report`: runs of `cbtriton` in one table, one CSV and a few pictures, or two of them compared.

A run that failed is a row with its error. A picture is drawn where the runs have the data for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cbtriton import figures
from cbtriton.comparison import Ratio, mean_ratio, ratio
from cbtriton.sweep import (
    FIGURES,
    KV_WASTE,
    LATENCY,
    PREFIX_HITS,
    RATE,
    WASTE,
    Run,
    Sweep,
    in_order,
    load_runs,
    matching_runs,
    unfinished_runs,
)

_SHARES = (WASTE, KV_WASTE, PREFIX_HITS)
_Q, _KV = "continuous_batching.q_padding_interval_size", "continuous_batching.kv_padding_interval_size"
_MOST_TRACES = 4


def command() -> None:
    """Entry point of `cbtriton-report`. A mistake is one line and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="cbtriton-report", description="Runs of cbtriton as a table, a CSV and pictures, or two of them compared."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, a sweep, or a folder of these")
    parser.add_argument("--compare", action="store_true", help="two folders: is the second one faster?")
    parser.add_argument("--output-dir", type=Path, help="where to write; by default DIR/report of the first one")
    arguments = parser.parse_args()
    try:
        if arguments.compare:
            print(compare(arguments.folders))
        else:
            write_report(arguments.folders, arguments.output_dir or arguments.folders[0] / "report")
    except ValueError as error:
        print(f"cbtriton-report: {error}", file=sys.stderr)
        sys.exit(1)


def write_report(folders: Sequence[Path], output_dir: Path) -> None:
    """Writes `runs.csv`, `report.md` and the pictures that the runs have data for, and prints the table.

    Args:
        folders: Runs, sweeps, or folders of these.
        output_dir: Made if need be.

    Raises:
        ValueError: See `load_runs`.
    """
    sweep = Sweep.of(load_runs(folders))
    output_dir.mkdir(parents=True, exist_ok=True)
    written = [output_dir / "runs.csv", output_dir / "report.md"]
    _write_csv(sweep, written[0])
    pictures = [path for name, figure in pictures_of(sweep) for path in figures.save(figure, output_dir / name)]
    text = markdown(sweep, [path.name for path in pictures if path.suffix == ".png"], unfinished_runs(folders))
    written[1].write_text(text, encoding="utf-8")
    print("\n".join([text, *(f"wrote {path}" for path in (*written, *pictures))]))


def markdown(sweep: Sweep, pictures: Sequence[str] = (), unfinished: Sequence[Path] = ()) -> str:
    """The report: a table of all runs, the best, the front, and what each parameter does.

    Args:
        sweep: The runs.
        pictures: File names of pictures to show.
        unfinished: Folders of runs that have no result.
    """
    parts = ["# Runs", _conditions(sweep), _runs_table(sweep)]
    if unfinished:
        parts.append("Without a result (killed, or still running): " + ", ".join(map(str, unfinished)))
    if sweep.finished:
        parts += [_best(sweep), _front_text(sweep)]
    if sweep.parameters and sweep.finished:
        parts += ["## Effect of each parameter", "Means over all other settings.", _effects_table(sweep)]
    parts += [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def compare(folders: Sequence[Path]) -> str:
    """A verdict on two runs, or on two sweeps whose runs are paired by their settings.

    Raises:
        ValueError: If there are not two folders, or nothing in them can be compared.
    """
    if len(folders) != 2:
        raise ValueError(f"--compare takes two folders, got {len(folders)}")
    before, after = (Sweep.of(load_runs([folder])) for folder in folders)
    pairs, keys = matching_runs(before, after)
    lines = [f"{folders[1]} beside {folders[0]}: {len(pairs)} pairs of {len(before.runs)} and {len(after.runs)} runs"]
    ratios = []
    for first, second in pairs:
        label = "".join(f"{_short(key)}={first.setting(key)}, " for key in keys)
        rates = ratio(first.repeats(RATE), second.repeats(RATE))
        ratios.append(rates.value)
        lines.append(f"{label}throughput: {rates.verdict('faster', 'slower')}")
        if (latency := _latency_ratio(first, second)) is not None:
            lines.append(f"{label}p95 inter-token latency: {latency.verdict('longer', 'shorter')}")
    if len(ratios) > 1:
        lines.append(f"throughput over {len(ratios)} settings: {mean_ratio(ratios).verdict('faster', 'slower')}")
    return "\n".join(lines)


def pictures_of(sweep: Sweep) -> Iterator[tuple[str, Any]]:
    """The pictures that the runs have data for: file name without ending, figure."""
    if {_Q, _KV} <= set(sweep.parameters) and sweep.finished:
        yield "padding_waste", figures.padding_waste_figure(*_waste_tables(sweep))
    if _Q in sweep.parameters and sweep.finished:
        runs = [runs[0] for runs in sweep.by_setting(_Q).values()]
        traces = {f"query interval {run.setting(_Q)}": run.steps() for run in runs[:_MOST_TRACES]}
        yield "step_sizes", figures.step_sizes_figure(traces)
    points = [
        figures.Point(run.name, rate, latency, run in sweep.front)
        for run in sweep.finished
        if (rate := run.figure(RATE)) is not None and (latency := run.figure(LATENCY)) is not None
    ]
    if len(points) > 1:
        yield "throughput_latency", figures.throughput_latency_figure(points)
    if seconds := _preparation_seconds(sweep):
        yield "preparation", figures.preparation_figure(seconds)
    if speed_ups := _speed_ups(sweep):
        yield "kernel_speed_ups", figures.speed_ups_figure(speed_ups)


def _short(key: str) -> str:
    return key.replace("/", ".").rsplit(".", 1)[-1]


def _shown_setting(run: Run, key: str) -> str:
    value = run.setting(key)
    try:
        return value if len(value) < 8 else f"{float(value):.4g}"
    except ValueError:
        return value


def _shown(name: str, figure: float | None) -> str:
    if figure is None:
        return "–"
    if name in _SHARES:
        return f"{figure:.1%}"
    return f"{figure:.1f}" if isinstance(figure, float) else f"{figure}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _conditions(sweep: Sweep) -> str:
    """What all runs have in common, for whoever wants to repeat them."""
    machines = {json.dumps(run.result["environment"]["machine"], sort_keys=True) for run in sweep.runs}
    machine = sweep.runs[0].result["environment"]["machine"]
    where = (
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores" if len(machines) == 1 else "several machines"
    )
    groups = [
        " or ".join(sorted({run.setting(group) for run in sweep.runs}, key=in_order)) for group in ("model", "workload")
    ]
    failed = len(sweep.runs) - len(sweep.finished)
    return f"{len(sweep.runs)} runs, {failed} failed; model {groups[0]}, workload {groups[1]}; {where}."


def _runs_table(sweep: Sweep) -> str:
    """All runs; figures in which no two differ are left out."""
    names = [name for name in FIGURES if name == RATE or len({run.figure(name) for run in sweep.finished}) > 1]
    header = ["run", *map(_short, sweep.parameters), *names, "repeats", ""]
    front, best = sweep.front, max(sweep.finished, key=lambda run: run.figure(RATE) or 0, default=None)
    rows = []
    for run in sweep.runs:
        remark = ", ".join(word for word, holds in (("fastest", run is best), ("Pareto", run in front)) if holds) or (
            run.error or ""
        )
        shown = [_shown(name, run.figure(name)) for name in names]
        settings = [_shown_setting(run, key) for key in sweep.parameters]
        rows.append([run.name, *settings, *shown, f"{len(run.repeats(RATE))}", " ".join(remark.split())])
    return _table(header, rows)


def _best(sweep: Sweep) -> str:
    """The fastest run, and which others cannot be told apart from it."""
    best = max(sweep.finished, key=lambda run: run.figure(RATE) or 0)
    text = f"Fastest: run {best.name}{_describe(sweep, best)}, {_shown(RATE, best.figure(RATE))} output tokens/s."
    if len(best.repeats(RATE)) < 2:
        return f"{text} One repeat is no evidence: set measure.repeats=5."
    others = [run for run in sweep.finished if run is not best and run.repeats(RATE)]
    near = [run.name for run in others if not ratio(run.repeats(RATE), best.repeats(RATE)).is_evidence]
    return (
        f"{text} No difference seen to: {', '.join(near)}." if near else f"{text} All others are slower beyond noise."
    )


def _front_text(sweep: Sweep) -> str:
    lines = [
        f"- run {run.name}{_describe(sweep, run)}: {_shown(RATE, run.figure(RATE))} output tokens/s, "
        f"{_shown(LATENCY, run.figure(LATENCY))} ms"
        for run in sweep.front
    ]
    return "\n".join(["Pareto front of throughput and p95 inter-token latency:", "", *lines])


def _describe(sweep: Sweep, run: Run) -> str:
    settings = ", ".join(f"{_short(key)}={_shown_setting(run, key)}" for key in sweep.parameters)
    return f" ({settings})" if settings else ""


def _effects_table(sweep: Sweep) -> str:
    rows = []
    for key in sweep.parameters:
        for runs in sweep.by_setting(key).values():
            means = [
                _shown(
                    name,
                    fmean(known) if (known := [f for run in runs if (f := run.figure(name)) is not None]) else None,
                )
                for name in (RATE, LATENCY)
            ]
            rows.append([_short(key), _shown_setting(runs[0], key), f"{len(runs)}", *means])
    return _table(["parameter", "value", "runs", RATE, LATENCY], rows)


def _write_csv(sweep: Sweep, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "status", "error", *sweep.parameters, *FIGURES, "repeats", "commit", "folder"])
        for run in sweep.runs:
            settings = [run.setting(key) for key in sweep.parameters]
            rates = " ".join(f"{rate:.2f}" for rate in run.repeats(RATE))
            commit = (run.result["environment"]["git"] or {}).get("commit")
            shown = [run.figure(name) for name in FIGURES]
            writer.writerow([run.name, run.result["status"], run.error, *settings, *shown, rates, commit, run.folder])


def _latency_ratio(first: Run, second: Run) -> Ratio | None:
    latencies = first.repeats(LATENCY), second.repeats(LATENCY)
    return ratio(*latencies) if all(latencies) else None


def _waste_tables(sweep: Sweep) -> tuple[list[str], list[str], dict[str, list[list[float | None]]]]:
    """Query intervals, KV intervals, and for either kind of waste its mean at each pair of them."""
    rows, columns = (list(sweep.by_setting(key)) for key in (_Q, _KV))
    cells = {(run.setting(_Q), run.setting(_KV)): [] for run in sweep.finished}
    for run in sweep.finished:
        cells[run.setting(_Q), run.setting(_KV)].append(run)
    tables = {
        title: [
            [fmean(run.figure(name) or 0.0 for run in cells[q, kv]) if (q, kv) in cells else None for kv in columns]
            for q in rows
        ]
        for title, name in (("query tokens", WASTE), ("longest contexts", KV_WASTE))
    }
    return rows, columns, tables


def _preparation_seconds(sweep: Sweep) -> dict[str, dict[str, float]]:
    """Mean seconds over the runs that prepared a bucket, by bucket and kind."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in sweep.finished:
        totals: dict[tuple[str, str], float] = {}
        for entry in run.result["stats"]["preparations"]:
            key = entry["bucket"], entry["kind"]
            totals[key] = totals.get(key, 0.0) + entry["seconds"]
        for (bucket, kind), total in totals.items():
            seconds.setdefault(bucket, {}).setdefault(kind, []).append(total)
    return {bucket: {kind: fmean(times) for kind, times in kinds.items()} for bucket, kinds in seconds.items()}


def _speed_ups(sweep: Sweep) -> dict[str, list[float]]:
    """Throughput beside the slot's reference, everything else being equal: one ratio for each such pair of runs."""
    found: dict[str, list[float]] = {}
    for key in (key for key in sweep.parameters if key.startswith("kernels/")):
        groups = {value: [run for run in runs if run.repeats(RATE)] for value, runs in sweep.by_setting(key).items()}
        references = {sweep.rest(run, key): run for run in groups.pop("reference", ())}
        for value, runs in groups.items():
            pairs = [(run, references.get(sweep.rest(run, key))) for run in runs]
            ratios = [ratio(other.repeats(RATE), run.repeats(RATE)).value for run, other in pairs if other is not None]
            if ratios:
                found[f"{_short(key)}: {value}"] = ratios
    return found
