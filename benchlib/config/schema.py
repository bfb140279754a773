"""From parameters to one frozen, validated config: a benchmark's defaults, then tier, backend and overrides.

``params/tiers/<tier>.yaml`` and ``params/backends/<backend>.yaml`` hold sections ``all`` and one per benchmark that
state only what differs from the defaults of the benchmark's config class.
"""

import functools
import re
import shlex
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from benchlib.benchmarks import BENCHMARKS
from benchlib.config import cluster
from benchlib.core.errors import UserError, explained, nearest
from benchlib.core.files import home, read_json, read_yaml, write_json
from benchlib.core.machine import BACKENDS, MOVES

Model = TypeVar("Model", bound=BaseModel)
EMBEDDED_MODEL = "tiny"  # the value of ``model`` that stands for the kit's own small encoder


UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(rf"([0-9]+[.]?[0-9]*) ?({'|'.join(UNITS_S)})")
_PERCENT = re.compile(r"([0-9]+[.]?[0-9]*) ?%")


def as_seconds(value: object) -> object:
    """Return the seconds of a duration such as `90s`, `5min` or `8h`; anything else as it is."""
    written = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(written[1]) * UNITS_S[written[2]] if written else value


def as_share(value: object) -> object:
    """Return the share of a percentage such as `10%`; anything else as it is."""
    written = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(written[1]) / 100 if written else value


Seconds = Annotated[float, BeforeValidator(as_seconds)]
Share = Annotated[float, BeforeValidator(as_share)]


