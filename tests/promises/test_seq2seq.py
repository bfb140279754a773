"""Encoder-decoder: throughput, data, cost"""

import csv
import io
import json
import math
import re
import shutil
import statistics

import jsonschema
import numpy as np
import pytest
import xxhash
from promised import promise

from benchlib.core.files import home
from benchlib.judge.verdict import judge
from benchlib.launch import plan
from benchlib.results.run import Run
from benchlib.workloads.shards import Pairs, Shards

H100 = "NVIDIA H100 80GB HBM3"
CPU = {"available": True, "count": 1, "names": ["cpu"], "reason": ""}
GPUS = {"backends": {"cpu": CPU, "cuda": {**CPU, "count": 4, "names": [H100] * 4}}}
SHAPE = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 1}
SHAPE |= {"vocabulary": 64, "sequence": 8}
WORK = {"samples": 8, "epochs": 2, "learning_rate": 0.01, "single": "true", "warmup_epochs": 0, "num_shards": 3}
SEARCH = {"batch": "auto", "memory_gb": 4, "memory_share": 0.5, "amp": "false"}
DEMO = ("1-rank/seq2seq-cpu-213058-02a1fe", "2-ranks/seq2seq-cpu-213122-d1f68e")
PRICES = (0.06, 0.10)


@pytest.fixture
def planned(program, monkeypatch):
    """Return what a dry run prints on a machine of four GPUs, for settings ``NAME=VALUE``."""
    monkeypatch.setattr(plan, "probe_devices", lambda: GPUS)

    def run(*settings, code=0):
        words = [word for setting in settings for word in ("--set", setting)]
        return program("run", "seq2seq", "--dry-run", *words, code=code)

    return run


def value(output, name):
    """Return the value of a parameter in the table of a dry run."""
    return re.search(rf"^{name} +(\S+)", output, re.M)[1]


@pytest.fixture(scope="module")
def trained(program, tmp_path_factory):
    """Make a run on one device that finds three shards, one of which has a changed bit.

    Return the run, what the terminal showed, the shards, and when they were written before.
    """
    folder = tmp_path_factory.mktemp("shards")
    shards = Shards(Pairs(8, SHAPE["sequence"], SHAPE["vocabulary"], 0), folder, num_shards=3, set_samples=8)
    shards.prepare()
    content = bytearray(shards.paths[1].read_bytes())
    content[5] ^= 4
    shards.paths[1].write_bytes(content)
    before = [path.stat().st_mtime_ns for path in shards.paths]
    settings = [f"{name}={value}" for name, value in (SHAPE | WORK | SEARCH | {"data_dir": folder}).items()]
    store = tmp_path_factory.mktemp("runs")
    words = [word for setting in settings for word in ("--set", setting)]
    output = program("run", "seq2seq", "--backend", "cpu", "--out", store, *words)
    (config,) = store.glob("*/*/config.json")
    return Run(config.parent), output, sorted(folder.glob("*/*.bin")), before


def table(run, name):
    return json.loads((run / "result.json").read_text())["tables"][name]


def metrics(run):
    return json.loads((run / "result.json").read_text())["metrics"]


def facts(run):
    return json.loads((run / "result.json").read_text())["facts"]


@promise("P126", "Train with all devices found, with one, or by torchrun", "benchlib run seq2seq --set nproc=1")
def test_p126_devices(planned, recorded, trained):
    everything = planned()
    assert (value(everything, "backend"), value(everything, "nproc")) == ("cuda", "4") and "WORLD_SIZE=4" in everything
    assert "WORLD_SIZE=1" in planned("nproc=1")
    command = planned("launcher=torchrun", "nnodes=2", "rdzv_endpoint=node1:29400")
    assert "torch.distributed.run --nnodes 2 --nproc-per-node 4" in command and "node1:29400" in command
    # Two ranks shared 4 passes over 16 samples, one rank did 2 over 8.
    assert facts(recorded("seq2seq"))["samples_seen"] == [32, 32]
    assert facts(trained[0].path)["samples_seen"] == [16]


