"""How to run the same again: the command line and the fields that differ from the defaults."""

import shlex
from typing import Any

from benchlib.config import BaseConfig, config_class, resolve
from benchlib.errors import UserError


def changes(config: BaseConfig) -> list[tuple[str, str, str]]:
    """Return the fields that differ from the benchmark's defaults: name, value, default."""
    fields = type(config).model_fields
    rows = [(name, getattr(config, name), fields[name].default) for name in fields if name != "benchmark"]
    return [(name, str(value) or "''", str(default) or "''") for name, value, default in rows if value != default]


def command(config: BaseConfig) -> str:
    """Return the command line that runs the same config again, with every value that its tier and backend do not give."""
    words = ["benchlib", "run", config.benchmark, "--tier", config.tier, "--backend", config.backend]
    try:
        usual: BaseConfig = resolve(config.benchmark, config.tier, config.backend).config
    except UserError:  # the tier's file changed or went away: then everything that is not a default is written out
        usual = config_class(config.benchmark)(benchmark=config.benchmark)
    for name, value in config.model_dump(mode="json").items():
        if name not in ("benchmark", "tier", "backend") and (value != getattr(usual, name) or name == "nproc"):
            words += ["--set", f"{name}={_written(value)}"]
    return shlex.join(words)


def _written(value: Any) -> str:
    """Write a value as ``--set`` reads it: a list by its members, separated by commas."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)
