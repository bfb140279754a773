"""Published figures: the registry is sound, and a run stands beside those that are comparable and no others."""

import re

import pytest
from click.testing import CliRunner

from benchlib.benchmarks.inference.spec import GEN_LEN
from benchlib.cli import main
from benchlib.config.schema import build, save_config
from benchlib.core.definitions import encoder_forward_flops
from benchlib.core.files import write_json
from benchlib.judge.published import Measured, comparable, conditions_text, device_name, placements, section, summary
from benchlib.judge.references import UNITS, registry
from benchlib.results.run import Result, Run, save_result
from benchlib.show import report

H100 = "NVIDIA H100 80GB HBM3"
BERT_BASE = 84_934_656  # parameters of the matrix products of 12 layers, 768 wide
RATE = {
    "model": "BERT-base uncased", "data": "SQuAD v1.1", "sequence_length": 384, "padding": "to the full length", "precision": "fp16",
    "devices": 1, "nodes": 1, "window": "whole training", "batch": 320,
}  # fmt: skip


def value(name):
    return registry().figure(name).value


def rate(device, value=800.0, **changes):
    return comparable(Measured("end_to_end_samples_per_s", "throughput", value, device, RATE | changes))


def ids(placement):
    return [place.figure.id for place in placement]


def test_every_figure_says_what_it_holds_for_and_where_it_stands():
    figures, sources, devices = registry().figures, registry().sources, registry().devices
    assert len(figures) > 100 and len({item.id for item in figures}) == len(figures)
    assert all(re.compile(device.torch) for device in devices.values())
    for item in figures:
        assert conditions_text(item) and len(registry().cite(item)) > 15, item.id
        low, middle, high = item.in_kit_unit()
        assert 0 < low <= middle <= high, item.id
        assert item.unit in ("", item.quantity.unit) or (item.unit, item.quantity.unit) in UNITS, item.id
        assert item.conditions.get("device") in {None, *devices} and item.source in sources, item.id
        assert bool(sources[item.source].url if item.validity == "trusted" else item.reason), item.id
        assert item.quantity.spread == "" or registry().figure(item.quantity.spread), item.id


@pytest.mark.parametrize(
    ("compute", "expected", "within"),
    [
        # Speed-ups that the sources state themselves.
        (lambda: value("bert-large-8xa100-fp16") / value("bert-large-1xa100-fp16"), 7.66, 0.005),
        # Shares of the vendor's peak that follow from the FLOPs of a sequence, from two sources each.
        (lambda: share("bert-base-1xa100-sxm", "peak-a100"), 0.30, 0.005),
        (lambda: share("bert-base-1xh100-sxm", "peak-h100-sxm"), 0.18, 0.005),
        # Efficiencies as in the table of achievable rates.
        (lambda: value("mamf-a100-sxm") / value("peak-a100"), 0.869, 0.0005),
        (lambda: value("mamf-h100-sxm") / value("peak-h100-sxm"), 0.803, 0.0005),
        (lambda: value("bert-large-f1-mlperf-99") / value("bert-large-f1-mlperf"), 0.99, 1e-5),
        # 24 minutes for two epochs; 0.0574 h against the rate of the same page; algbw 275 GB/s against busbw of 8 ranks.
        (lambda: 2 * value("squad-train-features") / (24 * 60), value("bert-base-1xv100-huggingface"), 0.2),
        (lambda: 2 * value("squad-train-features") / (3600 * value("bert-large-8xa100-hours")), value("bert-large-8xa100-fp16"), 15),
        (lambda: 275 * 2 * 7 / 8, value("allreduce-8xh100-nvls"), 2),
    ],
)  # fmt: skip
def test_figures_agree_with_what_can_be_recomputed(compute, expected, within):
    assert compute() == pytest.approx(expected, abs=within)


def share(rate_id, peak_id):
    per_sequence = 3 * encoder_forward_flops(12, 768, 3072, 384)
    assert per_sequence == pytest.approx(212.0e9, rel=1e-3)
    return value(rate_id) * per_sequence / (value(peak_id) * 1e12)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("NVIDIA H100 80GB HBM3", {"h100-sxm"}),
        ("NVIDIA H100 PCIe", {"h100-pcie"}),
        ("NVIDIA A100-SXM4-80GB", {"a100", "a100-sxm", "a100-sxm-80gb"}),
        ("NVIDIA A100-PCIE-40GB", {"a100", "a100-pcie", "a100-40gb", "a100-pcie-40gb"}),
        ("AMD Instinct MI300X", {"mi300x"}),
        # What only looks like a known one: a slice, a successor, another form, two kinds in one machine, a processor.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", set()),
        ("NVIDIA H200 NVL", set()),
        ("NVIDIA H100 80GB HBM3 and NVIDIA A100-SXM4-80GB", set()),
        ("", set()),
    ],
)
def test_a_device_is_known_by_its_whole_name_only(name, devices):
    assert registry().devices_of(name) == devices


