"""From a target to the plans of its runs, and from a plan to its run folder. Starts no rank and loads no torch.

A request is merged, built and checked first. Only then is torch asked for the machine's devices, which takes seconds.
The answer settles what the request leaves to the machine: the backend of ``auto`` and the number of ranks.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.config import cluster as clusters
from benchlib.config import schema
from benchlib.config.schema import Resolved, config_class, resolve
from benchlib.core.errors import UserError, nearest
from benchlib.core.files import outputs, write_json
from benchlib.core.machine import best_backend, default_nproc, describe, memory_bytes, probe_devices
from benchlib.launch.launchers import LAUNCHERS
from benchlib.results.run import Run, new_run_dir

RANK_BYTES = 2**28  # resident, that torch, its threads and its connections take in a process that does nothing yet


@dataclass(frozen=True)
class Plan:
    """A run to be: its config, where the values came from and what torch reported about the machine.

    ``of_tier`` says that the user named a tier, which chose the benchmark; ``auto`` that the machine chooses the
    backend, which is the CPU until torch was asked. ``overrides`` are what the user set, ``tier`` the tier as it was given:
    a name or a file.
    """

    resolved: Resolved
    probe: dict[str, Any] = field(default_factory=dict)
    of_tier: bool = False
    auto: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tier: str = ""

    @property
    def config(self) -> Any:
        return self.resolved.config

    def set_by_hand(self, name: str) -> bool:
        """Whether the user named the value of a parameter; else its tier, its backend or its default did."""
        return self.resolved.origins.get(name) == schema.BY_HAND

    @property
    def unavailable(self) -> str:
        """Why the backend cannot run here; '' where it can."""
        if self.config.launcher in clusters.ELSEWHERE:
            return ""  # the ranks find out, on their own machines
        device = self.probe.get("backends", {}).get(self.config.backend, {})
        missing = f"torch reports no {self.config.backend} device"
        return "" if device.get("available") else device.get("reason") or missing


def _requested(benchmark: str, tier: str, backend: str, overrides: Mapping[str, Any]) -> Plan:
    """Merge and check a request as far as no device is needed. Raises ``UserError``."""
    schema.check_names(benchmark, overrides)
    overrides = schema.absolute_paths(benchmark, overrides)
    profile = clusters.load(str(overrides.get("cluster", "")))
    overrides = profile.start | overrides
    if profile.groups:
        if backend not in ("auto", first := profile.groups[0].backend):
            raise UserError(
                f"--backend {backend}: the groups of {overrides['cluster']} name their backends: leave it out"
            )
        backend = first
    auto = backend == "auto"
    resolved = resolve(benchmark, tier, "cpu" if auto else backend, overrides)
    config = resolved.config
    BENCHMARKS[benchmark].spec.refuse(config)
    _ = BENCHMARKS[benchmark].notebook  # one without it is refused before a folder is made
    clusters.load(config.cluster)
    if config.launcher in clusters.ELSEWHERE:
        if auto:
            elsewhere = "runs on other machines, whose devices are not known here"
            raise UserError(f"launcher={config.launcher} {elsewhere}: say which, as in --backend cuda")
        LAUNCHERS[config.launcher](config, outputs() / "run")
    return Plan(resolved, auto=auto, overrides=overrides, tier=tier)


def _check_limits(overrides: Mapping[str, Any], benchmarks: Iterable[str]) -> None:
    """Raise ``UserError`` for a limit of the gate that no metric of these benchmarks has, and for a share above 1."""
    specs = [BENCHMARKS[name].spec for name in benchmarks]
    limited = {item: metric for spec in specs for item, metric in spec.limited.items()}
    for name, value in dict(overrides.get("limits", {})).items():
        own = [spec.metric(name) for spec in specs]
        fitting = [metric for item, metric in limited.items() if f"{item}_".startswith(f"{name}_") or metric in own]
        if not fitting:
            raise UserError(f"limits.{name}: no metric with a limit has this name: {nearest(name, limited)}")
        try:
            number = float(schema.as_share(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise UserError(f"limits.{name} = {value}: expected a number, as in 0.2 or 20%") from None
        if number > 1 and all(metric.amount is None for metric in fitting):
            raise UserError(f"limits.{name} = {value}: a share of the baseline from 0 to 1, as in 0.2 for 20%")


def _check_memory(config: schema.BaseConfig) -> None:
    """Raise ``UserError`` for more ranks than this machine has memory for, before they end each other."""
    needed, there = config.nproc * RANK_BYTES, memory_bytes()
    if needed > there:
        raise UserError(
            f"nproc = {config.nproc}: a rank takes {RANK_BYTES / 2**30:g} GiB before it holds a model, {config.nproc} take "
            f"{needed / 2**30:.0f} GiB, and this machine has {there / 2**30:.0f} GiB: set nproc={there // RANK_BYTES} or less"
        )


def _settled(request: Plan, probe: dict[str, Any]) -> Plan:
    """Return the plan for the machine that ``probe`` describes. Raises ``UserError`` for values that do not fit it."""
    resolved, config = request.resolved, request.config
    backend = best_backend(probe) if request.auto else config.backend
    if backend != config.backend:  # an accelerator has parameters of its own
        resolved = resolve(config.benchmark, request.tier, backend, request.overrides)
    here = config.launcher not in clusters.ELSEWHERE  # other machines may have other devices than this one
    if here and not config.ONE_PROCESS:
        resolved = resolved.detected(nproc=default_nproc(backend, probe))
    if request.auto:
        resolved = resolved.detected(backend=backend)
    resolved.config.check_whole()
    if here:
        _check_memory(resolved.config)
        resolved.config.check_precision(probe.get("backends", {}).get(backend, {}).get("lacks", {}))
    return replace(request, resolved=resolved, probe=probe)


def plan(
    benchmark: str, tier: str, backend: str, overrides: Mapping[str, Any], probe: dict[str, Any] | None = None
) -> Plan:
    """Plan one run; ``backend="auto"`` takes the first accelerator that torch reports, else the CPU.

    Without ``probe`` torch is asked for it, after all that needs no device was checked. Raises ``UserError``.
    """
    request = _requested(benchmark, tier, backend, overrides)
    _check_limits(overrides, [benchmark])
    return _settled(request, probe_devices() if probe is None else probe)


def plans(
    target: str, tier: str | None, backend: str, pairs: Iterable[str], resume: str | None, file: Path | None = None
) -> list[Plan]:
    """Plan the run of a benchmark, or of all benchmarks of a tier; several runs for a suite of the settings' ``file``.

    What ``tier``, ``backend`` and ``pairs`` say goes before the file. Raises ``UserError``.
    """
    by_hand, requests = schema.parse_overrides(pairs), list[tuple[bool, Plan]]()
    if resume:
        by_hand["resume"] = str(Path(resume).resolve())
    for settings in schema.read_settings(file) if file else [{}]:
        level, device = str(settings.pop("tier", "")) or None, str(settings.pop("backend", "auto"))
        limits = {**settings.get("limits", {}), **by_hand.get("limits", {})}
        overrides = {**settings, **by_hand} | ({"limits": limits} if limits else {})
        requests += _requests(target, tier or level, device if backend == "auto" else backend, overrides)
    probe = probe_devices()
    return [replace(_settled(request, probe), of_tier=of_tier) for of_tier, request in requests]


def _requests(target: str, tier: str | None, backend: str, overrides: dict[str, Any]) -> list[tuple[bool, Plan]]:
    """Return the requests of a benchmark or of a tier, each with whether the tier chose the benchmark."""
    of_tier, names, level = target not in BENCHMARKS, [target], tier or "smoke"
    if of_tier:
        if target not in (tiers := schema.tier_names()) and not schema.is_tier_file(target):
            raise UserError(f"unknown benchmark or tier {target!r}: {nearest(target, [*BENCHMARKS, *tiers])}")
        if tier not in (None, target):
            raise UserError(f"{target} is a tier itself: leave out --tier {tier}, or name a benchmark")
        names, level = _of_tier(target, overrides), target
    requests = list[tuple[bool, Plan]]()
    for name in names:  # of a tier, a benchmark of one process takes part without the number of ranks
        single = of_tier and config_class(name).ONE_PROCESS
        values = {key: value for key, value in overrides.items() if not (single and key == "nproc")}
        requests.append((of_tier, _requested(name, level, backend, values)))
    _check_limits(overrides, names)
    return requests


def _of_tier(tier: str, overrides: Mapping[str, Any]) -> list[str]:
    """Return the benchmarks of a tier that know all overrides; over several nodes without those of one process."""
    names = [name for name in BENCHMARKS if name in schema.read_params("tiers", tier)]
    wanted, several = set(overrides), str(overrides.get("nnodes", "1")) != "1"
    left = dict[str, str]()
    for name in names:
        if lacking := sorted(wanted - set(config_class(name).model_fields)):
            left[name] = f"{name} has no {', '.join(lacking)}"
        elif several and config_class(name).ONE_PROCESS:
            left[name] = f"{name} runs in one process"
    if len(left) == len(names):  # refused with the reason: an unknown name, or several nodes for one process
        schema.check_names(names[-1], wanted)
        return names
    if left:  # not on standard output, which may be a manifest
        print(f"left out: {'; '.join(left.values())}", file=sys.stderr)
    return [name for name in names if name not in left]


def prepare(planned: Plan, out: Path) -> Path:
    """Make the run folder with ``config.json``, ``origins.json`` (where its values came from) and ``machine.json``;
    return it.

    Raises ``UserError`` for what is for a dry run alone, ``StorageError`` where they cannot be written, and leaves no
    half-made folder.
    """
    planned.config.check_start()
    run_dir = new_run_dir(planned.config, out)
    try:
        schema.save_config(planned.config, run_dir)
        write_json(run_dir / "origins.json", planned.resolved.origins)
        write_json(run_dir / "machine.json", describe(planned.probe))
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # the day's folder, where this was its first run
            run_dir.parent.rmdir()
        raise
    return run_dir


def prepare_again(run: Run) -> Path:
    """Make a new folder among the stored runs for the config of a run that has begun; return it."""
    return prepare(Plan(Resolved(run.config, run.origins), run.machine.get("devices", {})), outputs())
