"""What a report of the machine says of products that were planned and not measured."""

from benchlib.benchmarks.machine.config import MachineConfig
from benchlib.benchmarks.machine.view import VIEW
from benchlib.results.run import Result


def test_a_size_that_was_left_out_is_named() -> None:
    config = MachineConfig(matmul_sizes=[512, 1024, 2048], precisions=["fp32", "bf16", "fp16"])
    rows = [{"precision": "fp32", "n": size, "rank": rank} for size in (512, 1024) for rank in (0, 1)]
    rows += [{"precision": "bf16", "n": size, "rank": 0} for size in config.matmul_sizes]
    result = Result.of(config, status="complete", tables={"matmul": rows}, started_at=0.0, ended_at=1.0)
    [sentence] = VIEW.warnings(config, result)
    # fp16 has no rows: the device lacks it, which its metrics say.
    assert sentence.startswith("Incomplete: there are no matrix products in fp32 at n = 2048: ")
    assert VIEW.warnings(MachineConfig(matmul_sizes=[512, 1024]), result) == []
