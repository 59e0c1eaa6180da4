"""Answers of an unfinished run, kept in a file beside the output until all are there.

Owns that file and the check that a resumed run matches the one that began it. Knows nothing of how lines are answered.
"""

import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import InvalidRequest, PacelineError
from paceline.files import is_there, place_of, replacing, try_writing

STDOUT = Path("/dev/stdout")
"""What `-` is for the output."""
RUN = "paceline_run"
"""Key of the first line, which describes the run."""

Row = dict[str, Any]


class PartialOutputs:
    """Answers by line number. The file exists from the first answer until all are in the output."""

    def __init__(self, output: Path, run: Mapping[str, Any], *, resume: bool) -> None:
        """`run` has the settings that the answers depend on, by readable names. `resume` reads the earlier answers.

        Raise InvalidRequest when earlier answers belong to another run, or would be lost without `resume`.
        """
        # Standard output, a pipe or a device has no place for a file beside it.
        place = None if output == STDOUT else place_of(output)
        self._has_place, place = place is not None, place or output
        self.output, self.path = output, place.parent / f"{place.name}.partial"
        self._run: Row = json.loads(json.dumps(run))
        self._places: dict[int, int] = {}
        self._file: IO[bytes] | None = None
        self._has_made_file = False
        try:
            self._begin(resume)
        except PacelineError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise InvalidRequest(f"--output {output} cannot be written: {error}", field="output") from error

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_kept(self) -> bool:
        """True when there is a file to resume from."""
        return self._file is not None and self.path.exists()

    def _begin(self, resume: bool) -> None:
        if self.output.is_dir():
            raise IsADirectoryError("it is a folder; name a file")
        if not self._has_place:
            if resume:
                raise InvalidRequest(f"--resume needs a file, and --output {self.output} is none", field="resume")
            return
        try_writing(self.path.parent)
        if is_there(self.path):
            if not resume:
                raise InvalidRequest(
                    f"{self.path} has answers of a run that did not end: give --resume to go on with it, or delete it "
                    "to begin anew",
                    field="output",
                )
            self._read()
        elif resume and self.output.exists():
            raise InvalidRequest(
                f"{self.output} is whole, and there is no {self.path} to go on with; without --resume all lines are "
                "answered again",
                field="resume",
            )

    def _read(self) -> None:
        file = self.path.open("r+b")
        self._take(file)
        begun = file.readline()
        if not begun:  # the interruption came before anything was written
            file.close()
            self._file = None
            self.path.unlink()
            return
        first = _parsed(begun).get(RUN)
        if not isinstance(first, dict):
            raise InvalidRequest(
                f"{self.path} is not what an interrupted `paceline run` leaves; move it away", field="resume"
            )
        self._compare(first, self._run)
        self._run = first
        place = file.tell()
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(place)  # the interruption cut this line short
                break
            row = _parsed(line)
            if type(row.get("line")) is int and "output" in row:
                self._places[row["line"]] = place
            place += len(line)

    def _take(self, file: IO[bytes]) -> None:
        """Lock the file. Raise InvalidRequest when another process writes to it."""
        self._file = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._of_another() from None

    def _of_another(self) -> InvalidRequest:
        return InvalidRequest(
            f"another run is writing {self.path}; wait for its end, or name another --output", field="output"
        )

    def _compare(self, begun: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if begun.get(name) != value:
                raise InvalidRequest(
                    f"{self.path} is of another run: there {name} is {begun.get(name)!r}, and here {value!r}; give "
                    "what it was begun with, or delete it to begin anew",
                    field="resume",
                )

    def answered_by(self, model: Mapping[str, Any]) -> None:
        """Add the answering model to `run`. Raise InvalidRequest when the earlier answers are another model's."""
        if self._file:
            self._compare(self._run, model)
        self._run |= model

    def add(self, number: int, row: Row) -> None:
        """Keep an answer. Raise InvalidRequest when the disk refuses it or another run has begun to write the file."""
        try:
            file = self._opened()
            place = file.seek(0, os.SEEK_END)
            file.write(_line({"line": number, "output": row}))
            file.flush()
        except OSError as error:
            if self._has_made_file and not self._places:
                self.path.unlink(missing_ok=True)
            raise InvalidRequest(f"{self.path} cannot be written: {error}", field="output") from error
        self._places[number] = place

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            if self._has_place:
                self._take(self._made())
            else:
                self._file = io.BytesIO()
            assert self._file
            self._file.write(_line({RUN: self._run}))
        return self._file

    def _made(self) -> IO[bytes]:
        try:
            file = self.path.open("x+b")
        except FileExistsError:
            # Both runs were started before either had an answer.
            raise self._of_another() from None
        self._has_made_file = True
        return file

    def publish(self, failures: Mapping[int, Row], *, again: bool) -> None:
        """Write the whole output in the order of the lines; delete the partial file unless failed lines may be retried.

        Raise InvalidRequest when the disk refuses.
        """
        with self._whole() as whole:
            for number in sorted((*self._places, *failures)):
                whole.write(_line(failures[number] if number in failures else self._answer(number)))
        if again:
            self._opened().flush()
        elif self._file and self._has_place:
            self.path.unlink(missing_ok=True)

    @contextmanager
    def _whole(self) -> Iterator[IO[bytes]]:
        """Yield the file for the whole output."""
        if self.output != STDOUT:
            with replacing(self.output) as beside, beside.open("wb") as whole:
                yield whole
            return
        try:
            # Opened by its name it would begin anew: what `>>` is to keep or another command wrote would be lost.
            with open(1, "wb", closefd=False) as whole:
                yield whole
        except OSError as error:
            raise InvalidRequest(f"{self.output} cannot be written: {error}", field="output") from error

    def _answer(self, number: int) -> Row:
        assert self._file
        self._file.seek(self._places[number])
        row: Row = json.loads(self._file.readline())["output"]
        return row

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # closing repeats a write that failed
                self._file.close()


def _parsed(line: bytes) -> Row:
    """Return the line's JSON object, or an empty one when a damaged line holds none."""
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    return {}


def _line(row: Row) -> bytes:
    # Half a surrogate pair has no UTF-8 form and is written as a JSON escape.
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
