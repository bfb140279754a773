"""How much faster than gloo's own are the all-gather and the reduce-scatter of `benchlib.workloads.collectives.exchange`, with the same result?

Question 1: the time of both on two ranks, by the size of the larger tensor, against gloo's own and against a raw socket
pair that carries the same bytes both ways (half of the larger tensor each); with one connection between the ranks, and with one
for each direction (`GLOO_SOCKET_IFNAME=lo,lo`; gloo's own are not faster with it).
Question 2: forward and backward of an FSDP2 model of 39 million fp32 parameters (156 MB, 8 linear blocks), with
FSDP2's own communication and with `use_direct`, over one connection.
Question 3, with `--groups` alone: the all-reduce of fp64 through groups of ranks (`collective=hierarchical`), each by gloo and
gloo between them, against gloo without groups; a rank for each name.

Method: two processes of one thread on loopback. Everything that is compared takes turns, so that a busy neighbour slows
all of it; a time is that of the slower rank; the ratio is formed within each turn, and its median over the turns is printed
with the 95% interval. Results are compared bit by bit in every turn. Takes about 50 s.

    python scripts/bench_direct.py
    python scripts/bench_direct.py --seconds 20 --sizes 64MiB --no-fsdp
    python scripts/bench_direct.py --groups a,a,b,b
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchlib.benchmarks.collectives.sockets import ALL_RANKS, Wires, sockets
from benchlib.core.machine import cpu_model, usable_cores
from benchlib.core.stats import median_interval
from benchlib.workloads.collective_ops import Place
from benchlib.workloads.collectives import exchange as direct
from benchlib.workloads.collectives import hierarchy
from benchlib.workloads.collectives.exchange import use_direct
from benchlib.workloads.collectives.hierarchy import Hierarchy, Member, layout

RANKS = 2
SHORT_S = 0.002  # what takes less is repeated within a turn
WIDTH, BLOCKS = 2208, 8

Case = Callable[[], object]


def turns(cases: dict[str, Case], seconds: float, check: Callable[[], None]) -> dict[str, list[float]]:
    """Time the cases in turn for about ``seconds``, at least 5 turns; return the seconds of each on the slower rank."""
    once = {name: max(_time(case, 1) for _ in range(2)) for name, case in cases.items()}
    repeats = {name: max(1, round(SHORT_S / taken)) for name, taken in once.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    count = max(5, round(seconds / sum(repeats[name] * taken for name, taken in once.items())))
    for turn in range(min(count, 200)):
        names = list(cases) if turn % 2 else list(reversed(cases))
        for name in names:
            times[name].append(_time(cases[name], repeats[name]))
        check()
    return times


def _time(case: Case, repeats: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        case()
    taken = torch.tensor((time.perf_counter() - began) / repeats, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def exchange(size: int, seconds: float, wires: Wires, groups: dict[str, dist.ProcessGroup]) -> None:
    """Compare the collectives on a larger tensor of ``size`` bytes, and print it."""
    rank, part = dist.get_rank(), size // 4 // RANKS
    generator = torch.Generator().manual_seed(rank)
    given, own = torch.randn(RANKS * part, generator=generator), torch.randn(part, generator=generator)
    gathered, direct_gathered, in_place = (torch.zeros(RANKS * part) for _ in range(3))
    reduced, direct_reduced = torch.zeros(part), torch.zeros(part)
    mine = in_place[rank * part : (rank + 1) * part]
    mine.copy_(own)
    cases: dict[str, Case] = {
        "socket": wires(ALL_RANKS, 4 * part).run,
        "gloo all-gather": lambda: dist.all_gather_into_tensor(gathered, own),
        "gloo reduce-scatter": lambda: dist.reduce_scatter_tensor(reduced, given),
    }
    for name, group in groups.items():
        cases[f"all-gather{name}"] = partial(direct.all_gather, direct_gathered, own, group)
        cases[f"all-gather in place{name}"] = partial(direct.all_gather, in_place, mine, group)
        cases[f"reduce-scatter{name}"] = partial(direct.reduce_scatter, direct_reduced, given, group=group)

    def check() -> None:
        """Compare what the last call of each wrote; the next one writes over what is not the result."""
        if not (torch.equal(gathered, direct_gathered) and torch.equal(gathered, in_place)):
            raise SystemExit(f"all-gather of {size} bytes: the results differ")
        if not torch.equal(reduced, direct_reduced):
            raise SystemExit(f"reduce-scatter of {size} bytes: the results differ")
        for tensor in (direct_gathered, direct_reduced, in_place):
            tensor.zero_()
        mine.copy_(own)

    times = turns(cases, seconds, check)
    if rank == 0:
        for name in list(cases)[3:]:
            library = times["gloo reduce-scatter" if "reduce" in name else "gloo all-gather"]
            print(
                f"{_bytes(size):>8}  {name:<31} {_us(times[name]):>10} {_us(library):>10} {_us(times['socket']):>10}   "
                f"{_ratio(library, times[name]):<22} {_ratio(times['socket'], times[name])}",
                flush=True,
            )


def _group(interfaces: str) -> dist.ProcessGroup:
    """Return a group of all ranks over these interfaces, which gloo reads when a group is made."""
    before, os.environ["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"], interfaces
    group = dist.new_group()
    os.environ["GLOO_SOCKET_IFNAME"] = before
    return group


def fsdp(seconds: float) -> None:
    """Compare forward and backward of an FSDP2 model, and print it."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        return layers

    models = {"stock": model(), "direct": model()}
    use_direct(models["direct"])
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(name: str) -> Case:
        def forward_and_backward() -> None:
            models[name].zero_grad(set_to_none=True)
            models[name](x).square().sum().backward()

        return forward_and_backward

    def check() -> None:
        pairs = zip(models["stock"].parameters(), models["direct"].parameters(), strict=True)
        if not all(torch.equal(one.grad.to_local(), other.grad.to_local()) for one, other in pairs):  # type: ignore
            raise SystemExit("the gradients differ")

    times = turns({name: step(name) for name in models}, seconds, check)
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in models["stock"].parameters())
        print(
            f"\nFSDP2 forward and backward, {count / 1e6:.1f} million fp32 parameters ({4 * count / 1e6:.0f} MB), "
            f"gradients equal bit by bit:\nstock {1e3 * statistics.median(times['stock']):.0f} ms, "
            f"direct {1e3 * statistics.median(times['direct']):.0f} ms, {_ratio(times['stock'], times['direct'])} "
            f"times as fast ({len(times['stock'])} turns)"
        )


