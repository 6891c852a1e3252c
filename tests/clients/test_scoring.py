"""Texts are scored in batches through log-probabilities of prompts, the way lm-evaluation-harness calls a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cbtriton
from cbtriton import ContinuousBatchingConfig, ContinuousBatchingManager

models = pytest.importorskip("lm_eval.api.model", reason="needs the extra evaluation")
tasks = pytest.importorskip("lm_eval.api.task", reason="needs the extra evaluation")
evaluator = pytest.importorskip("lm_eval.evaluator", reason="needs the extra evaluation")

VOCAB_SIZE = 128


def tokens_of(text: str) -> list[int]:
    return list(text.encode("ascii"))


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, intermediate_size=96, initializer_range=0.3, **sizes)
    return LlamaForCausalLM(config).eval()


def scored_by(manager: ContinuousBatchingManager, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The log-probability of each continuation, and whether it is what greedy decoding would answer."""
    options = {"max_new_tokens": 1, "prompt_logprobs": True, "eos_token_id": -1}
    ids = [manager.add_request(tokens_of(context + continuation), **options) for context, continuation in pairs]
    # What greedy decoding answers is asked for beside.
    answers = [
        manager.add_request(tokens_of(context), max_new_tokens=len(continuation), eos_token_id=-1)
        for context, continuation in pairs
    ]
    scores = []
    for name, answer, (_, continuation) in zip(ids, answers, pairs, strict=True):
        logprobs = manager.get_result(name).prompt_logprobs[-len(continuation) :]
        is_greedy = manager.get_result(answer).generated_tokens == tokens_of(continuation)
        scores.append((sum(logprobs), is_greedy))
    return scores


def dense_score(model: Any, context: str, continuation: str) -> tuple[float, bool]:
    tokens = torch.tensor([tokens_of(context + continuation)])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].double().log_softmax(-1)[len(context) - 1 : -1]
    targets = tokens[0, len(context) :]
    return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())


class Engine(models.LM):
    """This engine as the harness has models."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        super().__init__()
        self.manager = manager
        self.seen: list[tuple[tuple[str, str], tuple[float, bool]]] = []

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        scores = scored_by(self.manager, pairs)
        self.seen += zip(pairs, scores, strict=True)
        return scores

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError


def task_of(folder: Path, documents: list[dict[str, Any]]) -> Any:
    file = folder / "documents.jsonl"
    file.write_text("\n".join(json.dumps(document) for document in documents))
    return tasks.ConfigurableTask(
        config={
            "task": "choices",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{best}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )


def test_an_evaluation_gives_what_dense_passes_give(tmp_path):
    model = small_model()
    documents = []
    for place in range(12):
        question = f"Question {place}: what comes next? " * (1 + place % 3)
        choices = [f"this {place}", "that", "neither of both"]
        scores = [dense_score(model, question, choice)[0] for choice in choices]
        # Every third target is not the model's own.
        best = scores.index(max(scores)) if place % 3 else scores.index(min(scores))
        documents.append({"question": question, "choices": choices, "best": best})
    config = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
    with cbtriton.enable(model).continuous_batching_context_manager(continuous_batching_config=config) as manager:
        engine = Engine(manager)
        task = task_of(tmp_path, documents)
        results = evaluator.evaluate(lm=engine, task_dict={"choices": task}, bootstrap_iters=0)
    assert results["results"]["choices"]["acc,none"] == pytest.approx(8 / 12)
    assert len(engine.seen) == 36
    for (context, continuation), (score, is_greedy) in engine.seen:
        expected, expected_greedy = dense_score(model, context, continuation)
        assert score == pytest.approx(expected, abs=1e-3, rel=1e-4)
        assert is_greedy == expected_greedy


def test_what_greedy_decoding_answers_is_known_as_such():
    model = small_model()
    context = "The model's own words: "
    answer = model.generate(torch.tensor([tokens_of(context)]), do_sample=False, max_new_tokens=5, eos_token_id=None)
    own = bytes(answer[0, len(context) :].tolist()).decode("ascii")
    with cbtriton.enable(model).continuous_batching_context_manager() as manager:
        scores = scored_by(manager, [(context, own), (context, own[:-1] + "~")])
    for (score, is_greedy), continuation in zip(scores, (own, own[:-1] + "~"), strict=True):
        expected, expected_greedy = dense_score(model, context, continuation)
        assert score == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy
    assert [is_greedy for _, is_greedy in scores] == [True, False]
