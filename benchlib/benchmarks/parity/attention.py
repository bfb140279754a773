"""The kernels of scaled_dot_product_attention side by side, on inputs of BERT-base's heads: how far apart, how fast.

Each kernel is held against the same attention in float64, written out here, and against the math kernel in its own type;
outputs and gradients. Inputs are rounded to the type first, so that what is seen is the kernel's error alone.

What a query that may attend to nothing gets, no standard says: ``masked_row`` asks each kernel, with three masks that mean
the same: False, -inf, and the least finite number.

Letters: B rows, H heads, S tokens, D numbers of a head. Times are of a forward pass, in microseconds.
"""

import functools
import math
import re
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchlib.benchmarks.parity.switches import KERNELS
from benchlib.runtime.timing import Clock
from benchlib.workloads import distances

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LACKING = "no kernel"
NO_MATH = "no math kernel ran to compare with"
ONLY_OF_CPU = "on a CPU torch has the kernels math and flash only"
MASKED_ROWS = ("bool", "-inf", "finfo.min")
B, H, D = 1, 12, 64
MOST_TOKENS = 2048  # scores in float64, of which a forward and backward pass keep four, are 0.4 GB each
PEAKED = 6.0  # on q and k: scores 36 times as large, so that the softmax is nearly a choice
WARMUP, RUNS, FEWEST = 3, 20, 5
TIMED_S = 0.05  # of one row
DISTANCES = ("max_abs", "one_minus_cosine", "gradient_max_abs")
NUMBERS = (*(f"{name}_{other}" for other in ("truth", "math") for name in DISTANCES), "median_us")

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One input. ``scale`` multiplies q and k; ``mask`` none, causal, or padding (the last quarter of the keys)."""

    dtype: str
    length: int
    mask: str = "none"
    scale: float = 1.0


@dataclass(frozen=True)
class Answer:
    """What attention gave: (B, H, S, D) and, where they could be computed, the gradients of q, k and v. All float64."""

    output: np.ndarray
    gradients: tuple[np.ndarray, ...] | None
    gradients_lack: str = ""


class NoKernel(RuntimeError):
    """The device has no such kernel for the input; the text is torch's."""


def kernels(where: torch.device, dtypes: Sequence[str], lengths: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Return a row for each kernel, type, length, mask and scale; the fields are those of ``_row``.

    A kernel that the device lacks is SKIPPED with torch's own reason, and so is what ``seconds`` are not enough for.
    One that breaks, or answers with numbers that are not finite, is FAIL. The rest is MEASURED.
    """
    until = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        masked = {kernel: masked_row(kernel, where, dtype) for kernel in KERNELS}
        for case in (case for length in lengths for case in cases(dtype, length)):
            rows.extend(_rows(case, where, masked, until, seconds))
    return rows


def cases(dtype: str, length: int) -> tuple[Case, ...]:
    """Return the inputs of one type and length."""
    return (
        Case(dtype, length),
        Case(dtype, length, "causal"),
        Case(dtype, length, "padding"),
        Case(dtype, length, scale=PEAKED),
    )


def inputs(case: Case) -> tuple[Tensors, torch.Tensor]:
    """Return q, k, v and the gradient of the output, (B, H, S, D) each, on the CPU in the case's type."""
    drawn = _drawn(case.length)
    q, k, v, gradient = (
        tensor.to(DTYPES[case.dtype], copy=True)
        for tensor in (case.scale * drawn[0], case.scale * drawn[1], *drawn[2:])
    )
    return (q, k, v), gradient


@functools.lru_cache(maxsize=1)  # the cases of a length follow each other
def _drawn(length: int) -> Tensors:
    """Return four tensors of random numbers, (B, H, S, D) in float64. Nobody may change them."""
    generator = torch.Generator().manual_seed(1000 + length)
    return tuple(torch.randn(B, H, length, D, generator=generator, dtype=torch.float64) for _ in range(4))


def allowed(case: Case) -> torch.Tensor | None:
    """Return which keys a query may attend to, bool (S, S) or (1, S); None: all."""
    if case.mask == "none":
        return None
    places = torch.arange(case.length)
    if case.mask == "causal":
        return places[:, None] >= places
    return (places < max(1, math.ceil(case.length * 3 / 4)))[None, :]


def truth(case: Case) -> Answer:
    """Return softmax(q k^T / sqrt(D)) v and its gradients in float64, from the inputs as rounded to the case's type."""
    tensors, gradient = inputs(case)
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors)
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    mask = allowed(case)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    output = torch.softmax(scores, dim=-1) @ v
    output.backward(gradient.double())
    return Answer(_wide(output), tuple(_wide(tensor.grad) for tensor in (q, k, v)))


