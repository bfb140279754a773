"""Parallel training: strategies, models, analysis"""

import csv
import io
import json
import math
import os
import re
import shutil
import statistics
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from filelock import FileLock
from make_run import make_run
from promised import promise, skip_rest

from benchlib import session
from benchlib.cli import main
from benchlib.results.run import Run
from benchlib.runtime.devices import lacking
from benchlib.workloads.shards import Pairs, Shards, generate

# A model of one's own: a Llama of transformers, by its config.json alone.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA |= {"intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 100, "tie_word_embeddings": False}
# A processor without bf16 instructions refuses it: there the suite stays in fp32, and the other halves of the promises hold.
PRECISION = "fp32" if lacking("bf16", torch.device("cpu")) else "bf16"
SUITE = {
    "hardware": {"backend": "cpu", "nproc": 2, "threads": 1},
    "seq_len": 16,
    "steps": 4,
    "suite": [
        {
            "model": "tiny",
            "parallelization": {"strategies": ["single", "data", "tensor", "pipeline"], "scaling": "both"},
            "find_max_batch": True,
            "memory_gb": 0.04,
        },
        {
            "model": "OWN",
            "parallelization": {"strategies": "data"},
            "precision": PRECISION,
            "checkpointing": True,
            "fused_loss": True,
            "prove": False,
            "planted": "data",
            "planted_slowdown": 3,
        },
    ],
}


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Run ``SUITE`` once, with --verbose: what was printed, the two runs with their rows by table, and the file of results."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    store, own = shared / "promised" / "parallel-suite", shared / "promised" / "my-llama"
    own.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{store}.lock"):
        if not (printed := store / "printed.txt").exists():
            (own / "config.json").write_text(json.dumps(LLAMA))
            file = own.parent / "suite.json"
            file.write_text(json.dumps(SUITE).replace("OWN", str(own)))
            done = CliRunner().invoke(
                main, ["run", "parallel", "--config", str(file), "--verbose", "--out", str(store)]
            )
            assert done.exit_code in (0, 1), done.output  # which checks pass is for the tests to say
            printed.write_text(done.output)
    (results,) = store.glob("*/suite-results.json")
    runs = [Run(path.parent) for path in sorted(store.glob("*/*/config.json"))]
    assert len(runs) == 2
    return SimpleNamespace(text=printed.read_text(), runs=runs, results=json.loads(results.read_text()), own=own)


@pytest.fixture(scope="session")
def absent(program, tmp_path_factory):
    """What `benchlib doctor` prints, the backends that this machine has not, and what a run on one of them prints."""
    text = program("doctor")
    missing = [
        name for name in ("cuda", "rocm", "mps", "xpu", "tpu") if re.search(rf"^no +backend {name} ", text, re.M)
    ]
    assert missing, "no machine has them all"
    run = program("run", "parallel", "--backend", missing[-1], "--out", tmp_path_factory.mktemp("absent"), code=3)
    return SimpleNamespace(doctor=text, missing=missing, run=run)


def rows(run, table):
    return json.loads((run.path / "result.json").read_text())["tables"][table]


def raw(run, name):
    """Return the raw samples of a column by the key of its row, scaling left out."""
    own = rows(run, "strategies")
    return {
        row["key"]: run.row_samples[f"strategies[{place}].{name}"]
        for place, row in enumerate(own)
        if not row["scaling"]
    }


def check(run, name):
    return next(item for item in run.verdict.checks if item.name == name)


def shown(run, heading):
    """Return a table of the report as records of texts."""
    return session.table(run, heading).to_dict("records")


def dry(program, benchmark, *settings):
    """Return what a dry run on a CPU prints."""
    words = [word for setting in settings for word in ("--set", setting)]
    return program("run", benchmark, "--dry-run", "--backend", "cpu", *words)


def number(text):
    return float(re.match(r"-?[\d.,]+", text)[0].replace(",", ""))


@promise(
    "P057",
    "Train by data, model (tensor), pipeline and hybrid parallelism on real split layers, with the losses and gradients of one device",
    "benchlib run parallel --set nproc=4 --set coverage=all",
)
def test_p057_strategies_compute_what_one_device_does(suite, program):
    run = suite.runs[0]
    own = {row["strategy"]: row for row in rows(run, "strategies") if not row["scaling"]}
    assert set(own) == {"single", "data", "tensor", "pipeline"}
    for row in own.values():
        assert row["loss_error"] <= 1e-12 and row["weight_error"] <= 1e-9 and row["gradient_error"] <= 1e-5
        assert row["counted_parameters"] == 940_800, "the ranks together hold the model once"
    for row in own.values():
        assert row["losses"] == pytest.approx(own["single"]["losses"], rel=1e-4)
    assert check(run, "equal to one device in fp64").status == "PASS"
    text = dry(program, "parallel", "machine=h100", "batch_size=32", "model=small")
    for hybrid in ("data_tensor", "data_pipeline", "sharded_tensor", "sharded_pipeline", "data_tensor_pipeline"):
        assert re.search(rf"^ +{hybrid}\b.* (data|shard) \d x ", text, re.M), hybrid


