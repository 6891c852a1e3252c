"""The device-resident table of running requests: tokens, block tables and sampling parameters, one row each.

A step sends only (row, start, count) per scheduled request; kernels gather everything else from here, and the sampler
writes the new token back, so that the next step never waits for the host. `StepInputs` writes what enters a row; the
`sample` kernel writes tokens. Rows are handed out by the scheduler.
"""

from __future__ import annotations

import torch

MAX_EOS_IDS = 16
MAX_RULES = 512
MAX_RULE_PREFIXES = 1024
NO_DECAY = 2**31 - 1


class RequestTable:
    """Tensors of the table; see the attributes.

    One more row than requests takes what padding rows write; nothing is ever read from it.

    Args:
        num_rows: Requests that can run at once; the attributes have one row more.
        max_len: Longest sequence in tokens, the last generated token included.
        num_groups: Block tables of each request.
        max_blocks: Longest block table.
        vocab_size: Number of token ids that the model can produce.
        device: Where the table lives.

    Attributes:
        padding_row: The row of no request.
        token_table: `[num_rows, max_len]` int32, prompt and generated tokens by position.
        block_tables: `[num_groups, num_rows, max_blocks]` int32; what lies in front of a group's window and behind
            the request's own blocks means nothing.
        temperature: `[num_rows]` float32; 0 for greedy rows.
        top_k: `[num_rows]` int32; 0 is off.
        top_p: `[num_rows]` float32; 1 is off.
        min_p: `[num_rows]` float32; 0 is off.
        seeds: `[num_rows]` int64.
        min_positions: `[num_rows]` int32; EOS ids cannot be sampled for positions below this.
        eos_ids: `[num_rows, MAX_EOS_IDS]` int32, padded with -1.
        prompt_lengths: `[num_rows]` int32.
        has_long_rope: `[num_rows]` int32; 0 where rotary frequencies are those of short sequences, or of all.
        repetition_penalty: `[num_rows]` float32; 1 is off.
        presence_penalty: `[num_rows]` float32; 0 is off.
        frequency_penalty: `[num_rows]` float32; 0 is off.
        no_repeat_ngram_size: `[num_rows]` int32; 0 is off.
        num_biases: `[num_rows]` int32, rules that are biases; they come first.
        num_rules: `[num_rows]` int32, all rules.
        rules: `[num_rows, MAX_RULES, 4]` int32: token, kind + 4 * prefix length, position or -1, bits of the bias.
        rule_prefixes: `[num_rows, MAX_RULE_PREFIXES]` int32, the prefixes of a row's rules one after the other.
        has_token_mask: `[num_rows]` int32; 0 where all tokens are allowed.
        token_masks: `[num_rows, ceil(vocab_size / 32)]` int32; bit `token % 32` of word `token // 32` allows a token.
        decay_starts: `[num_rows]` int32, position beyond which EOS ids grow; `NO_DECAY` is off.
        decay_rates: `[num_rows]` float32, base-2 logarithm of the growth per token.
        remove_invalid: `[num_rows]` int32; 0 is off.
        is_truncated: `[num_rows]` int32; 0 where none of the following filters is on.
        top_h: `[num_rows]` float32; 0 is off.
        typical_p: `[num_rows]` float32; 1 is off.
        epsilon_cutoff: `[num_rows]` float32; 0 is off.
        eta_cutoff: `[num_rows]` float32; 0 is off.
    """

    def __init__(
        self, num_rows: int, max_len: int, num_groups: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        self.padding_row = num_rows
        num_rows += 1
        # Never read beyond what was written, so the (large) token table needs no initial value.
        self.token_table = torch.empty((num_rows, max_len), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((num_groups, num_rows, max_blocks), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.min_positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.eos_ids = torch.full((num_rows, MAX_EOS_IDS), -1, dtype=torch.int32, device=device)
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.has_long_rope = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.repetition_penalty = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.presence_penalty = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.frequency_penalty = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.no_repeat_ngram_size = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.num_biases = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.num_rules = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.rules = torch.zeros((num_rows, MAX_RULES, 4), dtype=torch.int32, device=device)
        self.rule_prefixes = torch.zeros((num_rows, MAX_RULE_PREFIXES), dtype=torch.int32, device=device)
        self.has_token_mask = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.token_masks = torch.empty((num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self.decay_starts = torch.full((num_rows,), NO_DECAY, dtype=torch.int32, device=device)
        self.decay_rates = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.remove_invalid = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.is_truncated = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.top_h = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.typical_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.epsilon_cutoff = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.eta_cutoff = torch.zeros(num_rows, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; on a CPU, tokens take memory only once they are written."""
        return sum(column.nbytes for column in vars(self).values() if isinstance(column, torch.Tensor))
