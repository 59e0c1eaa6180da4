"""Peers of the coordinator without models: a made-up language whose next token is a function of the prefix."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.protocols import Deadline, OnStreamEnd
from coordinator.replicas.plausibility import check_identity
from paceline.checks import MAX_ROWS
from paceline.errors import CacheFull, PacelineError, PrefixNotCached
from paceline.prefix_hash import PrefixHash
from paceline.types import (
    CacheDescription,
    CallTiming,
    ChoiceRule,
    ModelDescription,
    ModelIdentity,
    Prefilled,
    PreparedDrafts,
    Proposal,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenizerFiles,
    TokenLogprobs,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)

VOCABULARY_SIZE = 50
END_TOKEN_ID = 3
CHUNK_TOKENS = 16
UNTIMED = CallTiming()


class Clock:
    """A clock that stands still except when advanced."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def next_token(prefix: Sequence[int], language: int = 17) -> int:
    """Return the made-up target's choice after `prefix`; every token of the prefix matters."""
    value = language
    for token in prefix:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY_SIZE


def continuation(prompt: Sequence[int], max_new_tokens: int, language: int = 17) -> list[int]:
    """Return the target's own output, with which every test compares."""
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_new_tokens:
        token_ids.append(next_token(token_ids, language))
        if token_ids[-1] == END_TOKEN_ID:
            break
    return token_ids[len(prompt) :]


def logprobs_of(prefix: Sequence[int], top_count: int, language: int = 17) -> TokenLogprobs:
    """Return made-up log-probabilities of the last token of `prefix`; every token of it matters."""
    value = next_token(prefix, language)
    return TokenLogprobs(-(value + 1) / 64, tuple(((value + n) % VOCABULARY_SIZE, -n / 64) for n in range(top_count)))


class FakeModel:
    """Tokens by sequence id, by the rules of the state protocol, within a capacity; also the peers' common calls."""

    def __init__(self, role: str, capacity_tokens: int = 10**6) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.rules: dict[str, ChoiceRule] = {}
        self.description = describe(role)
        self.is_draining = False
        self.away: PacelineError | None = None
        """Error of every call while the peer is away; None while it is there."""
        self.is_closed = False
        self.trusted: ModelIdentity | None = None
        self.end_stream: OnStreamEnd = lambda wrong: None
        self._owed: set[str] = set()
        self._capacity_tokens = capacity_tokens

    def answer(self) -> None:
        if self.away:
            raise self.away

    async def is_serving(self, timeout_s: float) -> bool:
        self.answer()
        return not self.is_draining

    async def describe(self, timeout_s: float) -> ModelDescription:
        self.answer()
        return self.description

    def tell_stream_ends(self, on_end: OnStreamEnd) -> None:
        self.end_stream = on_end

    def trust(self, identity: ModelIdentity) -> None:
        self.trusted = identity

    async def close(self) -> None:
        self.is_closed = True

    def owe(self, sequence_ids: Sequence[str]) -> None:
        self._owed.update(sequence_ids)

    @property
    def owed_count(self) -> int:
        return len(self._owed)

    def append(self, row: ProposeRow | VerifyRow, token_ids: Sequence[int]) -> list[int]:
        """Keep the row's prefix and append `token_ids`.

        A rule that was never sent fails the test, and so does a row that relies on tokens other than the cached ones.
        """
        sequence_id, base_length = row.sequence_id, row.base_length
        cached = self.token_ids.get(sequence_id, [])
        if base_length > len(cached):
            raise PrefixNotCached(f"{base_length} > {len(cached)}")
        held_hash = PrefixHash().of(cached, base_length)
        assert row.base_hash in (None, held_hash), f"{sequence_id} has other first {base_length} tokens"
        if row.rule is not None:
            self.rules[sequence_id] = row.rule
        assert sequence_id in self.rules, f"nobody told how tokens of {sequence_id} are chosen"
        others = sum(len(held) for name, held in self.token_ids.items() if name != sequence_id)
        if (missing := others + base_length + len(token_ids) - self._capacity_tokens) > 0:
            raise CacheFull("no room", {"missing_bytes": str(missing)}, retry_after_s=0.001)
        self.token_ids[sequence_id] = [*cached[:base_length], *token_ids]
        return self.token_ids[sequence_id]

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        """Roll back, counting each token as a byte and a page."""
        self.answer()
        results: list[RolledBack | PacelineError] = []
        for one in lengths:
            held = self.token_ids[one.sequence_id]
            results.append(RolledBack(one.length, len(held) - one.length))
            del held[one.length :]
        return results

    async def release(self) -> int:
        self.answer()
        count = len(self._owed)
        while self._owed:
            sequence_id = self._owed.pop()
            self.token_ids.pop(sequence_id, None)
            self.rules.pop(sequence_id, None)
        return count

    def evict(self) -> None:
        self.token_ids.clear()
        self.rules.clear()


