"""Ranks: processes that hold one model together, each a part of it, and where a process stands among them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankGrid:
    """How a model is divided: layers among stages, and the heads and the feed-forward of a layer among its shares."""

    share_count: int = 1
    """Ranks that hold the same layers (`--tensor-parallel`; Shoeybi et al., arXiv 1909.08053)."""
    stage_count: int = 1
    """Ranges of layers (`--pipeline-parallel`; Huang et al., arXiv 1811.06965)."""

    @property
    def rank_count(self) -> int:
        return self.share_count * self.stage_count


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of one process. Ranks of a stage have neighbouring numbers, so that they share a machine."""

    rank: int = 0
    """Number of the process, from 0, which serves the others' work too."""
    grid: RankGrid = RankGrid()
    device_index: int = 0
    """Which of its machine's devices it takes."""
    meeting: str = "env://"
    """Where the ranks find each other: a URL as torch.distributed takes it."""

    @property
    def share(self) -> int:
        return self.rank % self.grid.share_count

    @property
    def stage(self) -> int:
        return self.rank // self.grid.share_count

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.grid.stage_count - 1

    @property
    def next_rank(self) -> int:
        """The rank of the same share in the next stage; after the last stage that is the first."""
        return (self.rank + self.grid.share_count) % self.grid.rank_count

    @property
    def previous_rank(self) -> int:
        return (self.rank - self.grid.share_count) % self.grid.rank_count

    def layers(self, layer_count: int) -> range:
        """Return the model's layers that this rank holds; the number of stages divides their number."""
        size = layer_count // self.grid.stage_count
        return range(self.stage * size, (self.stage + 1) * size)

    def part(self, size: int) -> range:
        """Return this share of so many rows or columns; the last shares may have one less."""
        count = self.grid.share_count
        return range(-(-self.share * size // count), -(-(self.share + 1) * size // count))
