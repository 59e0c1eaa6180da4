"""The settings that a pair can be served with, what each needs and gives, and which of them loses least speed.

It owns the order in which things are given up: rows, prompts' chunk and drafts first, then the draft's weights, which
cannot affect output, and the target's last. It knows nothing of files and of how a plan is shown.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from paceline.planning.dimensions import ModelDimensions
from paceline.planning.memory import (
    CallSize,
    PlannedDevice,
    WeightForm,
    held_logit_count,
    kv_bytes,
    process_bytes,
    serving_work_bytes,
    token_bytes,
    weight_bytes,
)
from paceline.planning.speed import FloorCosts, Machine, ModelWork, RoundCosts, expected_tokens

Int8 = Literal["none", "draft", "both"]
INT8_STEPS: tuple[Int8, ...] = ("none", "draft", "both")
"""Which models have weights of int8; each step gives up more."""
DRAFT_COUNTS = range(1, 9)
CHUNKS = (16, 32, 64, 128, 256, 512)
PAGE_TOKENS = 16


@dataclass(frozen=True)
class HeadsSize:
    parameter_count: int
    layer_count: int
    """Layers that keep keys and values."""
    tapped_count: int
    """Results of the target's layers that they read of every token; 0 without layers of their own."""
    draft_count: int
    """Most tokens that they draft for a round."""


@dataclass(frozen=True)
class Pair:
    target: ModelDimensions
    draft: ModelDimensions | None = None
    heads: HeadsSize | None = None
    """What drafts inside the target, in place of a draft. Without either the target decodes alone."""
    device: PlannedDevice = "cpu"

    def most_drafts(self, asked_count: int) -> int:
        """Return the drafts of a round that asks for so many: heads have no more than they were made for.

        A target alone has none.
        """
        if self.heads:
            return min(asked_count, self.heads.draft_count)
        return asked_count if self.draft else 0

    def target_form(self, int8: Int8) -> WeightForm:
        return WeightForm(self.target.dtype, int8 == "both", self.device)

    def draft_form(self, int8: Int8) -> WeightForm:
        assert self.draft
        return WeightForm(self.draft.dtype, int8 != "none", self.device)


@dataclass(frozen=True)
class Workload:
    conversation_count: int
    """Conversations that are open at once; those beyond a setting's rows wait."""
    token_count: int
    """Tokens of each, prompt and output."""
    prompt_count: int
    """Those of the prompt."""
    acceptance: float
    """Chance of a draft once those before it are accepted."""


@dataclass(frozen=True)
class Setting:
    draft_count: int
    row_count: int
    """Rows of a round, and so conversations that are cached at once."""
    chunk_tokens: int
    int8: Int8 = "none"


@dataclass(frozen=True)
class Need:
    """Bytes of one service."""

    process: int
    weights: int
    kv: int
    work: int
    logit_count: int
    """Of how many places it holds logits at a time."""

    @property
    def total(self) -> int:
        return self.process + self.weights + self.kv + self.work


@dataclass(frozen=True)
class Candidate:
    setting: Setting
    target: Need
    draft: Need | None
    tokens_per_s: float

    @property
    def total_bytes(self) -> int:
        return self.target.total + (self.draft.total if self.draft else 0)


@dataclass(frozen=True)
class Plan:
    candidates: Sequence[Candidate]
    budget_bytes: int

    @property
    def bound(self) -> Candidate:
        """What needs least of all that is planned."""
        return min(self.candidates, key=lambda one: one.total_bytes)

    @property
    def best(self) -> Candidate:
        """What is fastest whatever it needs, with weights as they are."""
        return _fastest(one for one in self.candidates if one.setting.int8 == "none")

    @property
    def chosen(self) -> Candidate | None:
        """What loses least speed within the budget; None below the bound."""
        for step in INT8_STEPS:
            fitting = [
                one for one in self.candidates if one.setting.int8 == step and one.total_bytes <= self.budget_bytes
            ]
            if fitting:
                return _fastest(fitting)
        return None

    @property
    def frontier(self) -> list[Candidate]:
        """Return those beside which none is faster with as little memory, by what they need."""
        found: list[Candidate] = []
        for one in sorted(self.candidates, key=lambda one: (one.total_bytes, -one.tokens_per_s)):
            if not found or one.tokens_per_s > found[-1].tokens_per_s:
                found.append(one)
        return found


def plan(pair: Pair, workload: Workload, costs: Iterable[RoundCosts], budget_bytes: int) -> Plan:
    """Weigh every setting. `costs` are those of each of `INT8_STEPS`."""
    by_step = dict(zip(INT8_STEPS, costs, strict=True))
    settings = _settings(pair, workload.conversation_count)
    return Plan([weighed(pair, workload, by_step[one.int8], one) for one in settings], budget_bytes)