@promise(
    "P058",
    "Choose model and strategy of a run by name: small, medium, large, GPT-2, Llama, BERT",
    "benchlib run parallel --set model=small --set strategies=data_tensor",
)
def test_p058_models_and_strategies_by_name(program):
    published = {"gpt2": "124,439,808", "llama-8b": "8,030,261,248", "bert-base": "108,893,186"}  # by transformers
    for model in published:
        text = dry(program, "parallel", f"model={model}", "strategies=data", "nproc=2", "seq_len=64")
        assert f"{model} ({published.get(model, '')}" in text and "on 2 ranks by data" in text
    text = program("run", "parallel", "--set", "model=unheard", code=2)
    assert all(model in text for model in ("small", "medium", "large", *published))


@promise(
    "P059",
    "Bring a model of one's own to the benchmark by a small interface: a folder with config.json, or a file of its widths",
    "benchlib run parallel --set model=FOLDER",
)
def test_p059_a_model_of_ones_own(suite, program, in_folder):
    run = suite.runs[1]
    (row,) = rows(run, "strategies")
    # h = 64, keys and values of 32, f = 96: query and output h², key and value 32h each, three feed-forward matrices, two norms;
    # embedding and output layer of 100 tokens, the last norm. LlamaForCausalLM(LlamaConfig(**LLAMA)) has as many.
    expected = 2 * (2 * 64**2 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64) + 2 * 100 * 64 + 64
    assert (row["model"], row["parameters"], row["counted_parameters"]) == ("my-llama", expected, expected)
    assert len(row["losses"]) == 4 and row["losses"][0] == pytest.approx(math.log(100), abs=0.3), (
        "a model that knows nothing"
    )
    (in_folder / "mine.yaml").write_text(
        "kind: decoder\nhidden: 64\nlayers: 2\nheads: 4\npositions: 64\nvocabulary: 96\n"
    )
    # Per layer 12h² + 13h; embeddings of tokens and places, the last norm, the output layer.
    count = 2 * (12 * 64**2 + 13 * 64) + (96 + 64) * 64 + 2 * 64 + 96 * 64
    text = dry(program, "parallel", "model=mine.yaml")
    assert f"mine.yaml ({count:,} parameters)" in text.replace("\n", "")
    (in_folder / "mine.yaml").write_text(
        "kind: decoder\nhidden: 64\nlayers: 2\nheads: 5\npositions: 64\nvocabulary: 96\n"
    )
    assert "heads = 5 does not divide hidden = 64" in program("run", "parallel", "--set", "model=mine.yaml", code=2)


@promise("P060", "List models and strategies", "benchlib list")
def test_p060_models_and_strategies_are_listed(program):
    text = program("list")
    for name in (
        "small",
        "medium",
        "large",
        "gpt2-xl",
        "llama-8b",
        "bert-large",
        "data",
        "tensor",
        "pipeline",
        "data_tensor_pipeline",
    ):
        assert re.search(rf"^{name} +\S", text, re.M), name
    assert "bert-base" in text and "108,893,186 parameters in 12 layers" in text


@promise(
    "P061",
    "Have degrees that do not fit the devices refused with the nearest that do",
    "benchlib run parallel --set nproc=4 --set strategies=data_tensor_pipeline --set data=2",
)
def test_p061_degrees_that_do_not_fit_are_refused(program):
    words = [word for name in ("nproc=4", "strategies=data_tensor_pipeline", "data=2") for word in ("--set", name)]
    text = program("run", "parallel", "--backend", "cpu", *words, code=2)
    assert "data(2) × pipeline(2) × tensor(2) = 8 but world size is 4: set data=1,pipeline=2,tensor=2" in text
    words = ("--set", "nproc=8", "--set", "strategies=pipeline")
    assert "8 stages (1f1b) for 4 layers of tiny" in program("run", "parallel", "--backend", "cpu", *words, code=2)


