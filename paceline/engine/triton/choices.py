"""Launches of the Triton kernels of choices. It satisfies `ChoiceKernels`."""

import torch
import triton

from paceline.engine.row_choice import NO_TOKEN, RowRules
from paceline.engine.triton.choice_kernels import choose_kernel, least_kernel, score_kernel

BLOCK = 1024
"""Logits that a program scores; a row's blocks are compared afterwards."""
FILTER_BLOCK = 4096
"""Logits that the one program of a row's filters reads at a time."""


class TritonChoices:
    def choose_rows(self, logits: torch.Tensor, rules: RowRules, positions: torch.Tensor) -> torch.Tensor:
        (row_count, size), device = logits.shape, logits.device
        block_count = triton.cdiv(size, BLOCK)
        least = torch.empty(row_count, device=device)
        scores = torch.empty((row_count, block_count), dtype=torch.float64, device=device)
        token_ids = torch.empty((row_count, block_count), dtype=torch.int32, device=device)
        chosen = torch.empty(row_count, dtype=torch.int64, device=device)
        least_kernel[(row_count,)](logits, rules.numbers, least, size, BLOCK=FILTER_BLOCK, num_warps=16)
        score_kernel[(row_count, block_count)](
            logits, rules.numbers, rules.seeds, positions, least, scores, token_ids, size, BLOCK=BLOCK
        )
        block = triton.next_power_of_2(block_count)
        choose_kernel[(row_count,)](scores, token_ids, chosen, block_count, NO_TOKEN=NO_TOKEN, BLOCK=block)
        return chosen
