"""Drafts prepared between calls: a hit gives the very tokens that a plain call gives, and nothing else changes."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draft_service.drafter import Drafter
from draft_service.preparing import MOST_STEPS, PASS_ROWS, Preparing
from paceline.engine.cache.paged import KvPool
from paceline.engine.calls import Call
from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.runner import PassSize, Runner
from paceline.errors import InvalidRequest
from paceline.prefix_hash import PrefixHash, extended_hash
from paceline.scope import Caller as PacelineCaller
from paceline.types import (
    GREEDY,
    ChoiceRule,
    PreparedDrafts,
    Proposal,
    ProposeRow,
    RolledBack,
    SamplingParameters,
    SequenceLength,
)
from tests.checkpoints import VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import Clock

PROMPT = tuple(range(20, 33))
RULES = (
    GREEDY,
    ChoiceRule(SamplingParameters(temperature=1.0), seed=5),
    ChoiceRule(SamplingParameters(temperature=0.8, top_k=20, frequency_penalty=0.3), seed=6, prompt_count=len(PROMPT)),
)
OPTIONS = EngineOptions(kv_memory="4MiB", page_tokens=4)


@pytest.fixture(scope="module")
def model(pairs: dict[str, PairOfCheckpoints]) -> LoadedModel:
    return load_model(str(pairs["Llama"].draft))


class Caller:
    """A coordinator's side of one sequence, beside a drafter that prepares nothing."""

    def __init__(self, model: LoadedModel, drafter: Drafter, rule: ChoiceRule = GREEDY, name: str = "a") -> None:
        self.plain = Drafter(Runner(model, OPTIONS))
        self.drafter = drafter
        self.name = name
        self.rule = rule
        self.committed = list(PROMPT)
        self.cached_length = 0
        self.drafts: tuple[int, ...] = ()

    def row(self, draft_count: int, prepare_count: int) -> ProposeRow:
        base = min(self.cached_length, len(self.committed) - 1)
        rule = None if base else self.rule
        base_hash = PrefixHash().of(self.committed, base)
        return ProposeRow(self.name, base, tuple(self.committed[base:]), draft_count, rule, 0, base_hash, prepare_count)

    def ask(self, draft_count: int = 2, prepare_count: int = 256, scope: str = "") -> Proposal:
        """Ask both drafters, compare, and note what is cached."""
        (found,) = self.drafter.propose([self.row(draft_count, prepare_count)], scope)
        whole = ProposeRow("plain", 0, tuple(self.committed), draft_count, self.rule)
        (expected,) = self.plain.propose([whole])
        assert isinstance(found, Proposal)
        assert replace(found, prepared=False) == expected
        tokens = [*self.committed, *found.draft_token_ids[:-1]]
        assert list(self.drafter.runner.cache.token_ids(scope + self.name)) == tokens
        self.cached_length, self.drafts = found.cached_length, found.draft_token_ids
        return found

    def commit(self, accepted_count: int, token_id: int) -> None:
        accepted_count = min(accepted_count, len(self.drafts))
        length = len(self.committed) + accepted_count
        self.committed += [*self.drafts[:accepted_count], token_id]
        self.cached_length = min(self.cached_length, length)

    def choice_after(self, drafts: Sequence[int]) -> int:
        """Return the draft's own choice after some drafts."""
        whole = ProposeRow("plain", 0, (*self.committed, *drafts), 1, self.rule)
        (found,) = self.plain.propose([whole])
        assert isinstance(found, Proposal)
        return found.draft_token_ids[0]


def taken_page_count(drafter: Drafter) -> int:
    """Return how many pages of the cache are neither free nor kept for later prompts."""
    pool = drafter.runner.cache
    assert isinstance(pool, KvPool)
    return pool._pages.page_count - pool.free_count - pool._index.idle_count


