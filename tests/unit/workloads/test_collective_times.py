"""Times and verification of a collective, by hand."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchlib.workloads.collective_ops import Place
from benchlib.workloads.collective_timing import Case, Exercise, over_ranks


def test_the_slowest_rank_counts(monkeypatch):
    def all_gather(parts, mine):
        parts[0].copy_(mine)
        parts[1].copy_(torch.cat([mine[:2], 3 * mine[2:]]))

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    series = over_ranks(SimpleNamespace(bytes=4, first_wrong=""), [(0.5, 0, 7), (1.0, 0, 7)], torch.device("cpu"))
    assert (series.seconds.tolist(), series.wrong, series.checked) == ([1.5, 3.0], 0, 28)


def test_an_operation_that_does_nothing_is_wrong_everywhere():
    case = Case("all_gather", "library", "fp32", "", in_place=False, bytes=64)
    exercise = Exercise(case, Place(0, 2, torch.device("cpu")))
    exercise.restore()
    assert exercise.check() == (16, 16)