def answer(kernel: str, case: Case, where: torch.device) -> Answer:
    """Return what one kernel gives. Raises ``NoKernel`` with torch's reason where the device lacks it."""
    tensors, gradient = inputs(case)
    given = tuple(tensor.to(where).detach().requires_grad_() for tensor in tensors)
    output = _attend(kernel, given, _mask(case, where), case.mask == "causal")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output.backward(gradient.to(where))
    except (RuntimeError, NotImplementedError) as error:  # a kernel of the forward pass only
        return Answer(_wide(output), None, f"no gradients: {_plain(str(error))}")
    return Answer(_wide(output), tuple(_wide(tensor.grad) for tensor in given))


def masked_row(kernel: str, where: torch.device, dtype: str) -> str:
    """Say what a query that may attend to nothing gets, by the kind of mask; '' where the kernel is lacking."""
    words = {kind: _word(kernel, kind, where, dtype) for kind in MASKED_ROWS}
    if set(words.values()) == {LACKING}:
        return ""
    return ", ".join(f"{kind}: {word}" for kind, word in words.items())


def _word(kernel: str, kind: str, where: torch.device, dtype: str) -> str:
    """Return zeros, uniform (the mean of all values), as unmasked, nan, error or other, of a row without a key."""
    case, row = Case(dtype, 16), 3
    (q, k, v), _ = inputs(case)
    mask = torch.zeros(case.length, case.length, dtype=q.dtype)
    mask[row] = -math.inf if kind == "-inf" else torch.finfo(q.dtype).min
    given = (q.to(where), k.to(where), v.to(where))
    try:
        with torch.no_grad():
            output = _attend(kernel, given, (mask == 0 if kind == "bool" else mask).to(where), causal=False)
    except NoKernel:
        return LACKING
    except Exception as error:  # what it gets, then, is an error
        return f"error ({_plain(str(error))})"
    return word(_wide(output)[:, :, row], _wide(v), truth(case).output[:, :, row], 8 * torch.finfo(q.dtype).eps)


def word(row: np.ndarray, values: np.ndarray, unmasked: np.ndarray, near: float) -> str:
    """Name what a query without a key got: ``row`` (B, H, D), where it would get ``unmasked`` of ``values`` (B, H, S, D)."""
    if np.isnan(row).any():
        return "nan"
    if not row.any():
        return "zeros"
    for name, expected in (("uniform", values.mean(axis=2)), ("as unmasked", unmasked)):
        if np.abs(row - expected).max() <= near:
            return name
    return "other"


