"""Tasks that run side by side."""

import pytest

from paceline.tasks import side_by_side


async def fail() -> None:
    try:
        raise OSError("the cause")
    except OSError as error:
        raise ValueError("the failure") from error


async def test_a_failure_comes_out_as_it_is_with_its_cause() -> None:
    with pytest.raises(ValueError, match="the failure") as raised:
        async with side_by_side() as group:
            group.create_task(fail())
    assert isinstance(raised.value.__cause__, OSError)
