"""Every instrument of the kit on a device whose truth was configured, and the kit without its synchronisations."""

from collections.abc import Iterator

import pytest
from simcuda.build import unavailable
from stage import Stage
from table import BY_NAME, INSTRUMENTS, REMOVALS, Instrument, Removal

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it can be simulated")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage.start() as started:
        yield started


@pytest.mark.parametrize("instrument", INSTRUMENTS, ids=lambda one: one.name)
def test_an_instrument_tells_the_truth(stage: Stage, instrument: Instrument) -> None:
    assert instrument.wrong(stage) == []


@pytest.mark.parametrize("removal", [one for one in REMOVALS if one.often], ids=lambda one: one.name)
def test_a_synchronisation_that_is_missing_shows(stage: Stage, removal: Removal) -> None:
    wrong = BY_NAME[removal.misses].wrong(stage, removal.change)
    assert wrong
    assert "LookupError" not in wrong[0], "the source has changed: let the row follow it"
