"""JSON of a given form, forced by a grammar: how many answers parse, and what the masks cost.

Every request brings a `token_mask` of its own: a matcher of xgrammar that follows the request's tokens and says which
may come next. The same requests run without masks beside it. Needs `pip install 'cbtriton[grammar]'`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import xgrammar  # pyright: ignore[reportMissingImports]
from transformers import GenerationConfig

import cbtriton
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.model_zoo import ModelSpec, load_model

# Lengths are bounded, so that every answer ends before its last token is due.
WORDS = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "name": WORDS,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_student": {"type": "boolean"},
    },
    "recipe": {"title": WORDS, "ingredients": {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 4}},
    "city": {"city": WORDS, "country": WORDS, "size": {"enum": ["small", "medium", "large"]}},
    "event": {
        "date": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"},
        "what": WORDS,
    },
    "point": {
        "position": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        }
    },
}
MAX_NEW_TOKENS = 200


class GrammarMask:
    """A `token_mask`: what a grammar allows behind the tokens so far.

    Args:
        grammar: A compiled grammar.
        vocab_size: Number of token ids that the model can produce.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._words = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._accepted: list[int] = []

    def __call__(self, generated: list[int]) -> torch.Tensor:
        """`[ceil(vocab_size / 32)]` int32, a bit per token that may come next."""
        # Sequences of one request share it, and go different ways.
        if generated[: len(self._accepted)] != self._accepted:
            self._matcher.reset()
            self._accepted = []
        for token in generated[len(self._accepted) :]:
            assert self._matcher.accept_token(token), f"token {token} was not allowed"
        self._accepted = list(generated)
        self._matcher.fill_next_token_bitmask(self._words)
        return self._words[0]


def schema(name: str) -> dict[str, Any]:
    """A JSON schema of one object with nothing else in it."""
    properties = SCHEMAS[name]
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def is_wanted(text: str, name: str) -> bool:
    """Whether a text is JSON with the keys that were asked for."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == list(SCHEMAS[name])


def main() -> None:
    """Prints a table, and a few answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    loaded = load_model(ModelSpec())
    # Transformers' own, which a loaded checkpoint has.
    model, tokenizer = loaded.model, cast("Any", loaded.tokenizer)
    vocab_size = model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(arguments.num_requests)]
    grammars = {name: compiler.compile_json_schema(schema(name), any_whitespace=False) for name in SCHEMAS}
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Describe a {name} as JSON with the keys {', '.join(SCHEMAS[name])}."}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        for name in names
    ]
    print("| masks | answers that parse | tokens | tokens/s | ms of masks per token |\n|---|---|---|---|---|")
    for has_masks in (False, True):
        masks = [GrammarMask(grammars[name], vocab_size) if has_masks else None for name in names]
        texts, row = run(model, tokenizer, prompts, masks, arguments.temperature)
        parsed = sum(map(is_wanted, texts, names))
        print(f"| {'yes' if has_masks else 'no'} | {parsed} of {len(texts)} | {row} |")
    print("\n".join(texts[: len(SCHEMAS)]))


def run(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], masks: Sequence[GrammarMask | None], temperature: float
) -> tuple[list[str], str]:
    """Answers to all prompts, each with its mask; and their number of tokens, tokens/s and time of masks, as cells."""
    seconds_of_masks = 0.0

    def timed(mask: GrammarMask) -> Any:
        def call(generated: list[int]) -> torch.Tensor:
            nonlocal seconds_of_masks
            start = time.perf_counter()
            words = mask(generated)
            seconds_of_masks += time.perf_counter() - start
            return words

        return call

    config = cbtriton.ContinuousBatchingConfig(per_request_processors=True, seed=0)
    options = GenerationConfig(do_sample=True, temperature=temperature, eos_token_id=tokenizer.eos_token_id)
    manager = ContinuousBatchingManager(model, options, config)
    manager.start()
    try:
        start = time.perf_counter()
        ids = [
            manager.add_request(
                prompt,
                max_new_tokens=MAX_NEW_TOKENS,
                seed=i,
                token_mask=None if mask is None else timed(mask),
            )
            for i, (prompt, mask) in enumerate(zip(prompts, masks, strict=True))
        ]
        outputs = [manager.get_result(request_id) for request_id in ids]
        seconds = time.perf_counter() - start
    finally:
        manager.destroy()
    texts = []
    num_tokens = 0
    for output in outputs:
        assert output is not None
        assert output.error is None, output.error
        num_tokens += len(output.generated_tokens)
        texts.append(tokenizer.decode(output.generated_tokens, skip_special_tokens=True))
    return texts, f"{num_tokens} | {num_tokens / seconds:.1f} | {1000 * seconds_of_masks / num_tokens:.2f}"


if __name__ == "__main__":
    main()
