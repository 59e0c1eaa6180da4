"""Costs of a cluster that never was: each call's seconds are a simple sum."""

from paceline.simulate.saved_costs import SavedCosts, SavedModel
from paceline.types import AcceptanceCounts, CallCosts, DraftSource, MeasuredCosts

DRAFT = "draft"
CALLS = 50


def verify_s(rows: int, drafted: float, prompt: float = 0.0, at_once: int = 1) -> float:
    """10 ms for a call, 1 a row, 0.2 a draft token and 0.1 a prompt token; a tenth more beside another round."""
    return (0.010 + 0.001 * rows + 0.0002 * drafted + 0.0001 * prompt) * (1 + 0.1 * (at_once - 1))


def propose_s(rows: int, steps: int) -> float:
    return 0.002 + 0.001 * steps + 0.0001 * rows * steps


def call(model: str, at_once: int, rows: int, steps: int, seconds: float, prompt: int = 0) -> CallCosts:
    counts = (CALLS, CALLS * rows * steps, CALLS * prompt)
    times = (CALLS * seconds, CALLS * seconds**2, 0.001 * CALLS, 0.0005 * CALLS)
    return CallCosts(model, at_once, rows, steps, *counts, *times)


def calls() -> list[CallCosts]:
    found = []
    for at_once in (1, 2):
        for rows in range(1, 9):
            for steps in (0, 2, 5, 8):
                found.append(call("", at_once, rows, steps, verify_s(rows, rows * steps, at_once=at_once)))
            for steps in (2, 5, 8):
                found.append(call(DRAFT, at_once, rows, steps, propose_s(rows, steps)))
        found.append(call("", at_once, 4, 5, verify_s(4, 20, 400, at_once), 400))
    return found


def saved_costs(right: tuple[int, ...] = (80, 60, 45, 30, 20, 14, 9, 5), deviation: float = 0.05) -> SavedCosts:
    """Costs of a target and a draft; `right` of 100 first drafts, and so on, were."""
    acceptance = AcceptanceCounts(DraftSource.DRAFT, DRAFT, (100, *right[:-1]), right, deviation)
    costs = MeasuredCosts(tuple(calls()), (acceptance,))
    return SavedCosts(SavedModel("target", 1000, 64), SavedModel(DRAFT, 100, 64), 8, 2, 5, costs)