def _rows(
    case: Case, where: torch.device, masked: dict[str, str], until: float, seconds: float
) -> Iterator[dict[str, Any]]:
    exact, reference = None, None
    for kernel in KERNELS:
        if case.length > MOST_TOKENS:
            yield _row(kernel, case, where, "SKIPPED", f"beyond {MOST_TOKENS:,} tokens float64 takes too much memory")
            continue
        if time.monotonic() > until:
            yield _row(kernel, case, where, "SKIPPED", f"no time left of {seconds:g} s")
            continue
        try:
            result = answer(kernel, case, where)
        except NoKernel as error:
            yield _row(kernel, case, where, "SKIPPED", str(error))
            continue
        except Exception as error:  # one kernel that breaks is a row, not the end of the others
            yield _row(kernel, case, where, "FAIL", f"{type(error).__name__}: {_plain(str(error))}")
            continue
        if not all(np.isfinite(array).all() for array in (result.output, *(result.gradients or ()))):
            yield _row(kernel, case, where, "FAIL", "numbers in the output or a gradient are NaN or infinite")
            continue
        exact = exact or truth(case)
        reasons = [result.gradients_lack, "" if reference or kernel == "math" else NO_MATH]
        yield (
            _row(kernel, case, where, "MEASURED", "; ".join(filter(None, reasons)))
            | _distances(result, exact, reference)
            | {"masked_row": masked[kernel], "median_us": 1e6 * statistics.median(_times_s(kernel, case, where))}
        )
        reference = result if kernel == "math" else reference


def _row(kernel: str, case: Case, where: torch.device, status: str, reason: str) -> dict[str, Any]:
    """Return a row whose numbers are not there yet."""
    return {
        "device": where.type,
        "kernel": kernel,
        "dtype": case.dtype,
        "length": case.length,
        "mask": case.mask,
        "scale": case.scale,
        "status": status,
        "reason": reason,
        "masked_row": "",
        **dict.fromkeys(NUMBERS),
    }


def _distances(result: Answer, exact: Answer, reference: Answer | None) -> dict[str, float]:
    apart: dict[str, float] = {}
    for name, other in (("truth", exact), ("math", reference)):
        if other is None:
            continue
        apart[f"max_abs_{name}"] = distances.max_abs(result.output, other.output)
        apart[f"one_minus_cosine_{name}"] = distances.one_minus_cosine(result.output, other.output)
        if result.gradients and other.gradients:
            pairs = zip(result.gradients, other.gradients, strict=True)
            apart[f"gradient_max_abs_{name}"] = max(distances.max_abs(a, b) for a, b in pairs)
    return apart


def _times_s(kernel: str, case: Case, where: torch.device) -> list[float]:
    """Return the seconds of forward passes, each waited for; as many as fit into TIMED_S, FEWEST at least."""
    (q, k, v), _ = inputs(case)
    q, k, v, mask = q.to(where), k.to(where), v.to(where), _mask(case, where)
    clock, seconds = Clock(where), []
    with torch.no_grad(), warnings.catch_warnings(), sdpa_kernel(KERNELS[kernel]):
        warnings.simplefilter("ignore")
        for number in range(WARMUP + RUNS):
            begin = clock.stamp()
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=case.mask == "causal")
            end = clock.stamp()
            clock.settle()
            if number >= WARMUP:
                seconds.append(clock.seconds(begin, end))
            if len(seconds) >= FEWEST and sum(seconds) > TIMED_S:
                break
    return seconds


def _attend(kernel: str, given: Tensors, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Call one kernel. torch tells why it takes none in warnings, where it tells at all, and raises a general error."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(KERNELS[kernel]):
                q, k, v = given
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        except RuntimeError as error:
            if not re.search(r"No (available kernel|viable backend)", str(error)):
                raise
            reasons = [*dict.fromkeys(_plain(str(warning.message)) for warning in messages)]
            if not reasons and given[0].device.type == "cpu":  # torch's error suggests that somebody turned it off
                reasons = [ONLY_OF_CPU]
            raise NoKernel("; ".join(reasons) or _plain(str(error))) from error


def _mask(case: Case, where: torch.device) -> torch.Tensor | None:
    """Return the mask to hand over; causal ones are built in."""
    mask = allowed(case) if case.mask == "padding" else None
    return None if mask is None else mask.to(where)


def _plain(text: str) -> str:
    """Return torch's message in one line, without the place in its sources."""
    return re.sub(r"\s*\(Triggered internally at.*?\)\.?", "", " ".join(text.split()))[:400]


def _wide(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return np.asarray(tensor.detach().to("cpu").double().numpy())