@promise(
    "P062",
    "Write this hardware as a preset, or take those of M4, 4x V100 NVLink and others, and estimate a run on them, labelled as estimates",
    "benchlib run parallel --dry-run --set machine=v100-4x-nvlink",
)
def test_p062_presets_of_machines(program, recorded, monkeypatch, tmp_path):
    text = dry(program, "parallel", "machine=v100-4x-nvlink", "model=small")
    assert "estimates for v100-4x-nvlink" in text and "nothing was measured" in text and "claimed" in text
    # Data sheet of the V100: 15.7 TFLOP/s in fp32; 8 samples of 64 tokens.
    products = 6 * 8 * 64 * (6 * 12 * 768**2 + 768 * 50304) + 12 * 6 * 8 * 64**2 * 768
    (single,) = re.findall(r"^ +single .*$", text, re.M)
    times = [part for part in re.split(r"  +", single.strip()) if part.endswith(" ms")]  # the step, then its parts
    assert number(times[1]) == pytest.approx(1e3 * products / 15.7e12, rel=0.01) and number(times[0]) > number(times[1])
    assert "m4-max" in program("run", "parallel", "--dry-run", "--backend", "cpu", "--set", "machine=m5", code=2)
    (tmp_path / "params" / "machines").mkdir(parents=True)
    with monkeypatch.context() as patch:  # the checkout is left as it is
        patch.setattr("benchlib.core.files.home", lambda: tmp_path)
        program("machine", "init", recorded("machine"), "--name", "mine")
    written = tmp_path / "params" / "machines" / "mine.yaml"
    text = dry(program, "parallel", f"machine={written}")
    assert "measured by machine-cpu" in text and "nothing was measured" in text


@promise(
    "P063",
    "Run from one JSON or YAML file with hardware, model and parallelization",
    "benchlib run parallel --config FILE",
)
def test_p063_a_run_from_one_file(suite, program, in_folder):
    config = json.loads((suite.runs[0].path / "config.json").read_text())
    wanted = {"nproc": 2, "threads": 1, "model": "tiny", "scaling": "both", "memory_gb": 0.04, "steps": 4}
    assert {name: config[name] for name in wanted} == wanted
    file = in_folder / "run.yaml"
    file.write_text("hardware: {nproc: 2}\nmodel: {model: small, seq_len: 64}\nparallelization: {strategies: [data]}\n")
    text = program("run", "parallel", "--config", file, "--backend", "cpu", "--dry-run", "--set", "batch_size=32")
    assert "on 2 ranks by data" in text and "32 samples each" in text
    for content, words in {
        "hardware: {nprocs: 2}\n": "unknown parameter 'nprocs' for parallel: did you mean nproc?",
        "model: smal\n": "did you mean small?",
        "model: {steps: 0}\n": "steps = 0",
        "a: {steps: 1}\nb: {steps: 2}\n": "steps is set twice",
        "suite: []\n": "expected settings by name",
    }.items():
        file.write_text(content)
        assert words in program("run", "parallel", "--config", file, "--backend", "cpu", "--dry-run", code=2)


@promise(
    "P064",
    "Run a suite of several configurations with one command and get one file of results",
    "benchlib run parallel --config suite.json",
)
def test_p064_a_suite_has_one_file_of_results(suite):
    first, second = suite.results
    assert [item["run"] for item in suite.results] == [run.path.name for run in suite.runs]
    assert len(first["results"]) == 4 and [row["model"] for row in second["results"]] == ["my-llama"]
    assert second["settings"].get("precision", "fp32") == PRECISION and "precision" not in first["settings"]
    steps = raw(suite.runs[1], "steps_s")["my-llama data"]
    rate = 8 / statistics.fmean(steps)
    assert second["results"][0]["samples_per_s"] == pytest.approx(rate, rel=1e-12)


@promise(
    "P065",
    "Follow the stages of a run: backend, model with parameter count, strategy, characterisation, throughput",
    "benchlib run parallel",
)
def test_p065_the_stages_of_a_run_are_shown(suite):
    head = re.search(r"^parallel  tier smoke  backend cpu  2 ranks", suite.text, re.M)
    stages = (
        "name=peak",
        "name=prove and measure",
        "name=write",
        "name=done",
        "key numbers  Fastest strategy",
        "report:",
    )
    places = [head.start(), *(suite.text.index(stage) for stage in stages)]
    assert places == sorted(places)
    assert any(
        "tiny (940,800 parameters) trains fastest by" in line
        for line in session.reading(suite.runs[0]).data.splitlines()
    )
    events = [
        json.loads(line) for path in suite.runs[0].path.glob("events*.jsonl") for line in path.read_text().splitlines()
    ]
    assert {"peak", "prove and measure", "batch", "done"} <= {
        event.get("name") for event in events if event["kind"] == "phase"
    }


