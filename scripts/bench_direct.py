"""How fast are all-gather and reduce-scatter of `benchlib.workloads.collectives.exchange` beside gloo's own, and the exchange in groups?

1. Both collectives on two ranks, by the size of the larger tensor, over one connection and over one for each direction
   (`GLOO_SOCKET_IFNAME=lo,lo`; gloo's own are not faster with it).
2. Forward and backward of an FSDP2 model of 39 million fp32 parameters (156 MB, 8 linear blocks), with and without `use_direct`.
3. With `--groups` alone: the fp64 all-reduce through groups of ranks (`collective=hierarchical`), all over gloo, beside gloo
   without groups. One name per rank.

Method: processes of one thread on loopback. Everything compared is interleaved; a time is that of the slowest rank; each ratio is
formed within its round and printed as median with 95% interval. Results are compared bit by bit in every round. Takes about 50 s.

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
from measuring import interleaved, machine, options_of, ratio
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchlib.workloads.collectives import exchange, hierarchy
from benchlib.workloads.collectives.hierarchy import Hierarchy, Member, layout

RANKS = 2
SHORT_S = 0.002  # shorter calls are repeated within a round
MIN_ROUNDS, MAX_ROUNDS = 5, 200
WIDTH, BLOCKS = 2208, 8

Case = Callable[[], object]


def timed(cases: dict[str, Case], seconds: float, check: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each case on the slowest rank, by round, in about ``seconds`` altogether; ``check`` runs after each round."""
    once = {name: max(seconds_of(case) for _ in range(2)) for name, case in cases.items()}
    repeats = {name: max(1, round(SHORT_S / s)) for name, s in once.items()}
    rounds = round(seconds / sum(repeats[name] * s for name, s in once.items()))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number, name in enumerate(interleaved(list(cases), min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)), 1):
        times[name].append(seconds_of(cases[name], repeats[name]))
        if number % len(cases) == 0:
            check()
    return times


