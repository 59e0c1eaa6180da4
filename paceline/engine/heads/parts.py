"""The parts that heads are made of."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel


class Part(nn.Module):
    """A module whose calls have a type."""

    if TYPE_CHECKING:

        def __call__(self, *values: Tensor) -> Tensor: ...


class Norm(Part):
    """Root mean square norm in float32."""

    weight: Tensor

    def __init__(self, size: int, epsilon: float, *, is_trained: bool = True) -> None:
        """Unless it is trained its weight is 1, and stands in no file."""
        super().__init__()
        if is_trained:
            self.weight = nn.Parameter(torch.ones(size))
        else:
            self.register_buffer("weight", torch.ones(size), persistent=False)
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        return F.rms_norm(values.float(), self.weight.shape, self.weight.float(), self.epsilon)


class ResidualBlock(Part):
    """Medusa's: x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, values: Tensor) -> Tensor:
        return values + F.silu(self.linear(values))


class AttentionDecoder(Part):
    """Clover's: lets a state look at one token, head by head.

    With one key a softmax would be constant, so the likeness of query and key itself is the weight of the value: their
    scaled product, then SiLU, in Clover; their cosine in Clover-2.
    """

    def __init__(self, size: int, head_count: int, epsilon: float, *, by_cosine: bool) -> None:
        super().__init__()
        self.norm, self.unit = Norm(size, epsilon), Norm(size, 1e-6, is_trained=False)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self._head_count = head_count
        self._by_cosine = by_cosine
        for linear in (self.query, self.key):
            nn.init.eye_(linear.weight)
            nn.init.uniform_(linear.bias, -0.01, 0.01)
            with torch.no_grad():
                linear.weight += 0.01 * torch.randn_like(linear.weight)
        nn.init.uniform_(self.value.weight, -0.01, 0.01)
        nn.init.zeros_(self.value.bias)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        token = self.unit(embedded)
        query, key, value = (
            part.unflatten(-1, (self._head_count, -1))
            for part in (self.query(self.norm(state)), self.key(token), self.value(token))
        )
        if self._by_cosine:
            likeness = F.cosine_similarity(query, key, dim=-1).unsqueeze(-1)
            seen: Tensor = (likeness * value).flatten(-2)
        else:
            likeness = (query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
            seen = F.silu((likeness * value).flatten(-2))
        return state + seen


def new_body(config: Any, layer_count: int) -> nn.Module:
    """Return transformers' model of this architecture with so many layers, without embeddings and last norm."""
    own = deepcopy(config)
    own.num_hidden_layers, own.vocab_size, own.pad_token_id = layer_count, 1, None
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[-layer_count:]
    new: Any = AutoModel
    body: Any = new.from_config(own, attn_implementation="sdpa")
    body.embed_tokens, body.norm = None, nn.Identity()
    module: nn.Module = body
    return module
