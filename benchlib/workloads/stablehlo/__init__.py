"""PyTorch to StableHLO: a graph of torch.export becomes text, a manifest, and a program that other compilers run.

export.py      a module becomes a graph of core ATen operations: forward, or forward and backward
emit.py        the writer of text: names, types, constants, the operations of StableHLO
lowerings.py   the table: ATen operation -> StableHLO, one function each
convert.py     the graph, operation by operation, through the table; what is unknown is listed first
manifest.py    what each argument is: name, role, shape, type; files and their check
pjrt.py        XLA through PJRT: the one file that calls jax.extend's semi-public functions
mlir.py        parser, type checker and interpreter of the text, without torch
inspection.py  what a program consists of, counted in its text
runtimes.py    executors of a .mlir file: XLA, IREE, the reference interpreter
"""