class FakeVerifier(FakeModel):
    """A target that takes `CHUNK_TOKENS` of a prompt a call.

    `before` is called before every verify call: it may raise, or evict. `timing` is part of every answer.
    """

    def __init__(
        self,
        before: Callable[[int], None] = lambda number: None,
        *,
        capacity_tokens: int = 10**6,
        timing: CallTiming = UNTIMED,
        language: int = 17,
    ) -> None:
        super().__init__("target", capacity_tokens)
        self.language = language
        self.tokenizer: TokenizerFiles | None = None
        self.calls: list[list[VerifyRow]] = []
        self.timeouts_s: list[float | None] = []
        self.before = before
        self.timing = timing

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await asyncio.sleep(0)  # others run meanwhile, as with every service
        self.calls.append(list(rows))
        self.timeouts_s.append(timeout_s)
        self.before(len(self.calls))
        self.answer()
        check_identity(self.trusted, self.description.identity)
        return Verdicts([self._verify(row) for row in rows], self.timing)

    def _verify(self, row: VerifyRow) -> VerifyOutcome | PacelineError:
        is_scored_part = row.scores_tokens and row.following_count
        taken = row.token_ids[: min(CHUNK_TOKENS, len(row.token_ids) - 1) if is_scored_part else CHUNK_TOKENS]
        assert not (row.following_count and row.draft_token_ids)
        whole = len(taken) == len(row.token_ids) and not row.following_count
        try:
            prefix = self.append(row, taken + (row.draft_token_ids if whole else ()))
        except PacelineError as error:
            return error
        scores = self._scores(row, len(taken), prefix)
        if not whole:
            return Prefilled(len(prefix), scores)
        accepted = 0
        start = len(prefix) - len(row.draft_token_ids)
        while start + accepted < len(prefix) and prefix[start + accepted] == self._choice(prefix[: start + accepted]):
            accepted += 1
        del prefix[start + accepted :]
        return Verdict(accepted, self._choice(prefix), len(prefix), token_logprobs=scores)

    def _scores(self, row: VerifyRow, taken_count: int, prefix: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if not row.scores_tokens:
            return ()
        assert row.top_logprob_count is not None
        committed = [*prefix[: row.base_length], *row.token_ids]
        ends = range(row.base_length + 2, row.base_length + min(taken_count + 1, len(row.token_ids)) + 1)
        return tuple(logprobs_of(committed[:end], row.top_logprob_count, self.language) for end in ends)

    def _choice(self, prefix: Sequence[int]) -> int:
        return next_token(prefix, self.language)

    async def download_tokenizer(self) -> TokenizerFiles | None:
        self.answer()
        return self.tokenizer


class WithHeads(FakeVerifier):
    """A target whose heads draft what follows, as many tokens as they are asked for, and that runs further rounds."""

    def __init__(self, wrong_every: int = 10**6) -> None:
        """Of drafts at places that `wrong_every` divides the token is wrong."""
        super().__init__()
        self.description = replace(self.description, heads_draft_count=3)
        self._wrong_every = wrong_every

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        return replace(verdicts, results=list(map(self._with_more, rows, verdicts.results)))

    def _with_more(self, row: VerifyRow, result: VerifyOutcome | PacelineError) -> VerifyOutcome | PacelineError:
        """Add what the heads draft, and further rounds."""
        if not isinstance(result, Verdict):
            return result
        prefix = (*self.token_ids[row.sequence_id], result.next_token_id)
        drafted = continuation(prefix, row.propose_count)
        for place in range(-len(prefix) % self._wrong_every, len(drafted), self._wrong_every):
            drafted[place] = (drafted[place] + 1) % VOCABULARY_SIZE
        verdict = replace(result, draft_token_ids=tuple(drafted))
        if not row.further_count:
            return verdict
        further = replace(
            row,
            base_length=verdict.cached_length,
            token_ids=(verdict.next_token_id,),
            draft_token_ids=verdict.draft_token_ids,
            further_count=row.further_count - 1,
            base_hash=None,
        )
        made = self._with_more(further, self._verify(further))
        assert isinstance(made, Verdict)
        return replace(verdict, further=(replace(made, further=()), *made.further))


class HeldVerifier(FakeVerifier):
    """Answers the first calls; later calls wait until it is `open`."""

    def __init__(self, answered_count: int) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self._answered_count = answered_count

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        if len(self.calls) >= self._answered_count:
            await self.open.wait()
        return await super().verify(rows, timeout_s)


class FakeDrafter(FakeModel):
    """A draft that is right with probability `skill`; `before` as in FakeVerifier."""

    def __init__(
        self,
        skill: float,
        seed: int = 0,
        before: Callable[[int], None] = lambda number: None,
        *,
        capacity_tokens: int = 10**6,
    ) -> None:
        super().__init__("draft", capacity_tokens)
        self.max_length = 1000
        self.prefill_chunk_tokens = CHUNK_TOKENS
        self.max_rows = MAX_ROWS
        self.calls: list[list[ProposeRow]] = []
        self.deadlines: list[Deadline] = []
        self.take_prepared: Callable[[Sequence[PreparedDrafts]], None] = lambda prepared: None
        """Takes what is told unasked."""
        self._skill = skill
        self._random = random.Random(seed)
        self._before = before

    def listen(self, take: Callable[[Sequence[PreparedDrafts]], None]) -> None:
        self.take_prepared = take

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        self.calls.append(list(rows))
        self.deadlines.append(deadline)
        self._before(len(self.calls))
        self.answer()
        check_identity(self.trusted, self.description.identity)
        return Proposals([self._propose(row) for row in rows])

    def _propose(self, row: ProposeRow) -> Proposal | PacelineError:
        try:
            prefix = self.append(row, row.token_ids)
        except PacelineError as error:
            return error
        drafts: list[int] = []
        for _ in range(0 if row.following_count else row.draft_count):
            right = self._random.random() < self._skill
            drafts.append(next_token([*prefix, *drafts]) if right else self._random.randrange(VOCABULARY_SIZE))
        prefix += drafts[:-1]
        return Proposal(tuple(drafts), len(prefix))


def describe(
    model_id: str, tokenizer_fingerprint: str = "", vocabulary_size: int = VOCABULARY_SIZE
) -> ModelDescription:
    return ModelDescription(
        model_id=model_id,
        architecture="Fake",
        vocabulary_size=vocabulary_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        max_length=1000,
        end_token_ids=(END_TOKEN_ID,),
        device="cpu",
        dtype="float32",
        parameter_count=0,
        cache=CacheDescription(max_length=1000, prefill_chunk_tokens=CHUNK_TOKENS, token_bytes=1, page_tokens=1),
        max_rows=MAX_ROWS,
    )
