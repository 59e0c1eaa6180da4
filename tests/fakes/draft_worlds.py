"""Simulated rounds: worlds of known cost and acceptance, and the goodput of a planner in them.

A world has a draft and a target, which each serve one call at a time, and groups that alternate between them, as many
at once as the planner has lanes.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, product, takewhile
from operator import mul
from statistics import fmean

from coordinator.requests.acceptance import Acceptance
from coordinator.requests.generation import Generation, HeadsDraft, Request
from coordinator.requests.output import Output, StopRules
from coordinator.rounds.auto_planner import MAX_AUTO, AutoPlanner
from coordinator.rounds.round_report import NEW_TO_DRAFT, DraftCall, RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner, Wish
from paceline.types import DraftSource, HopTime, Usage

ROUNDS = 400
"""The horizon: the choices of its last `SETTLED_ROUNDS` are those of a long-lived service."""
SETTLED_ROUNDS = 100
SEEDS = range(6)
COUNTS = range(MAX_AUTO + 1)
SPIKE = 5
GOLDEN_RATIO = 0.618034
"""Multiples of it fill the unit interval evenly."""
OUTPUT_TOKENS = 100
MODEL = "draft"
MAX_LENGTHS = {MODEL: 100_000}
"""The draft services of a world draft for generations of any length that it has."""
RIGHT, WRONG = 1, 0
"""Every text is of one token."""
LONGEST_SEQUENCE = 150
"""Most tokens of a generation that a draft may have missed."""


@dataclass(frozen=True)
class World:
    """Cost of a round in seconds, and acceptance of the draft."""

    acceptance: float
    hop_s: float
    draft_token_s: float
    verify_s: float
    verified_token_s: float
    group_size: int = 1
    lanes: int = 1
    """Groups, and most lanes."""
    jitter: float = 0.0
    """Share by which times vary."""
    spike_share: float = 0.0
    """Share of calls that take `SPIKE` times as long."""
    later_acceptance: float = 1.0
    """Acceptance after an accepted draft token, as a share of that token's acceptance."""
    spread: float = 0.0
    """Largest distance of a generation's acceptance from the mean."""
    free_tokens: int = 0
    """Tokens of a verify without cost, because reading the weights is the limit."""
    step_tokens: int = 1
    """Step of tokens to which a verify's time is rounded up."""
    rivalry: float = 0.0
    """Share by which drafts lengthen a verify, because both models compete for the cores."""
    lane_rivalry: float = 0.0
    """Share by which a group in flight lengthens another's verify, because the coordinator wants the target's cores."""
    catch_up_token_s: float = 0.0
    """Seconds of the draft for each token that it missed."""
    life_rounds: int = 10
    """Rounds between two ends of generations."""
    prompt_s: float = 0.0
    """Extra seconds of a verify for each row with a prompt; such a row then has `OUTPUT_TOKENS`."""
    draft_prompt_s: float = 0.0
    """Extra seconds of the first drafting for such a row."""
    prepared_share: float = 0.0
    """Share of calls for drafts that no round waits for, because its drafts were prepared."""
    heads_count: int = 0
    """Most tokens that the target's heads draft."""
    heads_acceptance: float = 0.0
    heads_token_s: float = 0.0
    heads_call_s: float = 0.0
    """Seconds of a verify after which they draft, however many rows they draft for."""
    heads_answer: bool = True
    """Whether they draft when they are asked."""

    def propose_s(self, counts: Sequence[int]) -> float:
        return self.draft_token_s * (max(counts) + sum(counts) / 10)

    def heads_s(self, counts: Sequence[int]) -> float:
        call_s = self.heads_call_s if any(counts) else 0.0
        return call_s + self.heads_token_s * (max(counts) + sum(counts) / 10)

    def verify_executed_s(self, counts: Sequence[int]) -> float:
        token_count = math.ceil((len(counts) + sum(counts)) / self.step_tokens) * self.step_tokens
        executed_s = self.verify_s + self.verified_token_s * max(0, token_count - self.free_tokens)
        return executed_s * (1 + self.rivalry * (max(counts) > 0))

    def goodput(self, draft_count: int) -> float:
        """Return tokens a second with one lane and a fixed draft count."""
        rates = [self.acceptance + self.spread * share / 20 for share in range(-20, 21)]
        tokens = fmean(_Hope.of(draft_count, min(1.0, max(0.0, rate)), self.later_acceptance).tokens for rate in rates)
        noise = math.exp(self.jitter**2 / 2) * (1 + (SPIKE - 1) * self.spike_share)
        counts = [draft_count] * self.group_size
        hop_s, waited = self.hop_s, (1 - self.prepared_share) * (draft_count > 0)
        propose_s = waited * (hop_s + self.propose_s(counts) * noise)
        return self.group_size * tokens / (hop_s + propose_s + self.verify_executed_s(counts) * noise)

    def heads_goodput(self, count: int) -> float:
        """Return tokens a second if the heads draft so many tokens for each round, and nothing else drafts."""
        counts = [count] * self.group_size
        tokens = _Hope.of(count if self.heads_answer else 0, self.heads_acceptance, 1.0).tokens
        noise = math.exp(self.jitter**2 / 2) * (1 + (SPIKE - 1) * self.spike_share)
        executed_s = self.heads_s(counts) + self.verify_executed_s(counts)
        return self.group_size * tokens / (self.hop_s + executed_s * noise)