@promise("P066", "Ask for a more verbose run", "benchlib run parallel --verbose")
def test_p066_a_verbose_run_shows_every_event_and_check(suite, absent):
    assert re.search(r"^  rank1  phase  name=", suite.text, re.M) and re.search(
        r"^  supervisor  exited  rank=0", suite.text, re.M
    )
    names = [item.name for item in suite.runs[0].verdict.checks if item.status == "PASS"]
    assert len(names) > 5 and all(re.search(rf"^{re.escape(name[:20])}", suite.text, re.M) for name in names)
    assert "supervisor" not in absent.run and "no_baseline" not in absent.run, "a run without it"


@promise(
    "P067", "Read samples/s and tokens/s, one being the other times the length", "benchlib export RUN --to results"
)
def test_p067_tokens_are_samples_times_the_length(suite, program):
    run = suite.runs[0]
    assert len(raw(run, "steps_s")["tiny data"]) == 4, "even in number: the median lies between two steps"
    listed = csv.DictReader(io.StringIO(program("export", run.path, "--to", "csv", "-o", "-")))
    metrics = {row["metric"]: float(row["value"]) for row in listed if row["value"]}
    for row in suite.results[0]["results"]:
        assert row["tokens_per_s"] == pytest.approx(16 * row["samples_per_s"], rel=1e-12)
        name = f"samples_per_s_tiny_{row['way'].replace(' ', '_')}"
        assert metrics[name] == pytest.approx(row["samples_per_s"], rel=1e-12), "the metric is the same number"


@promise(
    "P068",
    "Read forward and backward time and the estimated and measured memory of each strategy",
    "benchlib run parallel",
)
def test_p068_times_and_memory_of_each_strategy(recorded):
    run = Run(recorded("parallel"))
    memory = {row["strategy"]: row for row in shown(run, "Memory of the fullest rank")}
    for row in rows(run, "strategies"):
        assert (row["forward_s"] or 0) + row["backward_s"] <= row["steps_s"] * 1.05
        held = memory[row["key"]]
        assert number(held["memory of the fullest rank"]) == pytest.approx(max(row["peak_bytes"]) / 1e9, rel=0.01)
        # fp32 weights, as many gradients, and two moments of AdamW.
        states = 16 * row["parameters"] / (row["shard"] * row["tensor"] * row["pipeline"]) / 1e9
        assert sum(number(held[name]) for name in ("parameters", "gradients", "optimizer")) == pytest.approx(
            states, rel=0.05
        )
        assert number(held["estimate"]) > states


