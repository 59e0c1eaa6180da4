"""Hypothesis profiles: the same examples in every run of the tests, new ones in every pass of `scripts/search`."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

SAME = "same"
SEARCH = "search"


def _constants() -> Constants:
    """Let only a search draw constants of loaded modules, which depend on earlier tests and on the project's folder."""
    return Constants() if settings().derandomize else _loaded_constants()


_loaded_constants = providers._get_local_constants
providers._get_local_constants = _constants

# Nothing here depends on a clock: a busy machine fails no test.
settings.register_profile(
    SAME, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# One error a test, and no search for the arguments that matter: time is for new examples.
settings.register_profile(
    SEARCH,
    settings.get_profile(SAME),
    derandomize=False,
    print_blob=True,
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},
)
settings.load_profile(SAME)
