"""The command `cbtriton`: a Hydra application over `conf/`, and the only module that knows of Hydra.

Loads a model, runs a workload through the continuous batching manager, shows the answers and what they cost, and
writes `result.json` and `timeline.png` into the run's folder. `cbtriton cache` shows what compilers have kept, and with
`--clear` deletes it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from cbtriton import compile_cache
from cbtriton.config import WorkloadHints
from cbtriton.model_zoo import LoadedModel, ModelUnavailableError, load_model
from cbtriton.report import write_result_json, write_timeline
from cbtriton.request import GenerationOutput
from cbtriton.workloads import Workload

logger = logging.getLogger(__name__)


def command() -> None:
    """Entry point of the command: `cache` is a word of its own, everything else is Hydra's."""
    if sys.argv[1:2] == ["cache"]:
        show_cache(sys.argv[2:])
    else:
        main()


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
def main(cfg: DictConfig) -> None:
    """Runs what Hydra composed. A user's mistake ends it with one line and exit code 1."""
    try:
        run(cfg, Path(HydraConfig.get().runtime.output_dir))
    except (ValueError, TypeError, NotImplementedError, ModelUnavailableError) as error:
        logger.debug("the whole traceback:", exc_info=True)
        print(f"cbtriton: {error}", file=sys.stderr)
        sys.exit(1)


def run(cfg: DictConfig, output_dir: Path) -> None:
    """Runs one configuration and writes its results into `output_dir`.

    Raises:
        ValueError: If the configuration asks for something impossible; so do `TypeError` and `NotImplementedError`.
        ModelUnavailableError: If the model cannot be had.
    """
    import cbtriton

    # What is wrong with the configuration shows before the model is loaded, which takes longer.
    spec, source = _instantiate(cfg.model), _instantiate(cfg.workload)
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
        result = load.run(manager, workload, progress_bar=cfg.progress_bar)
        stats, steps, engine_config = manager.stats(), manager.step_records(), manager.engine_config
    finally:
        manager.destroy()
    if cfg.print_answers:
        _print_answers(loaded, workload, result.outputs, manager.num_return_sequences)
    summary = load.summarise(result, stats)
    print(f"\n{summary.table()}")
    write_result_json(
        output_dir / "result.json",
        summary=summary,
        stats=stats,
        outputs=result.outputs,
        engine_config=engine_config.to_dict(),
        asked=OmegaConf.to_container(cfg, resolve=True),  # pyright: ignore[reportArgumentType]
    )
    write_timeline(output_dir / "timeline.png", steps)
    print(f"\nwrote {output_dir / 'result.json'}\nwrote {output_dir / 'timeline.png'}")


def _instantiate(node: DictConfig) -> Any:
    """Hydra's `instantiate`, but an error of the constructor comes out as it was raised."""
    try:
        return hydra.utils.instantiate(node)
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