def weighed(pair: Pair, workload: Workload, costs: RoundCosts, setting: Setting) -> Candidate:
    """Return what a setting needs and gives."""
    target = _target_need(pair, workload, setting)
    draft = _draft_need(pair, workload, setting) if pair.draft else None
    return Candidate(setting, target, draft, _tokens_per_s(workload, costs, setting, target.logit_count))


def floor_costs(pair: Pair, machine: Machine) -> list[FloorCosts]:
    """Return the floors of the rounds' costs for each of `INT8_STEPS`."""
    return [_floor(pair, machine, step) for step in INT8_STEPS]


def _floor(pair: Pair, machine: Machine, int8: Int8) -> FloorCosts:
    target = ModelWork.of(pair.target, pair.target_form(int8))
    draft = ModelWork.of(pair.draft, pair.draft_form(int8)) if pair.draft else None
    if not pair.heads:
        return FloorCosts(target, draft, None, machine)
    count = pair.heads.parameter_count + pair.target.embedding_count
    return FloorCosts(target, None, ModelWork(count * pair.target_form(int8).multiplied_bytes, 0, count), machine)


def _settings(pair: Pair, conversation_count: int) -> Iterator[Setting]:
    for setting in product(draft_counts(pair), row_counts(conversation_count), CHUNKS, _int8_steps(pair)):
        yield Setting(*setting)


def _int8_steps(pair: Pair) -> tuple[Int8, ...]:
    """Return the steps that can be had: on a GPU no kernels multiply by int8, and experts have no such weights."""
    if pair.device != "cpu" or (pair.draft and pair.draft.mixes_experts):
        return ("none",)
    steps: tuple[Int8, ...] = INT8_STEPS if pair.draft else ("none", "both")
    return tuple(one for one in steps if one != "both") if pair.target.mixes_experts else steps


def draft_counts(pair: Pair) -> list[int]:
    return sorted({pair.most_drafts(one) for one in DRAFT_COUNTS})


def row_counts(conversation_count: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12 and so on below the conversations, and all of them."""
    powers = [1 << power for power in range(conversation_count.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return [*sorted(count for count in powers + between if count < conversation_count), conversation_count]


def _target_need(pair: Pair, workload: Workload, setting: Setting) -> Need:
    form = pair.target_form(setting.int8)
    weights, heads = weight_bytes(pair.target, form), pair.heads or HeadsSize(0, 0, 0, 0)
    weights += heads.parameter_count * form.multiplied_bytes
    a_token = token_bytes(pair.target, form, heads.layer_count)
    return _need(pair.target, form, weights, _kv(workload, setting, a_token), setting, heads.tapped_count)


def _draft_need(pair: Pair, workload: Workload, setting: Setting) -> Need:
    assert pair.draft
    form = pair.draft_form(setting.int8)
    kv = _kv(workload, setting, token_bytes(pair.draft, form))
    return _need(pair.draft, form, weight_bytes(pair.draft, form), kv, setting)


def _kv(workload: Workload, setting: Setting, a_token_bytes: int) -> int:
    length = workload.token_count + setting.draft_count
    return kv_bytes(a_token_bytes, setting.row_count, length, PAGE_TOKENS)


def _need(
    model: ModelDimensions, form: WeightForm, weights: int, kv: int, setting: Setting, tapped_count: int = 0
) -> Need:
    """Return what a service needs that divides its `--memory` as services do, and so has this left for the cache."""
    call = CallSize.of_rows(setting.row_count, setting.chunk_tokens, tapped_count)
    count = held_logit_count(model, form, call, kv_bytes=kv)
    work = serving_work_bytes(model, form, replace(call, logit_count=count))
    return Need(process_bytes(form.device), weights, kv, work, count)


def _tokens_per_s(workload: Workload, costs: RoundCosts, setting: Setting, logit_count: int) -> float:
    """Return tokens of output a second while all rows are in use, with their prompts."""
    rows, drafts = setting.row_count, setting.draft_count
    output_count = workload.token_count - workload.prompt_count
    length = workload.prompt_count + output_count // 2
    part_count = ceil(rows / max(1, logit_count // (drafts + 1)))
    verify_s = part_count * costs.verify_s(ceil(rows / part_count), drafts, length)
    round_s = costs.draft_s(rows, drafts, length) + verify_s
    prompts = rows * workload.prompt_count
    prompts_s = costs.prompt_s(prompts, ceil(prompts / setting.chunk_tokens))
    rounds_s = output_count / expected_tokens(workload.acceptance, drafts) * round_s
    return rows * output_count / (prompts_s + rounds_s)


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the fastest; of equal ones that which needs least."""
    return max(candidates, key=lambda one: (one.tokens_per_s, -one.total_bytes))
