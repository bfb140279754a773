"""Attention kernels side by side, against softmax(q k^T / sqrt(d)) v and its derivatives written out in numpy."""

import warnings

import numpy as np
import pytest
import torch

from benchlib.benchmarks.parity import attention
from benchlib.benchmarks.parity.attention import Case, kernels
from benchlib.benchmarks.parity.judge import lacks

CPU = torch.device("cpu")
LIMITS = {"fp32": 3e-6, "bf16": 3e-2, "fp16": 4e-3, "fp64": 1e-14}


pytestmark = pytest.mark.usefixtures("one_thread")


def by_hand(case):
    """Return output and the gradients of q, k and v in float64."""
    (q, k, v), gradient = ([tensor.double().numpy() for tensor in part] for part in wrapped(case))
    gradient = gradient[0]
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    for row, column in np.ndindex(scores.shape[-2:]):
        if (case.mask == "causal" and column > row) or (case.mask == "padding" and column >= 0.75 * case.length):
            scores[..., row, column] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = np.einsum("bhqd,bhkd->bhqk", gradient, v)
    of_scores = weights * (of_weights - (of_weights * weights).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return weights @ v, (of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ gradient)


def wrapped(case):
    tensors, gradient = attention.inputs(case)
    return tensors, [gradient]


CASES = [case for dtype in LIMITS for case in attention.cases(dtype, 24)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_truth_and_both_kernels_of_a_cpu_are_the_formula(case):
    output, gradients = by_hand(case)
    exact = attention.truth(case)
    size = case.scale**2
    assert np.abs(exact.output - output).max() < 1e-13 * size
    for kernel in ("math", "flash"):
        found = attention.answer(kernel, case, CPU)
        assert np.abs(found.output - output).max() < LIMITS[case.dtype] * size
        for name, a, b, c in zip("qkv", exact.gradients, found.gradients, gradients, strict=True):
            assert np.abs(a - c).max() < 1e-12 * size, name
            assert np.abs(b - c).max() < 3 * LIMITS[case.dtype] * size, name


def test_rows_hold_what_each_kernel_is_apart_and_why_others_are_not_there():
    rows = kernels(CPU, ["fp32"], [24], 60)
    assert [(row["kernel"], row["mask"], row["scale"]) for row in rows if row["status"] == "MEASURED"] == [
        (kernel, case.mask, case.scale) for case in attention.cases("fp32", 24) for kernel in ("math", "flash")
    ]
    skipped = [row for row in rows if row["status"] != "MEASURED"]
    assert {row["kernel"] for row in skipped} == {"efficient", "cudnn"}
    assert all(row["status"] == "SKIPPED" and row["reason"] == attention.ONLY_OF_CPU for row in skipped)
    assert all(row["max_abs_truth"] is None and row["median_us"] is None for row in skipped)

    math, flash = rows[:2]
    output, _ = by_hand(Case("fp32", 24))
    (q, k, v), _ = attention.inputs(Case("fp32", 24))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        direct = torch.nn.functional.scaled_dot_product_attention(q, k, v).double().numpy()
    assert flash["max_abs_truth"] == pytest.approx(np.abs(direct - output).max(), rel=1e-6)
    assert 0 < flash["max_abs_math"] <= flash["max_abs_truth"] + math["max_abs_truth"]
    assert flash["gradient_max_abs_math"] > 0 and math["max_abs_math"] is math["gradient_max_abs_math"] is None
    assert all(row["median_us"] > 0 for row in rows[:2])


def planted(monkeypatch, fault, of="flash"):
    """Let a kernel answer what ``fault`` makes of its output."""
    attend = attention._attend
    monkeypatch.setattr(
        attention,
        "_attend",
        lambda kernel, *rest, **named: (fault if kernel == of else lambda output: output)(
            attend(kernel, *rest, **named)
        ),
    )
    return [row for row in kernels(CPU, ["fp32"], [16], 60) if row["kernel"] in ("math", "flash")]


def test_a_kernel_that_is_off_by_a_factor_shows_it_in_every_distance_but_the_cosine(monkeypatch):
    output, _ = by_hand(Case("fp32", 16))
    for row in planted(monkeypatch, lambda output: output * 1.01):
        if row["kernel"] == "math":
            assert row["max_abs_truth"] < LIMITS["fp32"] * row["scale"] ** 2
            continue
        assert row["max_abs_math"] > 1e-3 and row["gradient_max_abs_math"] > 1e-3
        assert row["one_minus_cosine_truth"] < 1e-11
        if (row["mask"], row["scale"]) == ("none", 1.0):
            assert row["max_abs_truth"] == pytest.approx(0.01 * np.abs(output).max(), rel=1e-3)


def test_without_the_math_kernel_there_is_no_distance_to_it_and_the_row_says_so(monkeypatch):
    rows = [row for row in planted(monkeypatch, lambda output: output / 0, of="math") if row["kernel"] == "flash"]
    assert {(row["status"], row["reason"], row["max_abs_math"]) for row in rows} == {
        ("MEASURED", attention.NO_MATH, None)
    }
    assert all(lacks("attention", row, name) for row in rows for name, value in row.items() if value is None)


def test_a_kernel_that_answers_nan_or_breaks_fails_alone(monkeypatch):
    rows = planted(monkeypatch, lambda output: output / 0)
    assert {(row["kernel"], row["status"]) for row in rows} == {("math", "MEASURED"), ("flash", "FAIL")}
    assert all(row["max_abs_truth"] is None for row in rows if row["kernel"] == "flash")

    def backward_of_nan(output):
        output.register_hook(lambda gradient: gradient / 0)
        return output

    rows = planted(monkeypatch, backward_of_nan)
    assert {row["status"] for row in rows if row["kernel"] == "flash"} == {"FAIL"}
    assert all("a gradient" in row["reason"] for row in rows if row["kernel"] == "flash")
    assert all(lacks("attention", row, name) for row in rows for name, value in row.items() if value is None)

    def broken(output):
        raise RuntimeError("an illegal address was encountered")

    rows = planted(monkeypatch, broken)
    assert {(row["kernel"], row["reason"]) for row in rows if row["status"] == "FAIL"} == {
        ("flash", "RuntimeError: an illegal address was encountered")
    }


@pytest.mark.parametrize(
    ("dtype", "least"), [("fp32", "uniform"), ("bf16", "uniform"), ("fp16", "as unmasked"), ("fp64", "uniform")]
)
def test_a_row_with_no_key_is_told_by_the_kind_of_mask(dtype, least):
    """-65504, the least number of fp16, is added in fp32, where it takes nothing from the scores it is added to."""
    for kernel in ("math", "flash"):
        assert attention.masked_row(kernel, CPU, dtype) == f"bool: zeros, -inf: zeros, finfo.min: {least}"
    assert attention.masked_row("cudnn", CPU, dtype) == ""


def test_a_softmax_written_plainly_gives_nan_for_a_row_with_no_key(monkeypatch):
    def plain(q, k, v, attn_mask, is_causal):
        scores = q @ k.transpose(-2, -1) / 8
        masked = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return torch.softmax(masked, dim=-1) @ v

    monkeypatch.setattr(attention, "scaled_dot_product_attention", plain)
    assert attention.masked_row("math", CPU, "fp32") == "bool: nan, -inf: nan, finfo.min: uniform"


def test_the_reason_of_a_missing_kernel_is_what_torch_warned_of(monkeypatch):
    def refuses(*_, **__):
        warnings.warn(
            "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:1.)", stacklevel=1
        )
        warnings.warn("Flash Attention does not support non-null attn_mask.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", refuses)
    assert {row["reason"] for row in kernels(CPU, ["fp32"], [8], 60)} == {
        "Flash attention kernel not used because:; Flash Attention does not support non-null attn_mask."
    }


def test_what_there_is_no_time_or_memory_for_is_skipped():
    assert {row["reason"] for row in kernels(CPU, ["bf16"], [8], 0)} == {"no time left of 0 s"}
    assert {row["reason"][:19] for row in kernels(CPU, ["bf16"], [4096], 60)} == {"beyond 2,048 tokens"}


def test_what_is_drawn_once_stays_as_it_was():
    case = attention.Case("fp64", 8)
    first, _ = attention.inputs(case)
    kept = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.requires_grad_().data.zero_()
    again, _ = attention.inputs(case)
    assert all(not tensor.requires_grad and torch.equal(tensor, old) for tensor, old in zip(again, kept, strict=True))
