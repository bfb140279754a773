"""SQuAD features: windows of tokens, made once and then mapped from a cache file.

Letters: F windows, T tokens of all windows. See ``benchlib.windows`` for how they are cut.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tokenizers

from benchlib import windows
from benchlib.array_file import DamagedFile, read_arrays, write_arrays
from benchlib.example import Example, content_sha256

log = logging.getLogger(__name__)

# Part of the cache key: raise it with every change of what the arrays hold.
FORMAT = 1


@dataclass(frozen=True)
class Features:
    """Windows as flat arrays without padding; window i holds the tokens ``starts[i]`` to ``starts[i + 1]``.

    Tokens of a window count from 0. The context is the tokens from ``context_start[i]`` on, except the last ``suffix``
    ones. ``token_types`` says that the model takes segment numbers: 0 before ``context_start``, 1 from there on.
    The windows of a question are neighbours and in the order of the context.
    """

    input_ids: np.ndarray  # int32 (T,)
    starts: np.ndarray  # int64 (F + 1,)
    context_start: np.ndarray  # int32 (F,)
    example_index: np.ndarray  # int32 (F,): place in the list of examples
    start_positions: np.ndarray | None  # int32 (F,): first token of the answer, or cls_index; with training=True
    end_positions: np.ndarray | None  # int32 (F,): last token of the answer, or cls_index; with training=True
    char_start: np.ndarray | None  # int32 (T,): first character in the context, -1 elsewhere; with training=False
    char_end: np.ndarray | None  # int32 (T,): behind the last character, -1 elsewhere; with training=False
    max_length: int
    suffix: int
    cls_index: int
    token_types: bool
    questions: int
    questions_cut: int  # questions that were too long to leave room for a context
    from_cache: bool
    seconds: float  # that building or reading took

    def __len__(self) -> int:
        return len(self.example_index)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each window, int64 (F,)."""
        return np.diff(self.starts)

    def ids(self, window: int) -> np.ndarray:
        """Return the token ids of one window, int32 (length,), a view."""
        return self.input_ids[self.starts[window] : self.starts[window + 1]]

    def types(self, window: int) -> np.ndarray:
        """Return the segment numbers of one window, int32 (length,); zeros where the model takes none."""
        types = np.zeros(int(self.starts[window + 1] - self.starts[window]), np.int32)
        if self.token_types:
            types[self.context_start[window] :] = 1
        return types


def build(
    examples: Sequence[Example],
    tokenizer: Any,
    max_length: int,
    doc_stride: int,
    training: bool,
    cache_dir: Path | str | None,
    progress: windows.Progress | None = None,
) -> Features:
    """Return the features of ``examples``, from ``cache_dir`` when they are there, else made and left there.

    ``tokenizer`` is a fast tokenizer of transformers; it is not changed. ``max_length`` counts all tokens of a window,
    ``doc_stride`` those that neighbouring windows share. ``training`` asks for answer positions (of the first gold
    answer), else the characters of the tokens are kept. ``progress`` gets (contexts done, contexts), also now and then
    while another process builds. Without ``cache_dir`` nothing is stored.

    Several processes may call this at once: one builds, the others wait for it and read. A cut or altered file is
    built anew. Raises ``UserError`` for a slow or foreign tokenizer and for lengths that leave no room.
    """
    began = time.perf_counter()
    if cache_dir is None:
        arrays, meta = _cut(examples, tokenizer, max_length, doc_stride, training, progress)
        return _features(arrays, meta, False, began)
    path = Path(cache_dir) / f"features-{_key(examples, tokenizer, max_length, doc_stride, training)}.bin"
    found = _read(path)
    if found is None:
        with _locked(path, progress):
            found = _read(path)  # the process that held the lock has left it here
            if found is None:
                arrays, meta = _cut(examples, tokenizer, max_length, doc_stride, training, progress)
                _store(path, arrays, meta)
                return _features(arrays, meta, False, began)
    return _features(*found, True, began)


def _cut(
    examples: Sequence[Example],
    tokenizer: Any,
    max_length: int,
    doc_stride: int,
    training: bool,
    progress: windows.Progress | None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return windows.cut(examples, windows.template(tokenizer), max_length, doc_stride, training, progress)


def _key(examples: Sequence[Example], tokenizer: Any, max_length: int, doc_stride: int, training: bool) -> str:
    parts = [
        FORMAT,
        tokenizers.__version__,
        windows.plain_tokenizer_json(tokenizer),
        [tokenizer.cls_token_id, tokenizer.bos_token_id, list(tokenizer.model_input_names)],
        [max_length, doc_stride, training],
        content_sha256(examples),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    try:
        return read_arrays(path)
    except FileNotFoundError:
        return None
    except (DamagedFile, OSError) as error:
        log.warning("%s; the features are built anew", error)
        return None


def _store(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    try:
        write_arrays(path, arrays, meta)
    except OSError as error:
        # A full disk costs the next start its time, not this run its result.
        log.warning("%s cannot be written (%s); the next start builds the features again", path, error.strerror)


@contextlib.contextmanager
def _locked(path: Path, progress: windows.Progress | None) -> Iterator[None]:
    lock = filelock.FileLock(path.with_suffix(".lock"))  # the operating system frees it when its process dies
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=2)
            except filelock.Timeout:
                if progress:
                    progress(0, 0)
    except OSError as error:
        # Where nothing can be written there is nothing to wait for either: each process builds its own.
        log.warning("%s cannot be locked (%s); the features are built without the cache", path, error.strerror)
    try:
        yield
    finally:
        lock.release()


def _features(arrays: dict[str, np.ndarray], meta: dict[str, Any], from_cache: bool, began: float) -> Features:
    present: dict[str, Any] = (
        dict.fromkeys(("start_positions", "end_positions", "char_start", "char_end")) | arrays | meta
    )
    return Features(**present, from_cache=from_cache, seconds=time.perf_counter() - began)
