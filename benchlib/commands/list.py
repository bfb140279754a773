"""The commands that only show: the kit, the stored runs, the baselines, the machine."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from benchlib.benchmarks import BENCHMARKS, Benchmark
from benchlib.commands import OUT, user_errors
from benchlib.config import cluster
from benchlib.config.schema import nearest, read_params, tier_names
from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.core.files import PACKAGE, outputs
from benchlib.core.machine import BACKENDS, cpu_model, probe_devices, usable_cores, versions
from benchlib.core.text import band_text, day, duration, quantity
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.calibration import load_calibration
from benchlib.judge.change import Spread, own_spread, pooled
from benchlib.judge.checks import save_verdict
from benchlib.judge.disturbed import disturbances
from benchlib.judge.published import listed
from benchlib.judge.references import registry
from benchlib.launch.kubernetes import KUBECTL
from benchlib.launch.launchers import SLURM, TORCHX
from benchlib.results.metrics import Metric
from benchlib.results.record import Record, limits_of, load, load_all
from benchlib.results.run import Run
from benchlib.show import index

console = terminal.console(least_width=120)
LONGEST_NAME = 46  # of a run in a list: leaves room for verdict, time and number in 80 columns
ENOUGH_RUNS = 3  # from which on the spread between the accepted runs widens the gate's interval


def _notebook(benchmark: Benchmark) -> str:
    try:
        return benchmark.notebook.name
    except UserError:
        return "none"


def budget_s(tier: dict[str, Any]) -> float:
    """Return the seconds that the benchmarks of a tier, one after the other, may take by their budgets."""
    every = tier.get("all", {})
    values = [(every | (tier[name] or {})).get("budget_s") for name in BENCHMARKS if name in tier]
    return float(sum(value for value in values if value))


def show_kit() -> None:
    """Print benchmarks, tiers, backends and clusters."""
    tiers = {name: read_params("tiers", name) for name in tier_names()}
    rows = []
    for benchmark in BENCHMARKS.values():
        row: dict[str, Any] = {"benchmark": benchmark.name, "question": "", "tiers": "", "notebook": ""}
        if benchmark.fault:
            row["question"] = Text.assemble(("not loadable", "red"), f": {benchmark.fault}")
        else:
            has = ", ".join(name for name in tiers if benchmark.name in tiers[name])
            row |= {"question": benchmark.question, "tiers": has, "notebook": _notebook(benchmark)}
        rows.append(row)
    console.print(terminal.table(rows))
    about = {name: content.get("description", "") for name, content in tiers.items()}
    budgets = {name: f"at most {duration(budget_s(content))}" for name, content in tiers.items()}
    console.print(
        terminal.table(
            {"tier": name, "what it is": about[name], "time budget of all its benchmarks": budgets[name]}
            for name in tiers
        )
    )
    described = {name: read_params("backends", name).get("description", "") for name in BACKENDS}
    console.print(
        terminal.table(
            {"backend": name, "what it is": described[name], "needs": BACKENDS[name].install} for name in BACKENDS
        )
    )
    console.print(
        terminal.table({"cluster": name, "what it is": cluster.load(name).description} for name in cluster.names())
    )
    for benchmark in BENCHMARKS.values():
        if not benchmark.fault and benchmark.spec.listing:
            for title, listed_rows in benchmark.spec.listing().items():
                console.print(f"\n[bold]{escape(title)}[/]")
                console.print(terminal.table(listed_rows))
    console.print("\n`benchlib doctor` tells which of them this machine has.")


def show_runs(out: Path | None) -> None:
    """Print the stored runs, the newest first: name, verdict, time and key number; below it why a run did not pass."""
    folder = out or outputs()
    runs = load_all(folder)
    if not runs:
        raise UserError(f"{folder} holds no runs yet: `benchlib run quick` makes the first")
    names = {run.path: terminal.one_line(run.path) for run in runs}
    width = min(max(map(len, names.values())), LONGEST_NAME)
    words = max(len(run.word) for run in runs)
    for run in reversed(runs):
        line = f"{names[run.path]:<{width}}  {run.word:<{words}}  {run.moment:%H:%M}  "
        number = _key_number(run, 80 - len(line))
        console.print(escape(f"{line}{number}".rstrip()), soft_wrap=True)  # a name is there to be copied: never folded
        if run.word != "PASS" or run.copy_of:
            console.print(Padding(f"[dim]{escape(terminal.one_line(_sentence(run)))}[/]", (0, 0, 0, 4), expand=False))


def _key_number(run: Record, room: int) -> str:
    """Return the first key number that fits; a value without a unit has its label."""
    texts = (value if " " in value else f"{label} {value}" for label, value in index.key_numbers(run))
    return next((text for text in map(terminal.one_line, texts) if len(text) <= room), "")


def _sentence(run: Record) -> str:
    """Return what a run's line says after its verdict."""
    judged = any(problem.startswith("verdict.json") for problem in run.problems)
    remedy = " `benchlib report` judges it again." if judged else ""
    return (f"copy of {run.copy_of}: " if run.copy_of else "") + run.sentence + remedy


