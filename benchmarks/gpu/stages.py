"""A stage: named parts, each of which is done once. It owns the stage's file and the table; it knows no measurement.

A part that is in the file with figures is not done again, so a stage that was cut off goes on where it was. A part
that failed is told, and the others are done nevertheless.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from paceline.files import replace_file
from paceline.measure.tables import markdown_table

Figures: TypeAlias = Mapping[str, str | int | float | None]
"""One line of a stage's table."""
TABLE_FILE = "table.md"


class PartFailed(Exception):
    """A part could not be done, or what it shows is wrong."""


class OtherMachine(Exception):
    """What an earlier run did was done elsewhere, or of something else."""


@dataclass(frozen=True)
class Part:
    name: str
    work: Callable[[], Sequence[Figures]]


@dataclass(frozen=True)
class Done:
    """What is known of a part."""

    figures: Sequence[Figures] = ()
    elapsed_s: float = 0.0
    error: str | None = None


@dataclass
class Stage:
    """The record of one stage in a folder."""

    name: str
    folder: Path
    machine: Mapping[str, str]
    """What figures depend on beside the code."""
    parts: dict[str, Done] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def resume(self) -> None:
        """Read what an earlier run did. Raise OtherMachine when its figures are none of this machine."""
        if not self.file.exists():
            return
        known = json.loads(self.file.read_text(encoding="utf-8"))
        if known["machine"] != self.machine:
            raise OtherMachine(
                f"{self.file} has figures of {_words(known['machine'])}, and this is {_words(self.machine)}; give "
                "another folder, or --again to do all of it anew"
            )
        self.parts = {name: Done(**done) for name, done in known["parts"].items()}

    def run(
        self,
        parts: Sequence[Part],
        tell: Callable[[str], None],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Do the parts that have no figures yet, beginning none after `limit_s`. Return whether all have figures."""
        began = clock()
        for part in parts:
            if part.name in self.parts and self.parts[part.name].error is None:
                tell(f"{self.name}, {part.name}: done before")
            elif clock() - began > limit_s:
                tell(f"{self.name}, {part.name}: no time is left; run the stage again to go on")
            else:
                self._do(part, tell, clock)
        return all(part.name in self.parts and self.parts[part.name].error is None for part in parts)

    def _do(self, part: Part, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        tell(f"{self.name}, {part.name} ...")
        began = clock()
        try:
            done = Done(part.work(), clock() - began)
        except Exception as error:
            done = Done(error=str(error) or repr(error), elapsed_s=clock() - began)
            tell(f"{self.name}, {part.name} FAILED: {done.error}")
        self.parts[part.name] = done
        self._save()

    def _save(self) -> None:
        known = {"stage": self.name, "machine": self.machine, "parts": {k: asdict(v) for k, v in self.parts.items()}}
        replace_file(self.file, json.dumps(known, indent=1))
        replace_file(self.folder / TABLE_FILE, folder_table(self.folder))


def folder_table(folder: Path) -> str:
    """Return a table for each stage of a folder, with the errors of its parts below."""
    return "\n".join(_stage_table(json.loads(file.read_text("utf-8"))) for file in sorted(folder.glob("*.json")))


def _stage_table(known: Mapping[str, Any]) -> str:
    parts: Mapping[str, Mapping[str, Any]] = known["parts"]
    rows = [(name, one) for name, done in parts.items() for one in done["figures"]]
    columns = list(dict.fromkeys(column for _, one in rows for column in one))
    cells = [[name, *(_cell(one.get(column)) for column in columns)] for name, one in rows]
    title = f"## {known['stage']}\n\n{_words(known['machine'])}\n\n"
    return title + (markdown_table(["part", *columns], cells) if cells else "") + _errors(parts.items())


def _words(machine: Mapping[str, Any]) -> str:
    return ", ".join(map(str, machine.values()))


def _errors(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    failed = [f"- {name} failed: {done['error']}\n" for name, done in parts if done["error"]]
    return "\n" + "".join(failed) if failed else ""


def _cell(figure: str | int | float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.2f}" if isinstance(figure, float) else str(figure)
