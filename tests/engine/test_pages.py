"""The page allocator against a plain list of reference counts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.engine.cache.pages import PageAllocator

PAGE_COUNT = 12


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(PAGE_COUNT)
        self.truth = [0] * PAGE_COUNT

    @rule(after=st.none() | st.integers(0, PAGE_COUNT - 1))
    def take(self, after: int | None) -> None:
        free = [page for page in range(PAGE_COUNT) if not self.truth[page]]
        page = self.pages.take(after)
        if not free:
            assert page is None
            return
        assert page in free
        if after is not None and after + 1 in free:
            assert page == after + 1
        self.truth[page] = 1

    @rule()
    def take_last(self) -> None:
        free = [page for page in range(PAGE_COUNT) if not self.truth[page]]
        assert self.pages.take_last() == max(free, default=None)
        if free:
            self.truth[max(free)] = 1

    @rule(page=st.integers(0, PAGE_COUNT - 1))
    def share(self, page: int) -> None:
        if self.truth[page]:
            self.pages.share(page)
            self.truth[page] += 1

    @rule(page=st.integers(0, PAGE_COUNT - 1))
    def release(self, page: int) -> None:
        if self.truth[page]:
            self.pages.release(page)
            self.truth[page] -= 1

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pages.references(page) for page in range(PAGE_COUNT)] == self.truth
        assert self.pages.free_count == self.truth.count(0)


TestPageAllocator = AllocatorMachine.TestCase
TestPageAllocator.settings = settings(max_examples=100, stateful_step_count=40)


def test_what_grows_stays_contiguous_while_others_start_and_end() -> None:
    pages = PageAllocator(64)
    tables = [[pages.take(None)] for _ in range(4)]
    for _ in range(7):
        for table in tables:
            table.append(pages.take(table[-1]))
    for table in tables:
        first = table[0]
        assert first is not None
        assert table == list(range(first, first + 8))


def test_an_empty_allocator_has_nothing_to_give() -> None:
    assert PageAllocator(0).take(None) is None
