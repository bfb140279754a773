"""The golden folder: what one machine computed, written down so that another one can compare, with a seal on all of it.

    golden.json           the manifest: model, cases, environment, and size and SHA-256 of every other file
    weights.safetensors   one state dict in fp32; a slim recording has none
    model/config.json     the model's config
    inputs.safetensors    CASE/input_ids, CASE/attention_mask, [CASE/token_type_ids], [CASE/start, CASE/end]
    dev.json              what the span extraction of the dev set needs
    reference/            a recording of the reference, see benchlib.benchmarks.parity.recording
    fp64_reference/       a recording of the same in double precision on the CPU

The manifest finds a file that is missing, altered or extra. It is no signature: anyone with write access can rewrite it.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchlib
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.core.errors import UserError
from benchlib.core.files import home, read_object, sha256, write_json

NAME = "golden.json"
SCHEMA = 2
WEIGHTS = "weights.safetensors"
INPUTS = "inputs.safetensors"
DEV = "dev.json"
REFERENCE = "reference"
FP64 = "fp64_reference"

_FIELDS = ("model", "inputs_sha256", "cases", "work", "environment")
REMEDY = "copy the folder again from where it was recorded, or record it again: `benchlib parity record`"


def place(run_dir: Path | str, golden: str) -> Path:
    """Return the golden folder of a run: the one that its config names, else the one that it records itself."""
    return Path(golden) if golden else Path(run_dir) / "golden"


def write(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Seal a folder whose files are all there: list them and publish ``golden.json``, atomically and last.

    Of ``fields``, ``model`` holds name, init, sha256, parameters and description, each of ``cases`` id, kind, batch and
    length; ``work`` are the config's fields that change the work. Returns the manifest.
    """
    manifest: dict[str, Any] = {"schema_version": SCHEMA, "created_at": time.time(), "benchlib": benchlib.__version__}
    manifest |= {name: fields[name] for name in _FIELDS} | {"files": _files(folder)}
    write_json(folder / NAME, manifest)
    return manifest


def manifest(folder: Path | str) -> dict[str, Any]:
    """Read ``golden.json`` and none of the files; ``UserError`` for another folder, and for a manifest that is missing or cut."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"{folder}: not a golden folder, or an incomplete recording ({NAME} is missing); {REMEDY}")
    fields = read_object(path, {"benchlib": str, "files": dict}, SCHEMA)
    if fields["schema_version"] != SCHEMA:
        raise UserError(f"{path} is of another version of benchlib ({fields['benchlib']}); {REMEDY}")
    return fields


def read(folder: Path | str) -> dict[str, Any]:
    """Return the manifest after comparing every file of the folder with it; ``UserError`` names the first that differs."""
    fields, available = manifest(folder), _files(Path(folder))
    for name in sorted({*fields["files"], *available}):
        wanted, stored = fields["files"].get(name), available.get(name)
        if wanted != stored:
            fault = "is extra: remove it" if wanted is None else "was altered" if stored else "is missing"
            raise UserError(f"{folder}: {name} {fault}; {REMEDY}")
    return fields


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file but the manifest, by its path in the folder."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    paths.pop(NAME, None)
    return {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in paths.items()}


def work(config: ParityConfig) -> dict[str, Any]:
    """Return the fields that a golden folder fixes, for its manifest, and the tier, which only tells how long they take.

    Paths are cut to their last name: the folder is shared.
    """
    values = config.model_dump(mode="json", include={"tier", *config.RECORDED})
    return values | {name: _bare(values[name]) for name in ("model", "dev_file")}


def _bare(text: str) -> str:
    path = Path(text).expanduser()
    return path.name if path.is_absolute() or text.startswith(".") or path.exists() else text


def parameters(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that a run needs to compute the work of a manifest; ``UserError`` for those of another version.

    Files with data are left out: the inputs themselves lie in the folder.
    """
    values = {name: value for name, value in manifest["work"].items() if name != "tier"}
    if other := sorted(set(values) ^ set(ParityConfig.RECORDED)):
        raise UserError(
            f"{NAME}: recorded by benchlib {manifest['benchlib']} with other parameters ({', '.join(other)}): record it "
            "again, or verify with that version"
        )
    del values["dev_file"]
    return values


def shipped(config: ParityConfig) -> Path | None:
    """Return the recording of the same work that comes with the kit; None where there is none."""
    folders = (path.parent for path in sorted((home() / "baselines" / "golden").glob(f"*/{NAME}")))
    return next((folder for folder in folders if manifest(folder)["work"] == work(config)), None)


def refuse(config: ParityConfig) -> None:
    """Raise ``UserError`` for a golden folder that is damaged, and for parameters that contradict it."""
    if not config.golden:
        return
    manifest = read(config.golden)
    if WEIGHTS not in manifest["files"]:
        raise UserError(f"{config.golden} is a slim recording, without weights: verify one recorded without --slim")
    asked = work(config)
    for name, value in parameters(manifest).items():
        if asked[name] != value:
            raise UserError(
                f"{name} = {asked[name]!r} contradicts {config.golden}, which was recorded with {name} = {value!r}: "
                "leave it out (`benchlib parity verify` takes it from there), or record it again"
            )
