"""The folder of a model, looked at before anything is started: config, tokenizer and weights that are there and whole.

Of weights only the headers are read.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import read_object

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LAYER = re.compile(r"\.\d+\.")
# One file, or files that belong together, of which a tokenizer of transformers can be made.
TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.txt",),
    ("vocab.json", "merges.txt"),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("spm.model",),
)


def check(name: str, tokenizer: bool = True, weights: bool = True) -> None:
    """Raise ``UserError`` for a folder ``name`` that holds no whole model; what is no folder is left to the hub, and so is a
    bare name: the kit's own models and those of the hub have such.

    The message names the file, what is wrong with it and what to do. Without ``weights`` they are drawn at random.
    """
    folder = Path(name)
    if len(folder.parts) == 1 or not folder.is_dir():
        if len(folder.parts) > 1 and folder.exists():
            raise UserError(f"model = {name}: a file, expected a folder with {CONFIG}, tokenizer and weights")
        return
    try:
        config = read_object(folder / CONFIG, {})
        if not isinstance(config.get("model_type"), str):
            raise UserError(f"{folder / CONFIG}: not the config of a model of transformers (no model_type)")
        if tokenizer:
            _check_tokenizer(folder)
        if weights:
            _check_weights(folder)
    except UserError as error:
        raise UserError(f"model = {name}: {str(error).replace(f'{folder}/', '')}") from None


def _check_tokenizer(folder: Path) -> None:
    if not any(all((folder / file).is_file() for file in files) for files in TOKENIZERS):
        raise UserError(
            "no tokenizer in the folder (tokenizer.json, vocab.txt or tokenizer.model): all words would be unknown; "
            "add the model's own with `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`"
        )
    if (folder / "tokenizer.json").is_file():
        read_object(folder / "tokenizer.json", {"model": dict})
    if (folder / "tokenizer_config.json").is_file():
        read_object(folder / "tokenizer_config.json", {})


def _check_weights(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open  # here: who is a client of servers need not have it

    for file in _files(folder):
        try:
            with safe_open(folder / file, "numpy"):  # holds the header against the size of the file
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} was cut, altered or is no safetensors file ({error}): copy it again") from None


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        places = read_object(folder / INDEX, {"weight_map": dict})["weight_map"]
        files = sorted({str(place) for place in places.values()})
        if missing := [file for file in files if Path(file).name != file or not (folder / file).is_file()]:
            raise UserError(f"{missing[0]} is missing, which {INDEX} names: copy the whole folder")
        return files
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in files:
        return ["model.safetensors"]
    if files:
        return files
    if pickled := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"{pickled[0]} is a pickle, which can run code when it is opened, and is never read: convert it with "
            "`model.save_pretrained(FOLDER)` on a machine where you trust it, which writes model.safetensors"
        )
    raise UserError(
        "no model.safetensors in the folder; copy the whole folder (squad: init=random trains without weights)"
    )


def misfit(info: Mapping[str, Any], body: str = "") -> str:
    """Return why weights do not fit the model of their config, '' where they do.

    ``info`` is what transformers says of loading them: ``missing_keys``, ``unexpected_keys``, ``mismatched_keys`` (name, shape
    in the file, shape in the model). Only names that begin with ``body`` may not be missing: a new head is drawn.
    """
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, built = mismatched[0]
        return f"{name} is {list(stored)} in the weights and {list(built)} by {CONFIG}{_more(mismatched)}"
    if lost := sorted(name for name in info["missing_keys"] if name.startswith(body) and "pooler" not in name):
        return f"the weights lack {lost[0]}{_more(lost)}, which {CONFIG} asks for"
    # Heads and buffers of other tasks may be left over, whole layers may not.
    if left := sorted(name for name in info["unexpected_keys"] if _LAYER.search(name)):
        return f"the weights have {left[0]}{_more(left)}, which {CONFIG} does not ask for"
    return ""


def _more(names: Sequence[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