@promise(
    "P127",
    "Use short switches for one device, the full set and the number of shards",
    "benchlib run seq2seq --set single=true --set full=true --set num_shards=64 --set data_dir=/mnt/nvme",
)
def test_p127_short_switches(planned, trained, tmp_path):
    output = planned("single=true", "full=true", "num_shards=64", f"data_dir={tmp_path}")
    assert [value(output, name) for name in ("nproc", "samples", "num_shards")] == ["1", "7500000", "64"]
    assert "WORLD_SIZE=1" in output and "on 7,500,000 samples" in output
    for settings, message in (
        (("full=true", "samples=8"), "samples = 8 with full = True, which decides it: leave one out"),
        (("single=true", "nproc=2"), "nproc = 2 with single = True, which decides it: leave one out"),
        (("num_shards=17", f"data_dir={tmp_path}"), "set num_shards=16 or less"),
        (("num_shards=2",), "num_shards = 2 is about shards: set data_dir=FOLDER, too"),
    ):
        assert message in planned(*settings, code=2)
    # 8 samples of 2 x 8 tokens of 8 bytes in three files: 2, 3 and 3, each with 16 bytes more.
    assert [path.stat().st_size - 16 for path in trained[2]] == [2 * 128, 3 * 128, 3 * 128]


@promise(
    "P128",
    "Set batch, epochs, length, width, heads, layers, feed-forward size and mixed precision, bad values refused",
    "benchlib run seq2seq --set d_model=96 --set nhead=6 --set amp=false --dry-run",
)
def test_p128_sizes(planned):
    chosen = {"batch_size": 32, "epochs": 2, "sequence": 64, "d_model": 96, "nhead": 6, "encoder_layers": 2}
    chosen |= {"decoder_layers": 1, "dim_feedforward": 200, "amp": False}
    output = planned(*(f"{name}={chosen[name]}" for name in chosen))
    assert {name: value(output, name) for name in chosen} == {name: str(chosen[name]) for name in chosen}
    for setting, message in (
        ("nhead=3", "nhead = 3 does not divide d_model = 128"),
        ("batch_size=0", "batch_size"),
        ("epochs=0", "epochs"),
        ("amp=maybe", "amp"),
        ("heads=4", "unknown parameter 'heads'"),
    ):
        assert message in planned(setting, code=2)


@promise("P129", "Set the number of warm-up epochs, also 0", "benchlib run seq2seq --set warmup_epochs=0")
def test_p129_warmup_epochs(planned, recorded, trained):
    assert "3 + 3 epochs" in planned("warmup_epochs=3")
    assert "warmup_epochs" in planned("warmup_epochs=-1", code=2)
    assert [row["counted"] for row in table(recorded("seq2seq"), "epochs")] == [False, True, True, True]
    run = trained[0]
    assert [row["counted"] for row in table(run.path, "epochs")] == [True, True]
    counts = {metric["name"]: metric["n"] for metric in metrics(run.path)}
    assert counts["epoch_s_subset"] == counts["step_s_subset"] == facts(run.path)["planned_steps"] == 2


@promise(
    "P130",
    "Choose 3.5 M, 60 M, 220 M or 2.9 B parameters and read the true count",
    "benchlib run seq2seq --set size=xl --dry-run",
)
def test_p130_parameters(planned, recorded):
    import torch

    shapes = {  # width, heads, layers of each stack, feed-forward, sequence
        "small": (128, 4, 3, 512, 256),
        "medium": (512, 8, 6, 2048, 256),
        "large": (768, 12, 12, 3072, 256),
        "xl": (2048, 32, 24, 8192, 512),
    }
    counts = dict.fromkeys(shapes, 0)
    for size, (width, heads, layers, wide, sequence) in shapes.items():
        with torch.device("meta"):
            parts = [
                torch.nn.Transformer(width, heads, layers, layers, wide, batch_first=True),
                torch.nn.Embedding(8192, width),
                torch.nn.Embedding(sequence, width),
                torch.nn.Linear(width, 8192),
            ]
        counts[size] = sum(tensor.numel() for part in parts for tensor in part.parameters())
        assert f"{counts[size]:,} parameters ({size})" in planned(f"size={size}").replace("\n", " ")
    assert list(counts.values()) == [3_527_168, 52_668_416, 211_266_560, 2_854_764_544]
    assert facts(recorded("seq2seq"))["parameters"] == 3_527_168


