"""The command `cbtriton`: a Hydra application over `conf/`, and the only module that knows of Hydra.

Loads a model, runs a workload through the continuous batching manager, shows the answers and what they cost, and
writes `result.json`, `steps.jsonl` and `timeline.png` into the run's folder, beside what a profiler saw. A run of a
sweep that fails writes its error there, and the sweep goes on. `cbtriton cache` shows what compilers have kept, and
with `--clear` deletes it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from cbtriton import compile_cache
from cbtriton.config import WorkloadHints
from cbtriton.figures import write_timeline
from cbtriton.model_zoo import LoadedModel, ModelUnavailableError, load_model
from cbtriton.report import Summary, typical
from cbtriton.request import GenerationOutput
from cbtriton.results import Asked, clear, finished_before, read_result, write_failed, write_finished
from cbtriton.workloads import Workload

logger = logging.getLogger(__name__)

# What a user can mend; its message says how.
_MISTAKES = (ValueError, TypeError, NotImplementedError, ModelUnavailableError)


def command() -> None:
    """Entry point of the command: `cache` is a word of its own, everything else is Hydra's."""
    if sys.argv[1:2] == ["cache"]:
        show_cache(sys.argv[2:])
    else:
        try:
            main()
        except SystemExit as end:
            # Hydra ends a program inside the handler of the error, whose message it has printed by then.
            wrong = re.match(r"Could not override '(.+?)'", str(end.__context__))
            if wrong is not None and (nearest := _nearest_key(wrong[1], sys.argv[1:])) is not None:
                print(f"cbtriton: there is no {wrong[1]!r}; did you mean {nearest!r}?", file=sys.stderr)
            raise


def _nearest_key(wrong: str, words: Sequence[str]) -> str | None:
    """The group or key most like `wrong`, where the words choose the files; None where nothing is like it."""
    GlobalHydra.instance().clear()
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        groups = _groups(GlobalHydra.instance().config_loader(), "")
        chosen = [word for word in words if word.partition("=")[0] in groups and "," not in word]
        node = OmegaConf.to_container(compose("config", overrides=chosen))
    near = difflib.get_close_matches(wrong, [*groups, *_dotted_keys(node)], n=1)
    return near[0] if near else None


def _groups(loader: Any, parent: str) -> list[str]:
    own = (name for name in loader.list_groups(parent.rstrip("/")) if name not in ("hydra", "__pycache__"))
    names = [f"{parent}{name}" for name in own]
    return [*names, *(inner for name in names for inner in _groups(loader, f"{name}/"))]


def _dotted_keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return []
    return [name for key, value in node.items() for name in (f"{prefix}{key}", *_dotted_keys(value, f"{prefix}{key}."))]


def show_cache(words: Sequence[str]) -> None:
    """`cbtriton cache [--clear]`."""
    parser = argparse.ArgumentParser(prog="cbtriton cache", description="What compilers kept for the next process.")
    parser.add_argument("--clear", action="store_true", help="delete it; the next run compiles anew")
    arguments = parser.parse_args(words)
    folders = compile_cache.cache_folders()
    print(compile_cache.table(folders))
    if arguments.clear:
        compile_cache.clear(folders)
        print("deleted")


@hydra.main(version_base="1.3", config_path="pkg://cbtriton.conf", config_name="config")
def main(cfg: DictConfig) -> tuple[float, float]:
    """Runs what Hydra composed. A user's mistake ends it with one line and exit code 1, or becomes a run's result.

    Returns:
        What a search looks at: output tokens per second, and the 95th percentile of the inter-token latency in
        milliseconds. A run that failed is infinitely slow.
    """
    job = HydraConfig.get()
    folder, is_sweep = Path(job.runtime.output_dir), job.mode == RunMode.MULTIRUN
    asked = _asked(cfg, job)
    if cfg.resume and (result := finished_before(folder, asked)) is not None:
        print(f"skipped {folder}: it has the result of this configuration", flush=True)
        return _objectives(result["summary"])
    clear(folder)
    try:
        summary = run(cfg, folder, asked)
    except Exception as error:
        logger.debug("the whole traceback:", exc_info=True)
        write_failed(folder, asked, error)
        if not is_sweep and not isinstance(error, _MISTAKES):
            raise
        print(f"cbtriton: {error}", file=sys.stderr, flush=True)
        if not is_sweep:
            sys.exit(1)
        return 0.0, math.inf
    return _objectives(dataclasses.asdict(summary))


class SweepEnd(Callback):
    """Says at the end of a sweep how its runs ended, and how to look at them."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra in the process that was started, whatever launched the runs."""
        folder = Path(config.hydra.sweep.dir)
        states = Counter(read_result(path)["status"] for path in folder.rglob("result.json"))
        print(f"\n{states['finished']} runs finished, {states['failed']} failed: cbtriton-report {folder}", flush=True)


