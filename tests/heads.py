"""Random heads of every kind for the tiny targets, and what they draft by transformers' own modules."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.engine.heads.reading import new_heads, read_heads, write_heads

KINDS = ("medusa", "clover", "clover2", "eagle")
DRAFT_COUNT = 3


def write_random_heads(folder: Path, kind: str, target: Path) -> Path:
    """Write heads whose every weight is random, so that each of them shows in the drafts."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(target)
    heads = new_heads(kind, config, draft_count=DRAFT_COUNT)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    write_heads(heads, config, folder)
    return folder


@torch.inference_mode()
def drafts_of_modules(folder: Path, target: Path, token_ids: list[int], count: int = DRAFT_COUNT) -> list[int]:
    """Return the greedy drafts after `token_ids`, the last of which the target's cache does not hold."""
    heads, _ = read_heads(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    found: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, inputs, output: found.append(inputs[0][0]))
    model(input_ids=torch.tensor([token_ids[:-1]]))
    hook.remove()

    def layers(values: Tensor) -> Tensor:
        made: Tensor = heads.body(inputs_embeds=values[None]).last_hidden_state[0]
        return made

    embedded = model.get_input_embeddings()(torch.tensor(token_ids[1:]))
    entered = heads.enter(found[0], embedded)
    state = heads.leave(layers(entered) if heads.body else entered, embedded)[-1:]
    drafts: list[int] = []
    while True:
        drafts.append(int(model.lm_head(heads.output(state, len(drafts))).argmax()))
        if len(drafts) == count:
            return drafts
        last = model.get_input_embeddings()(torch.tensor(drafts[-1:]))
        state = heads.follow(state, last)
        if heads.repeats_layers:
            entered = torch.cat((entered, state))
            state = heads.leave(layers(entered)[-1:], last)
