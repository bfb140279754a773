"""Judging published and stored figures"""

import json
import re
import shutil
from pathlib import Path

import pytest
from promised import promise

FIXTURES = Path(__file__).parents[1] / "fixtures"
HONEST = FIXTURES / "honest"
PUBLISHED = """\
## Performance

| Configuration | Throughput | Full Dataset Time | Improvement |
|---------------|------------|------------------|-------------|
| Single GPU (node 2) | 0.18 samples/sec | 20.6 hours | Baseline |
| Single GPU (node 3) | 0.29 samples/sec | 12.8 hours | 1.6x faster |
| **Parallel (Both)** | **0.36 samples/sec** | **10.4 hours** | **4.3x faster** |
"""
SPEED_UP = "4.3 × stated, 2 × by 0.36 samples/s / 0.18 samples/s, compared with "


@pytest.fixture
def judged(program, tmp_path):
    """Judge a text as a file of this name: return the findings by rule, and the sentence. The exit code has to be ``code``."""

    def judge(text, name="table.md", code=0):
        path = tmp_path / name
        path.write_text(text)
        [document] = json.loads(program("judge", "--json", path, code=code))
        return {row["rule"]: row for row in document.get("findings", [])}, document.get("sentence", "")

    return judge


def changed(text, *changes):
    """Return a text with each (old, new) replaced; the old one has to be there once."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@promise("P140", "paste the document's performance table as it is and have it judged", "benchlib judge table.md")
def test_p140_the_published_table_as_it_is(judged):
    findings, sentence = judged(PUBLISHED, code=1)
    assert {rule: row["status"] for rule, row in findings.items()} == {"speed-up": "FAIL", "rate from counts": "PASS"}
    assert "Not read" not in sentence and "Not checked" not in sentence
    # 0.29 / 0.18 is 1.6; 2.0 is what two such nodes give.
    true, sentence = judged(changed(PUBLISHED, ("4.3x", "2.0x")))
    assert (true["speed-up"]["passed"], sentence[:18]) == (2, "Nothing impossible")
    # 0.36 samples/s for 4.8 hours are 6,221 samples, 0.18 for 20.6 hours 13,349.
    findings, _ = judged(changed(PUBLISHED, ("4.3x", "2.0x"), ("10.4 hours", "4.8 hours")), code=1)
    assert "13,349 samples as in Single GPU (node 2) in 17,280 s" in findings["rate from counts"]["finding"]
    # Each cell may have its own unit.
    judged(changed(PUBLISHED, ("4.3x", "2.0x"), ("12.8 hours", "768 min"), ("10.4 hours", "37,440 s")))
    _, sentence = judged(changed(PUBLISHED, ("4.3x", "2.0x"), ("0.29 samples/sec", "17 samples/min")))
    assert sentence.endswith("Not read: Throughput.")


NAMED = """\
machine,samples/s,speed-up
alpha,0.18,1.0x
beta,0.29,1.6x
both,0.36,4.3x
"""


@promise("P141", "have 4.3x refused where the rates give 2.0x, with the denominator named", "benchlib judge table.csv")
def test_p141_a_speed_up_that_the_rates_do_not_give(judged):
    for text, base in (
        (PUBLISHED, "Single GPU (node 2)"),
        (NAMED, "alpha"),
        (changed(NAMED, ("1.0x", "-"), ("1.6x", "")), "alpha"),  # the first row without a ratio is the baseline
        (changed(NAMED, ("speed-up", "Improvement"), ("1.0x", "baseline")), "alpha"),
        (changed(NAMED, ("samples/s", "Throughput (queries/s)")), "alpha"),
    ):
        findings, sentence = judged(text, "table.csv", code=1)
        assert SPEED_UP + base in findings["speed-up"]["finding"], findings
        assert sentence.startswith("Impossible: speed-up.")
    # 0.36 / 0.29 is 1.24: called 4.3 it is refused against the faster node, too.
    findings, _ = judged(changed(NAMED, ("alpha,0.18,1.0x\n", ""), ("1.6x", "1x")), "table.csv", code=1)
    assert "1.24138 × by 0.36 samples/s / 0.29 samples/s, compared with beta" in findings["speed-up"]["finding"]
    # Ratios to a run that is not in the table cannot be checked, and are named.
    findings, sentence = judged(changed(NAMED, ("alpha,0.18,1.0x\n", "")), "table.csv", code=3)
    assert findings["speed-up"]["status"] == "SKIPPED"
    assert "Not checked: speed-up (beta: 1.6 × stated, but not of which two runs), speed-up (both: 4.3 ×" in sentence
    claim = {
        "claim_version": 1,
        "claims": [{"speedups": [{"stated": 4.3, "new": 0.36, "old": 0.18, "base": "node 2"}]}],
    }
    assert "compared with node 2" in judged(json.dumps(claim), "claim.json", code=1)[0]["speed-up"]["finding"]


@promise("P141", "have honest ratios of unlike rows pass", "benchlib judge table.csv")
@pytest.mark.parametrize(
    ("header", "rows", "status"),
    [
        ("setup,samples/s,p99 (ms),improvement", "a,100,50,baseline b,120,25,2.0x", "PASS"),  # that of the latency
        ("step,samples/s,speed-up", "base,100,1x fp16,180,1.8x compiled,270,1.5x", "PASS"),  # each over the one before
        ("setup,gpus,samples/s,speed-up", "eager,1,100,1x fast,1,150,1.5x eager,8,780,7.8x fast,8,1150,11.5x", "PASS"),
        ("model,samples/s,time (h),speed-up", "a,10,10,1x b,18,6,1.67x", "PASS"),  # that of the time, start-up included
        ("setup,samples/s,F1,improvement", "a,100,80,baseline b,120,88,1.1x", "PASS"),  # that of the score
        ("setup,samples/s,memory (GB),improvement", "a,100,40,baseline b,120,20,2.0x", "PASS"),  # that of the memory
        ("setup,samples/s,$/h,improvement", "a,100,4,baseline b,120,2,2.4x", ""),  # that of samples for a dollar
        ("data set,samples/s,full dataset time (h),speed-up over eager", "SQuAD,100,1,1.5x CNN,10,20,2.1x", ""),
        ("model,samples/s,speed-up over eager", "BERT,100,1.5x GPT,50,2.1x", ""),
        ("model,fp32 samples/s,fp16 samples/s,speed-up", "a,100,200,2.0x b,120,200,1.67x", "SKIPPED"),
    ],
)
def test_p141_honest_ratios(program, tmp_path, header, rows, status):
    path = tmp_path / "table.csv"
    path.write_text("\n".join((header, *rows.split(" "))))
    [document] = json.loads(program("judge", "--json", path, code=0 if status == "PASS" else 3))
    assert "".join(row["status"] for row in document["findings"] if row["rule"] == "speed-up") == status


HOURS = """\
| setup | nodes | samples/s | samples | hours | speed-up |
|---|---|---|---|---|---|
| A30 | 1 | 2.1 | 13,368 | 1.77 | 1.0x |
| A30 | 2 | 4.0 | 13368 | 0.93 | 1.9x |
"""
SETUPS = """\
| Configuration | Throughput (samples/s) | TTFT p99 (ms) | Duration (h) | samples | Efficiency |
|---|---|---|---|---|---|
| 1x A30 | 59.4 | 410 | 0.06 | 13,368 | 100% |
| 2x A30 | 112.9 | 1730 | 0.03 | 13368 | 95% |
"""


@promise("P142", "have a table of rates, hours, samples and speed-up of one machine judged", "benchlib judge table.md")
def test_p142_rates_hours_samples_and_speed_up(judged, program):
    for table in (HOURS, SETUPS):
        assert {row["status"] for row in judged(table)[0].values()} == {"PASS"}
    for table, rule, *changes in (
        (HOURS, "rate from counts", ("0.93", "0.5")),  # 13,368 / 0.5 h are 7.4 samples/s
        (HOURS, "speed-up", ("1.9x", "3.5x")),  # 4.0 / 2.1
        (HOURS, "scaling", ("| 4.0 | 13368 | 0.93 | 1.9x", "| 9.0 | 13368 | 0.41 | 4.3x")),  # more than twice on two
        (SETUPS, "rate from counts", ("0.03", "0.01")),
        (SETUPS, "speed-up", ("95%", "70%")),
        (SETUPS, "scaling", ("112.9", "190.4")),
    ):
        assert judged(changed(table, *changes), code=1)[0][rule]["status"] == "FAIL", rule
    tables = [path for path in HONEST.iterdir() if path.suffix in (".md", ".csv")]
    assert len(tables) >= 3 and "Impossible" not in program("judge", *tables)
    # Columns that are no rates are never taken for such.
    for table in ("gpus,seed,steps,step_ms\n1,17,100,50\n4,1234,800,52\n", "gpus,parameters (billion)\n1,1.4\n16,40\n"):
        judged(table, "table.csv", code=2)


@promise(
    "P143",
    "have 15 to 25 samples/s of an A30 shown as claimed, never as a threshold",
    "benchlib references --device a30",
)
def test_p143_the_claimed_rate_of_an_a30(program, judged):
    shown = " ".join(program("references", "--device", "a30").split())
    assert shown.startswith("published holds for source validity") and "15 to 25 samples/s 1 x NVIDIA A30" in shown
    assert "unconfirmed" in shown and "claimed by its source, not measured" in shown
    assert "0.18 to 0.29 samples/s" in shown and "none was measured here" in shown
    # A hundredth of what is claimed, and a hundred times it, are judged by what the file states alone.
    measured = "setup,samples/s,samples,hours,speed-up\nNVIDIA A30,{},13368,{},1.0x\n"
    for rate, hours in ((0.18, 20.63), (0.29, 12.8), (1800, 0.002063)):
        findings, _ = judged(measured.format(rate, hours), "table.csv")
        assert [row["status"] for row in findings.values()] == ["PASS"]


def loadgen(name, *changes):
    return changed((HONEST / f"loadgen-{name}.txt").read_text(), *changes)


@promise(
    "P144", "have a LoadGen summary judged: verdict, rates and constraints", "benchlib judge mlperf_log_summary.txt"
)
def test_p144_a_loadgen_summary(judged, tmp_path):
    for name in ("offline", "server", "server-tokens", "server-tokens-6.0.17", "single-stream"):
        findings, sentence = judged(loadgen(name), "mlperf_log_summary.txt")
        assert {row["status"] for row in findings.values()} == {"PASS"} and findings["valid verdict"], name
    # 2,640,000 samples in 655.320 s are 4,028.57 a second.
    assert "2,640,000 samples" in judged(loadgen("offline"), "a.txt")[0]["rate from counts"]["finding"]
    server = "99.00 percentile latency (ns)   : 121004871"
    for rule, words, name, *changes in (
        ("rate from counts", "3,000 samples/s stated", "offline", ("4028.57", "3000.00")),
        ("rate from counts", "by 1 samples at a time", "single-stream", ("overhead        : 651.11", "overhead        : 851.11")),
        ("limits met", "duration 655.32 s, at least 1,200 s", "offline", ("min_duration (ms): 600000", "min_duration (ms): 1200000")),
        ("rates of requests", "3,701.87 requests/s answered of 3,602.11", "server", ("3601.87", "3701.87")),
        ("limits met", "p99 of latency 0.135005 s, at most 0.13 s", "server", (server, server.replace("121", "135"))),
        ("limits met", "p99 of first token 0.497121 s, at most 0.4 s", "server-tokens-6.0.17", ("ttft_latency (ns): 2000000000", "ttft_latency (ns): 400000000")),
        ("rates of requests", "560.65 and 660.65 tokens/s", "server-tokens-6.0.17", ("tokens per second: 560.65", "tokens per second: 660.65")),
        ("valid verdict", "Min duration not satisfied", "server", ("Min duration satisfied : Yes", "Min duration satisfied : NO")),
    ):  # fmt: skip
        findings, sentence = judged(loadgen(name, *changes), "mlperf_log_summary.txt", code=1)
        assert words in findings[rule]["finding"] and sentence.startswith("Impossible: "), findings[rule]
    # The query of Offline may be filled up to a multiple of the loaded samples: 6,000 of 1,000 here.
    filled = [
        ("4028.57", "100"),
        ("2640000", "5500"),
        ("count : 10833", "count : 1000"),
        ("655320118447", "60000000000"),
    ]
    percentiles = [
        (value, f"{60 - place}000000000")
        for place, value in enumerate(re.findall(r"percentile.*: (\d+)", loadgen("offline"))[::-1], 1)
    ]
    shorter = [("329114004112", "30000000000"), ("min_duration (ms): 600000", "min_duration (ms): 60000")]
    judged(loadgen("offline", *filled, *percentiles, *shorter), "mlperf_log_summary.txt")
    # The percentile of the limit is that of the detail log, if it is there.
    log = tmp_path / "mlperf_log_detail.txt"
    log.write_text(':::MLLOG {"key": "effective_target_latency_percentile", "value": 0.97, "metadata": {}}\n')
    findings, _ = judged(loadgen("server", (server, server.replace("121", "135"))), "mlperf_log_summary.txt")
    assert "p97 of latency 0.097911 s, at most 0.13 s" in findings["limits met"]["finding"]


@promise("P145", "exit non-zero for a summary that says INVALID", "benchlib judge mlperf_log_summary.txt")
def test_p145_invalid_is_its_own_word(judged, program):
    invalid = ("Result is : VALID", "Result is : INVALID")
    unmet = ("Early stopping satisfied: Yes", "Early stopping satisfied: NO")
    findings, sentence = judged(loadgen("server", invalid, unmet), "summary.txt", code=4)
    assert sentence.startswith(
        "INVALID, so that it is no result: Server run (not satisfied: Early stopping). Nothing impossible"
    )
    assert {row["status"] for row in findings.values()} == {"PASS"}  # nothing in it contradicts itself
    # What is impossible in it, or cannot be read beside it, is said first.
    _, sentence = judged(loadgen("server", invalid, unmet, ("3601.87", "3701.87")), "summary.txt", code=1)
    assert sentence.startswith("INVALID, so that it is no result") and "Impossible: rates of requests" in sentence
    assert "INVALID" in program("judge", "--help")


LENGTHS = "setup,length,samples/s,tokens/s\n1x laptop GPU,2048,156.2,{}\n"


@promise(
    "P146",
    "have 156.2 samples/s and 320,204.8 tokens/s at length 2048, and 2.5 PFLOP/s on one device, refused",
    "benchlib judge table.csv claim.json",
)
def test_p146_tokens_of_a_length_and_pflops(judged, program):
    findings, _ = judged(LENGTHS.format('"320,204.8"'), "table.csv", code=1)
    row = findings["tokens and samples"]["finding"]
    assert "320,205 tokens/s stated, 319,898 tokens/s by 156.2 samples/s × 2,048 tokens" in row
    for heads in (("length", "Sequence length"), ("length", "seq_len"), ("length", "tokens/sample")):
        judged(changed(LENGTHS, heads).format(320204.8), "table.csv", code=1)
    assert judged(LENGTHS.format(319898), "table.csv")[1].startswith("Nothing impossible")
    # Fewer tokens may be those without padding, twice as many those of source and target: not refused, and named.
    for tokens in (250_000, 2 * 319_898):
        assert "Not checked: tokens and samples" in judged(LENGTHS.format(tokens), "table.csv", code=3)[1]
    assert "Not read: seq length" in judged("gpus,requests/s,seq length\n1,2,512\n8,15,512\n", "table.csv")[1]
    # 6 × 1.3e9 parameters × 320,204.8 tokens/s are 2.5 PFLOP/s: above the peak of one device, that is 312 TFLOP/s for an A100.
    assert "2.5 PFLOP/s" in program("judge", FIXTURES / "impossible" / "15-laptop.json", code=1)
    compute = {"device": "NVIDIA A100-SXM4-80GB", "precision": "bf16", "flops_per_s": 2.5e15}
    for ranks, code in ((1, 1), (9, 0)):
        claim = {"claim_version": 1, "claims": [{"compute": compute | {"ranks": ranks}}]}
        assert (
            "312.0 TFLOP/s" in judged(json.dumps(claim), "claim.json", code)[0]["below the peak"]["finding"]
            or ranks > 1
        )


@promise("P147", "judge nccl-tests output and impossible collectives", "benchlib judge all_reduce.txt")
def test_p147_collectives(judged, program):
    logs = [
        path
        for path in HONEST.iterdir()
        if path.name.split("-")[0] in ("all_reduce", "all_gather", "alltoall", "sendrecv")
    ]
    assert len(logs) >= 7
    assert program("judge", *logs).count("Nothing impossible") == len(logs)
    for name in ("13-doubled-algbw.json", "14-not-waited.txt"):
        assert "Impossible: " in program("judge", FIXTURES / "impossible" / name, code=1)
    text = (HONEST / "all_reduce-8xh100-nvls.txt").read_text()
    last = re.findall(r"^\s*8589934592 .*$", text, re.MULTILINE)[0]
    seconds, algbw, busbw = (float(cell) for cell in last.split()[5:8])
    assert algbw == pytest.approx(8589934592 / seconds / 1e3, rel=1e-3) and busbw == pytest.approx(
        1.75 * algbw, rel=1e-3
    )
    wrong = text.replace(last, last.replace(f"{algbw:.2f}", f"{2 * algbw:.2f}", 1))
    findings, _ = judged(wrong, "doubled.txt", code=1)
    assert findings["algbw is S/t"]["status"] == findings["busbw factor"]["status"] == "FAIL"
    # Logs of pods come with the pod's name or the time before each line.
    for mark in ("[pod/launcher-0/main] ", "2026-01-02T03:04:05.500000000+02:00 "):
        marked = "\n".join(mark + line for line in text.splitlines())
        assert (
            judged(marked, "pod.txt")[0]["algbw is S/t"]["passed"]
            == judged(text, "log.txt")[0]["algbw is S/t"]["passed"]
        )


@promise(
    "P148",
    "see every extrapolation and estimate labelled as predicted, claimed or assumed",
    "benchlib run parallel --dry-run --set machine=h100",
)
def test_p148_estimates_are_labelled(program, recorded):
    settings = ("machine=h100", "model=bert-base", "precision=bf16", "strategies=data")
    text = program("run", "parallel", "--dry-run", *(word for setting in settings for word in ("--set", setting)))
    estimates, sources = text.split("expected work")[1].split("sources of the peaks:")
    assert "estimates for h100" in estimates and "nothing was measured; times are lower bounds" in estimates
    assert "step at least" in estimates and "samples/s at most" in estimates
    lines = [line for line in sources.splitlines() if re.search(r"\((TFLOP/s|GB|GB/s|GB/s one way|us)\)", line)]
    assert len(lines) >= 8 and all(re.search(r": (claimed|assumed), \S", line) for line in lines)
    assert "989: claimed, pytorch/torchtitan" in sources  # the dense bf16 peak of an H100
    # In a result each number says whether it was measured, derived, claimed or is not available, and then why.
    metrics = json.loads((recorded("collectives") / "result.json").read_text())["metrics"]
    assert {metric["provenance"] for metric in metrics} <= {"measured", "derived", "claimed", "not_available"}
    assert all(metric["reason"] for metric in metrics if metric["value"] is None)


@promise(
    "P149",
    "follow published figures to their sources and conditions, and know that they are others' results",
    "benchlib references",
)
def test_p149_published_figures(program):
    shown = " ".join(program("references").split())
    assert re.search(r"\d{3} figures, claimed by their sources; none was measured here\. Invalid ones are never", shown)
    f1 = " ".join(program("references", "--metric", "f1").split())
    # google-research/bert, README: 88.41 of BERT-base by 2 epochs of batch 12 at 3e-5.
    base = re.search(r"88\.41 BERT-base uncased, .*? 88\.52", f1)[0]
    assert (
        "google-research/bert, README" in base
        and "epochs 2" in base
        and "learning rate 3e-05" in base
        and "trusted" in base
    )
    h200 = " ".join(program("references", "--device", "h200").split())
    assert re.search(r"19,667 seq/s 8 x NVIDIA H200 SXM, .*?invalid", h200) and "21.1 times one device" in h200
    assert "did you mean" in program("references", "--metric", "f11", code=2)


@promise("P150", "have runs whose files or rows were edited refused", "benchlib list --runs")
def test_p150_edited_runs_are_refused(program, ran, recorded, tmp_path):
    sizes = ("matmul_sizes=256", "precisions=fp32", "seconds=0.05", "allreduce_mib=0.001", "copy_mib=8")
    original = ran("machine", *sizes).path
    store = tmp_path / "outputs" / "smoke-20261126"
    run = Path(shutil.copytree(original, store / original.name))
    assert "Nothing impossible" in program("judge", run)
    assert "DAMAGED" not in program("list", "--runs", "--out", store.parent)
    edits = {"result.json": r'("value": ?)', "machine.json": r'(_cores": ?)', "events-rank0.jsonl": r'("t": ?)'}
    for name, before in edits.items():
        content = (run / name).read_text()
        edited = re.sub(before, r"\g<1>7", content, count=1)  # one digit more
        assert edited != content
        (run / name).write_text(edited)
        assert re.search(f"{name} was (cut or )?altered", program("judge", run, code=2))
        listed = program("list", "--runs", "--out", store.parent)
        assert "DAMAGED" in listed and re.search(f"{name} was (cut or )?altered", listed)
        assert "altered" in program("baseline", "accept", run, "--reason", "faster", code=2)
        (run / name).write_text(content)
    # Without the list of its files a metric still has to be what its rows say.
    bare = Path(shutil.copytree(recorded("collectives"), tmp_path / "bare"))
    assert "Nothing impossible" in program("judge", bare)
    result = json.loads((bare / "result.json").read_text())
    metric = next(each for each in result["metrics"] if each["name"] == "allreduce_busbw_gbps")
    metric["value"] *= 2
    (bare / "result.json").write_text(json.dumps(result))
    said = program("judge", bare, code=2)
    assert "changed since the run ended: allreduce_busbw_gbps is" in said and "its row says" in said
