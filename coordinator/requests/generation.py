"""A request and its generations: the tokens of each, and how many of them each service has cached.

The token list is the truth; the cached lengths are hints. Only the coordinator changes a generation.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.requests.acceptance import Acceptance, by_place
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guesser
from coordinator.requests.output import Output
from coordinator.requests.prompt_scores import PromptScores
from coordinator.requests.stream import Stream
from coordinator.requests.traced_request import TracedRequest
from paceline.errors import PacelineError
from paceline.prefix_hash import PrefixHash
from paceline.types import (
    GREEDY,
    ChoiceRule,
    DraftingOptions,
    DraftSource,
    GenerationFinish,
    OutputPiece,
    OutputToken,
    ProposeRow,
    RoundSummary,
    SourceUsage,
    TokenLogprobs,
    Usage,
    VerifyRow,
)

LONGEST_DRAFT_PAUSE = 64
"""Most tokens of an output without drafts before its prompt is brought again."""


@dataclass(eq=False)
class Request:
    """One request of a client: its outputs are admitted and queued together."""

    stream: Stream = field(default_factory=Stream)
    seed: int = 0
    """Given or drawn; the seed of each output is made from it."""
    request_id: str = ""
    """Its name in the log and for its client."""
    generations: "list[Generation]" = field(default_factory=list)
    """Its outputs that had not ended when it arrived."""
    deadline_s: float | None = None
    """Time of its deadline, by the clock of rounds; None: no deadline."""
    traced: TracedRequest | None = None
    """Its span and baggage; None if it is not traced."""
    arrival: int = 0
    """Place in the order of submission."""
    submitted_s: float = 0.0
    """Time of its queueing, by the queue's clock."""
    tells_rounds: bool = False
    """Whether its client is told of each round."""
    beginnings: Sequence[int] = ()
    """Hashes of its prompt's beginnings, by which targets are chosen; the shortest first."""
    passed_count: int = 0
    """Younger requests that were placed before it."""
    omits_text: bool = False
    """Whether its client gets tokens without their texts."""
    prompt_time_s: int = 0
    """Time that the chat template had."""

    @property
    def prompt_count(self) -> int:
        return self.generations[0].usage.prompt_count

    @property
    def unfinished(self) -> "list[Generation]":
        return [generation for generation in self.generations if not generation.ended]


@dataclass(slots=True)
class HeadsDraft:
    """Tokens that the target's heads drafted with a verdict."""

    length: int
    """Committed tokens that they follow."""
    token_ids: tuple[int, ...]
    asked_count: int
    """Tokens that they were asked for; without their state of the sequence they give none."""