@pytest.mark.parametrize(
    ("name", "data_sheet"),
    [
        # The data sheets state these with structured sparsity, which doubles them.
        (H100, 1979 / 2), ("NVIDIA H100 PCIe", 1513 / 2), ("NVIDIA H100 NVL", 1671 / 2), ("NVIDIA H200", 1979 / 2),
        ("NVIDIA A100-SXM4-80GB", 624 / 2), ("NVIDIA B200", 4500 / 2), ("NVIDIA GB200", 5000 / 2),
        # And these without; an MI250X has two dies, each a device.
        ("AMD Instinct MI300X", 1307.4), ("AMD Instinct MI325X", 1307.4), ("AMD Instinct MI250X", 383 / 2),
    ],
)  # fmt: skip
def test_specified_peaks_are_dense(name, data_sheet):
    devices = registry().devices_of(name)
    own = [item for item in registry().figures if item.kind == "specified" and item.conditions.get("device") in devices]
    dense = [item.in_kit_unit()[1] for item in own if item.conditions.get("precision") == "bf16"]
    assert dense == [pytest.approx(data_sheet * 1e12, rel=0.01)]


def test_an_invalid_figure_is_never_used():
    placed = rate("NVIDIA H200", 7000.0, devices=8)
    assert ids(placed) == ["bert-base-8xh200-recomputed"]
    assert placed[0].figure.validity == "unconfirmed"
    assert ids(rate("NVIDIA B200", 9000.0, devices=8)) == []


def write_machine(folder, *names):
    write_json(folder / "machine.json", {"devices": {"backends": {"cuda": {"available": True, "names": names * 8}}}})


def squad_run(folder, *, device=H100, facts=None, **config):
    """Write a whole run of BERT-base on SQuAD v1.1 with made-up values."""
    setup = {"data": "squad", "model": "bert-base-uncased", "train_questions": 0, "eval_questions": 0, "epochs": 2, "precision": "fp16",
             "engine": "trainer", "trainer_padding": "max_length", "batch_size": 32, "learning_rate": 5e-5, "backend": "cuda"} | config  # fmt: skip
    resolved = build("squad", {"benchmark": "squad", **setup})
    known = {
        "epoch_share": 1.0,
        "cut_by": "",
        "matmul_parameters": BERT_BASE + 2 * 768,
        "bucket_bytes": [25 * 2**20],
    } | (facts or {})
    known |= {
        "quality": resolved.quality_scope() + "_cut" * (known["epoch_share"] < 1),
        "speed_scope": resolved.scope(),
    }
    known |= {"f1": 88.31, "exact_match": 81.0, "trained_samples": 80000, "train_s": 100.0}
    folder.mkdir()
    save_config(resolved, folder)
    save_result(folder, Result.of(resolved, status="complete", facts=known))
    write_machine(folder, device)
    return Run(folder)


def placed_ids(run):
    return {item.quantity: ids(places) for item, places in placements(run)}


def test_a_whole_training_of_bert_stands_beside_the_published_ones(tmp_path):
    run = squad_run(tmp_path / "run")
    placed = placed_ids(run)
    assert placed["f1"] == ["bert-base-f1-paper", "bert-base-f1-google", "bert-base-f1-huggingface"]
    assert placed["exact_match"] == ["bert-base-em-google", "bert-base-em-huggingface"]
    assert placed["end_to_end_samples_per_s"] == ["bert-base-1xh100-sxm"]
    said = summary(run)
    assert "F1: 88.31, published 88.5 in Devlin et al." in said
    assert "-0.19 points; a seed alone moves F1 by about 0.16" in said
    assert (
        "800.0 seq/s, published 846 (818 to 915) seq/s in lambdal/deeplearning-benchmark, logs of 39 hosts: 0.946"
        in said
    )
    assert "batch 12, learning rate 3e-05" in section(run)["rows"][1]["conditions"]
    page = report.render(run.path).read_text()
    assert "<h2>Compared with published figures</h2>" in page
    assert 'href="https://arxiv.org/abs/1810.04805"' in page
    assert "19,667" not in page


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"facts": {"epoch_share": 0.5}}, {"end_to_end_samples_per_s"}),
        ({"init": "random"}, set()),
        ({"facts": {"matmul_parameters": 10_000_000}}, set()),  # a folder that is only named like BERT
        ({"model": "tiny"}, set()),
        ({"epochs": 0.5}, {"end_to_end_samples_per_s"}),
        ({"engine": "native"}, {"f1", "exact_match"}),
        ({"device": "NVIDIA GeForce RTX 5090"}, {"f1", "exact_match"}),
    ],
)
def test_what_is_not_the_same_stands_beside_nothing(tmp_path, changes, left):
    placed = placed_ids(squad_run(tmp_path / "run", **changes))
    assert {name for name in ("f1", "exact_match", "end_to_end_samples_per_s") if placed.get(name)} == left


