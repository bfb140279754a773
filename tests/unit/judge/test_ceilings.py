"""Speeds that nothing built reaches fail in every benchmark; recorded runs and published figures are far below the ceilings."""

from statistics import median

import pytest
from make_smoke import SMOKE, unpack

from benchlib.benchmarks import BENCHMARKS
from benchlib.judge.checks import finite_check
from benchlib.judge.impossible import ceilings
from benchlib.judge.impossible.ceilings import ceiling, least_parameters
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.references import registry
from benchlib.judge.verdict import judge
from benchlib.results.metrics import measured
from benchlib.results.run import save_result
from benchlib.spec.tables import Rows

NAMES = sorted(path.name.partition(".")[0] for path in SMOKE.glob("*.json.gz"))
RATES = ("FLOP/s", "GB/s", "MB/s", "B/s", "Gbps", "samples/s", "queries/s", "tokens/s")


def faster(run, times):
    """Write the result of a run again with all its stored speeds ``times`` as high and its times as short; metrics follow."""
    spec, tables, samples = BENCHMARKS[run.config.benchmark].spec, Rows.of(run).tables, dict(run.row_samples)
    scale = dict.fromkeys(RATES, times) | dict.fromkeys(ceilings.SECONDS, 1 / times)
    for table in spec.tables:
        for index, row in enumerate(tables.get(table.name, ())):
            for col in (col for col in table.cols if col.unit in scale and row.get(col.name) is not None):
                values = row[col.name]
                row[col.name] = (
                    [scale[col.unit] * value for value in values]
                    if isinstance(values, list)
                    else scale[col.unit] * values
                )
                if f"{table.name}[{index}].{col.name}" in samples:
                    samples[f"{table.name}[{index}].{col.name}"] = row[col.name]
    stated = spec.stated(Rows(run.config, run.result.world_size, tables))
    thin = {
        name: [
            {key: median(value) if f"{name}[{index}].{key}" in samples else value for key, value in row.items()}
            for index, row in enumerate(rows)
        ]
        for name, rows in tables.items()
    }
    facts = thin.pop("run")[0]
    save_result(run.path, run.result.model_copy(update={"metrics": stated, "facts": facts, "tables": thin}), samples)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_a_million_times_as_fast_fails_and_the_run_itself_passes(tmp_path, name):
    assert len(NAMES) == len(BENCHMARKS) == 9
    run = unpack(name, tmp_path / "run")
    assert judge(run.path, tmp_path / "none").verdict == "PASS"
    for times, status in ((1.0, "PASS"), (1e6, "FAIL")):
        faster(unpack(name, tmp_path / f"{times:g}"), times)
        verdict = judge(tmp_path / f"{times:g}", tmp_path / "none")
        found = next(check for check in verdict.checks if check.name == "finite")
        assert (verdict.verdict, found.status) == (status, status)
    assert any(word in found.reason for word in (" is above ", " is below "))


def finite(run, name, value, unit, **config):
    """Judge the values of a run of one metric on one device."""
    result = run.result.model_copy(
        update={"metrics": [measured(name, value, unit, "higher")], "tables": {}, "world_size": 1}
    )
    result = result.model_copy(update={"backend": config.pop("backend", "cpu"), "facts": {}})
    return finite_check(Numbers(result, {}, run.config.model_copy(update=config)))


@pytest.mark.parametrize(
    ("benchmark", "name", "unit", "possible", "impossible"),
    [
        ("machine", "matmul_fp32_flops", "FLOP/s", 9e13, 1e17),
        ("machine", "matmul_bf16_flops", "FLOP/s", 1.7e15, 1e17),
        ("machine", "copy_host_gbytes_per_s", "GB/s", 6.9e3, 1e6),
        ("machine", "allreduce_gbps", "Gbps", 7200, 1e6),
        ("machine", "allreduce_latency_us", "us", 0.05, 1e-6),
        ("squad", "train_samples_per_s", "samples/s", 4.3e6, 1e9),
        ("parity", "eager_latency_ms", "ms", 0.002, 1e-5),
    ],
)
def test_one_impossible_speed_fails(tmp_path, benchmark, name, unit, possible, impossible):
    run = unpack(benchmark, tmp_path / "run")
    assert finite(run, name, possible, unit).status == "PASS"
    assert finite(run, name, impossible, unit).status == "FAIL"


def test_a_thousand_times_the_tokens_of_a_served_model_take_more_operations_than_there_are(tmp_path):
    """17,094 tokens/s of Llama-3.1-8B are what MLPerf has of a B200 (136,752 on eight), here with 2 FLOP a parameter."""
    run, name = unpack("inference", tmp_path / "run"), "tokens_per_s_offline"
    asked = {"model": "meta-llama/Llama-3.1-8B-Instruct", "precision": "bf16", "backend": "cuda"}
    assert finite(run, name, 17_094, "tokens/s", **asked).status == "PASS"
    judged = finite(run, name, 17_094_000, "tokens/s", **asked)
    assert judged.status == "FAIL" and "x 2 FLOP x 8 billion parameters" in judged.reason
    # A server at an address may be a rack of 72 devices.
    asked |= {"workers": ["http://127.0.0.1:8000"], "engine": "http", "backend": "cpu"}
    assert finite(run, name, 1.2e6, "tokens/s", **asked).status == "PASS"
    assert finite(run, name, 136_752_000, "tokens/s", **asked).status == "FAIL"


@pytest.mark.parametrize(
    ("names", "billions"),
    [
        (["meta-llama/Llama-3.1-8B-Instruct"], 8),
        (["llama3-8b-random"], 8),
        (["Qwen/Qwen3-30B-A3B"], 3),
        (["mistralai/Mixtral-8x7B-v0.1"], 7),
        (["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"], 0.5),
        (["tiny"], 0),
        (["sim", "Qwen/Qwen2.5-7B"], 0),
        (["openai/gpt-oss-120b"], 120),
        (["some/model-4bit"], 0),
    ],
)
def test_parameters_by_name(names, billions):
    assert least_parameters(names) == pytest.approx(1e9 * billions)


def test_no_published_figure_comes_within_a_factor_of_five():
    """The registry of published figures, from other sources, has nothing that a ceiling would refuse."""
    compared = 0
    for figure in registry().figures:
        unit, devices = figure.quantity.unit, figure.conditions.get("devices", 1)
        kind = "processors" if "xeon" in str(figure.conditions.get("device")) else "accelerator"
        bound = ceiling(figure.metric, unit, kind, devices, figure.conditions.get("precision", ""))
        if bound and bound.most:
            compared += 1
            assert 5 * figure.in_kit_unit()[2] <= bound.most, figure.id
    assert compared > 50
