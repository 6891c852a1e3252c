"""The engines' part of `gpu_check.py`: a random model and the same workloads through both engines."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
from _gpu_report import Report, Row

from cbtriton.report import Percentiles, first_token_times, inter_token_times
from cbtriton.workloads import Lengths, Synthetic, Workload

# (name, engine, settings), in the order in which they are run while there is time.
ENGINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cbtriton", "cbtriton", {}),
    ("transformers", "transformers", {}),
    ("cbtriton, no graphs", "cbtriton", {"use_cuda_graph": False}),
)
WORKLOADS = {
    "mixed": Synthetic("mixed", 128, Lengths(16, 1024, "loguniform"), Lengths(16, 256, "loguniform")),
    "single": Synthetic("single", 1, Lengths(128, 128), Lengths(128, 128)),
}
DRY_WORKLOADS = {
    "mixed": Synthetic("mixed", 3, Lengths(2, 9), Lengths(2, 4)),
    "single": Synthetic("single", 1, Lengths(3, 3), Lengths(4, 4)),
}


def measure_engines(task: dict[str, Any], report: Report) -> None:
    """A worker's run of the workloads: each once in small, so that everything it needs is compiled, then whole."""
    is_dry = task["is_dry"]
    device = torch.device("cpu" if is_dry else "cuda")
    for who, engine, settings in task["engines"]:
        report.write(doing=["loading", who])
        if is_dry:
            settings = settings | {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
        model, config = with_engine(random_llama(device, is_dry), engine, settings)
        for case, source in (DRY_WORKLOADS if is_dry else WORKLOADS).items():
            report.write(doing=[case, who])
            if not is_dry:
                # Fewer requests of the same lengths; drawn anew, so that nothing of the whole run is cached.
                small = dataclasses.replace(source, num_requests=max(1, source.num_requests // 8), seed=1)
                run_workload(model, small.build(None, model.config.vocab_size), config)
                release_memory()
            workload = source.build(None, model.config.vocab_size)
            outputs, stats = run_workload(model, workload, config)
            report.row(engine_row(case, who, workload, outputs, stats))
            release_memory()


def release_memory() -> None:
    """Makes sure that an engine which is gone holds nothing: the next one's cache is sized by what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_engine(model: Any, engine: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The model with the methods of an engine, and that engine's configuration."""
    if engine == "transformers":
        from transformers import ContinuousBatchingConfig

        return model, ContinuousBatchingConfig(**settings)
    import cbtriton

    return cbtriton.enable(model), cbtriton.ContinuousBatchingConfig(**settings)


def random_llama(device: torch.device, is_tiny: bool) -> Any:
    """A Llama of about a billion random weights in bf16, or a tiny one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 32_000,
        "max_position_embeddings": 8192,
    }
    if is_tiny:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"head_dim": 8, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 256}
    torch.manual_seed(0)
    # Made where it runs: a billion random numbers take the host half a minute.
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model = model.to(device).eval().requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def run_workload(model: Any, workload: Workload, config: Any) -> tuple[list[Any], Any]:
    """Finished outputs of a workload, and the engine's counters where it has any; the same calls for both engines."""
    from transformers import GenerationConfig

    options = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.max_new_tokens)
    )
    with model.continuous_batching_context_manager(
        generation_config=options, continuous_batching_config=config
    ) as manager:
        for prompt, limit in zip(workload.prompts, workload.max_new_tokens, strict=True):
            manager.add_request(list(prompt), max_new_tokens=limit, record_timestamps=True)
        outputs = []
        while len(outputs) < len(workload.prompts):
            if (output := manager.get_result(timeout=1)) is not None and output.is_finished():
                outputs.append(output)
            elif output is None and not manager.is_running():
                raise RuntimeError("the engine stopped before its requests were done")
        stats = manager.stats() if hasattr(manager, "stats") else None
    errors = [output.error for output in outputs if output.error]
    num_tokens = sum(len(output.generated_tokens) for output in outputs)
    if errors or num_tokens != sum(workload.max_new_tokens):
        raise RuntimeError(f"{num_tokens} of {sum(workload.max_new_tokens)} tokens; errors: {errors[:3]}")
    return outputs, stats


def engine_row(case: str, who: str, workload: Workload, outputs: list[Any], stats: Any) -> Row:
    """Throughput from the first request to the last token, as both engines stamp them with the same clock."""
    seconds = max(output.timestamps[-1] for output in outputs) - min(output.created_time for output in outputs)
    num_tokens = sum(workload.max_new_tokens)
    notes = [f"{len(outputs)} requests, {workload.num_prompt_tokens} prompt and {num_tokens} output tokens"]
    for label, times in (("first token", first_token_times(outputs)), ("inter-token", inter_token_times(outputs))):
        if (found := Percentiles.of(times)) is not None:
            notes.append(f"{label} p50 / p95 {found.p50_ms:.1f} / {found.p95_ms:.1f} ms")
    if stats is not None:
        stages = ("schedule", "prepare", "run", "update")
        split = " · ".join(f"{stage} {getattr(stats, f'{stage}_time'):.2f}" for stage in stages)
        notes.append(f"{stats.steps} steps (s: {split})")
    return Row("engines", case, who, "ok", tokens_per_s=num_tokens / seconds, note="; ".join(notes))
