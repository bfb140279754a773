"""What the training tests execute in each of two ranks: cases of one training after the other, see ``run``."""

import contextlib
import functools
import itertools
import json
import os
import shutil
from unittest import mock

import numpy as np
import torch
import transformers

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad import balance, compiled, train
from benchlib.benchmarks.squad import run as squad
from benchlib.benchmarks.squad.balance import Member, Split
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.train import Native
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter, Moment
from benchlib.core.files import write_json
from benchlib.runtime import checkpoint
from benchlib.runtime.group import weight_checksum, world
from benchlib.runtime.measurement import Rank, executed
from benchlib.runtime.steps import COLUMNS, Columns, compare_ranks
from benchlib.workloads import encoders, features, training

Config = SquadConfig
PADDINGS = ("longest", "max_length")
SAMPLE_S = 0.01  # of a rank that does its work once, by the injected clock
ONE_BATCH = {"train_questions": 16, "max_steps": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0}
UNLIKE = {"batch_size": 12, "epochs": 2}  # of one process; of two, which share each batch as they like


def make_model(folder):
    """Write a random BERT of one layer with the embedded vocabulary; return its path."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.TINY)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    return str(folder)


def config_of(model, nproc, **changes):
    """Return a config of a short training from random weights."""
    values = {
        "model": model, "init": "random", "nproc": nproc, "train_questions": 33, "eval_questions": 4, "batch_size": 16 // nproc, "seed": 5,
        "learning_rate": 1e-3, "threads": 1, "checkpoint_every": -1, "budget_s": 86400.0,
    }  # fmt: skip
    return SquadConfig.model_validate(values | changes)


def without_dropout(**changes):
    return {"attention_dropout": 0.0, "hidden_dropout": 0.0, **changes}


def trained(config, here, run_dir, events, exact=False):
    """Train on generated data, ``exact`` in fp64; return what the tests look at, and the gradients of each step before they
    are clipped."""
    loaded, gradients, clip = train.load_model(config), [], torch.nn.utils.clip_grad_norm_
    windows = features.build(
        train.load_data(config).train, loaded.tokenizer, config.max_length, config.doc_stride, True
    )
    task = train.Task(Rank(config, run_dir, here, events, Moment.now()), loaded, windows, 100)
    if exact:
        loaded.model.double()

    def look(parameters, limit):
        gradients.append({name: parameter.grad.clone() for name, parameter in loaded.model.named_parameters()})
        return clip(parameters, limit)

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", look):
        done = squad.engine(config.engine)(task)
    last = zip(COLUMNS, done.table[-1, 0].tolist(), strict=True)
    return {
        "losses": done.table[:, :, 0].sum(axis=1).tolist(),
        "weights": weight_checksum(loaded.model),
        # They begin at 0. Left out are those without a gradient but for rounding: of keys, and of what shifts all logits alike.
        "biases": [
            float(value.detach().abs().mean())
            for name, value in loaded.model.named_parameters()
            if name.endswith("bias") and not any(part in name for part in ("key", "qa_outputs", "0.output.LayerNorm"))
        ],
        "samples": done.table[:, :, COLUMNS.index("samples")].tolist(),
        "expected": done.plan.samples,
        "equal": [len(set(ranks)) == 1 for ranks in done.checksums],
        "resumed": done.first,
        "columns": {name: None if value != value else value for name, value in last},
        "tables": done.tables,
    }, gradients


def whole(config, run_dir, events):
    """Run the benchmark, whose speed nobody asks: peaks and all-reduces are measured for a moment only."""
    training.PEAK_S = squad.EXCHANGE_S = 0.02
    executed(BENCHMARKS["squad"])(config, run_dir, events)


def trainer(config, run_dir, events):
    """Run the whole benchmark once with each padding; the results are in folders of these names.

    The ranks have the names that srun gives them, of which accelerate knows none.
    """
    names = {
        "RANK": "PROCID",
        "WORLD_SIZE": "STEP_NUM_TASKS",
        "LOCAL_RANK": "LOCALID",
        "LOCAL_WORLD_SIZE": "STEP_TASKS_PER_NODE",
    }
    os.environ.update({f"SLURM_{theirs}": os.environ.pop(ours) for ours, theirs in names.items()})
    for padding in PADDINGS:
        whole(config.model_copy(update={"trainer_padding": padding}), run_dir / padding, events)


def other_split(work, step):
    """Return a split that is another one in every step: of all, of none, of one, in several micro-batches."""
    first = [0, 12, 1, 7, 5, 11][step % 6]
    members = (Member(most=5, sample_s=1.0 + place) for place in range(2))
    return Split(tuple(members), [first, 12 - first], tokens=100.0)


@contextlib.contextmanager
def injected_clock(config, rank):
    """Let calibration and steps take SAMPLE_S a sample times what the rank repeats, however busy the machine is."""
    follow = balance.Balance.follow

    def paced(own, table, next_open):
        repeats = [[config.work_of(place, step) for place in range(table.shape[1])] for step in range(len(table))]
        table = table.copy()
        table[:, :, [COLUMNS.index(name) for name in ("data_s", "backward_s", "optimizer_s")]] = 0.0
        table[:, :, COLUMNS.index("forward_s")] = SAMPLE_S * np.array(repeats) * Columns(table)["samples"]
        follow(own, table, next_open)

    with (
        mock.patch.object(balance, "fit", return_value=(0.0, SAMPLE_S * config.work_of(rank), 0.0)),
        mock.patch.object(balance.Balance, "_optimizer_s", return_value=0.0),
        mock.patch.object(balance.Balance, "follow", paced),
    ):
        yield


def run(config, run_dir, events):
    """Execute all cases one after the other; rank 0 leaves cases.json, and gradients.pt of two of them."""
    with world(config, run_dir) as here:
        _cases(config, run_dir, events, here)


def _cases(config, run_dir, events, here):
    outcomes, gradients = {}, {}

    def case(name, exact=False, **changes):
        place, settings = run_dir / name, config_of(config.model, 2, **changes)
        if here.main:
            place.mkdir()
            save_config(settings, place)
        torch.distributed.barrier()
        with injected_clock(settings, here.rank) if "balance" in changes else contextlib.nullcontext():
            outcomes[name], gradients[name] = trained(settings, here, place, events, exact)

    # Both trainings through XLA are of the same shapes, and weights are arguments: they share their programs.
    compiled.Xla._program = functools.partialmethod(_shared, compiled.Xla._program, {})
    case("plain", **without_dropout())
    case("one batch", **ONE_BATCH)
    accumulated = without_dropout(batch_size=4, accumulation=2)
    case("accumulated", **accumulated)
    case("compiled", engine="compiled", checkpoint_every=2, **accumulated)
    case("first", epochs=2, checkpoint_every=2)
    # From step 4 of 6 and step 2 of 3: the newest checkpoints are those of the end, with nothing left to train.
    case("resumed", epochs=2, checkpoint_every=0, resume=str(run_dir / "first"))
    case("compiled resumed", engine="compiled", resume=str(run_dir / "compiled"), **accumulated)

    halves = without_dropout(**UNLIKE | {"batch_size": 6})
    with mock.patch.object(Native, "split", other_split):
        case("unlike", exact=True, **halves)
    # Rank 1 becomes the fast one: the even split of the last steps follows from what the steps take.
    drift = halves | {"balance": "auto", "epochs": 8, "planted_work": [1, 4], "planted_drift_step": 8}
    with mock.patch.object(checkpoint, "KEEP", 100):
        case("drift", checkpoint_every=4, **drift)
    if here.main:  # it is continued from before the answer to it
        for folder in (run_dir / "drift" / "checkpoints").iterdir():
            if int(folder.name.rpartition("-")[2]) > 4:
                shutil.rmtree(folder)
    torch.distributed.barrier()
    case("drift resumed", resume=str(run_dir / "drift"), checkpoint_every=4, **drift)
    model = train.load_model(config).model
    if here.rank == 1:
        with torch.no_grad():
            next(iter(model.parameters()))[0, 0] += 1e-6
    outcomes["perturbed"] = compare_ranks(model, here, events, 1)
    if here.main:
        torch.save({name: gradients[name] for name in ("one batch", "unlike")}, run_dir / "gradients.pt")
        write_json(run_dir / "cases.json", outcomes)


def _shared(engine, program, programs, inputs):
    engine._programs = programs
    return program(engine, inputs)


def alone(config, run_dir, exact=False):
    """Train with one rank in this process."""
    run_dir.mkdir()
    with world(config, run_dir) as here:
        return trained(config, here, run_dir, EventWriter(run_dir, "rank0"), exact)


def single_gradients(config):
    """Return the gradients of the mean loss of the first batch by transformers alone: one sample at a time, no padding."""
    split = train.load_data(config)
    loaded = train.load_model(config)
    windows = features.build(split.train, loaded.tokenizer, config.max_length, config.doc_stride, True)
    model = loaded.model.train()
    for index, (first, end) in enumerate(itertools.pairwise(windows.starts)):
        ids = torch.from_numpy(windows.input_ids[first:end].astype("int64"))[None]
        types = (torch.arange(end - first) >= int(windows.context_start[index])).long()[None]
        names = ("start_positions", "end_positions")
        labels = {name: torch.tensor([int(getattr(windows, name)[index])]) for name in names}
        (model(input_ids=ids, token_type_ids=types, **labels).loss / len(windows)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def read(run_dir):
    return json.loads((run_dir / "cases.json").read_text())