def accept_baseline(run_dirs: Sequence[Path], reason: str, add: bool, if_improved: bool, force: bool = False) -> None:
    """Make runs the baseline of their fingerprint, or with ``add`` more runs of it, and say where it is.

    Several runs must be of one kind. Each is judged again first.
    """
    runs = [Run(path) for path in run_dirs]
    for run in runs:
        # The stored verdict may be older than what lies in the folder, or than the baselines.
        verdict = judging.judged(run)
        baselines.require_acceptable(run, verdict)
        save_verdict(run.path, verdict)
    runs = [run.refresh() for run in runs]
    limits = limits_of(runs[0])
    for run in runs:
        for sentence in disturbances(load(run.path)):
            console.print(
                f"[yellow]disturbed[/]  {escape(terminal.one_line(run.path.name))}: {escape(sentence)}", soft_wrap=True
            )
    path = baselines.accept(runs, reason, limits, add=add, if_improved=if_improved, force=force)
    accepted = baselines.load_baseline(path)
    count = len(accepted.runs)
    calibration = load_calibration(baselines.folder(), accepted.benchmark, accepted.tier, accepted.key)
    spreads = baselines.known_spreads(load(runs[0].path), limits, calibration, accepted.runs)
    rows = [row.cells() for row in baselines.widths(accepted, limits, spreads)]
    if rows:
        console.print(terminal.table(rows))
    console.print(f"accepted: {escape(str(path))}\ncommit this file to share it.", soft_wrap=True)
    if count < ENOUGH_RUNS:
        console.print(
            f"[dim]The baseline holds {count} run{'s' * (count > 1)}. From {ENOUGH_RUNS} on (accept --add), or after `benchlib calibrate`, "
            "the gate knows how much unchanged runs differ; until then it assumes a default.[/]",
            soft_wrap=True,
        )


def show_baselines() -> None:
    """Print the committed baselines."""
    refused: dict[Path, str] = {}
    stored = [item for _, item in baselines.stored(refused=refused)]
    rows = [
        {
            "key": item.key,
            "benchmark": item.benchmark,
            "tier": item.tier,
            "machine": item.fingerprint.get("devices") or item.fingerprint.get("cpu", ""),
            "ranks": item.fingerprint.get("world_size", ""),
            "runs": len(item.runs),
            "accepted": day(item.latest.accepted_at or 0),
            "reason": item.latest.reason,
        }
        for item in stored
    ]
    if stored:
        console.print(terminal.table(rows, whole=("key", "accepted")))
    if refused:
        raise UserError("\n".join(refused.values()))
    if not stored:
        raise UserError("no baselines yet: `benchlib baseline accept RUN --reason ...` makes the first")


def show_baseline(key: str) -> None:
    """Print a baseline's metrics and fingerprint."""
    item = baselines.load_baseline(Path(key)) if Path(key).is_file() else baselines.by_key(key)
    console.print(f"[bold]{item.benchmark}, {item.tier}[/]  {item.key}")
    for record in item.runs:
        console.print(f"from {escape(record.run)}: {escape(record.reason)}")
    measured = load_calibration(baselines.folder(), item.benchmark, item.tier, item.key)
    limits = {limit.metric: limit for limit in item.limits}
    rows = []
    for metric in item.latest.metrics:
        interval = (
            ""
            if metric.ci_low is None or metric.ci_high is None
            else f"{quantity(metric.ci_low)} to {quantity(metric.ci_high)}"
        )
        spread = measured.spread(metric.name) if measured else None
        value, band = _of_all_runs(item, metric, spread)
        limit = limits[metric.name].text(metric.direction) if metric.name in limits else ""
        cells = {"metric": metric.name, "value": value, "limit": limit, "A/A band": band, "n": metric.n}
        rows.append(cells | {"95% interval of the latest run": interval})
    console.print(terminal.table(rows))
    console.print(terminal.table({"factor": name, "value": value} for name, value in item.fingerprint.items()))