class BaseConfig(BaseModel):
    """What every benchmark's config has: where the work runs and within which limits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    benchmark: str = Field(description="the benchmark that this config belongs to")
    # The tier is a part of paths (runs, baselines): a stored config must not lead out of their folders.
    tier: str = Field(
        "smoke", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="how much work: a file of params/tiers"
    )
    backend: Literal["cpu", "cuda", "rocm", "mps", "xpu", "tpu"] = Field("cpu", description="where the work runs")
    collective: Literal["", "gloo", "nccl", "xccl", "mpi", "ucc", "hierarchical"] = Field(
        "",
        description="collective library; '': the backend's own; hierarchical: each rank's own, and gloo between them",
    )
    exchange_groups: str = Field(
        "", description="groups of collective=hierarchical, a name for each rank as in a,a,b; '': by library"
    )
    nproc: int = Field(1, ge=1, le=1024, description="ranks on each node, one device each")
    launcher: Literal["local", "torchrun", "mpirun", "slurm", "kubernetes", "torchx", "groups"] = Field(
        "local", description="who starts the ranks"
    )
    nnodes: int = Field(1, ge=1, le=4096, description="nodes; more than one needs a launcher that reaches them")
    rdzv_endpoint: str = Field("", description="HOST:PORT where the nodes of a torchrun launch meet")
    max_restarts: int = Field(
        0, ge=0, le=100, description="restarts by torchrun after a failure, from the last checkpoint"
    )
    cluster: str = Field(
        "", description="profile of the machines (params/clusters/NAME.yaml, or a file): images, queues, claimed links"
    )
    threads: int = Field(0, ge=0, le=4096, description="CPU threads of each rank; 0: cores / ranks on the node")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="random seed for data, weights, order and dropout")
    budget_s: Seconds = Field(60.0, gt=0, description="seconds from the start-up of the ranks to their result; a check")
    startup_timeout_s: Seconds = Field(
        120.0, gt=0, description="seconds until every rank must be at work; then the run is ended"
    )
    stall_timeout_s: Seconds = Field(
        60.0, gt=0, description="seconds without an event from a rank; then the run is ended"
    )
    wall_limit_s: Seconds = Field(
        0.0, ge=0, description="seconds after which the run is ended; 0: twice the budget plus the start-up"
    )

    planted_slowdown: Share = Field(
        0.0, ge=0, le=10, description="share by which timed work is slowed down on purpose, to test the gate; 0: none"
    )
    limits: dict[str, Annotated[Share, Field(ge=0)]] = Field(
        default={},
        description="limits of the gate by metric, in place of the benchmark's: "
        "shares or amounts, limits.train_samples_per_s=0.1",
    )

    # Fields that name a file or folder, and whether it must exist; relative paths are relative to the working folder.
    PATHS: ClassVar[dict[str, bool]] = {}
    # Whether the benchmark runs on one rank, however many devices the machine has.
    ONE_PROCESS: ClassVar[bool] = False
    # How threads of OpenMP wait for work; the user's own goes first. PASSIVE where two libraries compute: threads that spin take the
    # cores from each other, and CPU time would count the spinning.
    OMP_WAIT_POLICY: ClassVar[str] = ""
    # Fields that another one decides where that is set: both by hand contradict each other.
    EXCLUSIVE: ClassVar[dict[str, str]] = {}
    # Fields that change no work, besides limits, places and targets.
    ASIDE: ClassVar[tuple[str, ...]] = ()
    # Fields that earlier versions did not have, with the value that does what these did.
    LATER: ClassVar[dict[str, Any]] = {"exchange_groups": ""}
    # Fields that there were, with what to use instead.
    GONE: ClassVar[dict[str, str]] = {}
    # Fields that a validator sets, by the field that decides: the origin of such a value names it.
    FOLLOWS: ClassVar[dict[str, str]] = {"launcher": "collective"}

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Read what pydantic does not: "fp32,bf16", "null", a choice of numbers; True is no number."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        members = typing.get_args(annotation) if union else (annotation,)
        kind = typing.get_origin(members[0])
        if isinstance(value, bool) and bool not in members:
            raise ValueError(f"got {value}, and only switches are true or false")
        if isinstance(value, str) and kind is list:
            parts = [part.strip(" \"'") for part in value.strip("[]").split(",")]
            return [part for part in parts if part]
        if kind is Literal:
            return next((choice for choice in typing.get_args(members[0]) if str(choice) == value), value)
        return None if value == "null" and type(None) in members else value

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []
        if len(set(texts)) < len(texts):
            raise ValueError(f"{','.join(map(str, value))}: name each once")
        return value

    @model_validator(mode="before")
    @classmethod
    def _mpi_starts_its_own_ranks(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("collective") == "mpi":
            return {"launcher": "mpirun", **values}
        return values

    @field_validator("rdzv_endpoint")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        plain = host.startswith("[") or (host and ":" not in host)
        if value and not (plain and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ValueError(
                f"{value!r} is not HOST:PORT with a port from 1 to 65535, as in node1:29400 or [fe80::1]:29400"
            )
        return value

    @model_validator(mode="after")
    def _ranks_can_start(self) -> "BaseConfig":
        """Refuse what the fields ask for together and cannot be done."""
        launcher, nnodes, endpoint, world = self.launcher, self.nnodes, self.rdzv_endpoint, self.world_size
        groups = [name.strip() for name in self.exchange_groups.split(",")] if self.exchange_groups else []
        grouped = self.collective == "hierarchical" and len(groups) == world and "" not in groups
        ranks = f"nproc({self.nproc}) × nnodes({nnodes})"
        rows = {
            f"collective = mpi with launcher = {launcher}: MPI starts its ranks itself: leave launcher out (mpirun) or set "
            "launcher=slurm": self.collective == "mpi" and launcher not in ("mpirun", "slurm"),
            f"exchange_groups = {self.exchange_groups!r}: with collective=hierarchical give a name for each of the {world} "
            f"ranks ({ranks}), as in a,a,b": groups and not grouped,
            f"nnodes = {nnodes} and rdzv_endpoint = {endpoint!r} need launcher=torchrun (or, for nnodes alone, kubernetes, "
            "slurm, torchx; a cluster with groups sets both)": launcher in ("local", "mpirun")
            and (nnodes > 1 or endpoint),
            f"nnodes = {nnodes} needs rdzv_endpoint=HOST:PORT, the address where the nodes meet": (
                launcher == "torchrun" and nnodes > 1 and not endpoint
            ),
            f"max_restarts = {self.max_restarts} with launcher={launcher}: torchrun restarts ranks, set launcher=torchrun": (
                self.max_restarts and launcher in ("local", "mpirun", "slurm")
            ),
            f"{ranks} = {world}: {self.benchmark} is the work of one process on one device, leave both at 1": (
                self.ONE_PROCESS and world > 1
            ),
        }
        if wrong := [sentence for sentence, applies in rows.items() if applies]:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def hard_limit_s(self) -> float:
        """Seconds after which the supervisor ends the run."""
        return self.wall_limit_s or 2 * self.allowed_s + self.startup_timeout_s

    @property
    def allowed_s(self) -> float:
        """Seconds that the work may take: the budget, and what a slow-down that was injected on purpose adds."""
        return self.budget_s * (1 + self.planted_slowdown)

    def check_whole(self) -> None:
        """Raise ``UserError`` for values that do not fit the machine, once torch was asked for its devices."""
        name, kind = self.collective, BACKENDS[self.backend].device_type
        if name and kind not in MOVES[name]:
            here, fitting = f"{kind} (backend {self.backend})", [name for name, kinds in MOVES.items() if kind in kinds]
            moved = " and ".join(MOVES[name])
            raise UserError(f"collective = {name} moves tensors of {moved}, not of {here}: take {', '.join(fitting)}")

    def check_start(self) -> None:
        """Raise ``UserError`` for what only a dry run can do."""

    def check_precision(self, lacks: Mapping[str, str]) -> None:
        """Raise ``UserError`` for a precision in ``lacks``: what the device does not support, with the reasons."""

    def expected_work(self) -> str:
        """Say in a sentence what the run will do, for the dry run."""
        raise NotImplementedError

    def work(self) -> dict[str, Any]:
        """Return the fields that change the work, and with it what results may be compared."""
        # A field that came later is left out if it is not used: what was accepted before it stays comparable.
        later = BaseConfig.LATER | self.LATER
        unused = {name for name, value in later.items() if getattr(self, name) == value}
        targets = {name for name in type(self).model_fields if name.startswith("target_")}
        return self.model_dump(exclude={*_NOT_WORK, *self.ASIDE} | unused | targets)


BY_HAND = "set by hand"
_WORK = {"collective", "exchange_groups", "nproc", "nnodes", "threads", "seed"}
# Limits and places. A run with an injected slow-down is compared with the unchanged ones: that is what it is for.
_NOT_WORK = BaseConfig.model_fields.keys() - _WORK


@dataclass(frozen=True)
class Resolved:
    """A config and, for each field that is not the class's default, where its value came from."""

    config: BaseConfig
    origins: dict[str, str]

    def detected(self, **values: Any) -> "Resolved":
        """Return the same with what the machine says of fields that nothing else sets."""
        left = {name: value for name, value in values.items() if name not in self.origins}
        return Resolved(self.config.model_copy(update=left), self.origins | dict.fromkeys(left, "this machine"))


