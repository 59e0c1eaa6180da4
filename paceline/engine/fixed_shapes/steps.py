"""Several steps of some rows in a row, without the host: each choice is the one token of the row's next pass.

It owns what the steps share on the device. It knows nothing of the cache and of who asks.
"""

from collections.abc import Callable, Sequence

import torch

from paceline.checks import MAX_PROPOSED_COUNT
from paceline.engine.fixed_shapes.recording import Recorder, Work
from paceline.engine.fixed_shapes.rows import BlockBuffer, BlockRows, BlockShape, HostRow
from paceline.engine.row_choice import ChoiceKernels, RowRules
from paceline.engine.transfer import to_device
from paceline.types import ChoiceRule

LastLogits = Callable[[BlockRows], torch.Tensor]
"""Computes the logits [N, V] after each row's last real token."""


class NextSteps:
    """The choices of some rows so far, and the recorded step that makes one more for each."""

    def __init__(self, shape: BlockShape, last_logits: LastLogits, kernels: ChoiceKernels, recorder: Recorder) -> None:
        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=recorder.device)

        row_count = shape.row_count
        self._kernels = kernels
        self.rules = RowRules.empty(row_count, recorder.device)
        self.counts = zeros(row_count)
        """Choices [N] that each row wants."""
        self.made = zeros(row_count, MAX_PROPOSED_COUNT)
        self._made_count = zeros(1)
        self._rows = BlockRows(
            zeros(row_count, 1), zeros(row_count), zeros(row_count), zeros(row_count, shape.page_count)
        )
        self.replay: Work[None] = recorder.recorded(lambda: self.add(self._rows, last_logits(self._rows)))

    def begin(self, rows: BlockRows, logits: torch.Tensor) -> None:
        """Make the first choices, from the logits [N, V] after all tokens of `rows`."""
        self._made_count.zero_()
        self._rows.tables.copy_(rows.tables)
        self.add(rows, logits)

    def add(self, rows: BlockRows, logits: torch.Tensor) -> None:
        """Choose a token for each row, and make it the one token of the row's next step, if it wants more."""
        lengths = rows.bases + rows.counts
        chosen = self._kernels.choose_rows(logits, self.rules, lengths)
        self.made.index_copy_(1, self._made_count, chosen[:, None])
        self._made_count += 1
        # A row without a choice has failed, so any token will do for it. A row of no tokens stores nothing.
        self._rows.token_ids.copy_(chosen.clamp_min(0)[:, None])
        self._rows.bases.copy_(lengths)
        self._rows.counts.copy_(rows.counts.clamp_max(1) * (self._made_count < self.counts))


class FirstStep:
    """The recorded pass of one shape that makes the first choices; the others follow by `NextSteps`."""

    def __init__(self, shape: BlockShape, last_logits: LastLogits, steps: NextSteps, recorder: Recorder) -> None:
        self._buffer = BlockBuffer(shape, recorder.device)
        self._steps = steps
        self._begin: Work[None] = recorder.recorded(
            lambda: steps.begin(self._buffer.rows, last_logits(self._buffer.rows))
        )

    def run(self, rows: Sequence[HostRow], rules: Sequence[ChoiceRule], counts: Sequence[int]) -> torch.Tensor:
        """Return the choices [N, largest count], `NO_TOKEN` for none; those after a row's count mean nothing.

        There are as many steps as the largest count. A row with a smaller one computes on, and stores nothing.
        """
        steps = self._steps
        self._buffer.fill(rows)
        steps.rules.fill(rules)
        steps.counts[: len(rows)] = to_device(counts, steps.counts.device)
        self._begin()
        for _ in range(max(counts) - 1):
            steps.replay()
        return steps.made[: len(rows), : max(counts)]
