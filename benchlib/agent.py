"""What the agent that starts the ranks itself (torchrun, mpirun, a cluster's client) said, and why it left."""

from pathlib import Path

from benchlib import diagnosis
from benchlib.launchers import Job
from benchlib.processes import signal_name

NAMES = {"torchrun": "torchrun's agent", "mpirun": "mpirun"}


class AgentReport:
    """Reads ``logs/agent.err`` of a job. ``endpoint`` is where nodes meet, '' for one node."""

    def __init__(self, job: Job, logs: Path, endpoint: str, startup_s: float) -> None:
        self.job, self.path, self.endpoint, self.startup_s = job, logs / "agent.err", endpoint, startup_s
        self._read_bytes = 0

    @property
    def name(self) -> str:
        """What a person calls the agent."""
        return NAMES.get(self.job.name, f"the agent of launcher {self.job.name}")

    def text(self) -> str:
        """Return what it said so far."""
        return self.path.read_text(errors="replace") if self.job.agent and self.path.exists() else ""

    def news(self) -> dict[int, int]:
        """Return the exit codes by process id of ranks that it saw fail, where it said something since the last call."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._read_bytes:
            return {}
        self._read_bytes = size
        return dict(diagnosis.agent_exits(self.text()))

    def failures(self) -> list[tuple[int, int, int, bool]]:
        """Return the ranks in its last report, see ``diagnosis.agent_failures``."""
        return diagnosis.agent_failures(self.text())

    def reason(self) -> str:
        """Return why the nodes cannot meet; '' where that is not what it left for."""
        return diagnosis.agent_reason(self.text(), self.endpoint, self.startup_s) if self.endpoint else ""

    def meeting(self) -> str:
        """Return where the nodes should have met; '' for one node."""
        return f"; the nodes meet at {self.endpoint}: start this command on every one of them" if self.endpoint else ""

    def left(self, code: int) -> str:
        """Return why it left with an exit code (negative: a signal), as well as that is known."""
        if reason := self.reason():
            return reason
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code} and named no rank"
        return f"{self.name} {how}; see logs/agent.err{self.last_words()}"

    def last_words(self) -> str:
        """Return what the agent of a run elsewhere said last: the cluster's reason, where no rank was there to say it."""
        said = [line.strip() for line in self.text().split("\n") if line.strip()] if self.job.remote else []
        return f": {said[-1][:500]}" if said else ""
