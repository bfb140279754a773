"""From a target to the plans of its runs, and from a plan to its run folder. Starts no rank and loads no torch.

A request is merged, built and checked first: a draft. Only then is torch asked for the machine's devices, which takes
seconds. The answer settles what a draft leaves to the machine, the backend of ``auto`` and the number of ranks.
"""

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.config import cluster as clusters
from benchlib.config.schema import (
    BY_HAND,
    BaseConfig,
    Resolved,
    absolute_paths,
    check_names,
    config_class,
    parse_overrides,
    read_params,
    resolve,
    save_config,
    tier_names,
)
from benchlib.core.errors import UserError, nearest
from benchlib.core.files import outputs, write_json
from benchlib.core.machine import best_backend, default_nproc, describe, probe_devices
from benchlib.launch.launchers import LAUNCHERS
from benchlib.results.run import Run, new_run_dir


@dataclass(frozen=True)
class Plan:
    """A run to be: its config, where the values came from and what torch reported about the machine.

    ``of_tier`` says that the user named a tier, which chose the benchmark.
    """

    resolved: Resolved
    probe: dict[str, Any]
    of_tier: bool = False

    @property
    def config(self) -> Any:
        """The config."""
        return self.resolved.config

    @property
    def backend_named(self) -> bool:
        """Whether the user named the backend; with ``auto`` the machine chose it."""
        return "backend" not in self.resolved.origins

    def set_by_hand(self, name: str) -> bool:
        """Whether the user named the value of a parameter; else its tier, its backend or its default did."""
        return self.resolved.origins.get(name) == BY_HAND

    @property
    def unavailable(self) -> str:
        """Why the backend cannot run here; '' where it can."""
        if self.config.launcher in clusters.ELSEWHERE:
            return ""  # the ranks find out, on their own machines
        device = self.probe.get("backends", {}).get(self.config.backend, {})
        missing = f"torch reports no {self.config.backend} device"
        return "" if device.get("available") else str(device.get("reason") or missing)


@dataclass(frozen=True)
class Draft:
    """A valid request without what the machine decides. With ``auto`` that is the backend, too: the CPU until torch is asked."""

    resolved: Resolved
    overrides: Mapping[str, Any]
    auto: bool

    def on(self, probe: dict[str, Any]) -> Plan:
        """Return the plan for the machine that ``probe`` describes. Raises ``UserError`` for values that do not fit it."""
        resolved, config = self.resolved, self.resolved.config
        backend = best_backend(probe) if self.auto else config.backend
        if backend != config.backend:  # an accelerator has parameters of its own
            resolved = resolve(config.benchmark, config.tier, backend, self.overrides)
        # Other machines may have other devices than this one: there the config says how many ranks.
        if config.launcher not in clusters.ELSEWHERE and not config.ONE_PROCESS:
            resolved = resolved.detected(nproc=default_nproc(backend, probe))
        if self.auto:
            resolved = resolved.detected(backend=backend)
        resolved.config.check_whole()
        if config.launcher not in clusters.ELSEWHERE:
            resolved.config.check_precision(probe.get("backends", {}).get(backend, {}).get("lacks", {}))
        return Plan(resolved, probe)


def draft(benchmark: str, tier: str, backend: str, overrides: Mapping[str, Any]) -> Draft:
    """Merge and check a request as far as no device is needed. Raises ``UserError``."""
    check_names(benchmark, overrides)
    overrides = absolute_paths(benchmark, overrides)
    auto = backend == "auto"
    resolved = resolve(benchmark, tier, "cpu" if auto else backend, overrides)
    config = resolved.config
    BENCHMARKS[benchmark].spec.refuse(config)
    _ = BENCHMARKS[benchmark].notebook  # one without it is refused before a folder is made
    clusters.load(config.cluster)
    if config.launcher in clusters.ELSEWHERE:
        if auto:
            raise UserError(
                f"launcher={config.launcher} runs on other machines, whose devices are not known here: say which, as in --backend cuda"
            )
        LAUNCHERS[config.launcher](config, outputs() / "run")
    return Draft(resolved, overrides, auto)


