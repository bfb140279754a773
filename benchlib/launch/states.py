"""Where a run stands for its supervisor: the states, and the table of what leads from one to the next.

A state answers two questions: which limit counts now, and what it means when nothing happens until then. How long each
may last, and how the run ends after that, is in ``supervise.Supervisor``.
"""

from enum import Enum


class State(Enum):
    """Where a run stands."""

    QUEUED = "no rank of a job on other machines was heard yet"
    STARTING = "not every rank is at work yet"
    WORKING = "every rank is at work: who is silent for too long hangs"
    FAILING = "a process that the supervisor started failed: the others get a moment to say why"
    LEAVING = "a rank of an agent failed, or all have ended: the agent gets a moment to leave"
    AGAIN = "an attempt failed: the agent gets time to start the ranks again"
    OVER = "the run has ended"


class Sign(Enum):
    """What is seen of a run."""

    HEARD = "a rank of a job on other machines wrote an event"
    LATE = "a rank is not at work"
    READY = "every rank is at work"
    ENDED = "a rank of an agent failed, or all have ended, and the agent is still there"
    DIED = "a process that the supervisor started failed"
    RETRY = "the attempt failed, and the agent is allowed to start the ranks again"
    BEGUN = "the agent started the ranks again"


# What a row does not name changes nothing: a late rank in a run that is failing, say.
_UNDER_WAY = {Sign.ENDED: State.LEAVING, Sign.DIED: State.FAILING, Sign.RETRY: State.AGAIN, Sign.BEGUN: State.STARTING}
NEXT: dict[State, dict[Sign, State]] = {
    State.QUEUED: {Sign.HEARD: State.STARTING, Sign.DIED: State.FAILING},
    State.STARTING: {**_UNDER_WAY, Sign.READY: State.WORKING},
    State.WORKING: {**_UNDER_WAY, Sign.LATE: State.STARTING},
    State.LEAVING: {Sign.DIED: State.FAILING, Sign.RETRY: State.AGAIN, Sign.BEGUN: State.STARTING},
    State.AGAIN: {Sign.DIED: State.FAILING, Sign.BEGUN: State.STARTING},
    State.FAILING: {},
    State.OVER: {},
}