def _of_all_runs(baseline: baselines.Baseline, metric: Metric, calibrated: Spread | None) -> tuple[str, str]:
    """Return a metric's value over all accepted runs and its A/A band, as texts."""
    side = baseline.side(metric.name)
    if side is None or not side.runs or min(map(min, side.runs)) <= 0:
        return metric.text, ""
    spread = pooled(own_spread([side.readings("ratio")]), calibrated)
    return side.text("ratio"), band_text(spread.band(), "ratio") if spread else ""


def show_doctor() -> int:
    """Print what the machine has and lacks; return 2 where a needed part is missing."""
    findings = examine()
    rows = []
    for item in findings:
        mark = Text("yes", "green") if item.ok else Text("no", "red" if item.needed else "yellow")
        seen = terminal.stacked(item.seen, "" if item.ok else item.remedy)
        rows.append({"ready": mark, "part": item.part, "what was seen": seen})
    console.print(terminal.table(rows))
    return 2 if any(item.needed and not item.ok for item in findings) else 0


# `benchlib references`: the registry of published figures as a table.


MARKS = {"trusted": "", "unconfirmed": "yellow", "invalid": "red"}


def show(metric: str = "", device: str = "") -> None:
    """Print the published figures, those of one metric or device where asked; ``UserError`` where there are none."""
    figures = registry()
    if metric and not any(name.startswith(metric) for name in figures.quantities):
        raise UserError(f"no figure of metric {metric!r}: {nearest(metric, figures.quantities)}")
    rows = list(listed(metric, device))
    if not rows:
        names = sorted({item.name for item in figures.devices.values() if not device or item.torch})
        where = f" of {metric}" if metric else ""
        raise UserError(f"no published figure{where} for a device like {device!r}: known are {'; '.join(names)}")
    shown, last = list[dict[str, str | Text]](), ""
    for item, cells in rows:
        if item.metric != last:
            last = item.metric
            heading = Text(last.replace("_", " "), "bold")
            shown.append({"published": "", "holds for": heading, "source": "", "validity": ""})
        shown.append(
            {
                "published": cells["published"],
                "holds for": terminal.stacked(cells["conditions"], cells["notes"]),
                "source": terminal.stacked(cells["source"], cells["date"]),
                "validity": Text(item.validity, MARKS[item.validity]),
            }
        )
    console.print(terminal.table(shown, right=("published",), whole=("validity",)))
    count = f"{len(rows)} figure{'s' * (len(rows) != 1)}"
    console.print(f"\n{count}, claimed by their sources; none was measured here. Invalid ones are never compared with.")


# What this machine can run, which sensors and optional parts are there, and how to get what is missing.


