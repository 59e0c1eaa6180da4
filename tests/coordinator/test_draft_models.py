"""Several draft models behind one coordinator: which is asked, and what happens when they change under requests."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.drafting.draft_models import DraftModels
from coordinator.drafting.guarded_draft import GuardedDraft
from coordinator.drafting.prepared import PreparedDrafter
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.placement.dispatcher import Dispatcher
from coordinator.protocols import RemoteDraft
from coordinator.replicas import way
from coordinator.replicas.circuit import Circuit
from coordinator.replicas.replica import Replica
from coordinator.rounds.acceptances import Acceptances
from coordinator.rounds.costs import RoundCosts, RoundWork
from coordinator.rounds.round_report import DraftCall, RoundReport, RowReport
from coordinator.rounds.sources import MOST_MODELS
from paceline.errors import PeerUnavailable
from paceline.observe.metrics import new_registry
from paceline.types import (
    ComputeDescription,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    HopTime,
    ReplicaState,
    TokenIds,
    Verdicts,
    VerifyRow,
)
from tests.coordinators import Dispatched, dispatching, fake_cluster, fits
from tests.fakes.dispatches import EXPECTED, LENGTH, PROMPTS, output, submit, until, whole
from tests.fakes.draft_worlds import group_of
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier

ANY = DraftingOptions()


def of_model(name: str, skill: float, seed: int = 0) -> FakeDrafter:
    drafter = FakeDrafter(skill, seed=seed)
    drafter.description = replace(drafter.description, model_id=name)
    return drafter


async def serve_anew(drafter: FakeDrafter, replica: Replica[Any], name: str) -> None:
    """Let a replica come back with another model."""
    drafter.evict()
    drafter.description = replace(drafter.description, model_id=name)
    drafter.is_draining = True
    await replica.look()
    drafter.is_draining = False
    await replica.look()
    assert replica.state is ReplicaState.UP


async def outputs(running: Dispatched, drafting: DraftingOptions = ANY) -> list[list[int]]:
    dispatcher: Dispatcher = running.dispatcher
    requests = [
        running.admission.admit(GenerationRequest(TokenIds(prompt), LENGTH, drafting=drafting)) for prompt in PROMPTS
    ]
    for request in requests:
        dispatcher.submit(request)
    return [[token.token_id async for piece in one.stream.pieces() for token in piece.tokens] for one in requests]


def drafted_by(drafter: FakeDrafter) -> int:
    return sum(row.draft_count for call in drafter.calls for row in call)


@pytest.mark.parametrize("draft_count", [4, "auto"])
async def test_the_model_whose_drafts_are_right_is_asked_most_and_outputs_are_the_targets_own(
    draft_count: int | str,
) -> None:
    good, bad = of_model("good", 0.95), of_model("bad", 0.0, seed=1)
    async with dispatching([bad, good], [FakeVerifier()], draft_count=draft_count) as running:
        for _ in range(3):
            assert await outputs(running) == EXPECTED
        before = drafted_by(bad)
        good.calls.clear()
        assert await outputs(running) == EXPECTED
        assert drafted_by(good) > 4 * (drafted_by(bad) - before)
    assert not good.token_ids
    assert not bad.token_ids


class Held(FakeVerifier):
    """A target that answers while it is `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await self.open.wait()
        return await super().verify(rows, timeout_s)


async def test_a_generation_that_asks_another_model_is_freed_where_it_asked_before() -> None:
    """It kept its room there until its output ended, and who asked that model had none."""
    bad, good, verifier = of_model("bad", 0.0), of_model("good", 1.0), Held()
    good.away = PeerUnavailable("not started")
    only_draft = DraftingOptions((DraftSource.DRAFT,))
    async with dispatching([bad, good], [verifier], draft_count=4) as running:
        request = submit(running, (5, 5), 900, drafting=only_draft)
        await until(lambda: len(bad.calls) > 10)
        verifier.open.clear()
        good.away = None
        await running.draft_replicas[1].look()
        verifier.open.set()
        await until(lambda: bool(good.calls))
        verifier.open.clear()
        await until(lambda: not bad.token_ids)
        assert not request.generations[0].ended and good.token_ids
        verifier.open.set()
        assert await output(request) == whole((5, 5), 900)
    assert not good.token_ids


def test_drafts_of_one_model_tell_nothing_of_those_of_another() -> None:
    """An output whose drafts by a good model were right made a bad one seem as good for it."""
    one, other = group_of(2)
    for _ in range(20):
        one.commit([9] * 5, accepted_count=4, drafted_count=4, source=DraftSource.DRAFT, draft_model="good")
    known = Acceptances(4).of_models({"good": 1000, "bad": 1000})
    assert known["good"].tokens(one, 4) > known["good"].tokens(other, 4)
    assert known["bad"].of(one, 4) == known["bad"].of(other, 4)


async def test_a_request_may_name_the_model_that_drafts_for_it() -> None:
    good, bad = of_model("good", 0.95), of_model("bad", 0.0, seed=1)
    async with dispatching([good, bad], [FakeVerifier()], draft_count=4) as running:
        assert await outputs(running, DraftingOptions(draft_model="bad")) == EXPECTED
        assert not good.calls
        assert await outputs(running, DraftingOptions(draft_model="none such")) == EXPECTED
        assert not good.calls
        assert [one.model_id for one in running.drafts.describe()] == ["good", "bad"]


@pytest.mark.parametrize(
    ("drafting", "is_told"),
    [
        (DraftingOptions(draft_model="secret"), True),
        (DraftingOptions(draft_model="small"), False),
        (DraftingOptions(), False),
        (DraftingOptions(forbidden_sources=(DraftSource.DRAFT,), draft_model="secret"), False),
    ],
    ids=["missing", "there", "any", "no draft wanted"],
)
async def test_a_request_for_a_draft_model_that_is_not_there_is_answered_and_told_of(
    drafting: DraftingOptions, is_told: bool
) -> None:
    """It was decoded plainly without a word."""
    request = GenerationRequest(TokenIds(PROMPTS[0]), LENGTH, drafting=drafting)
    with capture_logs() as logs:
        async with fake_cluster(of_model("small", 0.9), FakeVerifier(), new_registry("coordinator")) as client:
            completion = await client.complete(request)
    assert completion.token_ids == EXPECTED[0]
    (ended,) = [one for one in logs if one["event"] == "request ended"]
    told = [one for one in logs if "drafting.draft_model" in one["event"]]
    assert [(one["request_id"], one["models"]) for one in told] == [(ended["request_id"], ["small"])] * is_told
    assert "secret" not in str(logs)


async def test_models_swapped_while_requests_run_change_no_output() -> None:
    """One replica comes back with the other's model, and the other with a new one."""
    drafters: Sequence[FakeDrafter] = (of_model("first", 0.9), of_model("second", 0.7, seed=1))

    async def swap(running: Dispatched, *names: str) -> None:
        for drafter, replica, name in zip(drafters, running.draft_replicas, names, strict=True):
            await serve_anew(drafter, replica, name)

    async with dispatching(drafters, [FakeVerifier()], draft_count=4) as running:
        assert sorted(running.drafts.usable) == ["first", "second"]
        requests = [running.admission.admit(GenerationRequest(TokenIds(prompt), LENGTH)) for prompt in PROMPTS]
        for request in requests:
            running.dispatcher.submit(request)
        found: list[list[int]] = []
        for number, one in enumerate(requests):
            found.append([token.token_id async for piece in one.stream.pieces() for token in piece.tokens])
            if number == 1:
                await swap(running, "second", "third")
                assert sorted(running.drafts.usable) == ["second", "third"]
        assert found == EXPECTED
    assert not any(drafter.token_ids for drafter in drafters)


async def test_a_model_that_no_replica_serves_any_more_is_forgotten_and_what_it_prepared_still_counts() -> None:
    """Each new name left a drafter behind, for as long as the coordinator ran."""
    clock, made = Clock(), list[weakref.ref[ReplicatedDrafter]]()

    def wrap(replicas: ReplicatedDrafter) -> PreparedDrafter:
        made.append(weakref.ref(replicas))
        return PreparedDrafter(replicas, clock)

    models = DraftModels(lambda replica: GuardedDraft(replica, Circuit(clock, lambda: 0.0), clock), wrap)
    drafter = of_model("0", 0.9)
    replica: Replica[RemoteDraft] = Replica("draft:1", drafter, fits, models.changed)
    for number in range(5):
        await serve_anew(drafter, replica, str(number))
        (asked,) = models.usable.values()
        assert isinstance(asked, PreparedDrafter)
        asked.row_count, asked.hit_count = 3, 2
        del asked
    gc.collect()
    assert [one for one in made if one()] == made[-1:]
    models.left(replica)
    gc.collect()
    assert not any(one() for one in made) and not models.usable
    assert (models.prepared_row_count, models.prepared_hit_count) == (15, 10)


def report_of(model: str) -> RoundReport:
    row, call = RowReport(4, 1, 2, DraftSource.DRAFT, model), DraftCall(1, 4, 4, 0)
    return RoundReport([row], 1.0, HopTime(), HopTime(), None, None, draft_calls={model: call})


def test_what_rounds_taught_of_models_that_are_asked_no_more_is_dropped_and_of_others_kept() -> None:
    """A peer that renamed its model at every look made each plan slower than the last."""
    acceptances, costs = Acceptances(4), RoundCosts()
    usual = Acceptances(4).of_models({"asked": 1000})["asked"].tokens(group_of(1)[0], 4)
    for number in range(3 * MOST_MODELS):
        for model in ("asked", str(number)):
            acceptances.observe({}, report_of(model))
            costs.add([RoundWork.of(report_of(model))], 1.0)
        costs.fit()
    assert "asked" in costs.models and len(costs.models) == MOST_MODELS
    found = {model: acceptances.of_models({model: 1000})[model] for model in ("0", "asked", str(number))}
    tokens = {model: one.tokens(group_of(1)[0], 4) for model, one in found.items()}
    assert tokens["0"] == usual > tokens[str(number)] > tokens["asked"]


def test_models_that_could_be_asked_take_no_place_of_one_that_is() -> None:
    """With one more than are kept, to weigh them all left nothing known of any."""
    alone, beside_others = Acceptances(4), Acceptances(4)
    usable = {str(number): 1000 for number in range(MOST_MODELS + 1)}
    for _ in range(50):
        for acceptances in (alone, beside_others):
            acceptances.observe({}, report_of("0"))
        beside_others.of_models(usable)
    (generation,) = group_of(1)
    found = [one.of_models(usable)["0"].tokens(generation, 4) for one in (alone, beside_others)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("draft_cores", "prepares"), [("the target's", False), ("others", True)])
async def test_a_draft_service_on_cores_of_a_target_prepares_nothing(
    draft_cores: str, prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "FAR_SHARE", inf)  # these services take no time, so the way may be all of a round
    drafter, verifier = of_model("draft", 0.9), FakeVerifier()
    drafter.description = replace(drafter.description, compute=ComputeDescription(draft_cores, 2, 1))
    verifier.description = replace(verifier.description, compute=ComputeDescription("the target's", 2, 2))
    async with dispatching([drafter], [verifier], draft_count=4) as running:
        assert await outputs(running) == EXPECTED
    assert any(row.prepare_count for call in drafter.calls for row in call) is prepares
