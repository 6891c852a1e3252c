"""The files under conf/ against the code they configure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import hydra.utils
import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cbtriton.config import ContinuousBatchingConfig, KernelConfig
from cbtriton.load_generator import LoadGenerator
from cbtriton.scheduler import SCHEDULERS
from cbtriton.traffic import MultiTurn, OpenLoop, PrefixTree, Rollouts
from cbtriton.workloads import BENCHMARK_WORKLOADS, Lengths, Synthetic

CONF = Path(__file__).resolve().parents[2] / "conf"
DEPRECATED = {"use_default_compile_configs", "max_cached_graphs", "block_size"}
MANDATORY = {
    "model=hub": ["model.name=somewhere"],
    "workload=file": ["workload.path=prompts.txt"],
    "workload=trace": ["workload.path=trace.csv"],
}
GROUP_OPTIONS = sorted(
    f"{path.parent.relative_to(CONF).as_posix()}={path.stem}" for path in CONF.rglob("*.yaml") if path.parent != CONF
)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        return compose("config", overrides=list(overrides))


def skip_without_plugin(option: str) -> None:
    if option.startswith("sweep=search"):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")


def test_every_group_has_an_option_to_test() -> None:
    assert len(GROUP_OPTIONS) >= 45


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_every_file_composes_and_builds_what_it_names(option: str) -> None:
    skip_without_plugin(option)
    cfg = composed(option, *MANDATORY.get(option, []))
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for group in ("model", "workload", "continuous_batching", "kernels", "measure"):
        built = hydra.utils.instantiate(cfg[group])
        assert dataclasses.is_dataclass(built)


@pytest.mark.parametrize(
    ("model", "workload", "generation"),
    list(
        itertools.product(
            ("smollm2_135m", "tiny_random"),
            ("chat", "synthetic", "W1", "W2", "W3", "W4"),
            ("greedy", "sampling"),
        )
    ),
)
def test_groups_combine_freely(model: str, workload: str, generation: str) -> None:
    cfg = composed(f"model={model}", f"workload={workload}", f"generation={generation}")
    assert OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def test_default_yaml_has_the_fields_of_the_config_in_order_with_their_defaults() -> None:
    written = yaml.safe_load((CONF / "continuous_batching" / "default.yaml").read_text())
    assert written.pop("_target_") == "cbtriton.ContinuousBatchingConfig"
    assert written.pop("_convert_") == "all"
    fields = {f.name: f.default for f in dataclasses.fields(ContinuousBatchingConfig) if f.name not in DEPRECATED}
    assert list(written.items()) == list(fields.items())
    assert [type(value) for value in written.values()] == [type(value) for value in fields.values()]
    assert len(fields) == 26


def test_default_yaml_builds_the_default_config() -> None:
    assert hydra.utils.instantiate(composed().continuous_batching) == ContinuousBatchingConfig()


PRESETS = sorted(p.stem for p in (CONF / "continuous_batching").glob("*.yaml") if p.stem != "default")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_states_only_what_it_changes(preset: str) -> None:
    written = yaml.safe_load((CONF / "continuous_batching" / f"{preset}.yaml").read_text())
    assert written.pop("defaults") == ["default", "_self_"]
    built = hydra.utils.instantiate(composed(f"continuous_batching={preset}").continuous_batching)
    assert built == dataclasses.replace(ContinuousBatchingConfig(), **written)
    assert all(value != getattr(ContinuousBatchingConfig(), key) for key, value in written.items())


SWEEPS = sorted(option for option in GROUP_OPTIONS if option.startswith("sweep="))


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_value_of_a_grid_is_one_that_a_run_can_have(sweep: str) -> None:
    """All values are tried, in as many runs as the longest list has; `search` draws its own."""
    skip_without_plugin(sweep)
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        params = compose("config", overrides=[sweep], return_hydra_config=True).hydra.sweeper.params
        options = {key: list_of_values(key, str(values)) for key, values in params.items()}
        for number in range(max(map(len, options.values()))):
            chosen = {key: values[number % len(values)] for key, values in options.items()}
            cfg = compose("config", overrides=[sweep, *(f"{key}={value}" for key, value in chosen.items())])
            built = {
                group: hydra.utils.instantiate(cfg[group]) for group in ("continuous_batching", "kernels", "measure")
            }
            assert built["measure"].repeats > 1
            assert hydra.utils.instantiate(cfg.continuous_batching).scheduler_type in SCHEDULERS.default_margins()
            for key, value in chosen.items():
                group, _, name = key.replace("/", ".").partition(".")
                assert str(getattr(built[group], name)).lower() == value


def list_of_values(key: str, values: str) -> list[str]:
    if values == "glob(*)":
        return sorted(path.stem for path in (CONF / key).glob("*.yaml"))
    inner = values.removeprefix("choice(").removeprefix("interval(").removesuffix(")")
    return [value.strip() for value in inner.split(",")]


@pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.endswith("_quick")])
def test_quick_grids_are_those_of_their_sweep_on_the_tiny_model(sweep: str) -> None:
    skip_without_plugin(sweep)
    with initialize_config_module("cbtriton.conf", version_base="1.3"):
        quick = compose("config", overrides=[sweep], return_hydra_config=True)
        whole = compose("config", overrides=[sweep.removesuffix("_quick")], return_hydra_config=True)
    assert set(quick.hydra.sweeper.params) == set(whole.hydra.sweeper.params)
    assert (quick.model.source, whole.model.source) == ("tiny_random", "smollm2_135m")
    assert quick.workload.num_requests <= 8
    if not sweep.startswith("sweep=search"):
        sizes = [len(list_of_values(key, str(values))) for key, values in quick.hydra.sweeper.params.items()]
        assert math.prod(sizes) <= 9


def test_kernels_yaml_has_the_slots_of_the_config_in_order_with_their_defaults() -> None:
    written = yaml.safe_load((CONF / "kernels" / "default.yaml").read_text())
    assert written.pop("_target_") == "cbtriton.KernelConfig"
    slots = [next(iter(entry)) for entry in written.pop("defaults") if entry != "_self_"]
    assert written == {f.name: f.default for f in dataclasses.fields(KernelConfig)}
    assert slots == [name for name in written if name != "default"]


@pytest.mark.parametrize("slot", [f.name for f in dataclasses.fields(KernelConfig) if f.name != "default"])
def test_choosing_an_implementation_changes_its_slot_only(slot: str) -> None:
    built = hydra.utils.instantiate(composed(f"kernels/{slot}=reference").kernels)
    assert built == dataclasses.replace(KernelConfig(), **{slot: "reference"})


@pytest.mark.parametrize("default", ["triton", "reference"])
def test_all_slots_can_be_chosen_at_once_and_one_of_them_again(default: str) -> None:
    assert hydra.utils.instantiate(composed(f"kernels={default}").kernels) == KernelConfig(default=default)
    built = hydra.utils.instantiate(composed(f"kernels={default}", "kernels/decode_attention=single_pass").kernels)
    assert built == KernelConfig(default=default, decode_attention="single_pass")


@pytest.mark.parametrize(
    "override", ["continuous_batching.pagesize=16", "model.nmae=x", "kernels.attention=reference", "workloads=chat"]
)
def test_an_unknown_key_is_refused(override: str) -> None:
    with pytest.raises((hydra.errors.HydraException, OmegaConfBaseException)):  # pyright: ignore
        composed(override)


def test_a_key_that_was_added_by_force_is_refused_by_the_constructor() -> None:
    cfg = composed("+continuous_batching.pagesize=16")
    with pytest.raises(hydra.errors.InstantiationException, match="pagesize"):  # pyright: ignore
        hydra.utils.instantiate(cfg.continuous_batching)


@pytest.mark.parametrize("name", BENCHMARK_WORKLOADS)
def test_each_benchmark_workload_can_be_run_by_name(name: str) -> None:
    assert hydra.utils.instantiate(composed(f"workload={name}").workload) == BENCHMARK_WORKLOADS[name]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("open_loop", OpenLoop(Synthetic(prompt_lengths=Lengths(16, 256, "lognormal")), rate=4.0)),
        ("prefix_tree", PrefixTree()),
        ("multi_turn", MultiTurn()),
        ("rollouts", Rollouts()),
    ],
)
def test_files_of_workloads_have_the_defaults_of_their_classes(workload: str, expected: object) -> None:
    assert hydra.utils.instantiate(composed(f"workload={workload}").workload) == expected


def test_the_load_has_the_defaults_of_its_class() -> None:
    assert hydra.utils.instantiate(composed().load) == LoadGenerator()


def test_any_prompts_can_arrive_at_a_rate() -> None:
    cfg = composed("workload=bursty", "workload@workload.prompts=rollouts", "workload.prompts.num_samples=3")
    assert hydra.utils.instantiate(cfg.workload) == OpenLoop(Rollouts(num_samples=3), 4.0, coefficient_of_variation=4.0)


def test_the_limit_on_new_tokens_reaches_chat_and_file_workloads() -> None:
    for workload in ("chat", "file"):
        extra = MANDATORY.get(f"workload={workload}", [])
        cfg = composed(f"workload={workload}", "generation.max_new_tokens=7", *extra)
        assert hydra.utils.instantiate(cfg.workload).max_new_tokens == 7
