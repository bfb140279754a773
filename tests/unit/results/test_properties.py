"""What holds for every input: the readers, the writers and the formats, on inputs that hypothesis makes up."""

import re
import shutil

import pytest
from bounded import bounded
from hypothesis import assume, given
from hypothesis import strategies as st

from benchlib.core.terminal import harmless
from benchlib.core.text import duration, quantity
from benchlib.results.metrics import measured
from benchlib.results.run import Result, Run, load_samples, save_result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all inputs of all tests here."""
    return tmp_path_factory.mktemp("properties")


@bounded(25)
@given(
    samples=st.dictionaries(
        st.text(min_size=1, max_size=9).map(harmless),
        st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9),
        max_size=3,
    ),
    notes=st.lists(st.text().map(harmless), max_size=2),
)
def test_a_result_comes_back_as_it_was_saved(folder, samples, notes):
    place = folder / "saved"
    shutil.rmtree(place, ignore_errors=True)
    metrics = [measured(name, values, "s") for name, values in samples.items()]
    result = Result(
        benchmark="b", tier="t", backend="cpu", world_size=1, metrics=metrics, notes=notes, facts={"x": notes}
    )
    save_result(place, result)
    assert Run(place).result.model_dump() == result.model_dump()
    assert load_samples(place) == samples


PREFIXES = {"PFLOP/s": 1e15, "TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "FLOP/s": 1.0}


@bounded(300)
@given(
    value=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**18), 10**18),
    unit=st.sampled_from(["", "s", "FLOP/s", "samples/s", "h"]),
)
def test_a_quantity_shows_the_right_size(value, unit):
    number, _, shown = quantity(value, unit).partition(" ")
    scale = PREFIXES[shown] if unit == "FLOP/s" else 1 / 60 if shown == "min" else 1.0
    assume(abs(value) < 1e307)  # three digits of the largest floats round to infinity
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=6e-3, abs=5e-324)
    assert shown == ("min" if unit == "h" and 0 < abs(value) < 1 else unit) or unit == "FLOP/s"


@bounded(100)
@given(seconds=st.floats(0, 1e9))
def test_a_duration_shows_the_right_size(seconds):
    shown = duration(seconds)
    units = {"h": 3600.0, "min": 60.0, "s": 1.0}
    total = sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.e+-]+) (h|min|s)", shown))
    assert total == pytest.approx(seconds, rel=6e-3, abs=0.5 if seconds >= 59 else 0)


@bounded(200)
@given(words=st.text(st.characters(codec=None)))
def test_what_is_printed_holds_no_control_characters(words):
    shown = harmless(words)
    assert not any((ord(sign) < 32 and sign not in "\t\n") or 127 <= ord(sign) < 160 for sign in shown)
    assert harmless(shown) == shown
    shown.encode()
    assert harmless("Plain words, ünï 漢字 [x]\n") == "Plain words, ünï 漢字 [x]\n"