def hierarchical(size: int, seconds: float, group: Hierarchy) -> None:
    """Compare the all-reduce of ``size`` bytes through groups with the one over gloo alone, and print it."""
    rank = dist.get_rank()
    own = torch.randn(size // 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    tensors = {name: own.clone() for name in ("gloo alone", "groups")}
    cases: dict[str, Case] = {
        "gloo alone": lambda: group.flat_allreduce(tensors["gloo alone"]).wait(),
        "groups": lambda: dist.all_reduce(tensors["groups"], group=group),
    }

    def check() -> None:
        """Compare sums of sums, as often as the last turn repeated them; the order of the sums may differ."""
        torch.testing.assert_close(
            tensors["groups"], tensors["gloo alone"], rtol=1e-12, atol=1e-12 * dist.get_world_size()
        )
        for tensor in tensors.values():
            tensor.copy_(own)

    times = turns(cases, seconds, check)
    if rank == 0:
        flat, through = times["gloo alone"], times["groups"]
        print(
            f"{_bytes(size):>8} {_us(through):>12} {_us(flat):>14}   {_ratio(through, flat):<22} {len(flat)}",
            flush=True,
        )


def _ratio(above: list[float], below: list[float]) -> str:
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):5.2f} ({low:.2f} to {high:.2f})"


def _us(times: list[float]) -> str:
    return f"{1e6 * statistics.median(times):,.0f}"


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _size(text: str) -> int:
    number, unit = text[:-3], text[-3:]
    if unit not in ("KiB", "MiB") or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no size; for example 64KiB or 16MiB")
    return int(number) << (10 if unit == "KiB" else 20)


def work(rank: int, store: Path, options: argparse.Namespace) -> None:
    """Do one rank's part."""
    torch.set_num_threads(1)
    ranks = len(options.groups) or RANKS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if rank == 0:
        print(f"{cpu_model()}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    if options.groups:
        hierarchy.load()
        group = dist.new_group(backend=hierarchy.BACKEND, pg_options=Member(options.groups[rank], "gloo"))
        if rank == 0:
            print(
                f"{layout(group.members)}\n\n{'bytes':>8} {'groups us':>12} {'gloo alone us':>14}   times as long         turns"
            )
        for size in options.sizes:
            hierarchical(size, options.seconds, group)
        dist.barrier()
        dist.destroy_process_group()
        return
    if rank == 0:
        print(
            f"{'larger':>8}  {'':<31} {'direct us':>10} {'gloo us':>10} {'socket us':>10}   "
            f"{'times as fast as gloo':<22} share of the socket's speed"
        )
    with sockets(Place(rank, RANKS, torch.device("cpu"))) as wires:
        groups = {"": _group("lo"), ", two lines": _group("lo,lo")}
        assert callable(wires), wires  # a reason where no socket can be opened
        for size in options.sizes:
            assert not isinstance(wires, str), wires
            exchange(size, options.seconds, wires, groups)
    if options.fsdp:
        fsdp(2 * options.seconds)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the options and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="per size; FSDP2 takes twice that (5)")
    parser.add_argument(
        "--sizes",
        type=lambda text: [_size(size) for size in text.split(",")],
        default=[1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20],
        help="of the larger tensor (1KiB,64KiB,1MiB,16MiB,64MiB)",
    )
    parser.add_argument("--fsdp", action=argparse.BooleanOptionalAction, default=True, help="measure FSDP2 too")
    parser.add_argument(
        "--groups", type=lambda text: text.split(","), default=[], help="measure question 3: the group of each rank"
    )
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"  # the newest torch has other names for two collectives
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (Path(folder) / "store", options), nprocs=len(options.groups) or RANKS)


if __name__ == "__main__":
    main()
