"""`token_logprobs` of the slot `sample` against fp64."""

from __future__ import annotations

import pytest
import torch

SLOT = "sample"


def expected(logits, token_ids, temperature, num_top):
    heat = torch.where(temperature == 0, 1.0, temperature).double()
    logprobs = (logits.double() / heat[:, None]).log_softmax(-1)
    top, ids = logprobs.sort(descending=True, stable=True)
    return logprobs.gather(1, token_ids[:, None])[:, 0], ids[:, :num_top], top[:, :num_top]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (5, 5), (127, 0), (128, 3), (129, 20), (1000, 20)])
def test_tokens_and_the_likeliest_ones_have_the_numbers_of_fp64(implementation, vocab_size, num_top, dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Whole numbers in bf16: many are equal, and come by their ids.
    logits = 4 * torch.randn(4, vocab_size, generator=generator)
    logits = logits.round().to(dtype) if dtype == torch.bfloat16 else logits
    padded = torch.full((4, vocab_size + 9), torch.nan, dtype=dtype)
    padded[:, :vocab_size] = logits
    padded[1, : vocab_size // 2] = -torch.inf
    padded[2, 0] = -0.0
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, vocab_size - 1])
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.5])
    arguments = (padded[:, :vocab_size], token_ids, temperature, num_top)
    logprobs, top_ids, top_logprobs = implementation.token_logprobs(*arguments)
    wanted, wanted_ids, wanted_top = expected(*arguments)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top_logprobs.double(), wanted_top, rtol=1e-5, atol=1e-5)
    # A division rounds: what differs by less in fp64 may be equal.
    for row, temperature_of_row in enumerate(temperature.tolist()):
        if temperature_of_row in (0.0, 1.0) or dtype == torch.bfloat16:
            assert top_ids[row].tolist() == wanted_ids[row].tolist()
    assert (top_ids.dtype, top_ids.shape) == (torch.int64, (4, num_top))


def test_large_logits_at_small_temperatures_stay_finite(implementation) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0], [1e5, 1e5, -torch.inf]])
    logprobs, top_ids, top_logprobs = implementation.token_logprobs(
        logits, torch.tensor([0, 1]), torch.full((2,), 0.9), 2
    )
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -0.6931472]), rtol=1e-6, atol=1e-6)
    assert top_ids.tolist() == [[0, 2], [0, 1]]
    torch.testing.assert_close(top_logprobs[1], torch.tensor([-0.6931472] * 2))


def test_no_rows_give_nothing(implementation) -> None:
    results = implementation.token_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0), 2)
    assert [tuple(result.shape) for result in results] == [(0,), (0, 2), (0, 2)]


def test_operator_declares_what_it_does(implementation, opcheck) -> None:
    opcheck(implementation.token_logprobs, (torch.randn(3, 40), torch.tensor([1, 2, 39]), torch.ones(3), 4))
