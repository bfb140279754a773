"""Readers of foreign results against hand-written expectations, and what they say of cut, odd and edited files."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.rules import judge_claims

FIXTURES = Path(__file__).parents[2] / "fixtures"
HONEST = FIXTURES / "honest"

# From nccl-tests before version 2.13: no root, no program, errors as floats; collected by mpirun.
OLD = """\
[1,0]<stdout>:# nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
[1,0]<stdout>:#
[1,0]<stdout>:# Using devices
[1,0]<stdout>:#   Rank  0 Pid  30183 on     node-a device  0 [0x07] Tesla V100-SXM2-32GB
[1,0]<stdout>:#   Rank  1 Pid  30183 on     node-a device  1 [0x0a] Tesla V100-SXM2-32GB
[1,0]<stdout>:#
[1,0]<stdout>:#                                                     out-of-place                       in-place
[1,0]<stdout>:#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
[1,0]<stdout>:#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
[1,0]<stdout>:     1048576        262144   float     sum    100.0   10.49   10.49  5e-07     80.0   13.11   13.11  5e-07
[1,0]<stdout>:     2097152        524288   float     sum    150.0   13.98   13.98  5e-07    140.0   14.98   14.98    N/A
[1,0]<stdout>:# Out of bounds values : 0 OK
[1,0]<stdout>:# Avg bus bandwidth    : 13.1400
"""


def failures(path):
    return {
        judgement.rule.name: judgement.failures
        for judgement in judge_claims(read_claims(path)[1])
        if judgement.failures
    }


def test_nccl_text_is_read_by_its_columns():
    name, claims = read_claims(HONEST / "all_reduce-8xh100-nvls.txt")
    row, average = claims[-3].collective, claims[-1].averages[0]
    assert (name, len(claims), claims[-3].subject) == ("nccl-tests", 64, "all_reduce 8 GiB, in place")
    assert (row.operation, row.ranks, row.size_bytes) == ("all_reduce", 8, 8589934592)
    assert (row.seconds, row.algbw_gbytes_per_s, row.busbw_gbytes_per_s) == (pytest.approx(0.0313445), 274.05, 479.59)
    assert (row.wrong_elements, row.bound_gbytes_per_s) == (0, 450)
    assert (claims[-2].subject, claims[-2].collective.wrong_elements) == ("footer", 0)
    assert (len(average.values), average.stated) == (62, pytest.approx(sum(average.values) / 62, abs=0.005))


def test_old_nccl_text_has_neither_root_nor_program(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text(OLD)
    name, claims = read_claims(path)
    row = claims[3].collective
    assert (name, len(claims), len(claims[-1].averages[0].values)) == ("nccl-tests", 6, 4)
    assert (row.operation, row.ranks, row.size_bytes, row.busbw_gbytes_per_s) == ("", 2, 2097152, 14.98)
    assert (row.wrong_elements, row.bound_gbytes_per_s) == (None, 150)  # that column holds differences, no counts
    assert failures(path) == {}


NVLS = (HONEST / "all_reduce-8xh100-nvls.txt").read_text()


@pytest.mark.parametrize(
    "mark",
    [
        "[1,0]<stdout>:",
        "0: ",
        "[pod/launcher-0/main] ",
        "2026-01-02T03:04:05.5+02:00 ",
        "node-a: ",
        "trainer-1  | ",
        "17 ",
    ],
)
def test_what_a_log_collector_puts_before_each_line_is_not_read(tmp_path, mark):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(mark + line for line in NVLS.splitlines()))
    assert read_claims(path) == read_claims(HONEST / "all_reduce-8xh100-nvls.txt")


def test_a_column_that_an_operation_leaves_blank_moves_no_other(tmp_path):
    text = (HONEST / "hypercube-4.txt").read_text()
    path = tmp_path / "log.txt"
    path.write_text(text)
    row = read_claims(path)[1][0].collective
    assert (row.seconds, row.algbw_gbytes_per_s, row.wrong_elements) == (pytest.approx(50e-6), 20.97, 0)
    # A row whose operation is not blank has lost its end.
    path.write_text(re.sub(r"(?m)^(\s*8589934592 .*\S)\s+0$", r"\1", NVLS))
    with pytest.raises(UserError, match="a row of 12 columns under 13 headings; the file may be cut"):
        read_claims(path)


def test_the_lines_of_two_processes_at_once_are_refused_by_what_they_are(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(line for line in OLD.replace("[1,0]<stdout>:", "").splitlines() for _ in range(2)))
    with pytest.raises(UserError, match=r"lines of several tests are mixed: .* Build nccl-tests with MPI=1"):
        read_claims(path)


@pytest.mark.parametrize(
    ("old", "new", "unmet"),
    [
        ("331.39", "331.39 FAILED", "average bus bandwidth of NCCL_TESTS_MIN_BW"),
        (
            "#\n# Collective",
            "node-a: Test NCCL failure common.cu:958 'remote error'\n# Collective",
            "Test NCCL failure common.cu:958",
        ),
    ],
)
def test_a_test_that_calls_itself_failed_is_no_result(tmp_path, old, new, unmet):
    path, text = tmp_path / "log.txt", (HONEST / "all_reduce-docker.txt").read_text()
    path.write_text(text.replace("trainer-1  | ", "").replace(old, new))
    [document] = json.loads(run("--json", path).stdout)
    assert document["exit_code"] == 4 and f"the test, FAILED (not satisfied: {unmet}" in document["sentence"]


def test_the_csv_of_rccl_tests_is_read_by_its_last_columns():
    for name, ranks, place in (("rccl-8xmi300x.csv", 8, "out of place"), ("rccl-mpi.csv", 16, "out of place")):
        kind, claims = read_claims(HONEST / name)
        row = claims[0].collective
        assert (kind, claims[0].subject) == ("nccl-tests", f"all_reduce 256 MiB, {place}")
        assert (row.operation, row.ranks, row.size_bytes, row.wrong_elements) == ("all_reduce", ranks, 2**28, 0)
    assert read_claims(HONEST / "rccl-8xmi300x.csv")[1][1].collective.wrong_elements is None


def test_of_a_part_of_the_rows_no_average_follows():
    whole, part = (read_claims(HONEST / f"all_reduce-{name}.txt")[1] for name in ("pdsh", "excerpt"))
    assert [len(claims[-1].averages) for claims in (whole, part)] == [1, 0]


@pytest.mark.parametrize(
    ("name", "unread"),
    [
        ("loadgen-single-stream.txt", []),
        ("loadgen-server-tokens.txt", []),
        ("hypercube-4.txt", ["the bus bandwidth of hypercube (no factor is agreed on)"]),
        ("all_reduce-8xh100-unnamed.txt", ["the bus bandwidth: the file does not name its program (all_reduce_perf or the like)"]),
        ("serving.md", ["TPOT p99 (ms)"]),
        ("loadgen-server-detail.txt", []),
    ],
)  # fmt: skip
def test_what_was_not_read_is_named(name, unread):
    assert json.loads(run("--json", HONEST / name).stdout)[0]["not_read"] == unread


def test_the_detail_log_states_what_the_summary_does():
    _, [detail] = read_claims(HONEST / "loadgen-server-detail.txt")
    _, [summary] = read_claims(HONEST / "loadgen-server.txt")
    assert (detail.subject, detail.verdict, detail.requests.due_per_s) == (summary.subject, summary.verdict, 3602.11)
    assert detail.latencies[0].max_s == summary.latencies[0].max_s


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        ("node-a:4000:4100 [0] NCCL INFO AllReduce: 1073741824 Bytes -> Algo RING proto SIMPLE", "RING"),
        # Where several are left, or none is named, the one counts that asks least of the links.
        ("NCCL_ALGO=^NVLS,NVLSTree", ""),
        ("NCCL_ALGO=Ring,NVLS", ""),
        ("node-a:4000:4100 [0] NCCL INFO NCCL_ALGO set by environment to Ring", "RING"),
    ],
)
def test_the_algorithm_is_what_the_log_of_nccl_tells(tmp_path, line, algorithm):
    path = tmp_path / "log.txt"
    path.write_text(line + "\n" + (HONEST / "all_reduce-8xh100-unnamed.txt").read_text())
    assert read_claims(path)[1][0].collective.algorithm == algorithm


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"),
    [
        ("all_reduce-8xh100-nvls.txt", "272.39  476.68       0", "272.39  476.68      17", "right results"),
        ("all_reduce-8xh100-nvls.txt", "values : 0 OK", "values : 3 FAILED", "right results"),
        ("all_reduce-8xh100-nvls.txt", "272.39  476.68", "299.39  523.93", "algbw is S/t"),
        ("all_reduce-8xh100-nvls.txt", "274.05  479.58", "274.05  274.05", "busbw factor"),
        ("loadgen-server.txt", "99.00 percentile latency (ns)   : 121004871", "99.00 percentile latency (ns)   : 21004871", "percentiles in order"),
        ("loadgen-server-tokens.txt", "Min First Token latency (ns)                : 21004112", "Min First Token latency (ns)                : -1", "no time below zero"),
        ("loadgen-server.txt", "No errors encountered", "1 ERROR encountered", "no errors logged"),
        ("loadgen-server.txt", "target_qps : 3600", "target_qps : 360", "rates of requests"),
        ("loadgen-server.txt", "Mean latency (ns)               : 41220010", "Mean latency (ns)               : 4222001", "percentiles in order"),
        ("loadgen-single-stream.txt", "90th percentile estimate: 1632004", "90th percentile estimate: 1432004", "limits met"),
        ("loadgen-single-stream.txt", "queries (389604)", "queries (38960)", "limits met"),  # 60 s, not 600
        ("loadgen-single-stream.txt", "Min latency (ns)                : 1401220", "Min latency (ns)                : -1", "no time below zero"),
        ("loadgen-server-tokens-6.0.17.txt", "Min Time per Output Token (ns)                : 9454541", "Min Time per Output Token (ns)                : -1", "no time below zero"),
        ("lambda-one-gpu.csv", "2x RTX 4090,2,900,541", "2x RTX 4090,2,900,941", "scaling"),
        ("serving-two-nodes.md", "1.90x", "2.60x", "speed-up"),
        ("published.json", '"failed": 360', '"failed": 400', "requests add up"),
    ],
)  # fmt: skip
def test_what_a_file_states_wrongly_in_itself_is_found(tmp_path, name, old, new, rule):
    path, text = tmp_path / name, (HONEST / name).read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    assert rule in failures(path)


def test_loadgen_summary_is_read_by_its_lines():
    name, [claim] = read_claims(HONEST / "loadgen-server.txt")
    assert (name, claim.subject, claim.requests.logged_errors) == ("LoadGen", "Server run, VALID", 0)
    assert claim.latencies[0].percentiles_s[99.9] == pytest.approx(0.149211004)
    _, [tokens] = read_claims(HONEST / "loadgen-server-tokens.txt")
    first, each = tokens.latencies[1:]
    assert (first.name, first.max_s, each.name) == ("first token", pytest.approx(2.41004412), "time per output token")
    assert (each.mean_s, each.percentiles_s[99.0]) == (pytest.approx(0.041004112), pytest.approx(0.091004112))


@pytest.mark.parametrize(
    ("header", "rows", "rule", "unread"),
    [
        ("num_gpu,samples/s,MFU", "1,20,38 8,100,143", "share of the peak", ""),
        ("model,MFU", "A,1.3", "share of the peak", ""),
        ("gpus,samples/s,samples,time (ms)", "2,100,1000,100", "rate from counts", ""),
        ("gpus,tokens/s/GPU", "1,1000 8,1600", "scaling", ""),
        # Honest ones, and what no rule sees of them.
        ("gpus,samples/s,MFU (%)", "1,100,41 8,700,38", "", ""),
        ("gpus,tokens/s/GPU,samples/s", "1,51200,100 8,51200,800", "", ""),
        ("gpus,samples/s,samples,time (s)", "1,10,100,-10 2,inf,100,10", "possible values", ""),
        ("run,F1,samples/s", "1,88.1,440 2,88.5,444 average,90.3,442", "average of its rows", ""),
        ("run,F1,samples/s", "1,88.1,440 2,88.5,444 mean,88.3,442", "", ""),
        ("run,F1,samples/s", "1,88.1,400 2,88.5,800 mean,88.3,700", "", ""),  # weighted: suspicious
        # Rows of other work are no scaling: one GPU in fp32, one with a batch of 1; a batch may grow with the devices.
        ("gpus,precision,samples/s", "1,fp32,100 1,fp16,300 8,fp16,2300", "", "precision"),
        ("gpus,precision,samples/s", "1,fp32,100 8,fp16,2300", "", "precision"),
        ("gpus,batch size,samples/s", "1,1,100 8,256,2300", "", "batch size"),
        ("gpus,batch size,samples/s", "1,32,100 8,256,2300", "scaling", "batch size"),
        ("gpus,samples/s", "1,-1 2,100", "", "samples/s"),  # of what was not run
        ("gpus,samples/s,latency change (ms)", "1,100,0 2,190,-12", "", "latency change (ms)"),
        ("gpus,samples/s,global batch,step time (ms)", "1,100,50,500 8,800,400,100", "rate from counts", ""),
        ("users,requests/s,mean latency (ms)", "1,100,90", "", "mean latency (ms)"),
        ("concurrency,requests/s,latency (ms)", "1,100,90", "", "latency (ms)"),  # of which percentile?
        ("backend,samples/s,p50 (s),p99 (ms)", "a,10,2,900", "", "p50 (s), p99 (ms)"),
        ("gpus,tokens/s,samples,time (s)", "1,5000,1000,100 2,9000,1000,55", "", ""),
        ("gpus,requests/s,$/GPU-h,seq length", "1,2,2.5,512 8,15,2.5,512", "", "$/GPU-h, seq length"),
        ("gpus,samples/s", "1,100±2 8,780", "", ""),
        ("# seq/s\ngpus,model_a,delta,price", "1,100,-3,30000 8,700,-4,300000", "", "delta, price"),
        ("gpus,samples/s,speed-up", "1,100,0% 2,180,80%", "", "speed-up"),
        ("gpus,samples/s,p99 (ms),time (epochs)", "1,100,3,2", "", "p99 (ms), time (epochs)"),
    ],
)  # fmt: skip
def test_a_table_that_contradicts_itself_is_refused_and_what_is_not_read_is_named(tmp_path, header, rows, rule, unread):
    path = tmp_path / "table.csv"
    path.write_text("\n".join((header, *rows.split(" "))))
    assert list(failures(path)) == [rule] * bool(rule)
    sentence = json.loads(run("--json", path).stdout)[0]["sentence"]
    assert sentence.endswith(f" Not read: {unread}.") if unread else "Not read" not in sentence


CLAIM = b'{"claim_version": 1, "claims": [%s]}'
LOADGEN = b"MLPerf Results Summary\nScenario : Offline\nResult is : VALID\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n \n", "is empty"),
        (b"Dear diary, nothing to measure today.\n", "not a format that can be judged"),
        (b'{"some": "json"}', 'not a format that can be judged, .*"claim_version": 1'),
        (CLAIM % b'{"speed": {"sample_per_s": 3}}', "sample_per_s: no such field: did you mean samples_per_s"),
        (CLAIM % b'{"speed": {"samples_per_s": NaN}}', "not valid JSON"),
        (CLAIM % b"", "docs/claims.md.*at least 1"),
        (b'{"claim_version": 2, "claims": [{}]}', "claim_version"),
        (LOADGEN + b"Min latency (ns): 12x\n", "invalid value"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(tmp_path, content, says):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_claims(path)


def run(*arguments):
    return CliRunner().invoke(main, ["judge", *map(str, arguments)])


def test_the_command_says_what_it_found_by_text_json_and_exit_code(tmp_path):
    silent = tmp_path / "silent.json"
    silent.write_text(json.dumps({"claim_version": 1, "claims": [{"speed": {"samples_per_s": 5}}]}))
    wrong, right = FIXTURES / "impossible" / "16-speed-up.json", HONEST / "loadgen-offline.txt"
    for files, code in (([right], 0), ([wrong], 1), ([tmp_path / "absent"], 2), ([silent], 3), ([right, silent], 3), ([silent, wrong], 1)):  # fmt: skip
        assert run(*files).exit_code == code
    shown, [report, absent] = run(wrong).output, json.loads(run("--json", wrong, tmp_path / "absent").stdout)
    assert (report["format"], report["exit_code"], report["findings"][0]["rule"]) == ("claim", 1, "speed-up")
    assert absent["exit_code"] == 2 and "no such file" in absent["error"]
    assert "Impossible: speed-up." in shown and "4.3 ×" in shown
    assert "states" not in run(right).output and "Nothing impossible" in run(right).output
    assert "does not state enough" in run(silent).output