def run(cfg: DictConfig, output_dir: Path, asked: Asked | None = None) -> Summary:
    """Runs one configuration and writes its results into `output_dir`.

    Args:
        cfg: The configuration.
        output_dir: The run's folder.
        asked: What the results say of where the configuration comes from; None for the configuration alone.

    Raises:
        ValueError: If the configuration asks for something impossible; so do `TypeError` and `NotImplementedError`.
        ModelUnavailableError: If the model cannot be had.
    """
    import cbtriton

    for flag in ("print_answers", "progress_bar", "warmup", "resume"):
        if not isinstance(cfg[flag], bool):
            raise ValueError(f"{flag} must be true or false, got {cfg[flag]!r}")
    # What is wrong with the configuration shows before the model is loaded, which takes longer.
    spec, source, measure = _instantiate(cfg.model), _instantiate(cfg.workload), _instantiate(cfg.measure)
    batching, kernels = _instantiate(cfg.continuous_batching), _instantiate(cfg.kernels)
    load = _instantiate(cfg.load)
    loaded = load_model(spec)
    workload = source.build(loaded.tokenizer, loaded.model.config.get_text_config().vocab_size)
    model = cbtriton.enable(loaded.model, loaded.tokenizer)
    manager = model.init_continuous_batching(
        generation_config=_generation_config(loaded.model, cfg.generation),
        continuous_batching_config=batching,
        workload_hints=_hints(workload),
        kernel_config=kernels,
    )
    try:
        if cfg.warmup:
            manager.warmup(cfg.progress_bar)
        manager.start()
        print(f"{loaded.name}: {len(workload.prompts)} prompts of the workload {workload.name}", flush=True)
        measured = measure.run(manager, workload, load, output_dir, progress_bar=cfg.progress_bar)
        stats, engine_config = manager.stats(), manager.engine_config
    finally:
        manager.destroy()
    repeats = measured.repeats
    shown = typical(repeats)
    if cfg.print_answers:
        _print_answers(loaded, workload, shown.outputs, manager.num_return_sequences)
    print(f"\n{shown.summary.table()}")
    if len(repeats) > 1:
        rates = ", ".join(f"{repeat.summary.output_tokens_per_s:.1f}" for repeat in repeats)
        print(f"\nthe median of {len(repeats)} repeats: {rates} output tokens/s")
    write_timeline(output_dir / "timeline.png", shown.steps)
    write_finished(
        output_dir,
        asked or Asked(_plain(cfg)),
        repeats=repeats,
        stats=stats,
        engine_config=engine_config.to_dict(),
    )
    written = [*measured.files, *(output_dir / name for name in ("timeline.png", "steps.jsonl", "result.json"))]
    print("\n" + "\n".join(f"wrote {path}" for path in written))
    return shown.summary


def _asked(cfg: DictConfig, job: Any) -> Asked:
    choices = {group: name for group, name in job.runtime.choices.items() if name and not group.startswith("hydra/")}
    return Asked(_plain(cfg), tuple(job.overrides.task), choices)


def _plain(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg, resolve=True)


def _objectives(summary: Mapping[str, Any]) -> tuple[float, float]:
    latency = summary["inter_token_latency"]
    return summary["output_tokens_per_s"], latency["p95_ms"] if latency else math.inf


def _instantiate(node: DictConfig) -> Any:
    """Hydra's `instantiate`, but an error of the constructor comes out as it was raised."""
    try:
        return hydra.utils.instantiate(node)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} has no default; add {error.full_key}=VALUE") from error
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | TypeError | NotImplementedError):
            raise error.__cause__ from None
        raise ValueError(str(error)) from error


def _hints(workload: Workload) -> WorkloadHints:
    return WorkloadHints(
        max_prompt_length=max(map(len, workload.prompts), default=0),
        max_generated_length=max(workload.max_new_tokens, default=0),
    )


def _generation_config(model: Any, overrides: DictConfig) -> Any:
    """A copy of the model's own generation configuration with the given fields changed.

    Raises:
        ValueError: If a field is not one of transformers' `GenerationConfig`.
    """
    config = copy.deepcopy(model.generation_config)
    fields: Any = OmegaConf.to_container(overrides, resolve=True)
    unknown = config.update(**fields)
    if unknown:
        raise ValueError(f"generation has no field {', '.join(map(str, unknown))}; see transformers' GenerationConfig")
    return config


def _print_answers(
    loaded: LoadedModel, workload: Workload, outputs: Sequence[GenerationOutput], per_prompt: int
) -> None:
    if not workload.titles or loaded.tokenizer is None:
        return
    for place, output in enumerate(outputs):
        title = workload.titles[place // per_prompt]
        answer = loaded.tokenizer.decode(output.generated_tokens, skip_special_tokens=True).strip()
        # A request that ran out of tokens stops in the middle of a sentence.
        ending = {"length": " …", "error": f"[failed: {output.error}]"}.get(output.finish_reason or "", "")
        print(f"\n> {title if len(title) <= 100 else title[:99] + '…'}\n{answer}{ending}")