@dataclass(frozen=True)
class _Hope:
    """What drafts of a row promise: the same for so many rows that it is worked out once."""

    places: Sequence[float]
    """Acceptance of each, given that the one before it was accepted."""
    tokens: float
    """Tokens of a round to expect."""

    @staticmethod
    @cache
    def of(draft_count: int, acceptance: float, later_acceptance: float) -> "_Hope":
        places = [acceptance * later_acceptance**place for place in range(draft_count)]
        return _Hope(places, sum(accumulate(places, mul, initial=1.0)))


class ConstantPlanner:
    """Asks for so many tokens for each row. What is compared with needs no planner that learns and takes its time."""

    leeway = 1.0

    def __init__(self, count: int, lanes: int = 1) -> None:
        self.lane_count = lanes
        self._wish = Wish(count, MODEL)

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        return dict.fromkeys(group, self._wish)

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        pass


@dataclass(frozen=True)
class Round:
    count: int
    """Largest draft count of a row."""
    lane_count: int
    tokens: float
    """Expected tokens, which exclude luck."""
    ended_s: float


def goodput(rounds: Sequence[Round]) -> float:
    """Return tokens a second, from the end of the first round to that of the last."""
    return sum(one.tokens for one in rounds[1:]) / (rounds[-1].ended_s - rounds[0].ended_s)


