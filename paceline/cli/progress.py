"""Progress lines for work in parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@dataclass(frozen=True)
class WorkProgress:
    """One line whose part and length change."""

    progress: Progress
    task: TaskID

    def started(self, part: str, step_count: int) -> None:
        self.progress.reset(self.task, description=part, total=step_count)

    def advanced(self) -> None:
        self.progress.advance(self.task)


@contextmanager
def work_progress(console: Console) -> Iterator[WorkProgress]:
    with progress_bar(console) as progress:
        yield WorkProgress(progress, progress.add_task("starting", total=None))
