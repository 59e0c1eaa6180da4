"""Policies, which choose the next group from the window. One file a policy; `make_policy` knows them by name.

A policy sees generations and changes none.
"""

from collections.abc import Callable

from coordinator.rounds.policies.continuous import Continuous
from coordinator.rounds.policies.eqspec import EqSpec
from coordinator.rounds.policies.exspec import ExSpec
from coordinator.rounds.policies.policy import Policy, Selection
from paceline.types import PolicyName

__all__ = ["POLICIES", "Policy", "Selection", "make_policy"]

POLICIES: dict[PolicyName, Callable[[int], Policy]] = {
    "continuous": lambda window: Continuous(),
    "eqspec": lambda window: EqSpec(),
    "exspec": ExSpec,
}


def make_policy(name: PolicyName, window: int) -> Policy:
    """Return a fresh policy; `window` is for policies that choose among more generations than fit a group."""
    return POLICIES[name](window)