def config_class(benchmark: str) -> type[BaseConfig]:
    if benchmark not in BENCHMARKS:
        raise UserError(f"unknown benchmark {benchmark!r}: {nearest(benchmark, BENCHMARKS)}")
    return BENCHMARKS[benchmark].config  # type: ignore[no-any-return]


def check_names(benchmark: str, names: Iterable[str], where: str = "") -> None:
    """Raise ``UserError`` for the first name that the benchmark's config does not have; ``where`` is a file."""
    cls = config_class(benchmark)
    fields = cls.model_fields
    for name in names:
        if name in cls.GONE:
            raise UserError(f"{where}{benchmark} has no {name} any more: {cls.GONE[name]}")
        if name not in fields:
            raise UserError(f"{where}unknown parameter {name!r} for {benchmark}: {nearest(str(name), fields)}")


class _All(BaseConfig):
    """What a parameter file says of every benchmark."""

    benchmark: str = ""


class _File(BaseModel, extra="allow"):
    """A parameter file: ``all`` is for every benchmark, other sections for one."""

    description: str = ""
    all: _All = _All()
    __pydantic_extra__: dict[str, dict[str, Any] | None]


def tier_names() -> list[str]:
    """Return the tiers, the smallest budget first."""
    names = (path.stem for path in (home() / "params" / "tiers").glob("*.yaml"))
    return sorted(names, key=lambda name: read_params("tiers", name).get("all", {}).get("budget_s", _All().budget_s))


def is_tier_file(tier: str) -> bool:
    """Return whether a tier is given as a file of the user's own and not by its name."""
    return tier.endswith((".yaml", ".yml"))


