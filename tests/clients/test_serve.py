"""transformers' own server on this engine, asked by the official client of the protocol that it speaks."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cbtriton
from cbtriton.compatibility import ServedManager, request_options
from cbtriton.manager import ContinuousBatchingManager

openai = pytest.importorskip("openai", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

NUM_WORDS, LENGTH, PATIENCE = 96, 16, 60
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
QUESTIONS = [" ".join(f"w{(7 * place + 3 * i) % 90 + 3}" for i in range(3 + place % 5)) for place in range(16)]


def saved_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_WORDS,
            intermediate_size=128,
            max_position_embeddings=2048,
            initializer_range=0.3,
            **sizes,
            **ends,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


class Server:
    """The server, a client of it, and what the model answers by itself."""

    def __init__(self, path: Path) -> None:
        from transformers.cli.serve import Serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.path = str(path)
        self.model = LlamaForCausalLM.from_pretrained(path)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        self.serve = Serve(
            force_model=self.path,
            continuous_batching=True,
            device="cpu",
            dtype="float32",
            host="127.0.0.1",
            port=port,
            cb_num_blocks=256,
            cb_block_size=16,
            non_blocking=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)

    @property
    def manager(self) -> Any:
        return self.serve._generation_state._cb_manager._cb

    def expected(self, question: str, length: int = LENGTH, **options: Any) -> str:
        prompt = torch.tensor([self.tokenizer.encode(question)])
        answer = self.model.generate(
            prompt, max_new_tokens=length, do_sample=False, eos_token_id=1, pad_token_id=0, **options
        )
        return self.tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)

    def client(self) -> Any:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)

    async def ask(self, client: Any, question: str, length: int = LENGTH, **options: Any) -> str:
        messages = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model=self.path, messages=messages, max_tokens=length, **options)
        return answer.choices[0].message.content

    async def stream(self, client: Any, question: str, leaves_after: int | None = None, length: int = LENGTH) -> str:
        messages, text, chunks = [{"role": "user", "content": question}], "", 0
        # Whoever leaves would have got on for long.
        endless = {} if leaves_after is None else {"logit_bias": {"1": -100}}
        stream = await client.chat.completions.create(
            model=self.path, messages=messages, max_tokens=length, stream=True, **endless
        )
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            chunks += 1
            if leaves_after is not None and chunks > leaves_after:
                await stream.close()
                return text
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with cbtriton.patch_transformers():
        server = Server(saved_model(tmp_path_factory.mktemp("model")))
        yield server
        server.serve.kill_server()


def test_answers_are_those_of_the_model(server: Server) -> None:
    async def ask() -> list[str]:
        async with server.client() as client:
            return [await server.ask(client, question) for question in QUESTIONS[:3]]

    assert asyncio.run(ask()) == [server.expected(question) for question in QUESTIONS[:3]]
    assert isinstance(server.manager, ServedManager)
    assert isinstance(server.manager.manager, ContinuousBatchingManager)


def test_streams_of_those_who_stay_are_whole_when_others_leave(server: Server) -> None:
    leavers = {2, 5, 11, 14}

    async def ask() -> list[str]:
        async with server.client() as client:
            return await asyncio.gather(
                *(
                    server.stream(
                        client, question, 3 if place in leavers else None, 1500 if place in leavers else LENGTH
                    )
                    for place, question in enumerate(QUESTIONS)
                )
            )

    before = server.manager.stats().requests_cancelled
    texts = asyncio.run(ask())
    for place, (text, question) in enumerate(zip(texts, QUESTIONS, strict=True)):
        if place not in leavers:
            assert text.split() == server.expected(question).split(), place
    deadline = time.monotonic() + 10
    while (stats := server.manager.stats()).requests_cancelled - before < len(leavers):
        assert time.monotonic() < deadline, "a client left, and its request goes on"
        time.sleep(0.01)
    assert stats.num_running == stats.num_waiting == stats.blocks_in_use == 0


def test_each_request_has_its_own_options(server: Server) -> None:
    words = server.expected(QUESTIONS[0], 4 * LENGTH).split()
    banned = server.tokenizer.convert_tokens_to_ids(words[0])

    async def ask() -> list[str]:
        async with server.client() as client:
            return await asyncio.gather(
                server.ask(client, QUESTIONS[0], 4 * LENGTH),
                server.ask(client, QUESTIONS[0], 4 * LENGTH, stop=[words[6]]),
                server.ask(client, QUESTIONS[0], 4 * LENGTH, frequency_penalty=0.7),
                server.ask(client, QUESTIONS[0], 4 * LENGTH, logit_bias={str(banned): -100}),
            )

    plain, stopped, penalised, biased = asyncio.run(ask())
    assert plain.split() == words
    assert stopped.split() == words[: words.index(words[6]) + 1]
    assert penalised == server.expected(QUESTIONS[0], 4 * LENGTH, repetition_penalty=1.7)
    assert biased == server.expected(QUESTIONS[0], 4 * LENGTH, sequence_bias={(banned,): -100.0})
    assert len({plain, stopped, penalised, biased}) == 4


def test_a_bad_request_harms_nobody_else(server: Server) -> None:
    async def ask() -> list[Any]:
        async with server.client() as client:
            return await asyncio.gather(
                server.ask(client, "w5 " * 3000),
                server.ask(client, QUESTIONS[1]),
                return_exceptions=True,
            )

    refused, answered = asyncio.run(ask())
    assert isinstance(refused, openai.APIError)
    assert answered == server.expected(QUESTIONS[1])


def test_monitors_see_what_runs(server: Server) -> None:
    manager = server.manager
    assert manager.background_thread_status.fatal_error is None
    assert not manager.batch_processor.scheduler.has_pending_requests()


def test_what_a_greedy_request_would_draw_with_is_left_out() -> None:
    greedy = GenerationConfig(do_sample=False, temperature=0.7, top_p=0.9, repetition_penalty=1.2, stop_strings=["a"])
    assert request_options(greedy) == {"do_sample": False, "repetition_penalty": 1.2, "stop_strings": ["a"]}
    drawing = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9)
    assert request_options(drawing) == {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def test_a_server_that_goes_ends_what_does_not_finish() -> None:
    calls = []
    manager = SimpleNamespace(stop=lambda **options: calls.append(options), is_running=lambda: len(calls) < 2)
    ServedManager(manager).stop(block=True, timeout=2)
    assert calls == [{"block": True, "timeout": 2}, {"block": True, "timeout": 2, "hard_stop": True}]


def test_the_server_gets_its_own_methods_back() -> None:
    from transformers.cli.serving.utils import CBGenerateManager

    names = ("init_cb", "generate_streaming", "generate_non_streaming")
    before = [getattr(CBGenerateManager, name) for name in names]
    with cbtriton.patch_transformers():
        assert CBGenerateManager.init_cb.__module__ == "cbtriton.compatibility"
    assert [getattr(CBGenerateManager, name) for name in names] == before