def own_page_count(drafter: Drafter, sequence_id: str = "a") -> int:
    return -(-drafter.runner.cache.length(sequence_id) // OPTIONS.page_tokens)


def prepare(preparing: Preparing, most_passes: int = 1000) -> list[PreparedDrafts]:
    found: list[PreparedDrafts] = []
    for _ in range(most_passes):
        if (made := preparing.work()) is None:
            break
        found += [one for _, one in made]
    return found


def choices_of(prepared: Sequence[PreparedDrafts]) -> dict[tuple[int, int], int]:
    """Return the draft's choice after each prefix, by its length and hash."""
    found: dict[tuple[int, int], int] = {}
    for one in prepared:
        length, value = one.length, one.hash
        for token_id in one.draft_token_ids:
            found[length, value] = token_id
            length, value = length + 1, extended_hash(value, (token_id,))
    return found


Outcomes = st.lists(
    st.tuples(
        st.integers(0, 6),  # accepted
        st.integers(-4, VOCABULARY_SIZE - 1),  # the target's next token; below 0: the draft's own choice
        st.integers(1, 6),  # drafts asked for next
        st.integers(0, 20),  # passes between the calls
        st.sampled_from((0, 3, 100)),  # places prepared
    ),
    max_size=5,
)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(outcomes=Outcomes)
def test_whatever_comes_drafts_and_cache_are_those_of_plain_calls(
    model: LoadedModel, rule: ChoiceRule, outcomes: list[tuple[int, int, int, int, int]]
) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter, rule)
    caller.ask()
    for accepted, token_id, draft_count, passes, prepare_count in outcomes:
        prepare(drafter.preparing, passes)
        drafts = caller.drafts[:accepted]
        caller.commit(accepted, caller.choice_after(drafts) if token_id < 0 else token_id)
        caller.ask(draft_count, prepare_count)
    drafter.runner.release(["a"])
    assert drafter.preparing.work() is None
    assert taken_page_count(drafter) == 0


@pytest.mark.parametrize("rule", RULES)
def test_full_acceptance_with_the_drafts_own_choice_is_a_hit_without_a_pass(
    model: LoadedModel, rule: ChoiceRule
) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    caller = Caller(model, drafter, rule)
    caller.ask()
    prepare(drafter.preparing)
    caller.commit(2, caller.choice_after(caller.drafts))
    passes.clear()
    assert caller.ask(2).prepared
    assert passes == []


def test_a_hit_goes_on_from_what_was_prepared_where_more_drafts_are_asked_for(model: LoadedModel) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing, 2)
    caller.commit(0, caller.choice_after(()))
    passes.clear()
    assert caller.ask(6).prepared
    assert 0 < len(passes) < 6


