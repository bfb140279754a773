"""What the fork server of kernels loads, once. To be imported there and nowhere else: it ties the process to its parent.

The server ends with the program that started it, also while kernels live, and these end when the server is gone.
"""

import importlib
import os

from benchlib.core.imports import importing
from benchlib.launch.processes import die_with_parent
from benchlib.show.kernels import HEADLESS

die_with_parent(os.getppid())
os.setsid()  # what a terminal sends to the program is the program's to pass on
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's starts its threads when it is loaded
os.environ.update(HEADLESS, JPY_PARENT_PID=str(os.getpid()))  # ipykernel reads them when it is loaded
with importing():
    for name in ("ipykernel.kernelapp", "benchlib.session", "benchlib.show.figures", "pandas", "scipy.stats"):
        importlib.import_module(name)
# Loaded outside of a kernel, pandas takes a terminal for granted, and cuts columns that its width does not hold.
importlib.import_module("pandas").set_option("display.max_columns", 20)
