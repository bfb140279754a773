import math

import pytest
import torch

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps, busbw_gbps
from benchlib.core.errors import RunBroken
from benchlib.runtime import peaks

CPU = torch.device("cpu")


def test_bandwidths_by_hand():
    # 1 GB in 0.5 s are 2 GB/s = 16 Gbps; over 4 ranks an all-reduce moves 2 * 3 / 4 of it over each link.
    assert algbw_gbps(1e9, 0.5) == pytest.approx(16)
    assert busbw_gbps("all_reduce", 1e9, 0.5, 4) == pytest.approx(24)
    assert busbw_gbps("all_reduce", 1e9, 0.5, 2) == pytest.approx(16)
    assert busbw_gbps("all_gather", 1e9, 0.5, 4) == pytest.approx(12)
    assert busbw_gbps("broadcast", 1e9, 0.5, 4) == pytest.approx(16)
    assert busbw_gbps("all_reduce", 1e9, 0.5, 1) == 0
    assert {name: factor(8) for name, factor in BUS_FACTORS.items()} == {
        "all_reduce": 1.75,
        "all_gather": 0.875,
        "reduce_scatter": 0.875,
        "all_to_all": 0.875,
        "gather": 0.875,
        "scatter": 0.875,
        "broadcast": 1,
        "reduce": 1,
        "send_recv": 1,
    }
    with pytest.raises(ValueError, match="above zero"):
        algbw_gbps(1, 0)


def test_the_rate_of_a_product_counts_two_operations_a_term(monkeypatch):
    monkeypatch.setattr(peaks, "_timed", lambda device, operation, repeats, slowdown=0.0: operation() is None or 0.002)
    (peak,) = peaks.matmul_peaks(CPU, "fp32", sizes=[100], seconds=0)
    assert peak.samples == pytest.approx([2 * 100**3 / 0.002] * peaks.MIN_SAMPLES)
    assert peak.best == peak.median == pytest.approx(1e9)


def test_the_peak_of_all_ranks_is_the_best_sum_of_a_size_that_every_rank_measured():
    first = [peaks.MatmulPeak(512, (90.0, 100.0)), peaks.MatmulPeak(1024, (80.0, 130.0))]
    second = [peaks.MatmulPeak(512, (95.0,)), peaks.MatmulPeak(1024, (60.0, 70.0))]
    assert peaks.peak_together([first, second]) == (200.0, 1024)
    assert peaks.peak_together([first, second[:1]]) == (195.0, 512)


def test_a_product_that_would_take_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr(peaks, "_timed", lambda device, operation, repeats, slowdown=0.0: operation() is None or 0.01)
    sizes = [peak.size for peak in peaks.matmul_peaks(CPU, "fp32", sizes=[256, 32, 64], seconds=0.1)]
    # 64 is predicted to take 8 x 0.01 s; 256 then 64 x 0.01 s, which is more than 0.1 s.
    assert sizes == [32, 64]


def test_a_precision_that_is_not_there_has_a_reason_and_no_samples(monkeypatch):
    (peak,) = peaks.matmul_peaks(CPU, "tf32", sizes=[64], seconds=0.01)
    assert (peak.samples, peak.best, peak.median) == ((), None, None) and "tensor cores" in peak.reason
    assert math.isnan(peaks.best([peak]))
    real = torch.mm

    def too_large(left, right, out):
        if len(left) > 32:
            raise RuntimeError("out of\nmemory")
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", too_large)
    (peak,) = peaks.matmul_peaks(CPU, "fp32", sizes=[64], seconds=0.01)
    assert (peak.samples, peak.reason) == ((), "cpu does not multiply fp32 matrices: out of memory")
    (peak,) = measured = peaks.matmul_peaks(CPU, "fp32", sizes=[32, 64], seconds=0.01)
    assert (peak.size, peak.reason) == (32, "") and peaks.best(measured) == peak.best


def test_a_wrong_product_is_found(monkeypatch):
    real = torch.mm

    def dropped_last_term(left, right, out):
        return real(left[:, :-8], right[:-8], out=out)

    monkeypatch.setattr(torch, "mm", dropped_last_term)
    with pytest.raises(RunBroken, match="wrong by"):
        peaks.matmul_peaks(CPU, "fp32", sizes=[64], seconds=0.01)


def test_copies_count_read_and_written_bytes_and_are_verified(monkeypatch):
    monkeypatch.setattr(peaks, "_timed", lambda device, operation, repeats, slowdown=0.0: operation() is None or 0.001)
    assert peaks.copy_rates("host", CPU, 1_000_000, 0) == pytest.approx([2.0] * 3)  # 2 x 1 MB in 1 ms
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, non_blocking: self)
    with pytest.raises(RunBroken, match="not equal"):
        peaks.copy_rates("host", CPU, 1000, 0)
