"""Of the limits that are shared: ``benchlib.workloads.numerics``."""

from benchlib.workloads.numerics import CURVE as CURVE
from benchlib.workloads.numerics import limit as limit
