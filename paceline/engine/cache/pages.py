"""The allocator of pages: which are free, and how many references the others have.

It knows nothing of tensors, tokens or sequences. Free pages are kept as maximal runs. A growing sequence takes the page
after its last one, and a new one starts in the middle of the widest run: with enough room all stay contiguous. What is
needed for a short time only takes the last free page.

Invariants: a page is free or has at least one reference, never both; runs are sorted, not empty, and never touch.
"""

from bisect import bisect_left, bisect_right


class PageAllocator:
    """Hands out pages 0 to `page_count` - 1 and counts the references to each."""

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.free_count = page_count
        self._references = [0] * page_count
        # Free pages: run n is [_starts[n], _stops[n]).
        self._starts = [0] if page_count else []
        self._stops = [page_count] if page_count else []

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, after: int | None) -> int | None:
        """Take a free page, the one following `after` if it is free, with one reference; None when no page is free."""
        if not self.free_count:
            return None
        page = self._start_of_gap() if after is None else after + 1
        run = bisect_right(self._starts, page) - 1
        if run < 0 or page >= self._stops[run]:
            page = self._start_of_gap()
            run = bisect_right(self._starts, page) - 1
        self._cut(run, page)
        self.free_count -= 1
        self._references[page] = 1
        return page

    def take_last(self) -> int | None:
        """Take the last free page, with one reference; None when no page is free."""
        return self.take(self._stops[-1] - 2) if self._stops else None

    def share(self, page: int) -> None:
        """Add a reference to a page that has one already."""
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop one reference; a page without references is free."""
        assert self._references[page] > 0, f"page {page} is free already"
        self._references[page] -= 1
        if not self._references[page]:
            self.free_count += 1
            self._join(page)

    def _start_of_gap(self) -> int:
        """Return the page in the middle of the widest run, or its first page when the run starts at page 0."""
        start, stop = max(zip(self._starts, self._stops, strict=True), key=lambda run: run[1] - run[0])
        return start + (stop - start) // 2 if start else start

    def _cut(self, run: int, page: int) -> None:
        start, stop = self._starts[run], self._stops[run]
        left, right = (start, page), (page + 1, stop)
        kept = [(a, b) for a, b in (left, right) if a < b]
        self._starts[run : run + 1] = [a for a, _ in kept]
        self._stops[run : run + 1] = [b for _, b in kept]

    def _join(self, page: int) -> None:
        run = bisect_left(self._starts, page)
        joins_right = run < len(self._starts) and self._starts[run] == page + 1
        joins_left = run > 0 and self._stops[run - 1] == page
        if joins_left and joins_right:
            self._stops[run - 1] = self._stops[run]
            del self._starts[run], self._stops[run]
        elif joins_left:
            self._stops[run - 1] += 1
        elif joins_right:
            self._starts[run] -= 1
        else:
            self._starts.insert(run, page)
            self._stops.insert(run, page + 1)
