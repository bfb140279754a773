"""What a golden folder fixes: the parameters that it was recorded with count on every machine that compares with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchlib.errors import UserError
from benchlib.files import read_object
from benchlib.parity import golden
from benchlib.parity.config import ParityConfig

# Named by path on one machine; what they hold lies in the golden folder.
_NAMED_BY_PATH = ("model", "dev_file")


def work(config: ParityConfig) -> dict[str, Any]:
    """Return the fields that a golden folder fixes, for its manifest, and the tier, which only tells how long they take.

    Paths are cut to their last name: the folder is shared.
    """
    values = config.model_dump(mode="json", include=set(config.RECORDED))
    named = {name: _bare(value) if name in _NAMED_BY_PATH else value for name, value in values.items()}
    return {"tier": config.tier, **named}


def _bare(text: str) -> str:
    path = Path(text).expanduser()
    return path.name if path.is_absolute() or text.startswith(".") or path.exists() else text


def parameters(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that a run needs to compute the work of a manifest; ``UserError`` for unknown ones.

    Files with data are left out: the inputs themselves lie in the folder.
    """
    found = {name: value for name, value in manifest["work"].items() if name != "tier"}
    unknown = sorted(set(found) - set(ParityConfig.RECORDED))
    lacking = sorted(set(ParityConfig.RECORDED) - set(found))
    if unknown or lacking:
        what = f"has {unknown[0]}" if unknown else f"lacks {lacking[0]}"
        raise UserError(
            f"{golden.NAME}: its work {what}: it was recorded by benchlib {manifest['benchlib']}, and this version has "
            "other parameters; record it anew, or verify with that version"
        )
    return {name: value for name, value in found.items() if name != "dev_file"}


def tier(manifest: Mapping[str, Any]) -> str:
    """Return the tier that a manifest was recorded with: its time limits suit the work."""
    return str(manifest["work"].get("tier") or "smoke")


def refuse(config: ParityConfig) -> None:
    """Raise ``UserError`` for a golden folder that is damaged, and for parameters that contradict it."""
    if not config.golden:
        return
    manifest = golden.read(config.golden)
    wanted, given = parameters(manifest), work(config)
    weights_are_here = golden.WEIGHTS not in manifest["files"]
    for name, value in wanted.items():
        if given.get(name) != value and not (name == "model" and weights_are_here):  # then its hash tells, not its name
            raise UserError(
                f"{name} = {_shown(given.get(name))} contradicts {config.golden}, which was recorded with {name} = "
                f"{_shown(value)}: leave it out (`benchlib parity verify` takes it from there), or record anew"
            )
    require_fp32(Path(config.golden) / golden.REFERENCE / "recording.json")


def require_fp32(path: Path) -> None:
    """Raise ``UserError`` for a reference, told by its ``recording.json``, that was not computed in fp32."""
    precision = read_object(path, {"precision": str})["precision"]
    if precision != "fp32":
        raise UserError(
            f"{path}: the reference was computed in {precision}, and the tolerances hold against one in fp32; "
            "record it anew: `benchlib parity record`"
        )


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else repr(value)