def test_what_is_prepared_says_what_a_call_would_propose(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    drafts = caller.ask().draft_token_ids
    found = choices_of(prepare(drafter.preparing))
    prefix = [*PROMPT, *drafts]
    value = extended_hash(0, prefix)
    bonus = found[len(prefix), value]
    assert bonus == caller.choice_after(drafts)
    chain: list[int] = []
    length, value = len(prefix) + 1, extended_hash(value, (bonus,))
    while (token_id := found.get((length, value))) is not None:
        chain.append(token_id)
        length, value = length + 1, extended_hash(value, (token_id,))
    assert len(chain) >= 2
    caller.commit(2, bonus)
    assert caller.ask(len(chain)).draft_token_ids == tuple(chain)


def test_runners_up_are_prepared_too(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    drafts = caller.ask().draft_token_ids
    hashes = {(one.length, one.hash) for one in prepare(drafter.preparing)}
    after_one = extended_hash(0, [*PROMPT, drafts[0]])
    outcomes = [one for one in range(VOCABULARY_SIZE) if (len(PROMPT) + 2, extended_hash(after_one, (one,))) in hashes]
    assert len(outcomes) >= 2
    caller.commit(1, next(one for one in outcomes if one != drafts[1]))
    assert caller.ask(1).prepared


@pytest.mark.parametrize("rule", RULES[:2])
def test_drafts_that_steps_ranked_are_not_computed_again(model: LoadedModel, rule: ChoiceRule) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    Caller(model, drafter, rule).ask()
    passes.clear()
    prepare(drafter.preparing)
    assert passes
    assert all(one.token_count == one.row_count for one in passes)


def longest_at_once(model: LoadedModel, *, target_agrees: bool) -> int:
    """Return how many tokens are prepared at once after a guess, once the target has agreed for long or never."""
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    for _ in range(12):
        caller.ask(prepare_count=40)
        prepare(drafter.preparing)
        if target_agrees:
            caller.commit(2, caller.choice_after(caller.drafts))
        else:
            caller.commit(0, next(one for one in range(20, 30) if one != caller.drafts[0]))
    caller.ask()
    return max(len(one.draft_token_ids) for one in prepare(drafter.preparing))


def test_choices_after_a_guess_are_prepared_with_it_as_far_as_the_target_agrees(model: LoadedModel) -> None:
    assert longest_at_once(model, target_agrees=True) == MOST_STEPS
    assert longest_at_once(model, target_agrees=False) == 1


def test_a_pass_between_calls_has_few_rows_and_no_more_is_prepared_than_was_asked_for(model: LoadedModel) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    caller = Caller(model, drafter)
    caller.ask(prepare_count=30)
    passes.clear()
    prepare(drafter.preparing)
    assert max(one.row_count for one in passes) <= PASS_ROWS
    assert sum(one.token_count for one in passes) <= 1 + 30 + PASS_ROWS


def test_a_hit_frees_what_did_not_come(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    caller.ask(prepare_count=60)
    prepare(drafter.preparing)
    page_count = taken_page_count(drafter)
    caller.commit(2, caller.choice_after(caller.drafts))
    assert caller.ask(1, prepare_count=5).prepared
    prepare(drafter.preparing)
    assert taken_page_count(drafter) < page_count / 2


def test_after_a_hit_as_much_is_prepared_as_its_row_asks_for(model: LoadedModel) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    caller = Caller(model, drafter)
    caller.ask(prepare_count=20)
    prepare(drafter.preparing)
    caller.commit(2, caller.choice_after(caller.drafts))
    assert caller.ask(1, prepare_count=80).prepared
    passes.clear()
    prepare(drafter.preparing)
    assert 20 + PASS_ROWS < sum(one.token_count for one in passes) <= 80 + PASS_ROWS


def test_the_more_the_target_agreed_the_further_goes_what_is_prepared(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))

    def prepared_length(name: str) -> int:
        Caller(model, drafter, name=name).ask(prepare_count=20)
        return max(one.length for one in prepare(drafter.preparing))

    first = prepared_length("b")
    caller = Caller(model, drafter)
    for _ in range(10):
        caller.ask(prepare_count=20)
        prepare(drafter.preparing)
        caller.commit(2, caller.choice_after(caller.drafts))
    assert prepared_length("c") > first


@pytest.mark.parametrize("is_cut", [True, False])
def test_nothing_stays_prepared_for_a_sequence_that_its_owner_cuts_or_frees(model: LoadedModel, is_cut: bool) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing, 5)
    if is_cut:
        drafter.runner.rollback([SequenceLength("a", 5)])
        caller.cached_length = 5
    else:
        drafter.runner.release(["a"])
        caller.cached_length = 0
    assert drafter.preparing.work() is None
    caller.commit(2, caller.choice_after(caller.drafts))
    assert not caller.ask().prepared


def test_nothing_stays_prepared_for_a_sequence_that_no_call_names_any_more(model: LoadedModel) -> None:
    """To compute its guesses is not to name it."""
    clock = Clock()
    drafter = Drafter(Runner(model, replace(OPTIONS, sequence_ttl_s=100), clock))
    Caller(model, drafter).ask()
    clock.advance(99)
    prepare(drafter.preparing, 5)
    assert taken_page_count(drafter) > own_page_count(drafter)
    clock.advance(2)
    assert drafter.runner.drop_idle() == 1
    assert taken_page_count(drafter) == 0
    assert drafter.preparing.work() is None


def test_another_prefix_ends_what_was_prepared(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing)
    caller.committed, caller.cached_length = [9, *PROMPT], 0
    assert not caller.ask(prepare_count=0).prepared
    assert drafter.preparing.work() is None
    assert taken_page_count(drafter) == own_page_count(drafter)


def test_another_rule_for_the_same_tokens_ends_what_was_prepared(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing)
    caller.commit(2, caller.choice_after(caller.drafts))
    caller.rule, caller.cached_length = RULES[1], 0
    assert not caller.ask().prepared


def test_branches_are_no_sequences_of_anyone(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    Caller(model, drafter).ask()
    prepare(drafter.preparing)
    assert drafter.runner.describe().cache.sequence_count == 1


def crowded(model: LoadedModel, page_count: int = 20) -> Drafter:
    """Return a drafter whose cache what is prepared can fill."""
    kv_memory = str(page_count * 4 * model.kv_shape.token_bytes)
    return Drafter(Runner(model, replace(OPTIONS, kv_memory=kv_memory, prefix_sharing=False)))


def test_branches_that_fill_the_cache_do_not_count_as_used(model: LoadedModel) -> None:
    """They took all free pages, so that an alert rang with one short sequence in the cache."""
    drafter = crowded(model)
    Caller(model, drafter).ask(prepare_count=120)
    used_bytes = drafter.runner.describe().cache.used_bytes
    prepare(drafter.preparing)
    assert taken_page_count(drafter) == 20
    assert drafter.runner.describe().cache.used_bytes == used_bytes


def test_a_cut_frees_the_bytes_of_its_sequence_and_none_of_branches(model: LoadedModel) -> None:
    drafter = crowded(model)
    Caller(model, drafter).ask()
    held_bytes = drafter.runner.cache.held_bytes
    prepare(drafter.preparing)
    (cut,) = drafter.runner.rollback([SequenceLength("a", 4)])
    assert isinstance(cut, RolledBack)
    assert cut.freed_bytes == held_bytes - drafter.runner.cache.held_bytes > 0


def test_coordinators_that_are_kept_apart_share_the_passes(model: LoadedModel) -> None:
    passes: list[PassSize] = []
    drafter = Drafter(Runner(model, OPTIONS, on_pass=passes.append))
    callers = {scope: Caller(model, drafter) for scope in ("one/", "two/")}
    for scope, caller in callers.items():
        caller.ask(scope=scope)
    passes.clear()
    for _ in range(4):
        made = drafter.preparing.work() or []
        counts = [sum(name.startswith(scope) for name, _ in made) for scope in callers]
        assert counts[0] == counts[1]
    prepare(drafter.preparing)
    assert max(one.row_count for one in passes) <= PASS_ROWS
    for scope, caller in callers.items():
        caller.commit(2, caller.choice_after(caller.drafts))
        assert caller.ask(1, scope=scope).prepared


def test_a_coordinator_without_room_gets_some_of_what_another_prepared(model: LoadedModel) -> None:
    options = replace(OPTIONS, kv_memory=str(40 * 4 * model.kv_shape.token_bytes))
    drafter = Drafter(Runner(model, options))
    first, second = Caller(model, drafter), Caller(model, drafter)
    first.ask(scope="one/")
    prepare(drafter.preparing)
    second.ask(scope="two/")
    assert len(prepare(drafter.preparing)) > 5


def test_what_is_prepared_takes_nothing_from_the_rows_that_cut_its_drafts_off(model: LoadedModel) -> None:
    """A branch shared the page of drafts that were rejected: the sequence wanted a page more for what it had."""
    options = replace(OPTIONS, kv_memory=str(3 * 4 * model.kv_shape.token_bytes), prefix_sharing=False)
    drafter = Drafter(Runner(model, options))
    drafter.propose([ProposeRow("a", 0, tuple(range(20, 29)), 4, GREEDY, prepare_count=120)])
    prepare(drafter.preparing)
    (found,) = drafter.propose([ProposeRow("a", 9, (200,), 3, None, prepare_count=120)])
    assert isinstance(found, Proposal)
    assert found.cached_length == 12


def test_with_few_free_pages_guesses_are_prepared_token_by_token(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, replace(OPTIONS, kv_memory=str(16 * 4 * model.kv_shape.token_bytes))))
    caller = Caller(model, drafter)
    caller.ask()
    assert {len(one.draft_token_ids) for one in prepare(drafter.preparing)} == {1}
    caller.commit(2, caller.choice_after(caller.drafts))
    assert caller.ask(1).prepared


@pytest.mark.parametrize("prepare_count", [2, 3])
def test_drafts_of_the_answer_are_not_counted_with_what_is_prepared(model: LoadedModel, prepare_count: int) -> None:
    drafter = Drafter(Runner(model, OPTIONS))
    Caller(model, drafter).ask(6, prepare_count)
    assert len(choices_of(prepare(drafter.preparing))) >= prepare_count


def test_a_sequence_for_which_nothing_is_left_to_prepare_takes_no_turn_of_another(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, replace(OPTIONS, prefill_chunk_tokens=512)))
    *most, last = (n % 300 for n in range(drafter.runner.limits.model_max_length))
    for number in range(PASS_ROWS):
        for row in (
            ProposeRow(f"{number}", 0, tuple(most), 1, GREEDY),
            ProposeRow(f"{number}", len(most), (last,), 1, None, prepare_count=9),
        ):
            assert isinstance(drafter.propose([row])[0], Proposal)
    drafter.propose([ProposeRow("short", 0, PROMPT, 2, GREEDY, prepare_count=9)])
    assert prepare(drafter.preparing)