def read_params(kind: str, name: str) -> dict[str, Any]:
    """Read ``params/<kind>/<name>.yaml``, once, or a tier from a file; kind is ``tiers`` or ``backends``.

    Raises ``UserError`` for a name that is not there, and for a file that has the name of one of the kit's tiers.
    """
    available = {path.stem: path for path in (home() / "params" / kind).glob("*.yaml")}
    if kind == "tiers" and is_tier_file(name):
        path = Path(name).expanduser()
        if path.stem in available:
            raise UserError(f"{name}: {path.stem} is a tier of the kit, which has its own baselines: rename the file")
        return check_params(path)
    if name not in available:
        file = " (or a file: --tier my.yaml)" * (kind == "tiers")
        raise UserError(f"unknown {kind[:-1]} {name!r}: {nearest(name, available)}{file}")
    return _kit_params(available[name])


def check_params(path: Path) -> dict[str, Any]:
    read = read_yaml(path) or {}
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected sections by benchmark, as in squad: {{epochs: 2}}")
    content = validated(_File, read, f"{path}: ").model_dump(exclude_unset=True)
    sections = ("description", "all", *BENCHMARKS)
    for section in (name for name in content if name not in sections):
        raise UserError(f"{path}: unknown section {section!r}: {nearest(section, sections)}")
    for benchmark in (name for name in BENCHMARKS if name in content):
        check_names(benchmark, content[benchmark] or {}, f"{path}: ")
    return content


_kit_params = functools.cache(check_params)