@promise(
    "P069",
    "Find the largest batch that fits a strategy, in parallel training",
    "benchlib run parallel --set find_max_batch=true --set memory_gb=16",
)
def test_p069_the_largest_batch_of_each_strategy(suite):
    run = suite.runs[0]
    tried = rows(run, "batches")
    for key in ("tiny single", "tiny data", "tiny tensor", "tiny pipeline 1f1b"):
        own = [row for row in tried if row["key"] == key]
        (largest,) = [row["batch"] for row in own if row["largest"]]
        unit = {"tiny data": 2, "tiny pipeline 1f1b": 4}.get(key, 1)  # copies, micro-batches
        assert all(row["batch"] % unit == 0 and row["fits"] == (row["peak_gb"] <= 0.04) for row in own)
        assert largest == max(row["batch"] for row in own if row["fits"])
        too_large = min(row["batch"] for row in own if not row["fits"])
        assert largest < too_large <= largest + max(unit, largest // 16 + unit), "found to a sixteenth"
        assert max(row["peak_gb"] for row in own) > min(row["peak_gb"] for row in own)
    text = session.reading(run).data
    assert re.search(r"tiny data takes batches of up to \d+ samples, which need [\d.]+ GB per rank", text)


@promise(
    "P070",
    "Get the table of configuration, model, strategy, hardware, samples/s, tokens/s, forward and backward ms, memory efficiency, "
    "performance and efficiency score, the scores by stated formulas",
    "benchlib export RUN --to results",
)
def test_p070_the_table_of_results_with_its_scores(recorded, program):
    run = Run(recorded("parallel"))
    (item,) = json.loads(program("export", run.path, "--to", "results", "-o", "-"))
    assert [len(row) for row in item["results"]] == [11] * 5 and len(shown(run, "Results")[0]) == 11
    measured = {row["strategy"]: row for row in rows(run, "strategies")}
    samples = {key.split()[1]: 8 / statistics.fmean(steps) for key, steps in raw(run, "steps_s").items()}  # three steps
    best = max(samples.values())
    best_rank = max(rate / measured[name]["world"] for name, rate in samples.items())
    for row in item["results"]:
        name = row["way"].split()[0]
        own, world = measured[name], measured[name]["world"]
        assert (row["model"], row["hardware"]) == ("tiny", f"{world} x cpu")
        assert row["configuration"].startswith("8 x 64 tokens, fp32")
        assert row["samples_per_s"] == pytest.approx(samples[name])
        assert row["tokens_per_s"] == pytest.approx(64 * samples[name])
        assert row["forward_ms"] == (pytest.approx(1e3 * own["forward_s"]) if own["forward_s"] else None)
        assert row["backward_ms"] == pytest.approx(1e3 * own["backward_s"])
        # docs/parallel.md: 16 bytes of weight, gradient and moments per parameter over the memory of all ranks.
        assert row["memory_efficiency"] == pytest.approx(16 * 940_800 / sum(own["peak_bytes"]))
        assert row["performance_score"] == pytest.approx(100 * samples[name] / best)
        assert row["efficiency_score"] == pytest.approx(100 * samples[name] / world / best_rank)


@promise(
    "P071",
    "Measure strong and weak scaling on the ranks at hand, with efficiency",
    "benchlib run parallel --set scaling=both",
)
def test_p071_scaling_with_efficiency(suite):
    points = [row for row in rows(suite.runs[0], "scaling") if row["key"] == "tiny data"]
    assert [(row["kind"], row["world"]) for row in points] == [("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)]
    single = next(
        row for row in rows(suite.runs[0], "strategies") if (row["strategy"], row["scaling"]) == ("single", "weak")
    )
    assert single["batch_size"] == 4, "as many samples per rank as on two"
    for one, two in (points[:2], points[2:]):
        assert two["efficiency"] == pytest.approx(two["samples_per_s"] / (2 * one["samples_per_s"]))
    assert (one["efficiency"], one["low"], one["high"]) == (1, 1, 1)
    steps = raw(suite.runs[0], "steps_s")["tiny data"]
    assert two["samples_per_s"] == pytest.approx(8 / statistics.fmean(steps))


@promise(
    "P072",
    "Predict scaling beyond the ranks at hand (8, 64, 1,024 devices), labelled as predicted, with the error of the model beside it",
    "benchlib run parallel",
)
def test_p072_more_devices_are_predicted_and_called_so(recorded):
    run = Run(recorded("parallel"))
    result = json.loads((run.path / "result.json").read_text())
    predicted = shown(run, "Predicted for more devices")
    assert all("predicted" in heading for heading in predicted[0] if re.search("devices|samples|efficiency", heading))
    own = {(row["strategy"], row["scaling"], row["devices, predicted"]): row for row in predicted}
    assert {key[2] for key in own} == {"8", "64", "1,024"}
    # By hand, copies with the same batch per device: a rank's compute, and one ring all-reduce of the fp32 gradients that nothing
    # hides, 2 (n-1) hops of alpha and 2 (n-1)/n bytes of beta. On two ranks alpha was measured for two hops, beta for a factor of one.
    data, single = (
        next(row for row in rows(run, "strategies") if row["strategy"] == name) for name in ("data", "single")
    )
    line = next(row for row in result["tables"]["alpha_beta"] if row["op"] == "all_reduce")
    rate_of_one = 8 / statistics.fmean(raw(run, "steps_s")["tiny single"])
    for devices in (8, 64, 1024):
        ring = (
            2 * (devices - 1) * line["alpha_s"] / 2
            + 2 * (devices - 1) / devices * 4 * 940_800 * line["beta_s_per_byte"]
        )
        rate = 4 * devices / (data["compute_s"] + ring)
        row = own["tiny data", "weak", f"{devices:,}"]
        assert number(row["samples/s, predicted"]) == pytest.approx(rate, rel=1e-3)
        assert number(row["efficiency, predicted"]) == pytest.approx(100 * rate / devices / rate_of_one, abs=0.6)
        off = statistics.median(raw(run, "steps_s")["tiny data"]) / data["predicted_step_s"] - 1
        assert number(row["error of the model here"]) == pytest.approx(100 * off, abs=0.6)
    assert single["world"] == 1


@promise(
    "P073",
    "See measured peaks and the roofline, with the kernels in it, and impossible rates refused",
    "benchlib run parallel",
)
def test_p073_operations_under_the_roofline(suite, program, tmp_path):
    run = suite.runs[0]
    facts = json.loads((run.path / "result.json").read_text())["facts"]
    operations = rows(run, "operations")
    products = [row for row in operations if row["operation"] in ("mm", "addmm") and row["key"] == "tiny data"]
    # 4 samples of 16 tokens: two FLOPs a multiply-add, three passes; the attention's products are in its own operation.
    expected = 3 * 2 * 4 * 16 * (4 * 12 * 128**2 + 128 * 512)
    assert sum(row["flops"] for row in products) == pytest.approx(expected, rel=0.01)
    lines = [line for line in shown(run, "Operations under the roofline") if line["operation"] == "mm"]
    row = next(row for row in operations if row["operation"] == "mm" and row["key"] == lines[0]["strategy"])
    roof = min(facts["rank_flops"], row["flops"] / row["bytes"] * facts["copy_bytes_per_s"])
    assert number(lines[0]["share of the roof"]) == pytest.approx(100 * row["flops"] / row["time_s"] / roof, abs=0.6)
    claim = {"claim_version": 1, "source": "a table", "claims": [
        {"subject": "one device", "compute": {"flops_per_s": 2.5e15, "device": "NVIDIA H100 80GB HBM3", "precision": "bf16", "ranks": 1}},
    ]}  # fmt: skip
    (tmp_path / "claim.json").write_text(json.dumps(claim))
    assert "989" in program("judge", tmp_path / "claim.json", code=1)  # TFLOP/s of the data sheet


@promise(
    "P074",
    "Be told whether memory, compute or communication is the bottleneck, how much communication is exposed, and the bubble beside its formula",
    "benchlib run parallel --set planted=data --set planted_slowdown=3",
)
def test_p074_the_bottleneck_and_the_bubble(suite, recorded):
    slowed = suite.runs[1]
    (row,) = rows(slowed, "strategies")
    assert row["bottleneck"] == "data", "what was injected is named"
    assert check(slowed, "injected bottleneck").status == "PASS"
    run = Run(recorded("parallel"))
    step = {row["strategy"]: row for row in shown(run, "Where a step goes")}
    assert number(step["tiny data"]["exposed communication"]) > 0
    # Which part it is depends on the machine that was recorded; that the largest is named is shown by the injected one above.
    parts = list(step["tiny data"])
    assert all(row["bottleneck"].removeprefix("the ") in parts for row in step.values())
    (bubble,) = shown(run, "Bubble")
    assert number(bubble["of equal stages"]) == pytest.approx(100 * (2 - 1) / (4 + 2 - 1)), "(p - 1) / (m + p - 1)"
    passes = rows(run, "stages")
    span = max(item["end_s"] for item in passes) - min(item["start_s"] for item in passes)
    busy = [sum(item["end_s"] - item["start_s"] for item in passes if item["rank"] == rank) for rank in (0, 1)]
    assert number(bubble["bubble"]) == pytest.approx(100 * (1 - sum(busy) / 2 / span), abs=1)


@promise(
    "P075",
    "Accumulate gradients, recompute activations and train in mixed precision, and compare what it is worth",
    "benchlib compare A B",
)
def test_p075_accumulation_checkpointing_and_mixed_precision(suite, program):
    results = suite.results[1]["results"][0]
    assert "checkpointing" in results["configuration"]
    text = program("compare", suite.runs[0].path, suite.runs[1].path, "--all-metrics")
    assert re.search(r"config\.checkpointing +false +true", text)
    if PRECISION == "bf16":
        assert "bf16" in results["configuration"] and re.search(r"config\.precision +\W?fp32\W? +\W?bf16", text)
    else:
        assert "no bf16 instructions" in program(
            "run", "parallel", "--backend", "cpu", "--set", "precision=bf16", code=2
        )
    assert "samples_per_s_best" in text and "→" in text
    shape = ("machine=h100", "model=small", "strategies=single", "seq_len=512", "batch_size=16")
    lines = [
        re.search(r"^ +single +one device +([\d.]+) GB .* ([\d.]+) ms +([\d.]+) ms +[\d.]+ ms  ", text, re.M)
        for text in (dry(program, "parallel", *shape, f"checkpointing={value}") for value in ("false", "true"))
    ]
    assert float(lines[1][1]) < 0.9 * float(lines[0][1]), "activations are not kept"
    assert float(lines[1][3]) / float(lines[0][3]) == pytest.approx(4 / 3, rel=0.01), "a forward pass more, of three"
    text = dry(program, "squad", "accumulation=4", "nproc=2", "batch_size=2")
    assert re.search(r"^accumulation +4 +set by hand", text, re.M)


@promise("P076", "Load training data through memory mapping", "benchlib run seq2seq --set data_dir=DIR --set read=mmap")
def test_p076_shards_are_read_through_a_memory_mapping(program, tmp_path, monkeypatch):
    monkeypatch.setattr("benchlib.workloads.shards.SHARD_BYTES", 1 << 12)  # several small shards
    pairs = Pairs(samples=100, sequence=16, vocabulary=512, seed=3)
    source = Shards(pairs, tmp_path, mapped=True)
    source.prepare()
    assert len(source.paths) > 2
    mapped = []
    memmap = np.memmap
    monkeypatch.setattr(np, "memmap", lambda *args, **more: mapped.append(args) or memmap(*args, **more))
    order = np.random.default_rng(0).permutation(100)
    assert np.array_equal(source.read(order), generate(pairs, order)) and mapped
    text = program(
        "run", "seq2seq", "--dry-run", "--backend", "cpu", "--set", f"data_dir={tmp_path}", "--set", "read=mmap"
    )
    assert re.search(r"^read +mmap +set by hand", text, re.M)


@promise(
    "P077",
    "Use custom kernels on a GPU: the loss of the measured training in Triton, as a torch.library operator with a fallback",
    "benchlib run parallel --set fused_loss=true",
    needs="a GPU with Triton for the kernel; its interpreter needs the package triton",
)
def test_p077_a_fused_loss_equals_that_of_torch(suite):
    from benchlib.workloads import fused_loss

    (row,) = rows(suite.runs[1], "strategies")
    assert suite.runs[1].config.fused_loss and len(row["losses"]) == 4, "a training with it"
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        for shape, targets in (((2, 5, 1500), torch.randint(1500, (2, 5))), ((3, 9, 2), torch.randint(9, (3, 2)))):
            ours = torch.randn(shape, dtype=dtype).requires_grad_()
            theirs = ours.detach().clone().requires_grad_()
            wide = theirs.double() if dtype == torch.float64 else theirs.float()
            flat = wide.flatten(0, 1) if shape[2] > 2 else wide
            expected = torch.nn.functional.cross_entropy(flat, targets.flatten() if shape[2] > 2 else targets)
            mean = fused_loss.loss(ours, targets)
            (3 * mean).backward()
            (3 * expected).backward()
            assert mean.item() == pytest.approx(
                expected.item(), rel=max(tolerance, 1e-6 if dtype != torch.float64 else 0)
            )
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    operator = torch.ops.benchlib.cross_entropy
    torch.library.opcheck(operator, (torch.randn(4, 7, requires_grad=True), torch.tensor([0, 1, 6, 3])))
    if not fused_loss.has_kernel(torch.zeros(1)):
        skip_rest(
            "the kernel needs a GPU with Triton, or TRITON_INTERPRET=1 and the package triton: torch's operations were tested"
        )


@promise(
    "P078",
    "Run on Apple Metal, NVIDIA, AMD, Intel, TPU or CPU, and get SKIPPED with the reason where it is not there",
    "benchlib run parallel --backend cuda",
    needs="a device of each backend",
)
def test_p078_backends_that_are_not_there_are_skipped(absent):
    for name in ("cpu", "cuda", "rocm", "mps", "xpu", "tpu"):
        assert re.search(rf"^(yes|no) +backend {name} +\S", absent.doctor, re.M), name
    assert re.search("^yes +backend cpu ", absent.doctor, re.M)
    assert re.search(r"SKIPPED +\S", absent.run)
    skip_rest(f"this machine has no {', '.join(absent.missing)}: nothing was computed on them")


@promise(
    "P079",
    "Train and measure a real task besides synthetic data",
    "benchlib run squad --set data=squad",
)
def test_p079_a_real_task(recorded, program):
    run = Run(recorded("squad"))
    answers = json.loads((run.path / "predictions.json").read_text())
    metrics = {item.name: item.value for item in run.result.metrics}
    assert answers and 0 < metrics["exact_match_minisquad_tiny"] <= metrics["f1_minisquad_tiny"] <= 100
    text = program("run", "squad", "--tier", "weekend", "--backend", "cpu", "--dry-run")
    assert re.search(r"^data +squad ", text, re.M)


@promise(
    "P080",
    "Get CPU, memory, OS, device and the versions of torch, transformers and datasets recorded with every run",
    "benchlib doctor",
)
def test_p080_machine_and_versions_are_recorded(suite):
    machine = json.loads((suite.runs[0].path / "machine.json").read_text())
    assert machine["cpu"]["model"] and machine["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine["memory_bytes"] == pytest.approx(pages, rel=0.01)
    assert os.uname().sysname in machine["system"] and machine["devices"]["backends"]["cpu"]["available"]
    for name in ("torch", "transformers", "datasets"):
        assert machine["versions"][name] == version(name)


@promise(
    "P081",
    "Get device utilisation, temperature and power of a training where the device gives them, else the reason",
    "benchlib run squad",
)
def test_p081_sensors_give_a_number_or_a_reason(recorded):
    for benchmark in ("squad", "seq2seq"):
        metrics = {item.name: item for item in Run(recorded(benchmark)).result.metrics}
        for name in ("utilization", "temperature_c", "power_w"):
            item = metrics[name]
            assert item.value is not None or (item.provenance == "not_available" and len(item.reason) > 10), name
        assert 0 < metrics["utilization"].value <= 100 * os.cpu_count() + 10_000, "of a CPU 100% is one core"


@promise(
    "P082",
    "Get mean, deviation, median, minimum, maximum and percentiles of the samples",
    "benchlib export RUN --to csv",
)
def test_p082_statistics_of_the_samples(program, tmp_path):
    samples = [float(value) for value in range(1, 101)]
    metric = {"name": "train_samples_per_s_minisquad_tiny", "value": 50.5, "unit": "samples/s", "direction": "higher"}
    metric |= {"provenance": "measured", "n": 100}
    folder = make_run(tmp_path / "quick-20261121" / "squad-cpu-100000-aaaaaa", metrics=[metric], with_samples=False)
    frame = pd.DataFrame({"metric": metric["name"], "index": range(100), "value": samples})
    frame.to_parquet(folder / "samples.parquet")
    rows_of = list(csv.DictReader(io.StringIO(program("export", folder, "--to", "csv", "-o", "-"))))
    (row,) = [row for row in rows_of if row["metric"] == metric["name"]]
    numbers = {
        name: float(row[name])
        for name in ("mean", "deviation", "minimum", "maximum", "p50", "p90", "p95", "p99", "value")
    }
    expected = {f"p{share}": float(np.percentile(samples, share)) for share in (50, 90, 95, 99)}
    expected |= {"mean": 50.5, "deviation": statistics.stdev(samples), "minimum": 1, "maximum": 100, "value": 50.5}
    assert numbers == pytest.approx(expected) and numbers["p50"] == 50.5 and numbers["p90"] == pytest.approx(90.1)


@promise("P083", "Compare runs with one command", "benchlib compare A B")
def test_p083_runs_are_compared_by_one_command(program, tmp_path):
    sides = []
    for day, rates in (("20261120", (100.0, 101.0, 99.0)), ("20261121", (70.0, 71.0, 69.0))):
        for index, rate in enumerate(rates):
            metric = {
                "name": "train_samples_per_s_minisquad_tiny",
                "value": rate,
                "unit": "samples/s",
                "direction": "higher",
            }
            metric |= {"provenance": "measured", "n": 1}
            folder = tmp_path / f"quick-{day}" / f"squad-cpu-10000{index}-run{day[-2:]}{index}"
            make_run(folder, metrics=[metric], with_samples=False, started_at=1.79e9 + 60 * index)
        sides.append(folder.parent)
    text = program("compare", *sides, code=1)
    assert "1 regression: train_samples_per_s_minisquad_tiny" in text and "0.700" in text
    assert "No regression found" in program("compare", *sides[::-1])


@promise("P084", "See in a comparison whether each benchmark computes the same", "benchlib compare A B")
def test_p084_a_comparison_says_whether_both_compute_the_same(recorded, program, tmp_path):
    names = ("parity", "parallel", "collectives", "machine")
    changes = {  # of the third side: another loss, wrong elements, a result farther from double precision
        "parallel": lambda tables: tables["strategies"][1]["losses"].append(9.0),
        "machine": lambda tables: tables["allreduce"][0].update(wrong_elements=3),
        "collectives": lambda tables: tables["series"][5].update(wrong_elements=1),
        "parity": lambda tables: tables["members"][2].update(fp64_max_abs=0.5),
    }
    for place, side in enumerate("abc"):
        for name in names:
            folder = tmp_path / side / "smoke-20261126" / f"{name}-cpu-10150{place}-aaaaa{place}"
            shutil.copytree(recorded(name), folder)
            (folder / "files.json").unlink(missing_ok=True)
            result = json.loads((folder / "result.json").read_text())
            result["started_at"] += 60 * place
            if side == "c":
                changes[name](result["tables"])
            (folder / "result.json").write_text(json.dumps(result))
    first, second, third = (tmp_path / side / "smoke-20261126" for side in "abc")

    def computes(*sides):
        text = program("compare", *sides)
        return {
            name: re.search(rf"^{name} .*?(the same \(\d+ values?\)|differs: .*|not known)", text, re.M)[1]
            for name in names
        }

    assert all(re.fullmatch(r"the same \([1-9]\d* values?\)", words) for words in computes(first, second).values())
    apart = computes(first, third)
    assert apart["machine"].startswith("differs: wrong elements 0 → 3")
    assert apart["collectives"].startswith("differs: wrong elements 0 → 1")
    assert apart["parallel"].startswith("differs: ") and "→ 9" in apart["parallel"]
    assert apart["parity"].startswith("differs: ") and "→ 0.5" in apart["parity"]