def plan(
    benchmark: str, tier: str, backend: str, overrides: Mapping[str, Any], probe: dict[str, Any] | None = None
) -> Plan:
    """Plan one run; ``backend="auto"`` takes the first accelerator that torch reports, else the CPU.

    Without ``probe`` torch is asked for it, after all that needs no device was checked. Raises ``UserError``.
    """
    wanted = draft(benchmark, tier, backend, overrides)
    return wanted.on(probe_devices() if probe is None else probe)


def plans(
    target: str,
    tier: str | None,
    backend: str,
    pairs: Iterable[str],
    resume: str | None,
    meanwhile: Callable[[], None] | None = None,
) -> list[Plan]:
    """Plan the run of a benchmark, or of all benchmarks of a tier. Raises ``UserError``.

    ``meanwhile`` begins what can go on while torch is asked for its devices: the request is valid then.
    """
    overrides: dict[str, Any] = dict(parse_overrides(pairs))
    if target in BENCHMARKS:
        names, level = [target], tier or "smoke"
    elif target in tier_names():
        if tier not in (None, target):
            raise UserError(f"{target} is a tier itself: leave out --tier {tier}, or name a benchmark")
        names, level = [name for name in BENCHMARKS if name in read_params("tiers", target)], target
        if overrides or resume:
            names = _that_know(names, overrides, resume)
        names = _that_fit(names, overrides)
    else:
        raise UserError(f"unknown benchmark or tier {target!r}: {nearest(target, [*BENCHMARKS, *tier_names()])}")
    if resume:
        overrides["resume"] = str(Path(resume).resolve())
    given = {name: overrides if target in BENCHMARKS else _of_one_process(name, overrides) for name in names}
    drafts = [draft(name, level, backend, given[name]) for name in names]
    if meanwhile:
        meanwhile()
    probe = probe_devices()
    return [dataclasses.replace(wanted.on(probe), of_tier=target not in BENCHMARKS) for wanted in drafts]


def _that_fit(names: list[str], overrides: Mapping[str, Any]) -> list[str]:
    """Leave the benchmarks of one process out of a tier that runs over several nodes, and say so."""
    single = [name for name in names if config_class(name).ONE_PROCESS]
    if str(overrides.get("nnodes", "1")) == "1" or single == names:
        return names
    for name in single:  # not on standard output, which may be a manifest
        print(f"{name} runs in one process: left out of this run over several nodes", file=sys.stderr)
    return [name for name in names if name not in single]


def _of_one_process(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides for a benchmark of a tier: one that runs in one process gets no number of ranks."""
    return {key: value for key, value in overrides.items() if key != "nproc" or not config_class(name).ONE_PROCESS}


def _that_know(names: list[str], overrides: dict[str, Any], resume: str | None) -> list[str]:
    wanted = {*(name.partition(".")[0] for name in overrides), *(["resume"] if resume else [])}
    fitting = [name for name in names if wanted <= set(config_class(name).model_fields)]
    if not fitting:
        check_names(names[-1], wanted)
    return fitting


def prepare(planned: Plan, out: Path) -> Path:
    """Make the run folder with ``config.json``, ``origins.json`` (where its values came from) and ``machine.json``; return it.

    Raises ``UserError`` for what is for a dry run alone, ``StorageError`` where they cannot be written, and leaves no half-made
    folder.
    """
    return _prepared(planned.config, planned.resolved.origins, planned.probe, out)


def prepare_again(run: Run) -> Path:
    """Make a new folder among the stored runs for the config of a run that has begun; return it."""
    return _prepared(run.config, run.origins, run.machine.get("devices", {}), outputs())


def _prepared(config: BaseConfig, origins: dict[str, str], probe: dict[str, Any], out: Path) -> Path:
    config.check_start()
    run_dir = new_run_dir(config, out)
    try:
        save_config(config, run_dir)
        write_json(run_dir / "origins.json", origins)
        write_json(run_dir / "machine.json", describe(probe))
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # the day's folder, where this was its first run
            run_dir.parent.rmdir()
        raise
    return run_dir