@dataclass(eq=False)
class Generation:
    sequence_id: str
    token_ids: TokenList
    """Committed tokens: prompt, then output."""
    output: Output
    max_draft_count: int
    usage: Usage
    """What it took so far: it grows, and others keep copies."""
    request: Request
    completion_index: int = 0
    rule: ChoiceRule = GREEDY
    seed: int = 0
    top_logprob_count: int | None = None
    prompt_scores: PromptScores | None = None
    """Log-probabilities of the prompt while the target computes them; None: they were sent, or nobody wants them."""
    drafting: DraftingOptions = DraftingOptions()
    guessers: Mapping[DraftSource, Guesser] = field(default_factory=dict)
    """Sources without a model, each with what it knows of this generation."""
    heads_draft: HeadsDraft | None = None
    """What the target's heads drafted last."""
    draft_cached_length: int = 0
    """Leading committed tokens that the draft service is known to hold."""
    target_cached_length: int = 0
    taken_in_length: int = 0
    """Leading committed tokens that some target took in once, whether it holds them still or not."""
    draft_taken_count: int | None = None
    """Tokens that the draft service took of the generation's last row; None: nothing is known of its cache."""
    target_taken_count: int | None = None
    draft_model: str = ""
    """Model of the draft service that may hold it."""
    refused_draft_models: set[str] = field(default_factory=set)
    """Models of draft services that can never take it: a token is unknown to them, say."""
    draft_pauses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Models of draft services that had no room for its prompt: the tokens that it gets before they are brought it
    again, and its committed tokens then."""
    draft_prefix: PrefixHash = field(default_factory=PrefixHash)
    """Hash of the tokens that rows to the draft service rely on."""
    target_prefix: PrefixHash = field(default_factory=PrefixHash)
    acceptances: dict[str, Acceptance] = field(default_factory=dict)
    """How often drafts were right, by the model of the draft service that made them."""
    rounds_by_accepted_count: Counter[int] = field(default_factory=Counter)
    """Rounds with drafts, by how many of them were accepted."""
    compared_counts: dict[object, tuple[int, int]] = field(default_factory=dict)
    """Its right and compared drafts, by what adds them up at its end."""
    ready_since_s: float = 0.0
    """Time when it last became live or came back from a round; since then it waits to be grouped."""
    queued_s: float = 0.0
    """Seconds in the queue, since its submission or last round, before it became live; 0 after a round."""
    runs_alone: bool = False
    """Whether a group with it failed for an unknown reason: a round alone shows whether it was the cause."""
    loss_count: int = 0
    """Targets lost while they verified it, since its last token."""
    failed_at: set[str] = field(default_factory=set)
    """Addresses of targets that failed or were lost with it since its last token; others are tried first."""
    first_grouped_s: float | None = None
    """Time when its first round took it; None before that."""
    ended: bool = False
    """Finished, failed or abandoned: no more rounds."""

    @property
    def arrival(self) -> tuple[int, int]:
        """Place in the order of submission."""
        return self.request.arrival, self.completion_index

    @property
    def is_unread(self) -> bool:
        """Whether so much of its output is unread that it should pause."""
        return self.request.stream.is_full(self.completion_index)

    @property
    def is_suspect(self) -> bool:
        """Whether a target failed with it since its last token."""
        return self.runs_alone or bool(self.failed_at)

    @property
    def until_first_round_s(self) -> float | None:
        """Seconds from its submission to its first round; None before that."""
        return None if self.first_grouped_s is None else self.first_grouped_s - self.request.submitted_s

    @property
    def needed_no_round(self) -> bool:
        """Whether its output ended with tokens that the client had already."""
        return self.first_grouped_s is None and self.output.finish_reason is not None

    def begin_rounds(self, now_s: float) -> None:
        """Note that its first round takes it now."""
        self.first_grouped_s = now_s
        self.usage.queued_s = now_s - self.request.submitted_s

    @property
    def most_useful_drafts(self) -> int:
        """Most drafts that can help a round, which adds one token more than it accepts; under 1: none."""
        return min(self.max_draft_count, self.output.remaining_count - 1)

    def useful_heads_count(self, count: int) -> int:
        """Return how many of `count` tokens that the target's heads draft after a round can help the next."""
        # At least one token comes before them, and one after them.
        return max(0, min(count, self.max_draft_count, self.output.remaining_count - 2))

    @property
    def draft_lack(self) -> int:
        """Committed tokens that the draft service is not known to hold, at least one: a row brings a token."""
        return max(1, len(self.token_ids) - self.draft_cached_length)

    @property
    def target_lack(self) -> int:
        return max(1, len(self.token_ids) - self.target_cached_length)

    @property
    def target_taken(self) -> int | None:
        """Tokens that the target took of its last row; None: there was none, and the target may hold more."""
        # A prompt that is scored takes nothing over.
        return 0 if self.prompt_scores else self.target_taken_count

    def propose_row(self, draft_count: int, token_count: int) -> ProposeRow:
        """Return a row that asks for drafts after all committed tokens and relies on the draft service's cache.

        It brings the rule if the service may not know it: one that holds any of the cache does.
        The row brings the next `token_count` tokens that the draft service lacks; the rest follow in later rows.
        """
        token_ids, length = self.token_ids, len(self.token_ids)
        base_length = min(self.draft_cached_length, length - 1)
        stop = base_length + token_count
        return ProposeRow(
            self.sequence_id,
            base_length,
            tuple(token_ids[base_length:stop]),
            draft_count,
            None if base_length else self.rule,
            length - stop,
            self.draft_prefix.of(token_ids, base_length),
        )

    def verify_row(
        self,
        draft_token_ids: tuple[int, ...],
        token_count: int,
        propose_count: int,
        further_count: int,
        *,
        draft_is_idle: bool,
    ) -> VerifyRow:
        """Return a row that asks the target for its choices, as `propose_row` asks for drafts.

        The target's heads are asked for `propose_count` tokens (`useful_heads_count`), and the target for
        `further_count` more rounds, as far as the output may go on. `draft_is_idle` tells that no draft service works
        meanwhile.
        """
        token_ids, length = self.token_ids, len(self.token_ids)
        base_length = min(self.target_cached_length, length - 1)
        stop = base_length + token_count
        if further_count:
            # A round brings a token at least. None follows an output that ends if all drafts are right.
            most = self.output.remaining_count - 1
            further_count = min(further_count, most) if most > len(draft_token_ids) else 0
        return VerifyRow(
            self.sequence_id,
            base_length,
            tuple(token_ids[base_length:stop]),
            draft_token_ids,
            None if base_length else self.rule,
            self.top_logprob_count,
            length - stop,
            self.target_prefix.of(token_ids, base_length),
            draft_is_idle and bool(draft_token_ids),
            self.prompt_scores is not None,
            propose_count,
            further_count,
        )

    def take_scores(self, base_length: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take log-probabilities of the tokens from `base_length` + 1 on; send the prompt once all of it has them."""
        assert self.prompt_scores
        self.prompt_scores.take(base_length, logprobs)
        if self.prompt_scores.is_whole:
            self.request.stream.put_prompt(self.prompt_scores.tokens())
            self.prompt_scores = None

    def may_ask(self, model: str) -> bool:
        """Return whether draft services of a model may be asked for drafts now."""
        if model in self.refused_draft_models:
            return False
        return model not in self.draft_pauses or len(self.token_ids) >= self.draft_pauses[model][1]

    def pause_draft(self) -> None:
        """Note that its draft service had no room for its prompt: it is brought ever more rarely."""
        before, _ = self.draft_pauses.get(self.draft_model, (0, 0))
        count = min(2 * before or 1, LONGEST_DRAFT_PAUSE)
        self.draft_pauses[self.draft_model] = count, len(self.token_ids) + count

    def move_draft(self, model: str) -> None:
        """Note that a draft service of this model is asked from now on."""
        if model != self.draft_model:
            self.forget_draft()
            self.draft_model = model

    def forget_draft(self) -> None:
        """Note that the draft service holds nothing of it, or that it goes to another."""
        self.draft_cached_length, self.draft_taken_count = 0, None

    def forget_target(self) -> None:
        """Note that the target holds nothing of it, or that it goes to another."""
        self.target_cached_length, self.target_taken_count = 0, None
        self.heads_draft = None  # another target may have other heads, or none

    def commit(
        self,
        token_ids: list[int],
        *,
        accepted_count: int,
        drafted_count: int,
        logprobs: Sequence[TokenLogprobs] = (),
        source: DraftSource | None,
        draft_model: str = "",
        told: RoundSummary | None = None,
    ) -> tuple[int, int, int]:
        """Add a round's tokens, up to the one that ends the output, and send them to the client.

        Drafts past the end of the output count neither as drafted nor as accepted. `source` proposed the drafts: None
        where there were none. `draft_model` is the draft service's. `told` goes to the client with the same counts.
        Return the counts of tokens that were drafted, accepted and committed.
        """
        tokens = self.output.extend(token_ids, accepted_count, logprobs, source)
        committed_count = len(tokens)
        self.token_ids += token_ids[:committed_count]
        if self.output.finish_reason:
            drafted_count = min(drafted_count, committed_count)
            accepted_count = min(accepted_count, committed_count)
        if self.runs_alone or self.failed_at or self.loss_count:
            self._came_through()
        self.usage.output_count = self.output.count
        self.usage.round_count += 1
        if source and drafted_count:
            self._count_drafts(source, draft_model, drafted_count, accepted_count)
        if told:
            told = replace(told, drafted_count=drafted_count, accepted_count=accepted_count)
        self._send(tokens, told)
        return drafted_count, accepted_count, committed_count

    def _count_drafts(self, source: DraftSource, model: str, drafted_count: int, accepted_count: int) -> None:
        if source is DraftSource.DRAFT:
            self.acceptances.setdefault(model, Acceptance()).add(accepted_count, drafted_count)
        usage = self.usage
        usage.drafted_count += drafted_count
        usage.accepted_count += accepted_count
        self.rounds_by_accepted_count[accepted_count] += 1
        for one in usage.sources:
            if one.source is source and one.model == model:
                break
        else:
            one = SourceUsage(source, model)
            usage.sources += (one,)
        one.drafted_count += drafted_count
        one.accepted_count += accepted_count

    def take_in(self, base_length: int, reused_count: int, cached_length: int) -> None:
        """Note a row's answer; count tokens of the prompt that the target had from earlier prompts.

        What a target took in once before, and had to take in again, does not count.
        """
        if reused_count:
            new_from = max(base_length, self.taken_in_length)
            count = min(base_length + reused_count, self.usage.prompt_count) - new_from
            self.usage.cached_prompt_count += max(0, count)
        self.target_cached_length = cached_length
        if cached_length > self.taken_in_length:
            self.taken_in_length = cached_length

    def _came_through(self) -> None:
        """Clear all suspicion, because it got a token. A prompt that another target prefills is no such progress."""
        self.runs_alone, self.loss_count = False, 0
        self.failed_at.clear()

    def resume(self, token_ids: Sequence[int]) -> None:
        """Commit tokens that the client has already, up to the one that ends the output; they are not sent."""
        tokens = self.output.extend(token_ids, 0)
        self.token_ids += list(token_ids[: len(tokens)])
        self.usage.output_count = self.output.count
        if self.output.finish_reason:
            self._send(())

    def _send(self, tokens: Sequence[OutputToken], told: RoundSummary | None = None) -> None:
        finish = None
        if self.output.finish_reason:
            self.ended = True
            usage, rounds = self.usage.copy(), self.rounds_by_accepted_count
            usage.accepted_counts_by_position = by_place([rounds[n] for n in range(1, 1 + max(rounds, default=0))])
            finish = GenerationFinish(self.output.finish_reason, usage, self.seed)
        self.request.stream.put(OutputPiece(tokens, finish, self.completion_index, round=told))

    def fail(self, error: PacelineError) -> None:
        """End the generation; its client gets `error`."""
        self.ended = True
        self.request.stream.put(error)


def request_ids(generations: Iterable[Generation]) -> list[str]:
    """Return the names of the generations' requests, for the log."""
    return [*dict.fromkeys(one.request.request_id for one in generations)]