@cache
def best_fixed(world: World) -> float:
    """Return the goodput of the best fixed count of the draft or of the heads, plain decoding included.

    Where lanes are rivals, it is the best with any number of them.
    """
    if world.lanes == 1:
        return max(*map(world.goodput, COUNTS), *map(world.heads_goodput, range(world.heads_count + 1)))

    def simulated(way: tuple[int, int], rounds: int) -> float:
        return goodput(simulate([world] * rounds, ConstantPlanner(*way), 0))

    # A short run of each way shows which ones may be the best.
    ways = list(product(COUNTS, range(1 if world.lane_rivalry else world.lanes, world.lanes + 1)))
    promising = sorted(ways, key=lambda way: simulated(way, ROUNDS // 2))[-4:]
    return max(simulated(way, 5 * ROUNDS) for way in promising)


def reached(world: World, seeds: Sequence[int] = SEEDS, rounds: int = ROUNDS, settled: int = SETTLED_ROUNDS) -> float:
    """Return the settled goodput of `auto` as a share of the best fixed count's, mean over the seeds."""
    runs = (
        simulate(
            [world] * rounds,
            AutoPlanner(world.lanes, world.heads_count, chooses_lanes=world.lane_rivalry > 0),
            seed,
        )
        for seed in seeds
    )
    return fmean(goodput(run[-settled - 1 :]) for run in runs) / best_fixed(world)


def simulate(worlds: Sequence[World], planner: DraftPlanner, seed: int) -> list[Round]:
    """Run each round in its own world; all worlds have equal lanes and group size.

    A generation ends after some rounds, and a new one takes its place.
    """
    return _Simulation(worlds, planner, seed).run()


def group_of(count: int) -> list[Generation]:
    output = Output(StopRules(max_new_tokens=OUTPUT_TOKENS, end_token_ids=frozenset()), None)
    return [
        Generation(str(number), [RIGHT] * 3 * LONGEST_SEQUENCE, output, 64, Usage(1), Request())
        for number in range(count)
    ]


@dataclass
class _Lane:
    group: list[Generation]
    rates: list[float]
    world: World
    ready_s: float = 0.0
    """When its last round ended."""
    wishes: dict[Generation, Wish] = field(default_factory=dict)
    counts: Sequence[int] = ()
    """Tokens that the draft is asked for, by row."""
    drafted: Sequence[int] = ()
    """Tokens that the target verifies, by row: drafted by the draft, or by the heads."""
    propose: HopTime = HopTime()
    verify: HopTime = HopTime()
    missed: dict[Generation, int] = field(default_factory=dict)
    """Tokens of the output that the draft has not seen."""
    unseen: set[Generation] = field(default_factory=set)
    """Generations whose prompt the draft has not seen."""
    caught_up_count: int = 0
    is_prepared: bool = False
    is_decoding: bool = True
    token_count: float = 0.0
    """Tokens since a generation ended."""
    prompt_s: float = 0.0
    prompt_count: int = 0


class _Simulation:
    def __init__(self, worlds: Sequence[World], planner: DraftPlanner, seed: int) -> None:
        self._worlds = worlds
        self._planner = planner
        self._rng = random.Random(seed)
        self._draft_free_s = self._target_free_s = 0.0
        self._sequence_count = seed
        world = worlds[0]
        self._lanes = [
            _Lane(group_of(world.group_size), [self._rate(world) for _ in range(world.group_size)], world)
            for _ in range(world.lanes)
        ]
        self._begun = self._prompts = 0
        self._in_flight_count = 0
        self._waiting = deque(range(len(self._lanes)))
        """Groups that wait for a lane."""
        self._rounds: list[Round] = []

    def run(self) -> list[Round]:
        steps = (self._propose, self._verify, self._end)
        events: list[tuple[float, int, int]] = []
        now_s = 0.0
        while len(self._rounds) < len(self._worlds):
            while self._waiting and self._in_flight_count < self._planner.lane_count:
                self._in_flight_count += 1
                heapq.heappush(events, (now_s, self._waiting.popleft(), 0))
            now_s, number, step = heapq.heappop(events)
            ended_s = steps[step](now_s, self._lanes[number])
            if step + 1 < len(steps):
                heapq.heappush(events, (ended_s, number, step + 1))
            else:
                self._in_flight_count -= 1
                self._waiting.append(number)
        return self._rounds

    def _rate(self, world: World) -> float:
        """Return a new generation's acceptance, evenly spread to exclude luck here too."""
        self._sequence_count += 1
        share = self._sequence_count * GOLDEN_RATIO % 1
        return min(1.0, max(0.0, world.acceptance + world.spread * (2 * share - 1)))

    def _renew(self, lane: _Lane) -> None:
        """Bring the next world, and from time to time a new generation."""
        lane.world = world = self._worlds[min(self._begun, len(self._worlds) - 1)]
        if not world.spread:
            lane.rates = [world.acceptance] * world.group_size
        lane.prompt_count = int(lane.token_count // OUTPUT_TOKENS) if world.prompt_s else 0
        lane.token_count -= lane.prompt_count * OUTPUT_TOKENS
        lane.prompt_s = lane.prompt_count * world.prompt_s
        for _ in range(lane.prompt_count if world.draft_prompt_s else 0):
            lane.unseen.add(lane.group[self._prompts % world.group_size])
            self._prompts += 1
        if self._begun % world.life_rounds == 0:
            place = self._begun // world.life_rounds % world.group_size
            lane.group[place].acceptances.clear()
            lane.rates[place] = self._rate(world)
        self._begun += 1

    def _propose(self, now_s: float, lane: _Lane) -> float:
        self._renew(lane)
        world = lane.world
        lane.propose, lane.caught_up_count = HopTime(), 0
        for one in lane.group:
            _note_missed(one, lane.missed.get(one, 0) + OUTPUT_TOKENS * (one in lane.unseen))
        lane.wishes = self._planner.plan(lane.group, MAX_LENGTHS)
        lane.counts = [wish.asked_count for wish in lane.wishes.values()]
        lane.drafted = [wish.asked_count or len(wish.token_ids) for wish in lane.wishes.values()]
        work_s = self._catch_up_s(lane)
        if not max(lane.counts):
            return now_s
        lane.is_prepared = world.prepared_share > 0 and self._rng.random() < world.prepared_share
        if lane.is_prepared:
            return now_s
        work_s = self._noisy(world.propose_s(lane.counts) + work_s, world)
        began_s = max(now_s, self._draft_free_s)
        self._draft_free_s = began_s + work_s
        lane.propose = HopTime(world.hop_s, began_s - now_s, work_s)
        return now_s + lane.propose.total_s

    def _catch_up_s(self, lane: _Lane) -> float:
        """Let the draft see what rows that ask it have missed; return the seconds that this takes."""
        spent_s = 0.0
        for one, count in zip(lane.group, lane.counts, strict=True):
            if not count:
                lane.missed[one] = min(lane.missed.get(one, 0) + 1, LONGEST_SEQUENCE)
                continue
            missed, is_unseen = lane.missed.pop(one, 0), one in lane.unseen
            lane.unseen.discard(one)
            lane.caught_up_count += missed + OUTPUT_TOKENS * is_unseen
            spent_s += missed * lane.world.catch_up_token_s + is_unseen * lane.world.draft_prompt_s
        return spent_s

    def _verify(self, now_s: float, lane: _Lane) -> float:
        heads_s = lane.world.heads_s([wish.propose_count for wish in lane.wishes.values()])
        rivalry = 1 + lane.world.lane_rivalry * (self._in_flight_count > 1)
        executed_s = rivalry * lane.world.verify_executed_s(lane.drafted)
        work_s = self._noisy(executed_s + heads_s + lane.prompt_s, lane.world)
        began_s = max(now_s, self._target_free_s)
        self._target_free_s = began_s + work_s
        lane.verify = HopTime(lane.world.hop_s, began_s - now_s, work_s)
        return now_s + lane.verify.total_s

    def _noisy(self, work_s: float, world: World) -> float:
        spike = SPIKE if self._rng.random() < world.spike_share else 1
        return work_s * spike * self._rng.lognormvariate(0, world.jitter)

    def _end(self, now_s: float, lane: _Lane) -> float:
        rows, tokens = [], 0.0
        for generation, rate in zip(lane.group, lane.rates, strict=True):
            wish = lane.wishes[generation]
            if wish.asked_count or not wish.token_ids:
                row, expected = self._drafted(generation, wish.asked_count, rate, lane.world)
            else:
                row, expected = _drafted_by_heads(generation, wish.token_ids, lane.world)
            self._ask_heads(generation, wish.propose_count, lane.world)
            rows.append(replace(row, token_ids=[RIGHT] * row.committed_count, heads_draft=generation.heads_draft))
            tokens += expected
        lane.token_count += tokens
        took_s, lane.ready_s = now_s - lane.ready_s, now_s
        report = RoundReport(
            rows,
            took_s,
            lane.propose,
            lane.verify,
            None,
            None,
            is_decoding=not (lane.prompt_count or lane.caught_up_count),
            prompt_token_count=lane.prompt_count * OUTPUT_TOKENS,
            draft_calls={MODEL: _call(lane)} if max(lane.counts) else {},
            heads_count=sum(wish.propose_count for wish in lane.wishes.values()),
        )
        self._planner.observe(lane.wishes, report, took_s)
        self._rounds.append(Round(max(lane.counts), self._planner.lane_count, tokens, now_s))
        return now_s

    def _drafted(self, generation: Generation, count: int, rate: float, world: World) -> tuple[RowReport, float]:
        """Return the report of a row with drafts of the draft, and the tokens to expect of it."""
        hope = _Hope.of(count, rate, world.later_acceptance)
        right = [self._rng.random() < one for one in hope.places]
        accepted = right.index(False) if False in right else count
        if count:
            generation.acceptances.setdefault(MODEL, Acceptance()).add(accepted, count)
        source = DraftSource.DRAFT if count else None
        return RowReport(count, accepted, accepted + 1, source, MODEL, generation), hope.tokens

    def _ask_heads(self, generation: Generation, count: int, world: World) -> None:
        """Let the heads draft for the next round."""
        drawn = [RIGHT if self._rng.random() < world.heads_acceptance else WRONG for _ in range(count)]
        generation.heads_draft = HeadsDraft(
            len(generation.token_ids), tuple(drawn if world.heads_answer else ()), asked_count=count
        )


def _drafted_by_heads(generation: Generation, token_ids: Sequence[int], world: World) -> tuple[RowReport, float]:
    accepted = len(list(takewhile(lambda one: one == RIGHT, token_ids)))
    row = RowReport(len(token_ids), accepted, accepted + 1, DraftSource.HEADS, "", generation)
    return row, _Hope.of(len(token_ids), world.heads_acceptance, 1.0).tokens


def _call(lane: _Lane) -> DraftCall:
    counts = [count for count in lane.counts if count]
    prepared_wait_s = 0.0 if lane.is_prepared else None
    return DraftCall(len(counts), max(counts), sum(counts), lane.caught_up_count, prepared_wait_s)


def _note_missed(generation: Generation, count: int) -> None:
    """Let a generation's draft cache lag behind by so many tokens."""
    generation.draft_model = MODEL
    generation.draft_cached_length = len(generation.token_ids) - NEW_TO_DRAFT - count
