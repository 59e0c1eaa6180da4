"""Lessons of drafts: where an output's tokens are chosen, and the file that lessons are kept in."""

from pathlib import Path

import torch

from training.lessons import TEACHER_CHOICES, Lesson, read_lessons, write_lessons
from training.outputs import Output, output_places, padded

OUTPUTS = [Output((5, 6, 7, 8), 2), Output((9, 10, 11, 12, 13, 14), 3)]


def test_each_token_of_an_output_is_chosen_at_the_place_before_it() -> None:
    following = padded([one.token_ids for one in OUTPUTS]).flatten()[output_places(OUTPUTS) + 1]
    assert following.tolist() == [7, 8, 12, 13, 14]


def test_lessons_come_back_from_their_file(tmp_path: Path) -> None:
    made = []
    for one in OUTPUTS:
        shape = (len(one) - one.prompt_count, TEACHER_CHOICES)
        made.append(Lesson(one, torch.randint(4096, shape, dtype=torch.int16), torch.rand(shape).half()))
    write_lessons(tmp_path / "lessons.safetensors", made)
    kept = read_lessons(tmp_path / "lessons.safetensors")
    assert [one.output for one in kept] == OUTPUTS
    for before, after in zip(made, kept, strict=True):
        assert torch.equal(before.choices, after.choices)
        assert torch.equal(before.weights, after.weights)