def seconds_of(case: Case, repeats: int = 1) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        case()
    seconds = torch.tensor((time.perf_counter() - began) / repeats, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def show(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def collectives(size: int, seconds: float, groups: dict[str, dist.ProcessGroup]) -> None:
    """Compare the collectives on a larger tensor of ``size`` bytes."""
    rank, part = dist.get_rank(), size // 4 // RANKS
    generator = torch.Generator().manual_seed(rank)
    whole, shard = torch.randn(RANKS * part, generator=generator), torch.randn(part, generator=generator)
    gathered, direct_gathered, in_place = (torch.zeros(RANKS * part) for _ in range(3))
    reduced, direct_reduced = torch.zeros(part), torch.zeros(part)
    shard_in_place = in_place[rank * part : (rank + 1) * part].copy_(shard)
    cases: dict[str, Case] = {
        "all-gather": partial(dist.all_gather_into_tensor, gathered, shard),
        "reduce-scatter": partial(dist.reduce_scatter_tensor, reduced, whole),
    }
    for name, group in groups.items():
        cases[f"all-gather{name}"] = partial(exchange.all_gather, direct_gathered, shard, group)
        cases[f"all-gather in place{name}"] = partial(exchange.all_gather, in_place, shard_in_place, group)
        cases[f"reduce-scatter{name}"] = partial(exchange.reduce_scatter, direct_reduced, whole, group=group)

    def check() -> None:
        """Compare the last results, then erase them."""
        pairs = ((gathered, direct_gathered), (gathered, in_place), (reduced, direct_reduced))
        if not all(torch.equal(expected, result) for expected, result in pairs):
            raise SystemExit(f"{size} bytes: the results differ")
        for tensor in (direct_gathered, direct_reduced, in_place):
            tensor.zero_()
        shard_in_place.copy_(shard)

    times = timed(cases, seconds, check)
    for name in list(cases)[2:]:
        gloo = times["reduce-scatter" if "reduce" in name else "all-gather"]
        show(f"{kib(size):>8}  {name:<35} {us(times[name]):>9} {us(gloo):>9}  {ratio(gloo, times[name])}")


def group_over(interfaces: str) -> dist.ProcessGroup:
    """A group of all ranks over these interfaces, which gloo reads when it makes a group."""
    before, os.environ["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"], interfaces
    group = dist.new_group()
    os.environ["GLOO_SOCKET_IFNAME"] = before
    return group


def fsdp(seconds: float) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        return layers

    models = {"stock": model(), "direct": model()}
    exchange.use_direct(models["direct"])
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def forward_and_backward(layers: nn.Module) -> None:
        layers.zero_grad(set_to_none=True)
        layers(x).square().sum().backward()

    def check() -> None:
        pairs = zip(models["stock"].parameters(), models["direct"].parameters(), strict=True)
        if not all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs):  # type: ignore[union-attr]
            raise SystemExit("the gradients differ")

    times = timed({name: partial(forward_and_backward, layers) for name, layers in models.items()}, seconds, check)
    stock, direct = times["stock"], times["direct"]
    show(f"\nFSDP2 forward and backward: {us(stock)} us, direct {us(direct)} us, {ratio(stock, direct)} times as fast")


def groups_of_ranks(size: int, seconds: float, group: Hierarchy) -> None:
    """Compare the all-reduce of ``size`` bytes through groups with gloo's alone; sums may be added in another order."""
    source = torch.randn(size // 8, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    alone, grouped = source.clone(), source.clone()

    def check() -> None:
        torch.testing.assert_close(grouped, alone, rtol=1e-12, atol=1e-12 * dist.get_world_size())
        alone.copy_(source)
        grouped.copy_(source)

    cases: dict[str, Case] = {
        "alone": lambda: group.flat_allreduce(alone).wait(),
        "groups": lambda: dist.all_reduce(grouped, group=group),
    }
    times = timed(cases, seconds, check)
    flat, through = times["alone"], times["groups"]
    show(f"{kib(size):>8} {us(through):>12} {us(flat):>14}   {ratio(through, flat)}")


def us(times: list[float]) -> str:
    return f"{1e6 * statistics.median(times):,.0f}"


def kib(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def sizes_of(text: str) -> list[int]:
    """Bytes of 64KiB,16MiB."""
    return [int(size[:-3]) << {"KiB": 10, "MiB": 20}[size[-3:]] for size in text.split(",")]


def work(rank: int, store: Path, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    ranks = len(options.groups) or RANKS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    show(f"{machine()}, torch {torch.__version__}\n")
    if options.groups:
        hierarchy.load()
        group = dist.new_group(backend=hierarchy.BACKEND, pg_options=Member(options.groups[rank], "gloo"))
        show(f"{layout(group.members)}\n\n{'bytes':>8} {'groups us':>12} {'gloo alone us':>14}   times as long")
        for size in options.sizes:
            groups_of_ranks(size, options.seconds, group)
    else:
        show(f"{'larger':>8}  {'':<35} {'direct us':>9} {'gloo us':>9}  times as fast")
        groups = {" direct": group_over("lo"), " direct, two lines": group_over("lo,lo")}
        for size in options.sizes:
            collectives(size, options.seconds, groups)
        if options.fsdp:
            fsdp(2 * options.seconds)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="per size; FSDP2 takes twice that [5]")
    parser.add_argument("--sizes", type=sizes_of, default="1KiB,64KiB,1MiB,16MiB,64MiB", help="of the larger tensor")
    parser.add_argument("--fsdp", action=argparse.BooleanOptionalAction, default=True, help="measure FSDP2 too")
    parser.add_argument("--groups", type=lambda text: text.split(","), default=[], help="3: the group of each rank")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"  # the newest torch renames two collectives
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (Path(folder) / "store", options), nprocs=len(options.groups) or RANKS)


if __name__ == "__main__":
    main()
