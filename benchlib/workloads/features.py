"""Questions and contexts as windows of tokens: the arithmetic of SQuAD features, on whole arrays.

A window is ``prefix question middle context-part suffix``, where prefix, middle and suffix are the tokenizer's special
tokens. Letters: N questions, C distinct contexts, F windows, T tokens of all windows. Arrays are ragged: a flat array
and, for row i, the bounds ``starts[i]`` and ``starts[i + 1]``.

Every distinct text is tokenised once, although about five questions share a context: this is what makes it fast.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tokenizers
from tokenizers import Encoding, Tokenizer

from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path
from benchlib.workloads.squad_text import Example, content_sha256

_BATCH = 1024
# A question so long that its windows would advance by fewer tokens is cut: one context could give hundreds of windows.
_LEAST_STEP = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Template:
    """How a tokenizer joins a question and a context. ``tokenizer`` neither truncates nor pads."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    cls_index: int
    token_types: bool

    @property
    def special(self) -> int:
        """Special tokens of a window."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


@dataclass(frozen=True)
class Texts:
    """Tokenised texts: ids int32 (T,), starts int64 (texts + 1,), characters int32 (T,) or None."""

    ids: np.ndarray
    starts: np.ndarray
    char_start: np.ndarray | None = None
    char_end: np.ndarray | None = None


def plain_tokenizer_json(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON without the truncation and padding that its last user left in it."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {type(tokenizer).__name__} is not a fast one: choose a model with a tokenizer.json")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(content | {"truncation": None, "padding": None}, sort_keys=True)


def template(tokenizer: Any) -> Template:
    """Find out how ``tokenizer`` (a fast tokenizer of transformers) joins two texts, by letting it join two.

    Works on a copy: the caller's tokenizer keeps its state. Raises ``UserError`` for a tokenizer that is slow or does
    not put the question before the context.
    """
    copy = Tokenizer.from_str(plain_tokenizer_json(tokenizer))
    pair = copy.encode("who is it", "it is me")
    parts = [
        (key, list(group)) for key, group in itertools.groupby(range(len(pair.ids)), key=pair.sequence_ids.__getitem__)
    ]
    keys = [key for key, _ in parts]
    first, second = keys.index(0) if 0 in keys else -1, keys.index(1) if 1 in keys else -1
    middle = tuple(pair.ids[index] for key, group in parts[first + 1 : second] for index in group if key is None)
    prefix = tuple(pair.ids[index] for _, group in parts[:first] for index in group) if first > 0 else ()
    suffix = tuple(pair.ids[index] for _, group in parts[second + 1 :] for index in group)
    question = copy.encode("who is it", add_special_tokens=False).ids
    context = copy.encode("it is me", add_special_tokens=False).ids
    if not 0 <= first < second or [*prefix, *question, *middle, *context, *suffix] != pair.ids:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} does not write a pair as question, context: choose a BERT-like encoder"
        )
    token_types = "token_type_ids" in tokenizer.model_input_names
    start = len(prefix) + len(question) + len(middle)
    if token_types and pair.type_ids not in ([0] * start + [1] * (len(pair.ids) - start), [0] * len(pair.ids)):
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} numbers its segments unlike BERT: choose a BERT-like encoder"
        )
    marks = [token for token in (tokenizer.cls_token_id, tokenizer.bos_token_id) if token in prefix]
    # Segment numbers that are 0 throughout need no array of their own.
    return Template(
        copy, prefix, middle, suffix, prefix.index(marks[0]) if marks else 0, token_types and 1 in pair.type_ids
    )


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], offsets: bool, progress: Callable[[int], None] | None = None
) -> Texts:
    """Tokenise ``texts`` without special tokens; ``progress`` gets the number of texts done after each batch."""
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    ids, characters = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
    lengths = np.zeros(len(texts) + 1, np.int64)
    for low in range(0, len(texts), _BATCH):
        batch = encode(list(texts[low : low + _BATCH]), add_special_tokens=False)
        sizes = [len(encoding) for encoding in batch]
        lengths[low + 1 : low + 1 + len(batch)] = sizes
        ids.append(_flat((encoding.ids for encoding in batch), sum(sizes)))
        if offsets:
            characters.append(_flat_pairs(batch, sum(sizes)))
        if progress:
            progress(low + len(batch))
    starts = np.cumsum(lengths)
    if not offsets:
        return Texts(np.concatenate(ids), starts)
    both = np.concatenate(characters)
    return Texts(np.concatenate(ids), starts, np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1]))


def _flat(rows: Iterable[list[int]], count: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), np.int32, count)


def _flat_pairs(batch: list[Encoding], count: int) -> np.ndarray:
    pairs = itertools.chain.from_iterable(encoding.offsets for encoding in batch)
    return np.fromiter(itertools.chain.from_iterable(pairs), np.int32, 2 * count).reshape(-1, 2)


def cut(
    examples: Sequence[Example],
    joint: Template,
    max_length: int,
    doc_stride: int,
    training: bool,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokenise ``examples`` and cut them into windows of at most ``max_length`` tokens that share ``doc_stride``.

    Returns the arrays and the metadata of ``features.Features``. ``progress`` gets (contexts done, contexts).
    Raises ``UserError`` when the windows leave no room for a context.
    """
    budget = max_length - joint.special - doc_stride
    if budget < 4:
        raise UserError(
            f"max_length = {max_length} with doc_stride = {doc_stride} and {joint.special} special tokens leaves {budget} tokens "
            f"for the question and new context: set max_length to {doc_stride + joint.special + 4} or more, or a smaller doc_stride"
        )
    places: dict[str, int] = {}
    context_of = np.array([places.setdefault(example.context, len(places)) for example in examples], np.int64)
    total = len(places)
    contexts = tokenize(joint.tokenizer, list(places), True, progress and (lambda done: progress(done, total)))
    # White space before a question is no information, and there are questions with thousands of blanks.
    questions = tokenize(joint.tokenizer, [example.question.lstrip() for example in examples], False)

    longest = budget - min(_LEAST_STEP, budget // 4)
    whole = np.diff(questions.starts)
    question_size = np.minimum(whole, longest)
    room = max_length - joint.special - question_size
    step = room - doc_stride
    context_size = np.diff(contexts.starts)[context_of]
    count = 1 + np.maximum(0, -(-(context_size - room) // step))

    example_index = np.repeat(np.arange(len(examples)), count)
    number = np.arange(len(example_index)) - np.repeat(np.cumsum(count) - count, count)
    first = number * step[example_index]  # of the window's context tokens, counted in the context
    size = np.minimum(room[example_index], context_size[example_index] - first)
    context_start = len(joint.prefix) + question_size[example_index] + len(joint.middle)
    starts = np.concatenate([[0], np.cumsum(context_start + size + len(joint.suffix))])
    source = contexts.starts[context_of[example_index]] + first

    ids = np.empty(starts[-1], np.int32)
    for tokens, at in (
        (joint.prefix, starts[:-1]),
        (joint.middle, starts[:-1] + context_start - len(joint.middle)),
        (joint.suffix, starts[1:] - len(joint.suffix)),
    ):
        ids[at[:, None] + np.arange(len(tokens))] = np.array(tokens, np.int32)
    question_source = questions.starts[:-1][example_index]
    _copy_rows(ids, starts[:-1] + len(joint.prefix), questions.ids, question_source, question_size[example_index])
    _copy_rows(ids, starts[:-1] + context_start, contexts.ids, source, size)

    arrays = {
        "input_ids": ids,
        "starts": starts,
        "context_start": context_start.astype(np.int32),
        "example_index": example_index.astype(np.int32),
    }
    if training:
        labels = _labels(examples, contexts, context_of, example_index, first, size, context_start, joint.cls_index)
        arrays["start_positions"], arrays["end_positions"] = labels
    else:
        for name, characters in (("char_start", contexts.char_start), ("char_end", contexts.char_end)):
            assert characters is not None  # contexts are tokenised with offsets
            arrays[name] = np.full(starts[-1], -1, np.int32)
            _copy_rows(arrays[name], starts[:-1] + context_start, characters, source, size)
    meta = {
        "max_length": max_length,
        "suffix": len(joint.suffix),
        "cls_index": joint.cls_index,
        "token_types": joint.token_types,
        "questions": len(examples),
        "questions_cut": int((whole > longest).sum()),
    }
    return arrays, meta


def _copy_rows(target: np.ndarray, to: np.ndarray, source: np.ndarray, start: np.ndarray, size: np.ndarray) -> None:
    # A loop of slices: as fast as an index of all tokens and without its 24 bytes a token.
    for here, there, length in zip(to.tolist(), start.tolist(), size.tolist(), strict=True):
        target[here : here + length] = source[there : there + length]


def _labels(
    examples: Sequence[Example],
    contexts: Texts,
    context_of: np.ndarray,
    example_index: np.ndarray,
    first: np.ndarray,
    size: np.ndarray,
    context_start: np.ndarray,
    cls_index: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end token, int32 (F,), of each window's answer; the class token where it is not inside.

    The rule is the usual recipe's: the start is the last token that begins at or before the answer, the end the first
    token that ends at or after it. Two of its slips are not followed: an answer that begins with the last context token
    of a window is labelled with that token (the recipe walks on to the last token of the padded window), and a start
    never lies behind its end (byte-level pieces of one character share their offsets).
    """
    assert contexts.char_start is not None  # contexts are tokenised with offsets
    assert contexts.char_end is not None
    if not len(contexts.ids):
        nothing = np.full(len(example_index), cls_index, np.int32)
        return nothing, nothing
    answers = np.array(
        [(start, start + len(text)) for text, start in (example.answers[0] for example in examples)], np.int64
    ).reshape(-1, 2)
    # One sorted array for all contexts: a context's characters are shifted behind those of the contexts before it.
    shift = max(int(contexts.char_end.max()), int(answers.max(initial=0))) + 1
    base = np.repeat(np.arange(len(contexts.starts) - 1) * shift, np.diff(contexts.starts))
    begins = np.maximum.accumulate(base + contexts.char_start)
    ends = np.minimum.accumulate((base + contexts.char_end)[::-1])[::-1]
    start_token = (
        np.searchsorted(begins, context_of * shift + answers[:, 0], side="right") - 1 - contexts.starts[context_of]
    )
    end_token = np.searchsorted(ends, context_of * shift + answers[:, 1], side="left") - contexts.starts[context_of]

    low, high = contexts.starts[context_of[example_index]] + first, np.maximum(size - 1, 0)
    top = len(contexts.ids) - 1
    inside = (
        (size > 0)
        & (contexts.char_start[np.minimum(low, top)] <= answers[example_index, 0])
        & (contexts.char_end[np.minimum(low + high, top)] >= answers[example_index, 1])
    )
    start = np.clip(start_token[example_index] - first, 0, high)
    end = np.clip(end_token[example_index] - first, 0, high)
    start = np.minimum(start, end)
    return (
        np.where(inside, context_start + start, cls_index).astype(np.int32),
        np.where(inside, context_start + end, cls_index).astype(np.int32),
    )


# Named numpy arrays in one file that is mapped into memory when read, with a checksum that detects damage.
#
# The file is a line of JSON (magic, place and type of each array, free metadata, SHA-256 of all of it and of the rest), then
# the arrays, each at a multiple of 64 bytes. Unlike a zip of ``.npy`` files it maps without a copy, and it unpickles nothing.


MAGIC = "benchlib arrays 2"
_ALIGN = 64
_HEADER_LIMIT = 1 << 20

Arrays = dict[str, np.ndarray]


class DamagedFile(ValueError):
    """The file is cut, altered or not of this format; the text says which."""


def write_arrays(path: Path | str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """Write ``arrays`` and the JSON values of ``meta`` atomically."""
    table, position = [], 0
    digest = hashlib.sha256()
    chunks: list[memoryview | bytes] = []
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        table.append({"name": name, "dtype": data.dtype.str, "shape": list(np.shape(array)), "at": position})
        padding = bytes(-data.nbytes % _ALIGN)
        for chunk in (data.reshape(-1).view(np.uint8).data, padding):
            digest.update(chunk)
            chunks.append(chunk)
        position += data.nbytes + len(padding)
    described = {"arrays": table, "meta": dict(meta), "bytes": position}
    digest.update(json.dumps(described).encode())
    header = {"magic": MAGIC, **described, "sha256": digest.hexdigest()}
    line = json.dumps(header).encode()
    line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        handle.write(line)
        for chunk in chunks:
            handle.write(chunk)


def read_arrays(path: Path | str) -> tuple[Arrays, dict[str, Any]]:
    """Map the arrays of ``path``, read-only, and return them with the metadata.

    Raises ``DamagedFile`` when the content is not what was written, ``FileNotFoundError`` when there is none.
    """
    source = Path(path)
    if not stat.S_ISREG(source.stat().st_mode):  # to open a pipe would wait for its other end
        raise DamagedFile(f"{source}: no regular file")
    with source.open("rb") as handle:
        line = handle.readline(_HEADER_LIMIT)
    try:
        header = json.loads(line)
        known = header["magic"] == MAGIC
        described = {name: header[name] for name in ("arrays", "meta", "bytes")}
        expected = len(line) + int(header["bytes"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(f"{source}: not an array file of this version") from None
    if not known:
        raise DamagedFile(f"{source}: not an array file of this version")
    if source.stat().st_size != expected:
        raise DamagedFile(f"{source}: cut or extended: {source.stat().st_size} bytes, {expected} were written")
    raw = np.asarray(np.memmap(source, dtype=np.uint8, mode="r"))[len(line) :]
    digest = hashlib.sha256(raw.data)
    digest.update(json.dumps(described).encode())
    if digest.hexdigest() != header.get("sha256"):
        raise DamagedFile(f"{source}: altered: its checksum does not match")
    arrays: Arrays = {}
    for entry in header["arrays"]:
        dtype = np.dtype(entry["dtype"])
        size = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
        arrays[entry["name"]] = raw[entry["at"] : entry["at"] + size].view(dtype).reshape(entry["shape"])
    return arrays, header["meta"]


# SQuAD features: windows of tokens, made once and then mapped from a cache file.
#
# Letters: F windows, T tokens of all windows. See ``benchlib.workloads.features`` for how they are cut.


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
    progress: Progress | None = None,
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
    progress: Progress | None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return cut(examples, template(tokenizer), max_length, doc_stride, training, progress)


def _key(examples: Sequence[Example], tokenizer: Any, max_length: int, doc_stride: int, training: bool) -> str:
    parts = [
        FORMAT,
        tokenizers.__version__,
        plain_tokenizer_json(tokenizer),
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
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
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
