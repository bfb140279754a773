"""The time limits of a run, after which the supervisor ends it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Seconds; 0 is no limit."""

    startup_s: float = 120.0
    stall_s: float = 60.0
    wall_s: float = 0.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Limits":
        """Read the limits of a raw config: its own wall limit, else twice the budget and the start-up."""
        startup = float(config.get("startup_timeout_s", cls.startup_s))
        wall = float(config.get("wall_limit_s", 0.0)) or (
            2 * float(config["budget_s"]) + startup if "budget_s" in config else 0.0
        )
        return cls(startup, float(config.get("stall_timeout_s", cls.stall_s)), wall)
