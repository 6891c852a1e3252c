"""The kernels' part of `gpu_check.py`: which cases it times, and what it reports of them."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _gpu_report import Report, Row, Status, last_words
from _kernel_cases import REAL, TINY, Bench, Call, Case, Spec, TooLargeError
from _kernel_timing import SMALLEST_FLOOR_US, Ceilings, CudaTimer, DryTimer, Timer, Timing

from cbtriton.kernel_set import REFERENCE, implementations

# References that do not crawl at real sizes. The others gather row by row: not meant for a GPU. That of `kv_write`
# waits for the device once, so its time includes the host's.
FAST_REFERENCES = ("kv_write", "prepare_inputs", "block_copy")


def measure_kernels(task: dict[str, Any], report: Report) -> None:
    """A worker's run over all cases, except what is done already."""
    device = torch.device("cpu" if task["is_dry"] else "cuda")
    torch.manual_seed(0)
    timer: Timer = DryTimer() if task["is_dry"] else CudaTimer(device)
    report.write(device=device_facts(device))
    ceilings = timer.ceilings()
    report.write(ceilings=dataclasses.asdict(ceilings))
    done = {(case, who) for case, who in task["done"]}
    measurer = Measurer(device, timer, ceilings, report, task["deadline"], done)
    for spec in Bench(TINY if task["is_dry"] else REAL, device).specs():
        measurer.run(spec)
    # Clocks right after the load.
    report.write(device_afterwards=device_facts(device))


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory, driver and clocks of a GPU, as far as torch tells them."""
    if device.type != "cuda":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "processors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        "cuda": torch.version.cuda,
    }
    # These need pynvml and a driver that answers.
    for name in ("clock_rate", "temperature", "power_draw"):
        try:
            facts[name] = getattr(torch.cuda, name)(device)
        except Exception as error:
            facts[name] = f"unknown: {type(error).__name__}"
    try:
        from torch.utils import collect_env

        facts["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
    except Exception as error:
        facts["driver"] = f"unknown: {type(error).__name__}"
    return facts


class Measurer:
    """Runs cases and reports a row for each implementation and peer, within the time.

    Args:
        device: Where the cases are.
        timer: Measures the calls.
        ceilings: What the device can do.
        report: Takes the rows.
        deadline: Nothing is begun after this time, on the monotonic clock.
        done: (case, name) of what an earlier worker reported.
    """

    def __init__(
        self,
        device: torch.device,
        timer: Timer,
        ceilings: Ceilings,
        report: Report,
        deadline: float,
        done: set[tuple[str, str]],
    ) -> None:
        self._is_gpu = device.type == "cuda"
        self._timer = timer
        self._ceilings = ceilings
        self._report = report
        self._deadline = deadline
        self._done = done

    def run(self, spec: Spec) -> None:
        """Builds a case and measures everything that computes it."""
        if (spec.name, "all") in self._done:
            return
        names = [] if spec.only_peers else self._names(spec.slot)
        if time.monotonic() > self._deadline:
            for who in names or ["flex"]:
                self._finish(spec, Row("kernels", spec.name, who, "skipped", note="no time left"))
            return
        self._report.write(doing=[spec.name, "all"])
        try:
            case = spec.build()
        except TooLargeError as error:
            self._report.row(Row("kernels", spec.name, "all", "skipped", note=str(error)))
            return
        except Exception as error:
            is_ours = not isinstance(error, torch.OutOfMemoryError)
            self._report.row(
                Row("kernels", spec.name, "all", "failed" if is_ours else "skipped", note=last_words(error))
            )
            stop_if_device_is_lost()
            return
        for name, call in case.peers.items():
            self._one(spec, name, "unavailable", partial(self._measure_peer, spec, case, name, call))
        for name in names:
            self._one(spec, name, "failed", partial(self._measure_own, spec, case, name))

    def _names(self, slot: str) -> list[str]:
        """The implementations that run here at these sizes."""
        from triton import knobs

        has_triton = self._is_gpu or knobs.runtime.interpret
        names = [name for name in implementations(slot) if name != REFERENCE and has_triton]
        return names if self._is_gpu and slot not in FAST_REFERENCES else [*names, REFERENCE]

    def _one(self, spec: Spec, who: str, status: Status, measure: Callable[[], Row]) -> None:
        if (spec.name, who) in self._done:
            return
        self._report.write(doing=[spec.name, who])
        try:
            row = measure()
        except Exception as error:
            row = Row("kernels", spec.name, who, status, note=last_words(error))
            self._finish(spec, row)
            stop_if_device_is_lost()
            return
        self._finish(spec, row)

    def _finish(self, spec: Spec, row: Row) -> None:
        if (spec.name, row.who) not in self._done:
            self._report.row(row)

    def _measure_peer(self, spec: Spec, case: Case, name: str, call: Call) -> Row:
        return self._row(spec, case, name, self._timer.measure(call))

    def _measure_own(self, spec: Spec, case: Case, name: str) -> Row:
        module = importlib.import_module(f"cbtriton.kernels.{spec.slot}.{name}")
        call = case.bind(module)
        row = self._row(spec, case, name, self._timer.measure(call))
        error = case.check(call())
        if case.bind_plan is not None:
            row = dataclasses.replace(row, plan_us=self._timer.measure(case.bind_plan(module)).time_us)
        # Written this way round, NaN is not allowed either.
        if not error <= case.allowed:
            row = dataclasses.replace(row, status="failed", note=f"error {error:.3g}, allowed {case.allowed:.3g}")
        return dataclasses.replace(row, error=error)

    def _row(self, spec: Spec, case: Case, who: str, timing: Timing) -> Row:
        floor = self._ceilings.floor_us(case.num_bytes, case.num_flops)
        return Row(
            "kernels",
            spec.name,
            who,
            "ok",
            time_us=timing.time_us,
            floor_us=floor,
            roofline=floor / timing.time_us if floor >= SMALLEST_FLOOR_US else None,
            gb_per_s=case.num_bytes / (1e3 * timing.time_us),
            tflop_per_s=case.num_flops / (1e6 * timing.time_us) if case.num_flops else None,
            launch_us=timing.launch_us,
            first_call_s=timing.first_call_s,
        )


def stop_if_device_is_lost() -> None:
    """After an illegal access every later call of this process would fail: another worker must go on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
