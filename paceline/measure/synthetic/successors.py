"""The successor of each token, on which target and draft agree.

All ordinary tokens stand in one cycle, so that text made from it repeats itself only after the whole vocabulary. Both
models know the cycle by heart, each at its own width (`weights`): each token has a random code, the embedding is the
code, and the head's row of a token is the code of the token before it.

The target knows some links better than others: `strengths` are spread evenly from barely above chance to certainty. The
additions of its layers to the residual stream act on the head as noise, so scaling them up drowns more and more links,
the weakest first. The draft knows all links well and always follows the cycle. Hence the share of accepted drafts falls
smoothly from nearly 1 to nearly 0 as the factor on the target's layers grows, at any width and depth. The target's
choice in place of a drowned link depends on the whole text before it, so a wrong cache shows.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.measure.synthetic.seeds import generator

Role = Literal["target", "draft"]


@dataclass(frozen=True)
class Successors:
    token_ids: torch.Tensor
    """Ids [A] of the tokens that occur in outputs."""
    places: torch.Tensor
    """Place [A] of each token's successor in `token_ids`."""
    seed: int

    @property
    def count(self) -> int:
        return len(self.token_ids)

    def strengths(self, role: Role, hidden_size: int) -> torch.Tensor:
        """Return how well a model of this width knows the link from each token [A]; 1 is certain."""
        if role == "draft":
            return torch.ones(self.count)
        # Two random directions have a product of variance 1 / hidden_size; this is the largest of A such products.
        chance = math.sqrt(2 * math.log(self.count) / hidden_size)
        lowest = min(2 * chance, 0.9)
        return lowest + (1 - lowest) * torch.rand(self.count, generator=generator(self.seed, "strengths"))

    def codes(self, role: Role, hidden_size: int) -> torch.Tensor:
        """Return the codes [A, hidden_size], random directions of length sqrt(hidden_size)."""
        codes = torch.randn(self.count, hidden_size, generator=generator(self.seed, role, "codes"))
        return codes.mul_(math.sqrt(hidden_size) / torch.linalg.vector_norm(codes, dim=1, keepdim=True))

    def embedding(self, role: Role, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return each token's code [V, hidden_size]; a token that no output has gets another token's code."""
        vocabulary_size, hidden_size = size
        place = torch.arange(vocabulary_size) % self.count
        place[self.token_ids] = torch.arange(self.count)
        return self.codes(role, hidden_size).to(dtype)[place]

    def head(self, role: Role, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of length 1 [V, hidden_size]; the stronger a link, the nearer a row is to the code before it."""
        hidden_size = size[1]
        codes = self.codes(role, hidden_size) / math.sqrt(hidden_size)
        strengths = self.strengths(role, hidden_size)[:, None]
        noise = torch.randn(codes.shape, generator=generator(self.seed, role, "head")) / math.sqrt(hidden_size)
        head = torch.zeros(size, dtype=dtype)
        head[self.token_ids[self.places]] = (strengths * codes + (1 - strengths**2).sqrt() * noise).to(dtype)
        return head


def draw_successors(token_ids: list[int], seed: int) -> Successors:
    """Put the tokens into a random cycle."""
    order = torch.randperm(len(token_ids), generator=generator(seed, "cycle"))
    places = torch.empty_like(order)
    places[order] = order.roll(-1)
    return Successors(torch.tensor(token_ids), places, seed)
