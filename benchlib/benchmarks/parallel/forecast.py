"""The model of a step's time with what a run measures: links by size, and compute while all ranks compute."""

import functools
from statistics import median

from benchlib.benchmarks.parallel.estimate import HOPS, Rates, rank_parameters, step_time
from benchlib.benchmarks.parallel.measure import PHASES, Row, Runner, together
from benchlib.benchmarks.parallel.shapes import Job, Shape
from benchlib.benchmarks.parallel.strategies import Way, prepare
from benchlib.core.events import keep_alive
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import comm_device
from benchlib.workloads.alpha_beta import fit_alpha_beta
from benchlib.workloads.collective_ops import OPS, Place
from benchlib.workloads.collective_timing import Case, Exercise, Pace, interleaved

ALONE = 3  # steps of the compute of a rank
LINK_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


def links(here: World) -> list[Row]:
    """Return rows of op, wrong elements of its results, and ``t = alpha + beta bytes`` fitted to its times."""
    if here.size == 1:
        return [{"op": op, "status": "skipped", "reason": "one rank exchanges nothing"} for op in HOPS]
    rows, at, names = list[Row](), Place(here.rank, here.size, comm_device(here)), ("alpha_s", "beta_s_per_byte")
    for op in HOPS:
        reduction = "sum" if OPS[op].reduces else ""
        cases = [Exercise(Case(op, "library", "fp32", reduction, False, size), at) for size in LINK_BYTES]
        messages = interleaved(cases, at.device, Pace(0, least=5, most=5, warmup=1))
        line = fit_alpha_beta(LINK_BYTES, [median(series.seconds) for series in messages])
        row: Row = {"op": op, "world": here.size, "wrong_elements": sum(series.wrong for series in messages)}
        row |= {"why": dict.fromkeys(names, line.reason)} if line.reason else {n: getattr(line, n) for n in names}
        rows.append(row)
    return rows


class Forecast:
    """Predicts steps. It keeps measured phases by model, ranks that compute at once, and samples of each."""

    def __init__(self, rank: Rank, rates: Rates | None) -> None:
        self.rank, self.rates, self.shares = rank, rates, dict[tuple[Shape, int, int], Row]()

    def columns(self, job: Job, single_ran: bool) -> Row:
        """Return the columns compute_s and predicted_step_s of a job, or why there are none; all ranks call it.

        Compute of a rank while all ranks compute is its share of the model, and for each layer what the strategy adds
        (hooks, dispatch of cut tensors): the step of a narrow model, which has hardly any products, over its forecast.
        """
        lacks = "" if single_ran else "the model was not measured on one device"
        lacks = "one device" if job.layout.world == 1 else lacks or ("" if self.rates else "no line fits the links")
        if lacks or self.rates is None:
            return {"why": dict.fromkeys(("compute_s", "predicted_step_s"), lacks)}
        small = job.narrow()
        modelled = step_time(small, self.rates, self._share_s(small)).step_s
        added = max(0.0, self._phases(prepare(small, self.rank.world.device))["step_s"] - modelled)
        compute_s = self._share_s(job) + added * job.layers / small.layers
        return {"compute_s": compute_s, "predicted_step_s": step_time(job, self.rates, compute_s).step_s, "why": {}}

    def _share_s(self, job: Job) -> float:
        """Return the seconds in which each rank computes its share of a step at the same time.

        Each trains the whole model by itself on as many samples as have its share of the FLOPs; a pipeline's rank has
        its share of the layers, and each its share of the optimizer.
        """
        layout, here = job.layout, self.rank.world
        share = job.batch / job.micro_batches / layout.feeds / layout.tensor / layout.context
        samples = max(1, round(share))
        if (key := (job.shape, layout.world, samples)) not in self.shares:
            computes = here.rank < layout.world
            self.shares[key] = self._phases(Way(job.alone(batch=samples), here.device) if computes else None)
        times = self.shares[key]
        passes = (times["data_s"] + times["forward_s"] + times["backward_s"]) * share / samples
        updated = rank_parameters(job) / layout.shard / job.shape.parameters
        return float(passes * job.micro_batches * job.layers / job.shape.layers + times["optimizer_s"] * updated)

    def _phases(self, way: Way | None) -> Row:
        """Return the median seconds of a step and of its phases on the slowest rank, of those that have a ``way``."""
        runner = Runner(way, self.rank) if way else None
        with keep_alive(self.rank.events, self.rank.config.budget_s):
            for count in (1, ALONE):  # warmed up they begin together
                ranks = together(self.rank, functools.partial(runner.timed, count) if runner else None)
        return {name: max(median(row[name] for row in own) for own in ranks) for name in ("step_s", *PHASES)}