def absolute_paths(benchmark: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with absolute paths of files and folders, since ranks work in another folder.

    Raises ``UserError`` for one that must exist and does not.
    """
    resolved = dict(values)
    if resolved.get("cluster"):
        resolved["cluster"] = cluster.resolved(str(resolved["cluster"]))
    for name, needed in config_class(benchmark).PATHS.items():
        text = str(resolved.get(name) or "")
        if not text or (name == "model" and text == EMBEDDED_MODEL):
            continue
        path = Path(text).expanduser()
        if path.is_file() or path.is_dir():
            resolved[name] = str(path.resolve())
        elif needed or text.startswith((".", "/", "~")):
            raise UserError(f"{name} = {text!r}: no such file or folder")
    return resolved


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``name=value`` texts of the command line. The last of a name counts; each ``limits.METRIC`` adds to ``limits``."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise UserError(f"--set {pair!r}: expected NAME=VALUE, as in --set epochs=2")
        table, _, metric = name.strip().partition("limits.")
        if metric and not table:
            overrides["limits"] = {**overrides.get("limits", {}), metric: value.strip()}
        else:
            overrides[name.strip()] = value.strip()
    return overrides


def read_settings(path: Path) -> list[dict[str, Any]]:
    """Read a file of settings in JSON or YAML: the parameters of each configuration of its ``suite``, without one of a single one.

    Settings may be grouped: ``{"hardware": {"nproc": 2}, "model": {"model": "small"}}`` sets nproc and model. Settings beside
    ``suite`` hold for all of its configurations. Raises ``UserError`` for content of another form and a name that is set twice.
    """
    content = read_yaml(path)
    suite = content.pop("suite", [{}]) if isinstance(content, dict) else None
    if not isinstance(suite, list) or not suite or not all(isinstance(item, dict) for item in suite):
        raise UserError(f"{path}: expected settings by name, and in `suite`, if there is one, a list of such")

    def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
        values = dict[str, Any]()
        for name, value in settings.items():
            grouped = isinstance(value, dict) and name != "limits"
            for key, item in value.items() if grouped else [(name, value)]:
                if key in values:
                    raise UserError(f"{path}: {key} is set twice: keep one")
                values[key] = item
        return values

    return [{**flat(content), **flat(item)} for item in suite]


def build(benchmark: str, values: Mapping[str, Any]) -> BaseConfig:
    """Validate ``values`` into the benchmark's config; every wrong value is named in one ``UserError``."""
    cls = config_class(benchmark)
    check_names(benchmark, values)
    return validated(cls, values)


def validated(cls: type[Model], values: Any, where: str = "") -> Model:
    """Return the values as such a model; ``UserError`` with all that is wrong, after the words ``where``."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}{explained(error, cls)}") from None


def resolve(
    benchmark: str, tier: str = "smoke", backend: str = "cpu", overrides: Mapping[str, Any] | None = None
) -> Resolved:
    """Merge the class's defaults, the tier, the backend and the overrides into one config.

    ``tier`` is a name or a file, whose name without its ending becomes the tier of the config. Raises ``UserError`` for unknown
    names and for values out of their type or range.
    """
    cls = config_class(benchmark)
    check_names(benchmark, overrides or {})
    layers: dict[str, Mapping[str, Any]] = {}
    for kind, name in (("tiers", tier), ("backends", backend)):
        content = read_params(kind, name)
        origin = name if is_tier_file(name) else f"params/{kind}/{name}.yaml"
        layers[origin] = {**content.get("all", {}), **(content.get(benchmark) or {})}
    tier = Path(tier).stem if is_tier_file(tier) else tier
    fixed = {"benchmark": benchmark, "tier": tier, "backend": backend}
    values, origins = dict[str, Any](fixed), dict[str, str]()
    for origin, layer in {**layers, BY_HAND: overrides or {}}.items():
        for name in fixed.keys() & layer.keys():
            if str(layer[name]) != fixed[name]:
                contradiction = f"{name} = {layer[name]!r} contradicts the {name} {fixed[name]!r} of this run"
                raise UserError(f"{origin}: {contradiction}: use --{name}")
        below, limits = values.get("limits", {}), layer.get("limits", {})
        values |= layer
        if limits and isinstance(limits, Mapping):  # of a metric each: they add up
            values["limits"] = {**below, **limits}
        origins |= dict.fromkeys(layer, origin)
    config = validated(cls, values)
    for name, cause in cls.EXCLUSIVE.items():
        if origins.get(name) == BY_HAND and getattr(config, cause):
            raise UserError(
                f"{name} = {values[name]} with {cause} = {getattr(config, cause)}, which decides it: leave one out"
            )
    for name, cause in cls.FOLLOWS.items():
        value = getattr(config, name)  # texts stay as they are given; numbers may be given as texts
        added = name not in values and name in config.model_fields_set
        if added or (isinstance(value, (str, int)) and str(value) != str(values.get(name, value))):
            origins[name] = f"set by {cause}={Path(str(getattr(config, cause))).name}"
    return Resolved(config, origins)


def save_config(config: BaseConfig, run_dir: Path | str) -> None:
    write_json(Path(run_dir) / "config.json", config.model_dump(mode="json"))


def load_config(run_dir: Path | str) -> BaseConfig:
    path = Path(run_dir) / "config.json"
    values = read_json(path)
    if not isinstance(values, dict) or "benchmark" not in values:
        raise UserError(f"{path}: not a config of benchlib (no `benchmark` in it)")
    try:
        return build(str(values["benchmark"]), values)
    except UserError as error:
        raise UserError(f"{path}: not a config of this version: {error}") from None


def changes(config: BaseConfig, origins: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return the fields that differ from the benchmark's defaults: name, value, where it came from, default."""
    return [
        (name, str(value) or "''", origins.get(name, ""), str(field.default) or "''")
        for name, field in type(config).model_fields.items()
        if (value := getattr(config, name)) != field.default and name != "benchmark"
    ]


def command(config: BaseConfig, ranks: bool = True) -> str:
    """Return the command line that runs the same config again, with every value that its tier and backend do not give.

    ``ranks`` states their number even where it was chosen by itself: the devices of another machine may be others.
    """
    tier = config.tier
    try:
        usual = resolve(config.benchmark, tier, config.backend).config
    except UserError:  # a tier of the user's own, or one that changed or went away: its values are written out
        tier = "smoke"
        usual = resolve(config.benchmark, tier, config.backend).config
    words = ["benchlib", "run", config.benchmark, "--tier", tier, "--backend", config.backend]
    for name, value in config.model_dump(mode="json", exclude={"benchmark", "tier", "backend"}).items():
        if getattr(config, config.EXCLUSIVE.get(name, ""), ""):
            continue  # another field decides it
        if value != getattr(usual, name) or (ranks and name == "nproc"):
            items = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
            words += [word for key, item in items.items() for word in ("--set", f"{key}={_written(item)}")]
    return shlex.join(words)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)
