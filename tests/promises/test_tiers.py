"""Tiers, nightly gate, baselines."""

import datetime
import hashlib
import json
import re
import shutil

import pytest
import yaml
from promised import promise
from recorded import edited, judged

from benchlib import session
from benchlib.core.files import home
from benchlib.results.run import Run

SMALL = ("matmul_sizes=256", "precisions=fp32", "seconds=0.05", "allreduce_mib=0.001", "copy_mib=8")
SET = [word for setting in SMALL for word in ("--set", setting)]
BERT = {"data": "squad", "model": "bert-base-uncased", "train_questions": 0, "eval_questions": 0}
WHOLE = {"quality": "", "speed_scope": ""}


def _words(text):
    return " ".join(text.split())


def _check(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


@pytest.fixture
def own_baselines(tmp_path, monkeypatch):
    """Keep accepted runs out of the checkout."""
    monkeypatch.setattr("benchlib.judge.baselines.folder", lambda: tmp_path / "baselines")
    return tmp_path / "baselines"


@promise(
    "P014",
    "choose smoke, quick, nightly or weekend and get the work that the tier stands for",
    "benchlib run squad --tier nightly --dry-run",
)
def test_p014_tiers(program):
    listed = program("list")
    work = {
        "smoke": "tiny (pretrained weights, fp32) on 160 questions of minisquad for 1 epoch, 16 samples a step",
        "quick": "tiny (pretrained weights, fp32) on 4,000 questions of minisquad for 1 epoch, 16 samples a step",
        "nightly": "bert-base-uncased (pretrained weights, fp32) on all questions of squad for 2 epochs, 32 samples a step",
        "weekend": "bert-base-uncased (pretrained weights, fp32) on all questions of squad for 2 epochs, 64 samples a step",
    }
    for tier, text in work.items():
        assert tier in listed
        assert text in _words(program("run", "squad", "--tier", tier, "--backend", "cpu", "--dry-run"))


@promise("P015", "have each tier's time budget written down and checked", "benchlib run squad --tier nightly --dry-run")
def test_p015_budgets(program, tmp_path):
    for tier, seconds in (("smoke", 240), ("quick", 300), ("nightly", 1800), ("weekend", 7200)):
        plan = _words(program("run", "squad", "--tier", tier, "--dry-run"))
        assert f"budget_s {seconds}.0 params/tiers/{tier}.yaml" in plan
        assert f"within {seconds} s after their start-up" in plan
    recorded = Run(edited("squad", tmp_path / "recorded")).result
    took = recorded.value("total_s") - recorded.value("startup_s")
    for budget, status in ((took + 0.1, "PASS"), (took - 0.1, "FAIL")):
        verdict = judged(edited("squad", tmp_path / status, config={"budget_s": budget}))
        assert _check(verdict, "time budget").status == status


@promise(
    "P016",
    "have a run that hangs or crashes end by itself with the rank, its stack and a non-zero exit code",
    "benchlib run machine --set stall_timeout_s=0.4",
)
def test_p016_a_hanging_rank(program, tmp_path):
    hangs = ("--set", "seconds=5", "--set", "stall_timeout_s=0.4")  # a measurement of 5 s without a sign of life
    output = _words(program("run", "machine", *SET, *hangs, "--set", "nproc=1", "--out", tmp_path, code=2))
    assert re.search(
        r"BROKEN Rank 0 sent no sign of life for .* during phase measure; its Python stack was inside", output
    )
    (run,) = tmp_path.glob("*/machine-*")
    assert "Python stacks of rank 0" in (run / "report.html").read_text()


@promise(
    "P017",
    "run the nightly pipeline in order: data, training, loss, collectives, comparison with baselines",
    "benchlib run nightly --strict --repeat 5",
)
def test_p017_nightly(program, recorded, tmp_path):
    table = program("run", "nightly", "--dry-run")
    first = [line.split()[0] for line in table.splitlines() if line[:1].isalpha()]
    assert first.index("machine") < first.index("squad") < first.index("collectives")
    steps = yaml.safe_load((home() / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]["gate"]["steps"]
    assert any('benchlib run "$TIER" --backend "$BACKEND" --strict --repeat 5' in step.get("run", "") for step in steps)
    checks = [check.name for check in judged(shutil.copytree(recorded("squad"), tmp_path / "copy")).checks]
    order = ["loss decreases", "ranks equal", "all-reduce right", "final loss"]
    assert [name for name in checks if name in order] == order
    assert checks.index("final loss") < min(
        number for number, name in enumerate(checks) if name.endswith("vs baseline")
    )


def _loss(factor):
    return {"loss": factor, "run[0].loss": factor}


def _exchange(factor):
    return {"allreduce": factor, "run[0].exchange_us": 1 / factor}


def _speed(factor):
    rates = dict.fromkeys(("train_samples_per_s", "train_tokens_per_s", "flops_per_s", "mfu"), factor)
    return rates | {"step_s": 1 / factor, "steps[0].step_s": 1 / factor}


def _memory(factor):
    ranks = {f"ranks[{rank}].{name}": factor for rank in (0, 1) for name in ("memory_gb", "resident_gb")}
    return ranks | {"resident_memory_gb": factor, "run[0].resident_memory_gb": factor}


def _f1(factor):
    return {"f1": factor, "run[0].f1": factor}


# Times are stored in whole nanoseconds, so only halves and doubles of rates agree with them to the last digit.
GATED = [  # metric, what makes another value, a factor within its limit, one beyond it and noise, the limit as it is written
    ("loss_final", _loss, 1.1, 1.6, "+20%"),
    ("allreduce_gbps", _exchange, 1, 0.5, "-15%"),
    ("train_samples_per_s", _speed, 1, 0.5, "-20%"),
    ("resident_memory_gb", _memory, 1.1, 1.6, "+25%"),
    ("f1", _f1, 75.5 / 76.3, 70 / 76.3, "-1"),
]


@promise(
    "P018",
    "get a non-zero exit if a metric is worse than its threshold, and set limits of one's own",
    "benchlib run squad --set limits.f1=0.5",
)
def test_p018_the_gate(program, tmp_path, own_baselines):
    program("baseline", "accept", edited("squad", tmp_path / "first"), "--reason", "first")

    def compared(name, times, **config):
        verdict = judged(
            edited("squad", tmp_path / f"{name}{len(list(tmp_path.iterdir()))}", config=config, times=times)
        )
        gates = [
            check for check in verdict.checks if check.name.startswith(name) and check.name.endswith("vs baseline")
        ]
        return verdict, gates[0]

    for name, changed, fine, bad, limit in GATED:
        verdict, check = compared(name, changed(fine))
        assert check.status != "FAIL" and verdict.exit_code() == 0, (name, verdict.sentence)
        assert check.limit.replace("\N{MINUS SIGN}", "-").startswith(limit), check
        verdict, check = compared(name, changed(bad))
        assert check.status == "FAIL" and verdict.exit_code() == 1, (name, verdict.sentence)
    _, check = compared("f1", {}, limits={"f1": 0.5})
    assert check.limit.replace("\N{MINUS SIGN}", "-").startswith("-0.5")
    assert "limits {'f1': 0.5} set by hand" in _words(program("run", "squad", "--set", "limits.f1=0.5", "--dry-run"))


@promise(
    "P019",
    "see target, published reference and regression as three checks",
    "benchlib run squad --tier weekend --dry-run",
)
def test_p019_three_checks(program, tmp_path):
    plan = _words(program("run", "squad", "--tier", "weekend", "--dry-run"))
    assert "target_f1 88.0 params/tiers/weekend.yaml" in plan and "reference_f1 88.5 params/tiers/weekend.yaml" in plan
    asked = {**BERT, "target_f1": 88.0, "reference_f1": 88.5}
    for f1, target, reference in ((88.6, "PASS", "PASS"), (87.9, "FAIL", "DIFFERS"), (89.1, "PASS", "DIFFERS")):
        verdict = judged(edited("squad", tmp_path / str(f1), config=asked, facts={**WHOLE, "f1": f1}))
        assert _check(verdict, "F1 target").word == target
        assert (_check(verdict, "F1 reference").word, _check(verdict, "F1 reference").gates) == (reference, False)
        assert "Devlin" in _check(verdict, "F1 reference").source
        assert any(check.name.startswith("f1") and check.kind == "regression" for check in verdict.checks)


@promise(
    "P020",
    "have a run judged against the target of 45 minutes of training for BERT-base",
    "benchlib run squad --set target_minutes=45",
)
def test_p020_minutes(program, tmp_path):
    assert "target_minutes 45.0 set by hand" in _words(
        program("run", "squad", "--set", "target_minutes=45", "--dry-run")
    )

    def of(minutes, **config):
        run = edited(
            "squad",
            tmp_path / f"{minutes}{len(config)}",
            config={**BERT, **config},
            facts={**WHOLE, "train_s": 60 * minutes},
        )
        return _check(judged(run), "training time")

    within, beyond, asked = of(44.0), of(46.0), of(46.0, target_minutes=45)
    assert (within.word, beyond.word, asked.word) == ("PASS", "DIFFERS", "FAIL")
    assert (within.gates, beyond.gates, asked.gates) == (False, False, True), "it informs unless it is asked for"
    assert (beyond.value, beyond.limit, beyond.source) == (46.0, "<= 45.00 min", "goal of this benchmark for BERT-base")
    other = of(46.0, target_minutes=45, model="tiny")
    assert other.word == "SKIPPED" and "real model" in other.reason


@promise(
    "P021",
    "accept a run as baseline with a reason, as a file that can be reviewed, or only if it is better",
    "benchlib baseline accept RUN --reason TEXT",
)
def test_p021_accepting(program, tmp_path, own_baselines):
    run = edited("squad", tmp_path / "first")
    assert "--reason" in program("baseline", "accept", run, code=2)
    program("baseline", "accept", run, "--reason", "new driver")
    (file,) = own_baselines.glob("squad/smoke/*.json")
    assert "new driver" in file.read_text() and "new driver" in program("baseline", "list")
    before = file.read_bytes()
    worse = edited("squad", tmp_path / "worse", times=_loss(1.1))
    better = edited("squad", tmp_path / "better", times=_loss(0.9))
    program("baseline", "accept", worse, "--if-improved", "--reason", "x", code=2)
    assert file.read_bytes() == before
    program("baseline", "accept", better, "--if-improved", "--reason", "less loss")
    assert "less loss" in file.read_text()
    failed = edited("squad", tmp_path / "failed", facts={"learning_rate_min": 0.0})
    program("baseline", "accept", failed, "--reason", "x", code=2)
    # Of a whole tier what is sound is accepted, and what is not is named.
    said = _words(
        program("baseline", "accept", failed, edited("machine", tmp_path / "machine"), run, "--reason", "x", code=1)
    )
    assert (
        "replaces 1 accepted run;" in said and f"not accepted: {failed}" in said and f"not accepted: {run}" not in said
    )
    assert list(own_baselines.glob("machine/smoke/*.json"))


@promise(
    "P022",
    "read NO_BASELINE, SKIPPED or NOT_COMPARABLE if nothing could be compared, never PASS; exit 3 with --strict",
    "benchlib run squad --strict",
)
def test_p022_nothing_to_compare_with(program, tmp_path, own_baselines):
    def compared(verdict):
        return {check.word for check in verdict.checks if check.name.endswith("vs baseline")}

    run = edited("squad", tmp_path / "first")
    alone = judged(run)
    assert compared(alone) == {"NO_BASELINE"} and (alone.exit_code(), alone.exit_code(strict=True)) == (0, 3)
    program("baseline", "accept", run, "--reason", "first")
    other = judged(edited("squad", tmp_path / "other", config={"batch_size": 4}))
    assert compared(other) == {"NOT_COMPARABLE"} and other.exit_code(strict=True) == 3
    assert any("batch_size" in check.reason for check in other.checks)
    nothing = program("run", "machine", "--backend", "tpu", "--out", tmp_path / "out", code=3)
    assert "SKIPPED" in nothing and "PASS" not in nothing


@promise(
    "P023", "find the runs of a day in a folder of that day, and make their HTML reports again", "benchlib report RUN"
)
def test_p023_days(program, ran, tmp_path):
    whole = ran("machine", *SMALL)
    days = [datetime.date.today() - datetime.timedelta(days=late) for late in (0, 1)]
    assert whole.path.parent.name in [f"smoke-{day:%Y%m%d}" for day in days]
    copied = shutil.copytree(whole.path, tmp_path / whole.path.parent.name / whole.path.name)
    (copied / "report.html").unlink()
    program("report", copied)
    assert "Peak of matrix products" in (copied / "report.html").read_text()


TRAINING = {
    "nproc": 1,
    "threads": 1,
    "batch_size": 16,
    "train_questions": 80,
    "eval_questions": 8,
    "checkpoint_every": 3,
    "budget_s": 200,
}


def _trained(**more):
    """Train 5 steps on one rank, with a checkpoint after 3 and at the end; return the run folder."""
    return session.execute(session.open_run("squad", "", "smoke", "cpu", {**TRAINING, **more})).path


def _weights(run):
    """Return the SHA-256 of the newest weights, and the losses."""
    newest = max(
        (run / "checkpoints").rglob("model.safetensors"), key=lambda path: int(re.search(r"\d+", path.parent.name)[0])
    )
    return hashlib.sha256(newest.read_bytes()).hexdigest(), Run(run).samples["loss"]


@pytest.fixture(scope="module")
def first():
    return _trained()


@promise(
    "P024", "repeat a run with the same seed and get the same weights and losses", "benchlib run squad --set seed=0"
)
def test_p024_same_seed(first):
    assert len(_weights(first)[1]) == 5
    assert _weights(_trained()) == _weights(first)


@promise(
    "P025",
    "continue an interrupted training from its checkpoint to the same weights",
    "benchlib run squad --resume RUN",
)
def test_p025_resume(first, tmp_path):
    stopped = shutil.copytree(first, tmp_path / "stopped")
    steps = sorted((stopped / "checkpoints").iterdir(), key=lambda path: int(re.search(r"\d+", path.name)[0]))
    assert len(steps) == 2
    shutil.rmtree(steps[-1])
    for name in ("result.json", "samples.parquet", "verdict.json"):
        (stopped / name).unlink(missing_ok=True)
    status = json.loads((stopped / "status.json").read_text()) | {"outcome": "stopped", "reason": "stopped by the user"}
    (stopped / "status.json").write_text(json.dumps(status))
    again = _trained(resume=str(stopped))
    assert Run(again).result.facts["resumed_step"] == 3
    assert _weights(again) == _weights(first)


@promise(
    "P026", "write a tier of one's own as a file and name it at the command line", "benchlib run squad --tier my.yaml"
)
def test_p026_own_tier(program, in_folder):
    text = "description: mine\nall: {budget_s: 100}\nsquad: {train_questions: 48}\nmachine: {}\n"
    (in_folder / "my.yaml").write_text(text)
    plan = _words(program("run", "squad", "--tier", "my.yaml", "--backend", "cpu", "--dry-run"))
    assert (
        "squad, tier my, backend cpu" in plan
        and "train_questions 48 my.yaml" in plan
        and "budget_s 100.0 my.yaml" in plan
    )
    table = program("run", "my.yaml", "--dry-run")
    assert "tier my, backend" in table and {"machine", "squad"} <= {line.split(" ")[0] for line in table.splitlines()}
    run = session.open_run("squad", "", "my.yaml", "auto", {})
    assert (run.config.tier, run.config.train_questions) == ("my", 48) and run.path.parent.name.startswith("my-")
    again = str(session.provenance(run).to_dict())
    assert "train_questions=48" in again and "--tier my" not in again
    for name, content, words in (
        ("quick.yaml", text, "quick is a tier of the kit"),
        ("typo.yaml", "squad: {train_questons: 48}", "did you mean train_questions"),
        ("sections.yaml", "sqad: {}", "did you mean squad"),
        ("list.yaml", "- 1", "expected sections"),
    ):
        (in_folder / name).write_text(content)
        assert words in _words(program("run", "squad", "--tier", name, "--dry-run", code=2))
    assert "no such file" in program("run", "squad", "--tier", "none.yaml", "--dry-run", code=2)
