"""Random generators by name: a tensor's values depend on the seed and its name, and not on tensors made before it."""

import hashlib

import torch


def generator(seed: int, *names: str) -> torch.Generator:
    digest = hashlib.blake2b("/".join((str(seed), *names)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
