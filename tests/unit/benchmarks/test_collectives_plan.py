import itertools
import re

import pytest

from benchlib.benchmarks.collectives.config import CollectivesConfig, parse_sizes
from benchlib.benchmarks.collectives.plan import Schedule, Weight, plan
from benchlib.config.schema import build
from benchlib.core.errors import UserError

SIZES = {
    "1KiB:8KiB": (1024, 2048, 4096, 8192), "1KiB:256MiB:8": (2**10, 2**13, 2**16, 2**19, 2**22, 2**25, 2**28), "8:8": (8,),
    "3:10": (3, 6, 10),  # the stated end is measured although the factor misses it
    "1MiB,1KiB,1KiB": (1024, 2**20), "8B, 1K, 2kb,1.5MiB": (8, 1024, 2000, 3 * 2**19), "100,1KiB:2KiB": (100, 1024, 2048),
}  # fmt: skip
WRONG = {
    "": "sizes: '' is not a size from 1 B to 1 TiB: write sizes as 1KiB:256MiB", "1KiX": "'1KiX' is not a size",
    "8:4": "the range ends below its beginning; write it as 4:8", "1:8:1": "the factor must be a number above 1, as in 1:8:8", "1KiB:1GiB:1.01": "at most 64 can be measured: use a larger factor",
}  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read(text):
    assert parse_sizes(text) == SIZES[text]


@pytest.mark.parametrize("text", WRONG)
def test_sizes_that_cannot_be_are_told_before_anything_starts(text):
    with pytest.raises(UserError, match=re.escape(WRONG[text])):
        build("collectives", {"sizes": text})


def test_the_plan_holds_every_operation_type_and_reduction_once():
    config = CollectivesConfig(nproc=2)
    cases = plan(config)
    assert len(set(cases)) == len(cases)
    library = {(case.operation, case.dtype, case.reduction) for case in cases if case.variant == "library"}
    reducing = {"all_reduce", "reduce", "reduce_scatter"}
    every = set(itertools.product(reducing, config.dtypes, config.reductions))
    every |= set(itertools.product({*config.operations} - reducing - {"barrier"}, config.dtypes, [""]))
    assert every <= library
    assert [case.operation for case in cases if case.operation == "barrier"] == ["barrier"]
    both = {case.operation for case in cases if case.in_place} & {case.operation for case in cases if not case.in_place}
    assert both == set(config.operations) - {"all_to_all", "send_recv", "barrier"}
    assert {case.variant for case in cases} == {"library", "async", "direct", "ring", "tree", "rs_ag"}


def test_measurements_are_cut_from_the_end_and_rounds_before_them():
    schedule = Schedule(seconds=1.0)  # of 2 + 5 runs, three times as long in all
    large = Weight(2**20)
    assert schedule.pace([Weight(1024)], 100.0) == 1.0  # nothing is known yet
    schedule.learn(2**20, 0.1)
    assert schedule.least_s(large) == pytest.approx(0.7)
    assert schedule.least_s(Weight(2**22)) == pytest.approx(2.8)  # four times the bytes
    assert schedule.least_s(Weight(2**20, series=8)) == pytest.approx(5.6)
    assert schedule.least_s(Weight(1024)) == 0.0
    assert schedule.pace([large] * 2, 7.4) == pytest.approx(1.0)  # 2 * (0.7 + 3 * 1)
    assert schedule.pace([large] * 2, 4.4) == pytest.approx(0.5)  # half of the timed work fits
    assert schedule.pace([large] * 2, 1.0) == 0.0  # the fewest runs
    assert schedule.pace([large] * 2, 0.6) is None
    assert schedule.pace([Weight(2**20, 0.2)], 100.0) == pytest.approx(0.2)