def test_a_call_may_mix_rows_to_prepare_for_and_others(model: LoadedModel) -> None:
    drafter, plain = Drafter(Runner(model, OPTIONS)), Drafter(Runner(model, OPTIONS))
    rows = [ProposeRow(f"{n}", 0, (*PROMPT, 40 + n), 3, rule, 0, None, 20 * n) for n, rule in enumerate(RULES[:2] * 2)]
    assert drafter.propose(rows) == plain.propose([replace(row, prepare_count=0) for row in rows])
    assert {one.sequence_id for one in prepare(drafter.preparing)} == {"1", "2", "3"}


def test_a_coordinator_without_room_takes_none_of_its_own(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, replace(OPTIONS, kv_memory=str(20 * 4 * model.kv_shape.token_bytes))))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing)
    caller.commit(2, caller.choice_after(caller.drafts))
    assert caller.ask(1).prepared


@pytest.mark.parametrize("seed", range(8))
def test_room_is_made_for_nothing_that_making_room_ended(model: LoadedModel, seed: int) -> None:
    """Of two coordinators without room each ended what the other had, and a third lack of it found nobody to ask."""
    options = replace(OPTIONS, kv_memory=str(20 * model.kv_shape.token_bytes), page_tokens=1)
    drafter, random = Drafter(Runner(model, options)), Random(seed)
    for scope in ("one/", "two/"):
        prompt = random.choices(range(10, VOCABULARY_SIZE), k=random.randrange(1, 4))
        row = ProposeRow("a", 0, tuple(prompt), 3, prepare_count=120)
        assert isinstance(drafter.propose([row], scope)[0], Proposal)
    told = prepare(drafter.preparing)
    assert told
    drafter.runner.release(["a"], "one/")
    drafter.runner.release(["a"], "two/")
    assert taken_page_count(drafter) == 0


