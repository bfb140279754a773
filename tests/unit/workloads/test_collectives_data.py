"""The data of the collectives show every wrong result: each operation is simulated, and then made wrong in every way."""

import functools
import itertools
import math

import pytest
import torch

from benchlib.workloads import collective_ops
from benchlib.workloads.collective_ops import Place
from benchlib.workloads.operations import OPS

CPU = torch.device("cpu")
REDUCTIONS = {"sum": sum, "avg": sum, "min": min, "max": max, "product": math.prod}


def data(operation, dtype, reduction, elements, ranks):
    """Return what each rank gives and has to get."""
    places = [Place(rank, ranks, CPU) for rank in range(ranks)]
    return [collective_ops.data(operation, dtype, reduction, elements, place) for place in places]


def combined(reduction, parts, ranks):
    """Reduce lists of Python numbers, position by position."""
    reduced = [REDUCTIONS[reduction](values) for values in zip(*parts, strict=True)]
    return [value / ranks for value in reduced] if reduction == "avg" else reduced


def is_found(wrong, expected):
    return len(collective_ops.wrong_places(wrong, expected)) > 0


@pytest.mark.parametrize("dtype", collective_ops.DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_reductions_are_exact_and_show_what_was_lost_doubled_swapped_or_shifted(dtype, reduction, ranks):
    kind = collective_ops.DTYPES[dtype]
    for elements in (3 * ranks + 1, 211):
        every = data("all_reduce", dtype, reduction, elements, ranks)
        parts = [one.give.tolist() for one in every]
        expected = every[0].get
        assert combined(reduction, parts, ranks) == expected.tolist()
        assert all(torch.equal(one.get, expected) for one in every)
        # Exact in the type itself, in whatever order libraries combine.
        step = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(reduction, torch.add)
        for order in itertools.islice(itertools.permutations(range(ranks)), 0, 40, 3):
            total = functools.reduce(step, [every[rank].give for rank in order])
            assert torch.equal(total // ranks if reduction == "avg" else total, expected)
        assert is_found(expected.roll(1), expected)
        for rank in range(ranks):
            others = parts[:rank] + parts[rank + 1 :]
            if others:
                lost = combined(reduction, others, ranks)
                assert is_found(torch.tensor(lost, dtype=torch.float64).to(kind), expected)
            if reduction not in ("min", "max"):  # those do not change when something counts twice
                double = torch.tensor(combined(reduction, [*parts, parts[rank]], ranks), dtype=torch.float64)
                assert is_found(double.to(kind), expected)
            for other in set(range(ranks)) - {rank}:
                swapped = [parts[other] if index == rank else part for index, part in enumerate(parts)]
                replaced = torch.tensor(combined(reduction, swapped, ranks), dtype=torch.float64)
                assert is_found(replaced.to(kind), expected)


@pytest.mark.parametrize("dtype", collective_ops.DTYPES)
@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "gather", "scatter", "all_to_all", "send_recv"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_moved_data_show_parts_that_are_swapped_doubled_or_shifted(dtype, operation, ranks):
    for part in (1, 2, 97):
        for rank, one in enumerate(data(operation, dtype, "", ranks * part, ranks)):
            if one.get is None:
                continue
            expected, count = one.get, one.get.numel() // part
            if expected.numel() > 1:
                assert is_found(expected.roll(1), expected), (rank, part)
            slices = list(expected.chunk(count))
            for a, b in itertools.combinations(range(count), 2):
                order = list(range(count))
                order[a], order[b] = b, a
                assert is_found(torch.cat([slices[index] for index in order]), expected)
                order[a] = order[b] = a
                assert is_found(torch.cat([slices[index] for index in order]), expected)


@pytest.mark.parametrize("dtype", collective_ops.DTYPES)
@pytest.mark.parametrize("segment", [1, 64, 4096, 65536])
def test_segments_of_any_power_of_two_differ(dtype, segment):
    # Libraries cut messages into such segments; two that change places must not go unseen.
    pattern = collective_ops.moved(dtype, 4 * segment, 0, 0, 2, CPU)
    added = collective_ops.reduced("sum", dtype, 4 * segment, 2, CPU)
    for whole in (pattern, added):
        one, two, three, four = collective_ops.bits(whole).clone().split(segment)
        assert not any(torch.equal(*pair) for pair in ((one, two), (two, three), (one, four)))


@pytest.mark.parametrize(("dtype", "ranks"), [("bf16", 64), ("bf16", 300), ("uint8", 200), ("uint8", 300)])
@pytest.mark.parametrize("reduction", ["sum", "min", "product"])
def test_many_ranks_stay_exact_in_small_types(dtype, ranks, reduction):
    places = torch.arange(3 * ranks)
    parts = torch.stack([collective_ops.numbers(reduction, dtype, rank, ranks, places) for rank in range(ranks)])
    expected = collective_ops.reduced(reduction, dtype, 3 * ranks, ranks, CPU)
    assert combined(reduction, parts.tolist(), ranks) == expected.tolist()
    assert int(parts.sum(0).max() if reduction == "sum" else parts.max()) <= collective_ops.EXACT[dtype]
    if reduction == "sum":  # every rank counts somewhere
        assert bool((parts.amax(1) > 0).all())


def test_an_average_that_cannot_be_exact_is_refused():
    with pytest.raises(ValueError, match="the average over 300 ranks has no exact numbers in bf16: use fp32"):
        collective_ops.contribution("avg", "bf16", 8, 0, 300, CPU)


def test_wrong_places_compare_bits():
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    assert collective_ops.wrong_places(nan, nan.clone()).tolist() == []
    assert collective_ops.wrong_places(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])).tolist() == [1]
    assert collective_ops.wrong_places(torch.tensor([float("nan"), -0.0, 1.0]), nan).tolist() == [1]


@pytest.mark.parametrize(("operation", "dtype", "size", "ranks", "elements"), [
    ("all_reduce", "fp32", 1, 4, 1),  # less than an element
    ("all_gather", "fp32", 4, 4, 4),  # fewer elements than ranks
    ("reduce_scatter", "int64", 1000, 3, 123),  # 125 elements, of which three equal parts are 123
])  # fmt: skip
def test_sizes_become_what_the_operation_can_do(operation, dtype, size, ranks, elements):
    assert OPS[operation].elements(size, dtype, ranks) == elements
