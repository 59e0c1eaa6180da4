"""The default cache: fixed-size pages of one memory, a page table for each sequence, and shared equal beginnings.

It owns tables and lengths; `slots` has the memory, `pages` counts references, `prefix_index` knows contents. It knows
nothing of models or calls.

Invariants: a sequence has exactly the pages its length needs; a page has one reference for each table it is in, and one
more when the index holds it; no page is written to that a second table or the index holds; truncation copies nothing.

A branch is a sequence that continues another one on a guess. Branches live in what nobody needs: they are not counted,
they take free pages only, and their pages are the first to go when others need room. So what they alone hold is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.attention.paged import AttentionMaker, PagedAttention
from paceline.engine.cache.pages import PageAllocator
from paceline.engine.cache.prefix_index import PrefixIndex, page_key, root_key
from paceline.engine.interfaces import Attention, KvShape, Span, check_base, check_length
from paceline.engine.plan import BatchPlan
from paceline.engine.slots import KvSlots, SlotsMaker
from paceline.errors import CacheFull
from paceline.scope import scope_of
from paceline.types import CacheDescription

EVICTED_SHARE = 16
"""When pages run out, one in this many of all pages is freed at once, so that neighbours are free and form runs."""


@dataclass
class _Sequence:
    root: bytes
    """Key that stands before the first page's. Only sequences with equal roots share pages."""
    token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full pages, computed as far as they were needed."""
    is_branch: bool = False
    reused_count: int = 0
    """Tokens that its last `keep` took over."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