def test_nothing_is_made_for_what_ended_to_make_room_for_another(model: LoadedModel) -> None:
    """A branch was made for a sequence that was prepared for no more, and nothing but a full cache ever freed it."""
    options = replace(OPTIONS, kv_memory=str(34 * model.kv_shape.token_bytes), page_tokens=2)
    drafter, (_, hot, cool) = Drafter(Runner(model, options)), RULES
    one, two = PacelineCaller("one/", "one/"), PacelineCaller("two/", "two/")

    def ask(*calls: Call[ProposeRow], passes: int = 0) -> None:
        drafter.propose_calls(calls)
        prepare(drafter.preparing, passes)

    ask(Call([ProposeRow("c", 0, (33,), 1, cool)], one))
    rows = ProposeRow("c", 1, (216, 29), 2, None), ProposeRow("a", 0, (36, 37, 20, 29), 2, cool)
    ask(Call([replace(row, prepare_count=120) for row in rows], one), passes=2)
    row = ProposeRow("c", 4, (10, 27), 3, None, prepare_count=120)
    ask(Call([row], one), Call([ProposeRow("b", 0, (26, 36, 27), 2, hot, prepare_count=120)], two))
    rows = (
        ProposeRow("c", 0, (16, 16, 17, 34, 28, 26, 13), 1, hot),
        ProposeRow("a", 0, (14, 19, 24, 16, 14, 22, 33), 3, cool),
    )
    ask(Call([replace(row, prepare_count=120) for row in rows], two), passes=2)
    for caller in (one, two):
        drafter.runner.release(["a", "b", "c"], caller.scope)
    assert taken_page_count(drafter) == 0


def test_prompts_take_the_room_of_what_is_prepared(model: LoadedModel) -> None:
    options = replace(OPTIONS, kv_memory=str(16 * 4 * model.kv_shape.token_bytes), prefix_sharing=False)
    drafter = Drafter(Runner(model, options))
    caller = Caller(model, drafter)
    caller.ask()
    prepare(drafter.preparing)
    row = ProposeRow("b", 0, tuple(range(40, 80)), 1)
    assert isinstance(drafter.propose([row])[0], Proposal)
    prepare(drafter.preparing)
    caller.commit(2, caller.choice_after(caller.drafts))
    caller.ask()


def test_the_dense_layout_prepares_nothing(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, replace(OPTIONS, layout="dense")))
    drafter.propose([ProposeRow("a", 0, PROMPT, 4, prepare_count=100)])
    assert drafter.preparing.work() is None


@pytest.mark.parametrize("count", [-1, 257])
def test_a_count_out_of_range_is_refused(model: LoadedModel, count: int) -> None:
    (error,) = Drafter(Runner(model, OPTIONS)).propose([ProposeRow("a", 0, PROMPT, 4, prepare_count=count)])
    assert isinstance(error, InvalidRequest)
    assert error.field == "prepare_count"


def test_nothing_is_prepared_beyond_the_models_length(model: LoadedModel) -> None:
    drafter = Drafter(Runner(model, replace(OPTIONS, prefill_chunk_tokens=512)))  # the whole prompt in one call
    length = drafter.runner.limits.model_max_length
    row = ProposeRow("a", 0, tuple(n % 300 for n in range(length - 3)), 4, prepare_count=100)
    (proposal,) = drafter.propose([row])
    assert isinstance(proposal, Proposal)
    assert len(proposal.draft_token_ids) == 4
    assert max(one.length for one in prepare(drafter.preparing)) == length