def splitmix(counter):
    """Return the 64 bits of SplitMix64 at a counter of seed 0, as its authors print it."""
    mask = (1 << 64) - 1

    def mixed(state):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    return mixed((mixed(0) + (counter + 1) * 0x9E3779B97F4A7C15) & mask)


@promise(
    "P131",
    "Measure from generated tokens without a disk, or with shards of 128 MB on a chosen path, written once and found again",
    "benchlib run seq2seq --set data_dir=/mnt/nvme",
)
def test_p131_data(planned, recorded, trained, tmp_path):
    assert "16 samples from memory" in planned()
    assert table(recorded("seq2seq"), "disk")[0]["reason"].startswith("samples are generated in memory")
    for samples, count in ((3_750_000, 115), (7_500_000, 229)):  # of 2 x 256 tokens of 8 bytes: 32,768 in 2**27 bytes
        assert len(Shards(Pairs(samples, 256, 8192, 0), tmp_path).paths) == count == math.ceil(samples / 32_768)
    _, _, paths, before = trained
    assert [path.stat().st_mtime_ns == time for path, time in zip(paths, before, strict=True)] == [True, False, True]
    tokens = np.concatenate([np.frombuffer(path.read_bytes()[:-16], "<i8") for path in paths]).reshape(8, 2, 8)
    for sample, place in ((0, 0), (2, 5), (7, 7)):
        draw = splitmix(sample * 8 + place)
        halves = (draw >> 32, draw & 0xFFFFFFFF)
        assert tokens[sample, :, place].tolist() == [(half * half >> 32) * 64 >> 32 for half in halves]


@promise("P132", "Be told of a shard whose bytes were changed", "benchlib run seq2seq --set data_dir=/mnt/nvme")
def test_p132_changed_shard(trained):
    run, output, paths, _ = trained
    for text in (output, (run.path / "report.html").read_text()):
        assert "shard_0001.bin was written again: its bytes do not match its checksum" in text
        assert "shard_0000.bin" not in text and "shard_0002.bin" not in text
    # Whole again, by its checksum from the library itself: seeded by the set's key and the shard's number.
    key = int(paths[1].parent.name.removeprefix("pairs-"), 16)
    content = paths[1].read_bytes()
    assert content[-16:] == xxhash.xxh3_128_digest(content[:-16], seed=key ^ 1)


@promise(
    "P133",
    "Find the batch for a share of the memory",
    "benchlib run seq2seq --set batch=auto --set memory_share=0.9",
)
def test_p133_batch_for_memory(planned, trained):
    output = planned("batch=auto", "memory_share=0.9")
    assert "the largest batch that fits per device" in output and value(output, "memory_share") == "0.9"
    run = trained[0].path
    found, tried = facts(run), table(run, "batches")
    assert (
        found["memory_limit_gb"] == 0.5 * 4 and found["batch_per_rank"] == 8 and found["batch_limited_by"] == "samples"
    )
    assert tried and all(row["fits"] and row["peak_gb"] <= 0.5 * 4 for row in tried)
    assert "batch_size = 2 with batch = auto, which decides it" in planned("batch=auto", "batch_size=2", code=2)


@promise(
    "P134",
    "Read epoch time, samples/s of all devices, peak memory and utilisation, warm-up left out",
    "benchlib export RUN --to csv -o -",
)
def test_p134_speed(program, recorded):
    run = recorded("seq2seq")
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(program("export", run, "--to", "csv", "-o", "-")))}
    counted = [
        line
        for line in csv.DictReader(io.StringIO(program("export", run, "--to", "csv", "--samples", "-o", "-")))
        if line["metric"] == "epoch_s_subset"
    ]
    seconds = [float(line["value"]) for line in counted]
    assert seconds == [row["seconds"] for row in table(run, "epochs")[1:]], "the first of four epochs warms up"
    assert float(rows["epoch_s_subset"]["value"]) == pytest.approx(statistics.fmean(seconds))
    assert float(rows["end_to_end_samples_per_s_subset"]["value"]) == pytest.approx(3 * 16 / sum(seconds))
    rate = rows["train_samples_per_s_subset"]
    assert rate["n"] == "12" and float(rate["value"]) > float(rows["end_to_end_samples_per_s_subset"]["value"]) / 2
    held = max(row["resident_gb"] for row in table(run, "ranks"))
    assert float(rows["resident_memory_gb"]["value"]) == held and 0 < float(rows["utilization"]["value"]) <= 200
    assert rows["device_memory_gb"]["reason"].startswith("a CPU has no device memory")


