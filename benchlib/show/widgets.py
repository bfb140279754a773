"""Live progress of a run in a notebook, with a Stop button; plain lines where no widget can be shown.

In JupyterLab the progress is a widget. It is published together with an HTML form that takes its place at the end, so
that the stored notebook and the report show how the run went without any widget. Headless runs (``BENCHLIB_HEADLESS=1``,
no kernel or no ipywidgets) print lines.

The Stop button works while the cell runs because JupyterLab sends widget messages to a subshell of the kernel (a thread
of its own; JupyterLab >= 4.4 with ipykernel >= 7). A front end without subshells delivers the click only after the cell;
there, as everywhere, interrupting the kernel stops the ranks as well.
"""

import dataclasses
import functools
import html
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from benchlib.core.events import Progress

LINE_EVERY_S = 10.0
REFRESH_S = 0.25
PRINT = functools.partial(print, flush=True)
ENDS = {"complete": "finished", "timeout": "ended at its time limit", "stalled": "ended: a rank hung"}


def watch(launch: Any) -> dict[str, Any]:
    """Follow a started ``benchlib.launch.launch.Launch`` to its end, show its progress and return its status.

    An interrupt (Ctrl-C, the kernel's stop button, a cell's time-out) ends all ranks and is raised again.
    """
    progress, ending = Progress(), "interrupted"
    view = Panel(launch) if interactive() else Lines()
    try:
        view.show(progress)
        for event in launch.events():
            progress.update(event)
            view.show(progress)
        status: dict[str, Any] = launch.wait()
        ending = ENDS.get(status["outcome"], status["outcome"])
        return status
    except BaseException:
        launch.stop()
        raise
    finally:
        view.close(progress, ending)


def headless() -> bool:
    """Tell whether the notebook is executed by the kit itself, which reports to the terminal."""
    return os.environ.get("BENCHLIB_HEADLESS", "") not in ("", "0")


def interactive() -> bool:
    """Tell whether a widget can be shown: in a kernel, with ipywidgets, and not declared headless."""
    if headless() or "IPython" not in sys.modules or find_spec("ipywidgets") is None:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None  # type: ignore[no-untyped-call]


class Lines:
    """Progress as lines: one at each new phase, and one every ten seconds within a phase."""

    def __init__(self, put: Callable[[str], None] = PRINT) -> None:
        self.put, self.printed, self.last, self.phase = put, 0.0, "", ""

    def show(self, progress: Progress) -> None:
        line, now = progress.line(), time.monotonic()
        if line != self.last and (progress.phase != self.phase or now - self.printed >= LINE_EVERY_S):
            self.put(line)
            self.last, self.phase, self.printed = line, progress.phase, now

    def close(self, progress: Progress, ending: str) -> None:
        summary = f"finished after {time.monotonic() - progress.started:.0f} s"
        self.put(summary if ending == "finished" else f"{ending}: {progress.line()}")


class Panel:
    """Progress as a widget with a bar, the numbers and a Stop button."""

    def __init__(self, launch: Any) -> None:
        import ipywidgets
        from IPython.display import display

        self.launch, self.refreshed, self.text = launch, 0.0, ipywidgets.HTML()
        self.bar = ipywidgets.FloatProgress(min=0, max=1, layout={"flex": "1 1 auto"})
        looks = {"icon": "stop", "button_style": "warning", "layout": {"width": "8em"}}
        self.stop = ipywidgets.Button(description="Stop", tooltip="End all ranks and keep what was measured", **looks)
        self.stop.on_click(self._stop)
        _answer_at_once(self.stop)
        self.top = ipywidgets.HBox([self.bar, self.stop], layout={"align_items": "center"})
        self.box = ipywidgets.VBox([self.top, self.text], layout={"max_width": "46em"})
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": view, **_forms(Progress(), "running")}
        self.handle: Any = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def _stop(self, _button: Any) -> None:
        self.stop.disabled, self.stop.description = True, "Stopping"
        # Ending the ranks takes seconds; this thread has to stay free for the front end's other messages.
        threading.Thread(target=self.launch.stop, name="stop-button", daemon=True).start()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.refreshed >= REFRESH_S:
            self.refreshed, self.bar.value = now, _share(progress)
            head, *rest = map(html.escape, progress.line().split("  "))
            self.text.value = " &nbsp;·&nbsp; ".join([f"<b>{head}</b>", *rest])

    def close(self, progress: Progress, ending: str) -> None:
        self.handle.update(_forms(progress, ending), raw=True)
        for widget in (self.bar, self.stop, self.text, self.top, self.box):
            widget.close()


def _answer_at_once(widget: Any) -> None:
    """Let the clicks on a widget reach the kernel while a cell runs.

    ipykernel 7.4 sends a front end's message to the shell that last published on the widget's comm. For a widget made
    in a cell that is the main shell, which is busy until the cell ends. Here the message has to go where the front end
    addressed it: to a subshell. Earlier versions do so and have no such hook.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda _data, addressed: addressed


def _share(progress: Progress) -> float:
    return progress.done / progress.total if progress.total else 0.0


def _forms(progress: Progress, ending: str) -> dict[str, str]:
    seconds = time.monotonic() - progress.started
    if ending != "running":
        # Nothing is left of a run that has ended, and its last phase takes no longer.
        progress = dataclasses.replace(progress, left_s=None, began=time.monotonic())
    line = progress.line() if progress.phase != "done" else progress.text
    where = "" if ending == "finished" else f": {line}"
    text = f"{ending} after {seconds:.0f} s{where}" if ending != "running" else line
    share = _share(progress) or float(ending == "finished" and not progress.total)
    page = f'<p><progress max="1" value="{share:.3f}">{100 * share:.0f}%</progress> {html.escape(text)}</p>'
    return {"text/html": page, "text/plain": text}
