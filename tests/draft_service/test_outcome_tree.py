"""Outcomes of a sequence: the likeliest guesses come first, by the draft's scores and what came of earlier ones."""

import math
from collections.abc import Iterator

import pytest

from draft_service.outcome_tree import LEAST_CHANCE, Guess, Misses, OutcomeTree, Place, drafts_after
from paceline.engine.row_choice import RankedToken
from paceline.prefix_hash import extended_hash

PREFIX = (3, 4)
RANKED = [RankedToken(10 + n, one) for n, one in enumerate((0.5, 0.2, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01))]
"""What is ranked at every place: the draft's choice is 10."""
CHOICE, RUNNER_UP = 10, 11


def tree_of(limit: int = 100, misses: Misses | None = None) -> OutcomeTree:
    """Return a tree of a root alone."""
    tree = OutcomeTree(limit, misses or Misses())
    tree.move_root(Place(len(PREFIX), extended_hash(0, PREFIX), "root", RANKED, 1.0))
    return tree


def grow(tree: OutcomeTree, *token_ids: int) -> Place:
    """Compute a chain of places after the root."""
    assert tree.root
    return tree.grow(tree.root, token_ids, "branch", [RANKED] * len(token_ids))


def grow_next(tree: OutcomeTree) -> Guess:
    """Compute the likeliest guess."""
    guess = tree.pop()
    tree.grow(guess.parent, (guess.token_id,), "branch", [RANKED])
    return guess


def guesses(tree: OutcomeTree) -> Iterator[Guess]:
    """Take out all guesses that are left."""
    while tree.best_chance:
        yield tree.pop()


def test_the_likeliest_guess_of_all_places_comes_first() -> None:
    tree = tree_of()
    found = [grow_next(tree), grow_next(tree), *guesses(tree)]
    chances = [one.chance for one in found]
    assert chances == sorted(chances, reverse=True)
    assert chances[:6] == pytest.approx([0.5, 0.5 * 0.5, 0.2, 0.5 * 0.5 * 0.5, 0.1, 0.5 * 0.2])
    assert [(one.parent.length, one.token_id) for one in found[:4]] == [(2, 10), (3, 10), (2, 11), (4, 10)]


def test_every_guess_is_worth_its_work_wherever_the_root_is() -> None:
    tree = tree_of()
    for _ in range(30):
        assert grow_next(tree).chance >= LEAST_CHANCE
    for _ in range(2):
        assert tree.root
        tree.move_root(tree.root.children[CHOICE])
        left = list(guesses(tree))
        assert left
        assert min(one.chance for one in left) >= LEAST_CHANCE


def test_what_was_computed_is_guessed_no_more_after_a_move() -> None:
    tree = tree_of()
    for _ in range(30):
        grow_next(tree)
    assert tree.root
    tree.move_root(tree.root.children[CHOICE])
    assert tree.root.children
    assert not [one for one in guesses(tree) if one.token_id in one.parent.children]


def test_chances_are_those_after_the_root() -> None:
    tree = tree_of()
    grow(tree, CHOICE, RUNNER_UP, CHOICE)
    assert grow(tree, RUNNER_UP).chance == pytest.approx(0.2)
    assert (place := tree.find((CHOICE, RUNNER_UP)))
    tree.move_root(place)
    assert place.chance == 1.0
    assert place.children[CHOICE].chance == pytest.approx(0.5)
    assert max(one.chance for one in guesses(tree)) == pytest.approx(0.25)


def test_no_more_places_are_made_than_the_limit_and_moving_the_root_counts_anew() -> None:
    tree = tree_of(limit=5)
    for _ in range(5):
        grow_next(tree)
    assert tree.best_chance == 0.0
    assert tree.root
    tree.move_root(tree.root.children[CHOICE])
    assert tree.best_chance > 0
    tree.limit = sum(1 for _ in tree.root.below()) - 1
    assert tree.best_chance == 0.0
    tree.limit += 1
    assert tree.best_chance > 0


def test_a_guess_that_is_put_back_comes_again() -> None:
    tree = tree_of()
    guess = tree.pop()
    tree.push(guess)
    assert tree.pop() is guess


def test_places_are_found_by_the_tokens_after_the_root() -> None:
    tree = tree_of()
    last = grow(tree, CHOICE, RUNNER_UP)
    assert tree.find((CHOICE, RUNNER_UP)) is last
    assert (last.length, last.hash) == (4, extended_hash(0, (*PREFIX, CHOICE, RUNNER_UP)))
    assert tree.find(()) is tree.root
    assert tree.find((RUNNER_UP,)) is None
    assert tree.find((RUNNER_UP, CHOICE)) is None


def test_misses_make_runners_up_likelier_and_hits_the_choice() -> None:
    def chances_after(*token_ids: int) -> dict[int, float]:
        """Return the chances of guesses in a tree that is made after these tokens came."""
        misses = Misses()
        earlier = tree_of(misses=misses)
        grow(earlier, *[CHOICE] * 10)
        earlier.learn(token_ids)
        return {one.token_id: one.chance for one in guesses(tree_of(misses=misses))}

    missed, none, agreed = chances_after(RUNNER_UP), chances_after(), chances_after(*[CHOICE] * 10)
    assert missed[CHOICE] < none[CHOICE] < agreed[CHOICE]
    assert missed[RUNNER_UP] > none[RUNNER_UP] > agreed[RUNNER_UP]


def test_only_places_that_were_computed_are_learned_from() -> None:
    misses = Misses()
    tree = tree_of(misses=misses)
    grow(tree, CHOICE)
    tree.learn((CHOICE, RUNNER_UP, RUNNER_UP, RUNNER_UP))
    twice = Misses()
    for is_missed in (False, True):
        twice.add(0.5, is_missed)
    assert misses.ratio == twice.ratio


def test_the_ratio_of_misses_begins_at_one_and_comes_to_what_is_measured() -> None:
    misses = Misses()
    assert misses.ratio == 1.0
    for number in range(600):
        misses.add(0.2, is_missed=number % 10 < 4)
    assert math.isclose(misses.ratio, 2.0, rel_tol=0.1)


def test_runs_of_the_drafts_choices_are_as_long_as_the_target_agreed() -> None:
    misses = Misses()
    assert misses.run == 4.0
    for number in range(600):
        misses.add(0.2, is_missed=number % 2 == 0)
    assert math.isclose(misses.run, 2.0, rel_tol=0.1)
    for _ in range(600):
        misses.add(0.2, is_missed=False)
    assert misses.run > 40


def test_drafts_after_a_place_are_the_drafts_own_choices_as_far_as_they_are_computed() -> None:
    tree = tree_of()
    last = grow(tree, CHOICE, CHOICE)
    grow(tree, RUNNER_UP, CHOICE)
    assert tree.root
    assert drafts_after(tree.root, 5) == ((CHOICE, CHOICE, CHOICE), last)
    assert drafts_after(tree.root, 2) == ((CHOICE, CHOICE), tree.root.children[CHOICE])
    last.ranked = ()
    assert drafts_after(tree.root, 5) == ((CHOICE, CHOICE), tree.root.children[CHOICE])