class KvPool:
    def __init__(
        self,
        shape: KvShape,
        capacity_bytes: int,
        *,
        page_tokens: int,
        prefix_sharing: bool = True,
        attention: AttentionMaker = PagedAttention,
        lay_out: SlotsMaker = KvSlots,
    ) -> None:
        """`attention` reads the memory, which `lay_out` makes, and writes to it in a pass."""
        self.shape = shape
        self.page_tokens = page_tokens
        self._page_bytes = page_tokens * shape.token_bytes
        self._prefix_sharing = prefix_sharing
        self.slots = lay_out(shape, max(0, capacity_bytes // self._page_bytes), page_tokens, attention)
        self._pages = PageAllocator(self.slots.page_count)
        self._index = PrefixIndex()
        self._sequences: dict[str, _Sequence] = {}
        self._branch_ids: dict[str, None] = {}
        """Ids of branches, oldest first."""
        self._shared_token_count = 0

    @property
    def capacity_bytes(self) -> int:
        return self._pages.page_count * self._page_bytes

    @property
    def max_length(self) -> int:
        return self._pages.page_count * self.page_tokens

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return self._pages.free_count

    @property
    def least_bytes(self) -> int:
        return self._page_bytes

    @property
    def sequence_count(self) -> int:
        return len(self._sequences) - len(self._branch_ids)

    def length(self, sequence_id: str) -> int:
        sequence = self._sequences.get(sequence_id)
        return sequence.length if sequence else 0

    def token_ids(self, sequence_id: str) -> Sequence[int]:
        return self._sequences[sequence_id].token_ids

    def pages(self, sequence_id: str) -> Sequence[int]:
        """Return the sequence's pages in order; the caller must not change them."""
        return self._sequences[sequence_id].pages

    def fill(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Replace the last tokens, which were placeholders until a pass chose them."""
        held = self._sequences[sequence_id].token_ids
        held[len(held) - len(token_ids) :] = token_ids

    def fork(self, sequence_id: str, length: int, branch_id: str, kept_length: int | None = None) -> None:
        """Begin a branch with the first `length` tokens of a sequence or of another branch.

        Whole pages are shared, and a partial one is copied: the parent goes on in its own. So are pages with tokens
        beyond `kept_length`, which the parent may yet cut. Raise CacheFull when too few pages are free for that.
        """
        source, size = self._sequences[sequence_id], self.page_tokens
        whole_count = (length if kept_length is None else min(length, kept_length)) // size
        copied_count = -(-length // size) - whole_count
        branch = _Sequence(source.root, source.token_ids[:length], [], source.keys[:whole_count], is_branch=True)
        if copied_count > self._pages.free_count:
            raise CacheFull("no page is free for a branch")
        for page in source.pages[:whole_count]:
            self._pages.share(page)
            branch.pages.append(page)
        branch.pages += [self._take_apart() for _ in range(copied_count)]
        self._copy(source, branch, whole_count * size, length)
        self._sequences[branch_id] = branch
        self._branch_ids[branch_id] = None

    def adopt(self, sequence_id: str, base_length: int, branch_id: str, length: int) -> bool:
        """Keep `base_length` tokens of a sequence, and copy those up to `length` from a branch that begins alike.

        The copies lie in the sequence's own pages, which stay in one piece. Return False, and copy nothing, when the
        branch is gone or there is no room.
        """
        sequence = self._sequences[sequence_id]
        branch = self._sequences.get(branch_id)
        if branch is None:
            return False
        token_ids = branch.token_ids[base_length:length]
        self._cut(sequence, base_length)
        try:
            self.append(sequence_id, token_ids)
        except CacheFull:
            return False
        if branch_id not in self._sequences:  # its pages were needed
            self._cut(sequence, base_length)
            return False
        self._copy(branch, sequence, base_length, length)
        return True

    def _copy(self, source: _Sequence, target: _Sequence, start: int, stop: int) -> None:
        size = self.page_tokens
        while start < stop:
            page, offset = divmod(start, size)
            count = min(stop - start, size - offset)
            ours, theirs = (one.pages[page] * size + offset for one in (target, source))
            self.slots.copy(ours, theirs, count)
            start += count

    def keep(self, sequence_id: str, base_length: int, next_token_ids: Sequence[int]) -> int:
        check_base(sequence_id, base_length, self.length(sequence_id))
        # Callers of different scopes share nothing: the time a prompt takes would tell one about another's prompts.
        sequence = self._sequences.setdefault(sequence_id, _Sequence(root_key(scope_of(sequence_id))))
        self._cut(sequence, base_length)
        # Only one page of tokens is copied at a time: copying all the rest of a prompt would cost its length squared.
        for start in range(0, len(next_token_ids), self.page_tokens):
            content = next_token_ids[start : start + self.page_tokens]
            key = self._key_of_next(sequence, content)
            if key is None or (page := self._index.find(key)) is None:
                break
            self._index.wake(page)
            self._pages.share(page)
            sequence.pages.append(page)
            sequence.keys.append(key)
            sequence.token_ids += content
        sequence.reused_count = sequence.length - base_length
        self._shared_token_count += sequence.reused_count
        return sequence.length

    def reused_count(self, sequence_id: str) -> int:
        return self._sequences[sequence_id].reused_count

    def next_key(self, sequence_id: str, next_token_ids: Sequence[int]) -> bytes | None:
        return self._key_of_next(self._sequences[sequence_id], next_token_ids)

    def append(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        sequence = self._sequences[sequence_id]
        length = sequence.length + len(token_ids)
        try:
            if sequence.is_branch:
                self._check_free(sequence, length)
            self._own_last_page(sequence)
            self._grow(sequence, -(-length // self.page_tokens))
        except CacheFull:
            if not sequence.length:
                self.release(sequence_id)
            raise
        sequence.token_ids += token_ids

    def attention(self, spans: Sequence[Span]) -> Attention:
        pages = [self._sequences[span.sequence_id].pages for span in spans]
        return self.slots.attention(BatchPlan(spans, pages, self.page_tokens))

    def seal(self, sequence_id: str, length: int) -> None:
        sequence = self._sequences[sequence_id]
        if sequence.is_branch:
            return  # most branches are wrong: nobody should find their pages
        size = self.page_tokens
        for position in range(len(sequence.keys), length // size):
            key = self._key(sequence, sequence.token_ids[position * size : (position + 1) * size])
            sequence.keys.append(key)
            if self._prefix_sharing and self._index.add(key, sequence.pages[position]):
                self._pages.share(sequence.pages[position])

    def truncate(self, sequence_id: str, length: int) -> None:
        sequence = self._sequences.get(sequence_id)
        check_length(sequence_id, length, sequence.length if sequence else None)
        assert sequence is not None
        self._cut(sequence, length)

    def release(self, sequence_id: str) -> bool:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._branch_ids.pop(sequence_id, None)
        self._cut(sequence, 0)
        return True

    @property
    def held_bytes(self) -> int:
        if not self._branch_ids:
            return (self._pages.page_count - self._pages.free_count - self._index.idle_count) * self._page_bytes
        # The sequences are copied, because another thread may ask while a pass changes them.
        tables = [one.pages for one in list(self._sequences.values()) if not one.is_branch]
        return len(set().union(*tables)) * self._page_bytes

    def describe(self) -> CacheDescription:
        return CacheDescription(
            layout="paged",
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.held_bytes,
            idle_bytes=self._index.idle_count * self._page_bytes,
            sequence_count=self.sequence_count,
            token_bytes=self.shape.token_bytes,
            max_length=self.max_length,
            page_tokens=self.page_tokens,
            shared_token_count=self._shared_token_count,
            prefix_sharing=self._prefix_sharing,
        )

    def _key(self, sequence: _Sequence, token_ids: Sequence[int]) -> bytes:
        return page_key(sequence.keys[-1] if sequence.keys else sequence.root, token_ids)

    def _key_of_next(self, sequence: _Sequence, next_token_ids: Sequence[int]) -> bytes | None:
        """Return the key of the next full page; None inside a page, with too few tokens, or without sharing."""
        aligned = sequence.length == len(sequence.keys) * self.page_tokens
        if not self._prefix_sharing or not aligned or len(next_token_ids) < self.page_tokens:
            return None
        return self._key(sequence, next_token_ids[: self.page_tokens])

    def _cut(self, sequence: _Sequence, length: int) -> None:
        del sequence.token_ids[length:]
        del sequence.keys[length // self.page_tokens :]
        # The last page goes first: it is useless without the pages before it, so it should be evicted before them.
        while len(sequence.pages) * self.page_tokens - length >= self.page_tokens:
            self._drop(sequence.pages.pop())

    def _drop(self, page: int) -> None:
        self._pages.release(page)
        if self._index.holds(page) and self._pages.references(page) == 1:
            self._index.rest(page)

    def _own_last_page(self, sequence: _Sequence) -> None:
        """Make a partly filled last page safe to write to."""
        kept = sequence.length % self.page_tokens
        if not kept:
            return
        page = sequence.pages[-1]
        if self._index.holds(page) and self._pages.references(page) == 2:
            self._index.forget(page)
            self._pages.release(page)
        elif self._pages.references(page) > 1:
            own = self._take_apart() if sequence.is_branch else self._take(page)
            self.slots.copy(own * self.page_tokens, page * self.page_tokens, kept)
            sequence.pages[-1] = own
            self._drop(page)

    def _check_free(self, branch: _Sequence, length: int) -> None:
        """Raise CacheFull unless free pages are enough for a branch to grow to `length` tokens."""
        needed = -(-length // self.page_tokens) - len(branch.pages)
        if branch.length % self.page_tokens and self._pages.references(branch.pages[-1]) > 1:
            needed += 1
        if needed > self._pages.free_count:
            raise CacheFull("no page is free for a branch")

    def _grow(self, sequence: _Sequence, page_count: int) -> None:
        missing = page_count - len(sequence.pages)
        if missing > self._pages.free_count:
            self._evict(missing)
        for _ in range(missing):
            after = sequence.pages[-1] if sequence.pages else None
            sequence.pages.append(self._take_apart() if sequence.is_branch else self._take(after))

    def _take_apart(self) -> int:
        """Take a free page for a branch, which keeps off those that sequences grow into."""
        page = self._pages.take_last()
        assert page is not None
        return page

    def _take(self, after: int | None) -> int:
        if not self._pages.free_count:
            self._evict(1)
        page = self._pages.take(after)
        assert page is not None
        return page

    def _evict(self, missing: int) -> None:
        """Free branches, then idle pages until `missing` are free, and some more.

        Raise CacheFull, and free no idle page, if too few are.
        """
        while self._pages.free_count < missing and self._branch_ids:
            self.release(next(iter(self._branch_ids)))
        if missing > self._pages.free_count + self._index.idle_count:
            short = missing - self._pages.free_count - self._index.idle_count
            raise CacheFull(
                f"the cache has no room: {missing * self._page_bytes} more bytes are needed, "
                f"{self.held_bytes} of {self.capacity_bytes} are in use; "
                "release sequences or raise --kv-memory",
                {"missing_bytes": str(short * self._page_bytes)},
            )
        if self._pages.free_count >= missing:
            return
        wanted = max(missing, self._pages.page_count // EVICTED_SHARE)
        while self._pages.free_count < wanted and (page := self._index.evict()) is not None:
            self._pages.release(page)