@promise(
    "P135",
    "Get bench_GPU_Ngpu_TIMESTAMP.json with metadata, config, epochs and summary",
    "benchlib export RUN --to bench -o .",
)
def test_p135_bench_json(program, recorded, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(recorded("seq2seq"), run)
    for name, change in (
        ("config.json", {"backend": "cuda"}),
        ("result.json", {"backend": "cuda", "started_at": 1_795_367_498.25}),  # 2026-11-22 17:11:38 UTC
        ("machine.json", {"devices": GPUS}),
    ):
        (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | change))
    program("export", run, "--to", "bench", "-o", tmp_path)
    content = json.loads((tmp_path / "bench_NVIDIA-H100-80GB-HBM3_2gpu_20261122T171138Z.json").read_text())
    schema = json.loads((home() / "docs" / "bench.schema.json").read_text())
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    assert {"metadata", "config", "epochs", "summary"} <= content.keys()
    assert (content["gpu_name"], content["config"]["samples"]) == (H100, 16)
    seconds = [row["seconds"] for row in table(run, "epochs")]
    for epoch, took in zip(content["epochs"], seconds, strict=True):
        assert (epoch["wall_time_s"], epoch["total_samples"], epoch["counted"]) == (took, 16, epoch["epoch"] > 0)
        assert epoch["throughput_samples_per_s"] == pytest.approx(16 / took)
    assert content["wall_time_s"] == pytest.approx(sum(seconds[1:])) and content["total_samples"] == 3 * 16
    assert content["throughput_samples_per_s"] == pytest.approx(48 / sum(seconds[1:]))
    summary = {metric["name"]: metric["value"] for metric in content["summary"]}
    assert summary["epoch_s_subset"] == pytest.approx(statistics.fmean(seconds[1:]))


@pytest.fixture(scope="module")
def sides(program, tmp_path_factory):
    """Return the files of two runs that come with the kit, one rank and two on one machine, and the folders of the runs."""
    folders = [home() / "notebooks" / "demo-worth" / name for name in DEMO]
    files = []
    for name, folder in zip(("one", "two"), folders, strict=True):
        place = tmp_path_factory.mktemp(name)
        program("export", folder, "--to", "bench", "-o", place)
        (path,) = place.glob("bench_*_0gpu_*.json")
        files.append(path.rename(place / f"{name}.json"))
    return files, folders


@promise(
    "P136",
    "Compare exported bench_*.json files that were collected from machines",
    "benchlib compare bench_A.json bench_B.json --cost 3.00,5.50",
)
def test_p136_compare_files(program, sides, tmp_path):
    files = sides[0]
    by_files, by_folders = (json.loads(program("compare", *pair, "--json"))["contrasts"] for pair in sides)
    assert len(by_files) == 1 and by_files[0]["rows"] == by_folders[0]["rows"]
    assert {factor["name"] for factor in by_files[0]["factors"]} >= {"config.batch_size", "world_size"}
    prices = ["--cost", ",".join(map(str, PRICES)), "--json"]
    costs = [json.loads(program("compare", *pair, *prices))["worth"][0] for pair in sides]
    assert costs[0]["rows"] == costs[1]["rows"]
    assert [machine["label"] for machine in costs[0]["machines"]] == ["one.json", "two.json"]
    # A machine that is half as fast at the same work: a regression.
    content = json.loads(files[0].read_text())
    for metric in content["summary"]:
        if metric["name"].startswith("train_samples_per_s"):
            ends = {name: metric[name] / 2 for name in ("value", "ci_low", "ci_high") if metric[name]}
            metric.update(ends, samples=[rate / 2 for rate in metric["samples"]])
    (tmp_path / "slow.json").write_text(json.dumps(content))
    assert "regression" in program("compare", files[0], tmp_path / "slow.json", code=1)
    (tmp_path / "cut.json").write_text(json.dumps({"format": content["format"], "epochs": []}))
    assert "cut.json: not a bench file of version 2" in program("compare", files[0], tmp_path / "cut.json", code=2)


