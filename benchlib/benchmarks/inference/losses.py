"""What became of the servers behind ``workers=`` in each test, as rows and in words."""

from typing import Any

SUT = "Network SUT"  # in the name that the system tells LoadGen: MLPerf's rules for the network division


def rows(test: str, record: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a test for the tables of workers and of losses."""
    return (
        [{"test": test, **row} for row in record.get("workers", [])],
        [{"test": test, **row} for row in record.get("losses", [])],
    )


def sentences(tables: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return what was lost, by test, in words; nothing where every worker was there all the time."""
    lines = []
    for test in dict.fromkeys(row["test"] for row in tables.get("losses", [])):
        lost = [row for row in tables["losses"] if row["test"] == test]
        state = {row["worker"]: row for row in tables.get("workers", []) if row["test"] == test}
        again = sum(row["times"] for row in lost if row["event"] == "requeued")
        parts = []
        for worker in dict.fromkeys(row["worker"] for row in lost if row["event"] == "down"):
            down = next(row for row in lost if row["worker"] == worker and row["event"] == "down")
            up = next(
                (row for row in lost if row["worker"] == worker and row["event"] == "up" and row["t_s"] > down["t_s"]),
                None,
            )
            when = "was not there" if down["t_s"] <= 0 else f"was lost after {down['t_s']:.1f} s"
            parts.append(
                f"worker {state[worker]['url']} {when}"
                + (f" and came back after {up['t_s']:.1f} s" if up else " and did not come back")
            )
        parts.append(f"{again} queries were sent again to others" if again else "no query had to be sent again")
        lines.append(f"{test}: {'; '.join(parts)}.")
    return lines
