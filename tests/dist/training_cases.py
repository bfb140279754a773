"""What the training tests execute in each of two ranks: `python -m benchlib.runtime.worker RUN_DIR --benchmark training_cases:run`."""

import functools
import itertools
import json

import torch
import transformers

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad import compiled, train
from benchlib.benchmarks.squad import run as squad
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter, Moment
from benchlib.core.files import write_json
from benchlib.runtime.group import weight_checksum, world
from benchlib.runtime.measurement import Rank, executed
from benchlib.runtime.steps import COLUMNS, compare_ranks
from benchlib.workloads import features, training

Config = SquadConfig
PADDINGS = ("longest", "max_length")


def make_model(folder):
    """Write a random BERT of one layer with a word vocabulary of the generated data; return its path."""
    split = train.load_data(SquadConfig(train_questions=40, eval_questions=4))
    texts = " ".join(f"{example.question} {example.context}" for example in [*split.train, *split.eval])
    words = sorted(set("".join(c if c.isalnum() else f" {c} " for c in texts.lower()).split()))
    letters = sorted({letter for word in words for letter in word})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *dict.fromkeys([*letters, *(f"##{letter}" for letter in letters), *words])]
    tokenizer = transformers.BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(vocab_size=len(vocabulary), **sizes).save_pretrained(folder)
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


def task_of(config, here, run_dir, events):
    """Return a task on generated data, and the model that belongs to it."""
    split = train.load_data(config)
    loaded = train.load_model(config)
    windows = features.build(split.train, loaded.tokenizer, config.max_length, config.doc_stride, True)
    return train.Task(Rank(config, run_dir, here, events, Moment.now()), loaded, windows, 100)


def outcome_of(task):
    """Train and return losses by step, the checksum of the final weights and what else the tests look at."""
    trained = squad.engine(task.config.engine)(task)
    last = zip(COLUMNS, trained.table[-1, 0].tolist(), strict=True)
    return {
        "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
        "weights": weight_checksum(task.loaded.model),
        # They begin at 0. Left out are those without a gradient but for rounding: of keys, and of what shifts all logits alike.
        "biases": [
            float(value.detach().abs().mean())
            for name, value in task.loaded.model.named_parameters()
            if name.endswith("bias") and not any(part in name for part in ("key", "qa_outputs", "0.output.LayerNorm"))
        ],
        "samples": trained.table[:, :, COLUMNS.index("samples")].sum(axis=0).tolist(),
        "expected": trained.plan.samples,
        "equal": [len(set(ranks)) == 1 for ranks in trained.checksums],
        "resumed": trained.first,
        "columns": {name: None if value != value else value for name, value in last},
    }


def gradients_of(task):
    """Return the gradients of the first step, as they are when they get clipped."""
    outcomes = {}
    real = torch.nn.utils.clip_grad_norm_

    def look(parameters, limit):
        outcomes.update({name: parameter.grad.clone() for name, parameter in task.loaded.model.named_parameters()})
        return real(parameters, limit)

    torch.nn.utils.clip_grad_norm_ = look
    try:
        train.train(task)
    finally:
        torch.nn.utils.clip_grad_norm_ = real
    return outcomes


def whole(config, run_dir, events):
    """Run the benchmark, whose speed nobody asks: peaks and all-reduces are measured for a moment only."""
    training.PEAK_S = squad.EXCHANGE_S = 0.02
    executed(BENCHMARKS["squad"])(config, run_dir, events)


def trainer(config, run_dir, events):
    """Run the whole benchmark once with each padding; the results are in folders of these names."""
    for padding in PADDINGS:
        whole(config.model_copy(update={"trainer_padding": padding}), run_dir / padding, events)


def run(config, run_dir, events):
    """Execute all cases one after the other; rank 0 leaves cases.json and gradients.pt."""
    with world(config, run_dir) as here:
        _cases(config, run_dir, events, here)


def _cases(config, run_dir, events, here):
    outcomes = {}

    def case(name, folder="", **changes):
        place = run_dir / (folder or name)
        if here.main:
            place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        task = task_of(config_of(config.model, 2, **changes), here, place, events)
        save_config(task.config, place)
        outcomes[name] = outcome_of(task)

    # Both trainings through XLA are of the same shapes, and weights are arguments: they share their programs.
    compiled.Xla._program = functools.partialmethod(_shared, compiled.Xla._program, {})
    case("plain", **without_dropout())
    case("accumulated", **without_dropout(batch_size=4, accumulation=2))
    case("compiled", engine="compiled", checkpoint_every=2, **without_dropout(batch_size=4, accumulation=2))
    case("first", epochs=2, checkpoint_every=2)
    # From step 4 of 6 and step 2 of 3: the newest checkpoints are those of the end, with nothing left to train.
    case("resumed", epochs=2, checkpoint_every=0, resume=str(run_dir / "first"))
    resume = {"checkpoint_every": -1, "resume": str(run_dir / "compiled")}
    case("compiled resumed", engine="compiled", **without_dropout(batch_size=4, accumulation=2, **resume))

    first = config_of(config.model, 2, train_questions=16, max_steps=1, **without_dropout())
    gradients = gradients_of(task_of(first, here, run_dir, events))

    task = task_of(config_of(config.model, 2), here, run_dir, events)
    if here.rank == 1:
        with torch.no_grad():
            next(iter(task.loaded.model.parameters()))[0, 0] += 1e-6
    outcomes["perturbed"] = compare_ranks(task.loaded.model, here, events, 1)
    if here.main:
        torch.save(gradients, run_dir / "gradients.pt")
        write_json(run_dir / "cases.json", outcomes)


def _shared(engine, program, programs, inputs):
    engine._programs = programs
    return program(engine, inputs)


def alone(config, run_dir):
    """Train with one rank in this process."""
    run_dir.mkdir()
    with world(config, run_dir) as here:
        return outcome_of(task_of(config, here, run_dir, EventWriter(run_dir, "rank0")))


def single_gradients(config):
    """Return the gradients of the mean loss of all samples by transformers alone: one sample at a time, no padding."""
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
