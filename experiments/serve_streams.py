"""Asks transformers' server for many streams at once, on this engine and on transformers' own continuous batching.

    python experiments/serve_streams.py --streams 16 --leave 4

The official client asks, over the loopback device, for answers of SmolLM2-135M; some clients leave in the middle.
Server and clients share a process, and engines take turns in processes of their own. Needs the extra `serve`. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

ENGINES = ("transformers", "cbtriton")
QUESTIONS = ("Tell me a story about a river.", "Why is the sky blue?", "Write a poem about winter.", "What is a prime?")


def main() -> None:
    """Prints one row for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="(default: 16)")
    parser.add_argument("--leave", type=int, default=4, help="clients that leave after ten tokens (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each engine (default: 2)")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(serve(arguments)))
        return
    print("| engine | tokens/s | first token, p50 / p95, s | between tokens, p50 / p95, ms | whole answers | left |")
    print("|---|---|---|---|---|---|")
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(arguments.repeats):
        for engine in ENGINES:
            command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[engine].append(json.loads(done.stdout.strip().splitlines()[-1]))
    for engine, results in runs.items():
        middle = {name: statistics.median(result[name] for result in results) for name in results[0]}
        print(
            f"| {engine} | {middle['tokens']:.0f} | {middle['first_50']:.2f} / {middle['first_95']:.2f} | "
            f"{middle['between_50']:.0f} / {middle['between_95']:.0f} | {middle['whole']:.0f} | {middle['left']:.0f} |"
        )


def serve(arguments: argparse.Namespace) -> dict[str, float]:
    """Starts a server, warms it up with one request, and asks."""
    from transformers.cli.serve import Serve

    import cbtriton
    from cbtriton.model_zoo import demo_checkpoint

    if arguments.engine == "cbtriton":
        cbtriton.patch_transformers()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(demo_checkpoint())
    server = Serve(
        force_model=path,
        continuous_batching=True,
        device="cpu",
        dtype=arguments.dtype,
        host="127.0.0.1",
        port=port,
        cb_num_blocks=64,
        non_blocking=True,
    )
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    try:
        return asyncio.run(measure(f"http://127.0.0.1:{port}/v1", path, arguments))
    finally:
        server.kill_server()


async def measure(url: str, model: str, arguments: argparse.Namespace) -> dict[str, float]:
    """What the clients saw."""
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
        await stream(client, model, QUESTIONS[0], 4, None)
        start = time.perf_counter()
        every = await asyncio.gather(
            *(
                stream(
                    client,
                    model,
                    QUESTIONS[place % len(QUESTIONS)],
                    arguments.tokens,
                    10 if place < arguments.leave else None,
                )
                for place in range(arguments.streams)
            )
        )
        seconds = time.perf_counter() - start
    times = [each for each in every if each]
    first = sorted(each[1] - each[0] for each in times)
    between = sorted(1000 * (b - a) for each in times for a, b in itertools.pairwise(each[1:]))
    return {
        "tokens": sum(len(each) - 1 for each in times) / seconds,
        "first_50": first[len(first) // 2],
        "first_95": first[int(0.95 * (len(first) - 1))],
        "between_50": between[len(between) // 2],
        "between_95": between[int(0.95 * (len(between) - 1))],
        "whole": len(every) - arguments.leave,
        "left": arguments.leave,
    }


async def stream(client: Any, model: str, question: str, tokens: int, leaves_after: int | None) -> list[float]:
    """When the request was sent, and when each piece of text came."""
    times = [time.perf_counter()]
    messages = [{"role": "user", "content": question}]
    answer = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=tokens, temperature=0.0, stream=True
    )
    async for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
            if leaves_after is not None and len(times) > leaves_after:
                await answer.close()
                break
    return times


if __name__ == "__main__":
    main()
