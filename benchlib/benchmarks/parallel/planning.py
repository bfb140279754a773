"""Estimates in words: what a dry run says of a machine, and what ``benchlib list`` says of models and strategies.

A machine is a name of ``params/machines`` or a file, with ``:NODES`` behind it for several of them: ``h100:16``.
"""

from typing import Any

from benchlib.benchmarks.parallel.estimate import Estimate, Rates, Work, memory, step_time
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGIES, Layout, Shape
from benchlib.core.errors import UserError
from benchlib.core.text import quantity
from benchlib.judge.presets import Preset, names, preset

HERE = "this"  # the preset that `benchlib machine init` writes
LISTED = {"seq": 512, "batch": 8, "ranks": 4}  # what the memory of `benchlib list` is for
GB = 1e9
Row = dict[str, Any]


def machine(text: str) -> Preset:
    """Return the machine of ``NAME`` or ``NAME:NODES``; ``UserError`` where there is none, or where its nodes are not joined."""
    name, sign, nodes = text.partition(":")
    chosen = preset(name)
    if not sign:
        return chosen
    if not nodes.isdigit() or not int(nodes):
        raise UserError(f"machine = {text}: expected NAME:NODES with a whole number of nodes, as in {name}:16")
    if chosen.network is None:
        raise UserError(
            f"machine = {text}: {name} states no network between nodes: take {name}, or a file with `network`"
        )
    return chosen.model_copy(update={"nodes": int(nodes)})


def expected(config: Any) -> str:
    """Return the lines of a dry run about memory and time, '' where no machine is named and none was written."""
    name = config.machine or (HERE if HERE in names() else "")
    if not name:
        return ""
    there = machine(name)
    world = there.world if config.machine else config.world_size
    lines = [
        "",
        f"estimates for {name} ({there.description}), {world} device{'s' * (world > 1)}: nothing was measured; "
        "times are lower bounds from the peaks below",
    ]
    for shape in config.shapes:
        lines += ["", *_model(config, shape, there, world)]
    lines += ["", "sources of the peaks:"]
    lines += [f"  {what} {given.value:,.6g}: {given.kind}, {given.source}" for what, given in there.sources.items()]
    return "\n  ".join(lines)


def _model(config: Any, shape: Shape, there: Preset, world: int) -> list[str]:
    rates = Rates.of_preset(there, config.precision)
    seq = config.length(shape)
    title = (
        f"{shape.name}, {shape.parameters:,} parameters, {config.batch_size:,} samples of {seq:,} tokens a step, {config.precision}"
        f"{', checkpointing' if config.checkpointing else ''}{f' ({rates.note})' if rates.note else ''}"
    )
    possible, lacking = estimates(config, shape, rates, world)
    rows = [_cells(item) for item in possible]
    return [title, *_aligned(rows), *(f"  not possible: {why}" for why in lacking), f"  {choice(possible)}"]


def estimates(config: Any, shape: Shape, rates: Rates, world: int) -> tuple[list[Estimate], list[str]]:
    """Return the estimates of all strategies that fit a world, and why others do not."""
    possible, lacking = [], []
    for name in config.strategies or (STRATEGIES if config.machine else config.chosen):
        for schedule in config.schedules_of(name):
            ranks = world if STRATEGIES[name].axes else 1
            if why := config.obstacle(name, schedule, shape, ranks):
                lacking.append(why)
                continue
            work = Work(
                shape, name, config.layout(name, ranks), config.batch_size, config.length(shape),
                config.micro_batches, schedule, config.precision, config.checkpointing, config.shard or 2,
            )  # fmt: skip
            possible.append(Estimate(work, memory(work), step_time(work, rates), rates.memory_bytes, rates.note))
    return possible, lacking


