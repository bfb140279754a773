"""The golden folder: what one machine computed, written down so that another one can compare, with a seal on all of it.

    golden.json           the manifest: model, cases, environment, and size and SHA-256 of every other file
    weights.safetensors   one state dict in fp32; may be left out where the other machine has the weights itself
    model/config.json     the model's config
    inputs.safetensors    CASE/input_ids, CASE/attention_mask, [CASE/token_type_ids], [CASE/start, CASE/end]
    dev.json              what the span extraction of the dev set needs
    reference/            a recording of the reference, see benchlib.benchmarks.parity.recording
    truth/                a recording of the same in double precision on the CPU

The seal finds damage and edits: a file that is missing, cut, altered or extra, and a manifest that was touched. It is no
signature: anyone with write access can seal it anew.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchlib
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.core.errors import UserError
from benchlib.core.files import not_written, read_object, sha256, write_json

NAME = "golden.json"
SCHEMA = 2
WEIGHTS = "weights.safetensors"
INPUTS = "inputs.safetensors"
DEV = "dev.json"
REFERENCE = "reference"
TRUTH = "truth"

_FIELDS = {"model": dict, "inputs_sha256": str, "cases": list, "work": dict, "environment": dict}
_REQUIRED = {"created_at": float, "benchlib": str, **_FIELDS, "files": dict, "digest": str}
_NAMED_BY_PATH = ("model", "dev_file")  # on one machine; what they hold lies in the golden folder
REMEDY = "copy the folder again from where it was recorded, or record it again: `benchlib parity record`"


def place(run_dir: Path | str, golden: str) -> Path:
    """Return the golden folder of a run: the one that its config names, else the one that it records itself."""
    return Path(golden) if golden else Path(run_dir) / "golden"


def write(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Seal a folder whose files are all there: list them and publish ``golden.json``, atomically and last.

    Of ``fields``, ``model`` holds name, init, sha256, parameters and description, each of ``cases`` id, kind, batch and
    length; ``work`` are the config's fields that change the work. What is not JSON in them, NaN for one, is a
    ``ValueError``. Returns the manifest.
    """
    manifest: dict[str, Any] = {"schema_version": SCHEMA, "created_at": time.time(), "benchlib": benchlib.__version__}
    manifest |= {name: fields[name] for name in _FIELDS}
    manifest["files"] = {name: _facts(folder / name) for name in _listing(folder)}
    manifest["digest"] = _digest(manifest)
    write_json(folder / NAME, manifest)
    return manifest


def manifest(folder: Path | str) -> dict[str, Any]:
    """Read ``golden.json`` and check its own digest, but none of the files.

    Raises ``UserError`` for another folder, and for a manifest that is missing, cut or altered.
    """
    place = Path(folder)
    if not place.is_dir():
        raise UserError(f"{place}: not a golden folder; make one with `benchlib parity record FOLDER`")
    if not (place / NAME).exists():
        raise UserError(
            f"{place}: {NAME} is missing, so this is not a golden folder, or an incomplete recording; {REMEDY}"
        )
    fields = read_object(place / NAME, _REQUIRED, SCHEMA)
    if fields["schema_version"] != SCHEMA:
        raise UserError(f"{place / NAME} is of another version of benchlib ({fields['benchlib']}); {REMEDY}")
    if fields["digest"] != _digest(fields):
        raise UserError(f"{place / NAME} was altered: its digest does not match; {REMEDY}")
    return fields


def read(folder: Path | str) -> dict[str, Any]:
    """Return the manifest after holding every file of the folder against it, byte by byte.

    Raises ``UserError`` that names the first file that is missing, cut, altered or extra.
    """
    place, fields = Path(folder), manifest(folder)
    wanted, there = fields["files"], _listing(place)
    # Only names that the folder itself has are opened: a manifest cannot lead out of it.
    for name in sorted(wanted):
        if name not in there:
            raise UserError(f"{place}: {name} is missing; {REMEDY}")
    for name in there:
        if name not in wanted:
            raise UserError(f"{place}: {name} is extra: it was not recorded; remove it, or {REMEDY}")
    for name in there:
        fault = _fault(place / name, wanted[name])
        if fault:
            raise UserError(f"{place}: {name} {fault}; {REMEDY}")
    return fields


def _listing(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for path in files if (name := path.relative_to(folder).as_posix()) != NAME)


def _facts(path: Path) -> dict[str, Any]:
    try:
        return {"bytes": path.stat().st_size, "sha256": sha256(path)}
    except OSError as error:
        raise not_written(path.parent / NAME, error) from error


def _fault(path: Path, wanted: Any) -> str:
    """Return what is wrong with a file; '' where it is as recorded. The size is looked at first: weights are large."""
    if not isinstance(wanted, dict) or type(wanted.get("bytes")) is not int:
        return f"has no size in {NAME}"
    try:
        size = path.stat().st_size
        if size < wanted["bytes"]:
            return f"was cut: {size:,} of {wanted['bytes']:,} bytes are left"
        if size > wanted["bytes"] or sha256(path) != wanted.get("sha256"):
            return "was altered after it was recorded"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of all fields but the digest itself."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
    values = {name: value for name, value in manifest["work"].items() if name != "tier"}
    unknown = sorted(set(values) - set(ParityConfig.RECORDED))
    lacking = sorted(set(ParityConfig.RECORDED) - set(values))
    if unknown or lacking:
        what = f"has {unknown[0]}" if unknown else f"lacks {lacking[0]}"
        raise UserError(
            f"{NAME}: its work {what}: it was recorded by benchlib {manifest['benchlib']}, and this version has "
            "other parameters; record it again, or verify with that version"
        )
    return {name: value for name, value in values.items() if name != "dev_file"}


def refuse(config: ParityConfig) -> None:
    """Raise ``UserError`` for a golden folder that is damaged, and for parameters that contradict it."""
    if not config.golden:
        return
    manifest = read(config.golden)
    wanted, asked = parameters(manifest), work(config)
    weights_are_here = WEIGHTS not in manifest["files"]
    for name, value in wanted.items():
        if asked.get(name) != value and not (name == "model" and weights_are_here):  # then its hash tells, not its name
            raise UserError(
                f"{name} = {_shown(asked.get(name))} contradicts {config.golden}, which was recorded with {name} = "
                f"{_shown(value)}: leave it out (`benchlib parity verify` takes it from there), or record it again"
            )
    path = Path(config.golden) / REFERENCE / "recording.json"
    precision = read_object(path, {"precision": str})["precision"]
    if precision != "fp32":
        raise UserError(
            f"{path}: the reference was computed in {precision}, and the tolerances hold against one in fp32; "
            "record it again: `benchlib parity record`"
        )


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else repr(value)