def test_a_machine_stands_beside_what_is_achieved_and_what_is_specified(tmp_path):
    config = build("machine", {"benchmark": "machine", "backend": "cuda", "nproc": 8, "precisions": ["bf16", "fp32"], "allreduce_mib": [1, 1024]})  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(config, folder)
    write_machine(folder, H100)
    products = [
        {"precision": name, "ranks": 8, "alone_flops": rate} for name, rate in (("bf16", 7.0e14), ("fp32", 5.0e13))
    ]
    size = 1 << 30
    exchange = {"bytes": size, "times_us": 1e6 * 8e-9 * size * 2 * 7 / 8 / 3600.0, "wrong_elements": 0}  # 3600 Gbps
    tables = {"products": products, "allreduce": [exchange | {"times_us": [exchange["times_us"]]}]}
    save_result(folder, Result.of(config, status="complete", tables=tables))
    placed = placements(Run(folder))
    assert [(item.label, ids(places)) for item, places in placed] == [
        ("matrix products in bf16", ["mamf-h100-sxm", "peak-h100-sxm"]),
        ("matrix products in fp32", ["peak-h100-sxm-fp32"]),
        ("all-reduce", ["allreduce-8xh100-nvls", "allreduce-8xh100-ring"]),
    ]
    assert [place.compared for place in placed[0][1]] == ["0.881", "0.708"]  # 700 / 794.5 and / 989
    mixed = {"devices": {"backends": {"cuda": {"names": [H100, "NVIDIA A100-SXM4-80GB"]}}}}
    assert registry().devices_of(device_name(mixed, "cuda", 2)) == set()
    assert registry().devices_of(device_name(mixed, "cuda", 1)) == {"h100-sxm"}


def test_the_command_line_lists_the_registry():
    runner = CliRunner(env={"COLUMNS": "160"})
    listed = runner.invoke(main, ["references", "--metric", "end_to_end", "--device", "h200"])
    assert listed.exit_code == 0
    assert "19,667 seq/s" in listed.output
    assert "21.1 times one device" in listed.output
    assert "3 figures, claimed by their sources" in listed.output
    wrong = runner.invoke(main, ["references", "--metric", "f2"])
    assert wrong.exit_code == 2
    assert "did you mean f1?" in wrong.output


def test_no_figure_states_more_tokens_than_its_answers_may_have():
    stated = [
        item
        for item in registry().figures
        if item.metric.startswith("generated") and "articles" in str(item.conditions)
    ]
    limited = [item for item in stated if "new tokens" in item.conditions["setting"]]
    assert len(limited) == 2
    for item in limited:
        answers = int(re.search(r"([\d,]+) articles", item.conditions["data"])[1].replace(",", ""))
        most = answers * int(re.search(r"to (\d+) new tokens", item.conditions["setting"])[1])
        low, _, high = item.in_kit_unit()
        # A token of English text has some four or five characters: these figures are no tokens.
        assert (
            (high <= most)
            if item.quantity.unit == "tokens"
            else (item.quantity.unit, 3 < low / most < 6) == ("characters", True)
        )
    assert value("llama-8b-generated-characters") == GEN_LEN


def test_the_windows_of_published_trainings_are_named_by_their_step():
    # 384 tokens that advance by 128 give more windows than 384 that share 128, by which this kit cuts: 88,524.
    figure = registry().figure("squad-train-features")
    assert (figure.value, figure.conditions["window_step"]) == (88641, 128)
    assert not any("doc_stride" in item.conditions for item in registry().figures)
