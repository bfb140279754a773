"""The folder of a model, looked at before anything is started: config, tokenizer and weights that are there and whole.

Of weights only the headers are read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchlib.core.errors import UserError
from benchlib.core.files import read_object

T = TypeVar("T")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# One file, or files that belong together, of which a tokenizer of transformers can be made.
TOKENIZERS = (
    *({name} for name in ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model")),
    *({name} for name in ("sentencepiece.bpe.model", "spm.model")),
    {"vocab.json", "merges.txt"},
)

# A folder or a repository can name Python files of its own (``auto_map``). Without this word transformers asks on the terminal whether to
# run them, and a `y` that was meant for something else would do.
NO_CODE: dict[str, bool] = {"trust_remote_code": False}
OWN_CODE = "needs Python code that lies beside its weights, which is never run: give a model whose architecture transformers has"


def reason(error: Exception) -> str:
    """Say in one line why transformers could not load a model."""
    text = str(error).strip()
    return OWN_CODE if "trust_remote_code" in text else " ".join(text.split())[:300]


def with_attention(make: Callable[[str], T], wanted: str) -> T:
    """Make a model by an attention of transformers; one that has no scaled_dot_product_attention with its own instead."""
    try:
        return make(wanted)
    except ValueError as error:
        if wanted != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
    return make("eager")


def attention_note(model: Any, wanted: str = "sdpa") -> str:
    """Return that a model was made with another attention than ``wanted``; '' if it was not."""
    own = getattr(model.config, "_attn_implementation", wanted)
    kind = model.config.model_type
    return (
        f"transformers has no {wanted} attention for {kind}: it computes with {own}, which is slower"
        if own != wanted
        else ""
    )


def check(name: str, tokenizer: bool = True, weights: bool = True) -> None:
    """Raise ``UserError`` for a folder ``name`` that holds no whole model; what is no folder is left to the hub, and so is a
    bare name: the kit's own models and those of the hub have such.

    The message names the file, what is wrong with it and what to do. Without ``weights`` they are drawn at random.
    """
    folder = Path(name)
    if len(folder.parts) == 1 or not folder.exists():
        return
    try:
        files = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
        read_object(folder / CONFIG, {"model_type": str})
        if tokenizer:
            _check_tokenizer(folder, files)
        if weights:
            _check_weights(folder, files)
    except UserError as error:
        raise UserError(f"model = {name}: {str(error).replace(f'{folder}/', '')}") from None


def _check_tokenizer(folder: Path, files: set[str]) -> None:
    if not any(needed <= files for needed in TOKENIZERS):
        raise UserError(
            "no tokenizer in the folder (tokenizer.json, vocab.txt or tokenizer.model): all words would be unknown; "
            "add the model's own with `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`"
        )
    for file, required in (("tokenizer.json", {"model": dict}), ("tokenizer_config.json", {})):
        if file in files:
            read_object(folder / file, required)


def _check_weights(folder: Path, files: set[str]) -> None:
    from safetensors import SafetensorError, safe_open  # here: who is a client of servers need not have it

    stored = {WEIGHTS} & files or {file for file in files if file.endswith(".safetensors")}
    if INDEX in files:
        stored = {*map(str, read_object(folder / INDEX, {"weight_map": dict})["weight_map"].values())}
        if missing := sorted(stored - files):
            raise UserError(f"{missing[0]} is missing, which {INDEX} names: copy the whole folder")
    if not stored and (pickled := sorted(file for file in files if file.endswith(PICKLES))):
        raise UserError(
            f"{pickled[0]} is a pickle, which can run code when it is opened, and is never read: convert it with "
            f"`model.save_pretrained(FOLDER)` on a machine where you trust it, which writes {WEIGHTS}"
        )
    if not stored:
        raise UserError(
            f"no {WEIGHTS} in the folder; copy the whole folder (squad: init=random trains without weights)"
        )
    for file in sorted(stored):
        try:
            with safe_open(folder / file, "numpy"):  # holds the header against the size of the file
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} was cut, altered or is no safetensors file ({error}): copy it again") from None


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
    if left := sorted(name for name in info["unexpected_keys"] if re.search(r"\.\d+\.", name)):
        return f"the weights have {left[0]}{_more(left)}, which {CONFIG} does not ask for"
    return ""


def _more(names: Sequence[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
