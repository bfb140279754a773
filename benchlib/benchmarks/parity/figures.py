"""The pictures of a parity run, in the order of the report."""

from collections.abc import Callable

from benchlib.benchmarks.parity import divergence, pictures
from benchlib.show.figures import Picture

FIGURES: dict[str, Callable[..., Picture]] = {
    "backend-matrix": pictures.matrix,
    "quantities": pictures.quantities,
    "difference-histograms": divergence.histograms,
    "different-or-worse": divergence.closeness,
    "divergence-by-depth": divergence.depth,
    "gradient-differences": divergence.gradients,
    "loss-curves": divergence.losses,
    "attention-kernels": divergence.kernels,
    "latency-by-member": pictures.latency,
}