@promise(
    "P137",
    "Compare runs side by side with the best one marked, by speed and by cost per epoch from USD per GPU hour",
    "benchlib compare A B --cost 3.00,5.50",
)
def test_p137_cost(program, sides):
    words = ("compare", *sides[1], "--cost", ",".join(map(str, PRICES)))
    item = json.loads(program(*words, "--json"))["worth"][0]
    rows = {row["name"]: row for row in item["rows"]}
    rates, seconds, usd = (
        [cell["value"] for cell in rows[name]["values"]] for name in ("rate", "epoch_s", "usd_per_epoch")
    )
    for run, rate in zip(sides[1], rates, strict=True):
        (stated,) = (metric for metric in metrics(run) if metric["name"] == "train_samples_per_s_subset")
        assert rate == pytest.approx(stated["value"], rel=1e-6)
    assert seconds == pytest.approx([64 / rate for rate in rates])  # 64 samples are an epoch
    assert usd == pytest.approx([price / 3600 * took for price, took in zip(PRICES, seconds, strict=True)])
    best = [rows[name]["best"] for name in ("rate", "epoch_s", "usd_per_epoch")]
    assert best == [int(np.argmax(rates)), int(np.argmin(seconds)), int(np.argmin(usd))] == [1, 1, 1]
    shown = program(*words)
    assert re.search(r"^Time per epoch +\S+ s +✓ \S+ s", shown, re.M) and re.search(r"Cost per epoch .* ≈ ", shown)


@promise(
    "P138",
    "Be warned where sides differ in effective batch, precision or size",
    "benchlib compare A B --cost 3.00,5.50",
)
def test_p138_unlike_sides(program, sides, tmp_path):
    reference = sides[0][0]
    for factor, changed, warning in (
        ("config.batch_size", "8", "The work differs in effective batch: 16 / 8"),
        ("config.amp", "false", "The work differs in amp: yes / no"),
        ("config.d_model", "256", "The work differs in d_model: 128 / 256"),
    ):
        content = json.loads(reference.read_text())
        assert content["metadata"]["fingerprint"][factor] != changed
        content["metadata"]["fingerprint"][factor] = changed
        other = tmp_path / f"{factor}.json"
        other.write_text(json.dumps(content))
        assert warning in program("compare", reference, other, "--cost", "1,2")
        assert f"Not comparable: {factor} differs" in program("compare", reference, other)


@promise("P139", "Have a wrong engine found (dropout, other weights) in seq2seq", "benchlib run seq2seq")
def test_p139_wrong_engine(recorded, tmp_path):
    """How much a mistake moves the loss is measured on torch's own Transformer, and the losses of a recorded run are moved by it."""
    import torch

    def losses(seed=0, dropout=0.0):
        torch.manual_seed(seed)
        embedding, head = torch.nn.Embedding(8192, 128), torch.nn.Linear(128, 8192)
        model = torch.nn.Transformer(128, 4, 3, 3, 512, dropout=dropout, batch_first=True)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(256)
        for source, target in torch.randint(8192, (3, 2, 2, 256), generator=torch.Generator().manual_seed(7)):
            with torch.no_grad():
                states = model(embedding(source), embedding(target.roll(1, 1)), tgt_mask=mask)
            yield torch.nn.functional.cross_entropy(head(states).flatten(0, 1), target.flatten()).item()

    right = list(losses())
    wrong = {"as it was": right, "dropout": losses(dropout=0.1), "other weights": losses(seed=1)}
    moves = {name: [one / other for one, other in zip(steps, right, strict=True)] for name, steps in wrong.items()}
    words = {}
    for name, factors in moves.items():
        run = tmp_path / name
        shutil.copytree(recorded("seq2seq"), run)
        content = json.loads((run / "result.json").read_text())
        tuned = content["tables"]["engines"][1]
        assert tuned["engine"] == "tuned"
        tuned["loss"] = [step * factor for step, factor in zip(tuned["loss"], factors, strict=True)]
        (run / "result.json").write_text(json.dumps(content))
        verdict = judge(run)
        words[name] = {check.name: check.status for check in verdict.checks}["engines agree"]
    assert words == {"as it was": "PASS", "dropout": "FAIL", "other weights": "FAIL"}, moves
