"""TRL's trainers roll out on this engine: the real package, its switch for continuous batching, weights that change."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cbtriton
from cbtriton.manager import ContinuousBatchingManager

trl = pytest.importorskip("trl", reason="needs the extra trl")
datasets = pytest.importorskip("datasets", reason="needs the extra trl")

NUM_WORDS, EOS, PAD = 64, 1, 0
PER_GROUP, LENGTH = 8, 12


def words() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=NUM_WORDS, intermediate_size=128, max_position_embeddings=128, **sizes, **ends)
    )


def share_of_low_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < NUM_WORDS // 4 for token in tokens) / len(tokens) for tokens in completion_ids]


class Rollouts:
    """What the trainer asked for, and what plain `generate` answers with the weights of that moment."""

    def __init__(self, is_greedy: bool) -> None:
        self.is_greedy = is_greedy
        self.submit_batch = ContinuousBatchingManager.submit_batch
        self.managers: list[weakref.ref[ContinuousBatchingManager]] = []
        self.answers: list[list[list[int]]] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours = LlamaForCausalLM.generate_batch

        def generate_batch(model: Any, inputs: Any, generation_config: Any = None, **options: Any) -> Any:
            before = generation_config.to_dict()
            outputs = ours(model, inputs, generation_config=generation_config, **options)
            assert generation_config.to_dict() == before
            self.answers.append([output.generated_tokens for output in outputs.values()])
            if self.is_greedy:
                self._compare(model, inputs)
            return outputs

        def submit_batch(manager: ContinuousBatchingManager, *args: Any, **kwargs: Any) -> Any:
            self.managers.append(weakref.ref(manager))
            return self.submit_batch(manager, *args, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "generate_batch", generate_batch)
        monkeypatch.setattr(ContinuousBatchingManager, "submit_batch", submit_batch)

    def _compare(self, model: Any, inputs: list[list[int]]) -> None:
        model.eval()
        for prompt, answer in zip(inputs[::PER_GROUP], self.answers[-1][::PER_GROUP], strict=True):
            expected = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD
            )
            assert answer == expected[0, len(prompt) :].tolist()


@pytest.fixture
def patched() -> Iterator[None]:
    with cbtriton.patch_transformers():
        yield


def trainer_of(folder: Path, model: Any, steps: int, kind: str = "GRPO", **options: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": PER_GROUP,
        "num_generations": PER_GROUP,
        "generation_batch_size": 2 * PER_GROUP,
        "max_completion_length": LENGTH,
        "max_steps": steps,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "beta": 0.0,
        "disable_tqdm": True,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 256},
    }
    config = getattr(trl, f"{kind}Config")(**settings | options)
    prompts = [f"w{first} w{first + 1} w{first + 2}" for first in range(2, 42)]
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=share_of_low_words,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=words(),
    )


def assert_nothing_is_left(model: Any, rollouts: Rollouts) -> None:
    gc.collect()
    assert rollouts.managers
    assert all(manager() is None for manager in rollouts.managers), "an engine outlived its rollout"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cbtriton")]
    assert not [module for module in model.modules() if "_cbtriton_packed" in vars(module)]
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_rollouts_follow_the_weights(patched, monkeypatch, tmp_path, bf16) -> None:
    model, rollouts = small_model(), Rollouts(is_greedy=not bf16)
    trainer = trainer_of(
        tmp_path, model, steps=6, bf16=bf16, generation_kwargs={"do_sample": False} if not bf16 else {}
    )
    rollouts.watch(monkeypatch)
    before = model.lm_head.weight.detach().float().clone()
    trainer.train()
    assert len(rollouts.answers) == 3
    assert all(all(answer) for answer in rollouts.answers), "the trainer takes no empty answers"
    assert not torch.equal(before, model.lm_head.weight.detach().float())
    assert_nothing_is_left(model, rollouts)


def test_other_trainers_do_the_same(patched, monkeypatch, tmp_path) -> None:
    model, rollouts = small_model(), Rollouts(is_greedy=False)
    trainer = trainer_of(tmp_path, model, steps=2, kind="RLOO", bf16=False)
    rollouts.watch(monkeypatch)
    trainer.train()
    assert rollouts.answers
    assert_nothing_is_left(model, rollouts)


@pytest.mark.slow
def test_the_reward_rises(patched, monkeypatch, tmp_path) -> None:
    model, rollouts = small_model(), Rollouts(is_greedy=False)
    trainer = trainer_of(tmp_path, model, steps=20, bf16=False, learning_rate=1e-2)
    rollouts.watch(monkeypatch)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1.0
    assert_nothing_is_left(model, rollouts)