def choice(possible: list[Estimate]) -> str:
    """Say which strategy the estimates prefer: the fastest that fits, and whether one device does not."""
    fitting = [item for item in possible if item.fits]
    if not fitting:
        least = min(possible, key=lambda item: item.memory.total, default=None)
        if least is None or least.fits is None:
            return "estimate: none can be compared"
        return (
            f"estimate: none fits; {least.work.strategy} needs least, {quantity(least.memory.total / GB, 'GB')} of "
            f"{quantity((least.capacity or 0) / GB, 'GB')} a device: take more devices, checkpointing=true or fewer samples"
        )
    best = min(fitting, key=lambda item: item.time.step_s)
    words = f"estimate: {best.work.strategy} ({best.work.layout}) is the fastest that fits"
    alone = next((item for item in possible if item.work.strategy == "single"), None)
    if alone and not alone.fits:
        words += f"; one device needs {quantity(alone.memory.total / GB, 'GB')} and does not fit"
    return words


def _cells(item: Estimate) -> Row:
    time, need, work = item.time, item.memory, item.work
    return {
        "strategy": f"{work.strategy} {work.schedule}".strip(), "layout": str(work.layout), "GB a device": f"{need.total / GB:.3g}",
        "fits": {None: "?", True: "yes", False: "no"}[item.fits], "step at least": _time(time.step_s), "compute": _time(time.compute_s),
        "memory-bound": _time(time.elementwise_s + time.optimizer_s), "communication": _time(time.comm_s),
        "exposed": _time(time.exposed_s), "bubble": _time(time.bubble_s), "samples/s at most": f"{item.samples_per_s:,.4g}",
    }  # fmt: skip


def _time(seconds: float) -> str:
    return quantity(seconds, "s") if seconds >= 1 else f"{1e3 * seconds:.3g} ms" if seconds else "0"


def _aligned(rows: list[Row]) -> list[str]:
    """Return a table as lines of equal columns: the first two to the left, numbers to the right."""
    if not rows:
        return []
    lines = [dict(zip(rows[0], rows[0], strict=True)), *rows]
    width = {name: max(len(line[name]) for line in lines) for name in rows[0]}
    left = ("strategy", "layout")
    words = [[f"{line[name]:{'<' if name in left else '>'}{width[name]}}" for name in line] for line in lines]
    return ["  " + "  ".join(line) for line in words]


# `benchlib list`


def _listed(shape: Shape, strategy: str) -> Work:
    axes = STRATEGIES[strategy].axes
    ranks = LISTED["ranks"] if axes else 1
    each = {1: ranks, 2: 2, 3: 2}.get(len(axes), 1)
    layout = Layout(**dict.fromkeys(axes, each))
    batch, seq = LISTED["batch"], min(LISTED["seq"], shape.positions)
    return Work(shape, strategy, layout, batch, seq, 4, "1f1b" if layout.pipeline > 1 else "")


def listing() -> dict[str, list[Row]]:
    """Return the models and the strategies with parameters and estimated memory, as rows by heading."""
    models = [
        {
            "model": shape.name, "layers": f"{shape.layers}", "hidden": f"{shape.hidden:,}",
            "heads": f"{shape.heads}" + f" ({shape.kv_heads} kv)" * (shape.kv_heads != shape.heads),
            "parameters": f"{shape.parameters:,}", "weights GB": f"{4e-9 * shape.parameters:.3g}",
            "training GB": f"{memory(_listed(shape, 'single')).total / GB:.3g}",
        }
        for shape in MODELS.values()
    ]  # fmt: skip
    ways = []
    for name, strategy in STRATEGIES.items():
        work = _listed(MODELS["medium"], name)
        need = f"{memory(work).total / GB:.3g}"
        ways.append(
            {"strategy": name, "what it does": strategy.about, "layout": str(work.layout), "medium, GB a rank": need}
        )
    about = f"{LISTED['batch']} samples of {LISTED['seq']} tokens, fp32, AdamW"
    return {
        f"Models of parallel (memory: estimates, {about})": models,
        f"Strategies of parallel (memory: estimates, {about})": ways,
    }