OPTIONAL = (
    ("jupyterlab", "notebooks by hand", "pip install -e '.[notebooks]'"),
    ("papermill", "headless runs and reports", "pip install -e '.[notebooks]'"),
    ("ipywidgets", "live progress in JupyterLab", "pip install -e '.[notebooks]'"),
    ("pynvml", "power, temperature and energy of NVIDIA GPUs", "pip install -e '.[nvidia]'"),
    ("amdsmi", "power, temperature and energy of AMD GPUs", "install amd-smi-lib of ROCm and its Python package"),
    ("torch_xla", "TPUs", "pip install torch_xla[tpu] on a TPU machine"),
    ("pytest", "the tests", "pip install -e '.[test]'"),
)
PROGRAMS = (
    ("kubectl", "runs on Kubernetes", KUBECTL),
    ("sbatch", "runs on a SLURM cluster", SLURM),
    ("torchx", "runs through TorchX", TORCHX),
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a part, whether it is there, what was seen and what to do."""

    part: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at the machine. Asks torch in a process of its own."""
    findings = [
        Finding("processor", True, f"{cpu_model()}, {usable_cores()} cores"),
        Finding(
            "versions",
            True,
            ", ".join(
                f"{name} {version}"
                for name, version in versions().items()
                if name in ("python", "torch", "transformers", "benchlib")
            ),
        ),
    ]
    try:
        probe = probe_devices()
    except UserError as error:
        return [
            *findings,
            Finding("torch", False, str(error), "pip install --constraint constraints.txt torch", needed=True),
        ]
    findings += [_backend(name, probe["backends"].get(name, {})) for name in BACKENDS]
    findings += [_collective(name, reason) for name, reason in probe.get("libraries", {}).items()]
    findings += _sensors()
    for module, use, install in OPTIONAL:
        there = importlib.util.find_spec(module) is not None
        findings.append(Finding(module, there, use, "" if there else install))
    for program, use, install in PROGRAMS:
        findings.append(Finding(program, shutil.which(program) is not None, use, install))
    return [*findings, *_data(), _space()]


def _backend(name: str, probed: dict[str, Any]) -> Finding:
    if probed.get("available"):
        names = ", ".join(dict.fromkeys(probed.get("names", []))) or "ready"
        return Finding(f"backend {name}", True, f"{probed.get('count', 1)} x {names}" if name != "cpu" else names)
    return Finding(
        f"backend {name}",
        False,
        # The reason ends with what to install.
        str(probed.get("reason") or f"torch does not report it: {BACKENDS[name].install}"),
        needed=name == "cpu",
    )


def _collective(name: str, reason: str) -> Finding:
    return Finding(f"collective {name}", not reason, reason or "ready")


def _sensors() -> list[Finding]:
    from benchlib.core.sensors import Sensors

    sensors = Sensors([os.getpid()])
    try:
        readings, missing = sensors.read(), sensors.availability()
    finally:
        sensors.close()
    there = sorted(name for name, value in readings.items() if value is not None and name not in missing)
    return [
        Finding("sensors", True, ", ".join(there) or "none"),
        *(Finding(f"sensor {name}", False, reason) for name, reason in sorted(missing.items())),
    ]


def _data() -> list[Finding]:
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = any((hub / "datasets").glob("*squad*")) or any((hub / "hub").glob("datasets--*squad*"))
    remedy = "" if cached else "run once with internet access, or give --set train_file=F --set eval_file=G"
    tiny = PACKAGE / "assets" / "tiny" / "model.safetensors"
    return [
        Finding(
            "rajpurkar/squad",
            cached,
            "in the datasets cache" if cached else "not downloaded yet (the quick tier does not need it)",
            remedy,
        ),
        Finding(
            "embedded model",
            tiny.exists(),
            f"{tiny.stat().st_size / 1e6:.1f} MB" if tiny.exists() else "missing",
            "" if tiny.exists() else "restore benchlib/assets/tiny",
            needed=True,
        ),
    ]


def _space() -> Finding:
    folder = outputs()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    return Finding(
        "outputs",
        writable and free > 1e9,
        f"{folder}: {free / 1e9:.0f} GB free{'' if writable else ', not writable'}",
        "choose another folder with --out DIR",
        needed=True,
    )


@click.command()
@click.option("--runs", is_flag=True, help="List the stored runs instead.")
@OUT
@user_errors
def verb(runs: bool, out: Path | None) -> None:
    """List benchmarks, tiers, backends and clusters, or the stored runs."""
    if runs:
        show_runs(out)
    else:
        show_kit()


@click.group()
def baseline() -> None:
    """Accept, list and show baselines: the runs that later ones are compared with."""


@baseline.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--reason", required=True, help="Why this run is the new normal; stored in the file.")
@click.option(
    "--add", is_flag=True, help="Keep the runs of the baseline as well: several show how much unchanged runs differ."
)
@click.option("--if-improved", is_flag=True, help="Accept only where no gated metric gets worse.")
@click.option("--force", is_flag=True, help="Accept runs whose spread makes a limit more than twice as wide.")
@user_errors
def accept(runs: tuple[Path, ...], reason: str, add: bool, if_improved: bool, force: bool) -> None:
    """Make RUN the baseline of its benchmark, tier and fingerprint. Several runs of one kind are accepted together.

    Of several runs it shows how much they differ and the smallest loss that the gate will find.
    """
    accept_baseline(runs, reason, add, if_improved, force)


@baseline.command("list")
@user_errors
def list_baselines() -> None:
    """List the committed baselines."""
    show_baselines()


@baseline.command("show")
@click.argument("key")
@user_errors
def one_baseline(key: str) -> None:
    """Show a baseline's metrics and fingerprint. KEY is a file or the first digits of its name."""
    show_baseline(key)


@click.command()
@click.option("--metric", "-m", default="", help="Only figures of this metric, such as f1 or matmul_flops.")
@click.option("--device", "-d", default="", help="Only figures of devices with this in their name, such as h100.")
@user_errors
def references(metric: str, device: str) -> None:
    """List the published figures that runs are placed beside, with conditions, source and validity."""
    show(metric, device)


@click.command()
@user_errors
def doctor() -> None:
    """Show what this machine can run, what is missing and how to install it."""
    sys.exit(show_doctor())
