"""Parameters of the serving benchmark. The defaults are those of the smoke tier, with two heterogeneous workers that compute nothing."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from benchlib.config import addresses
from benchlib.config.schema import EMBEDDED_MODEL, BaseConfig, Seconds, Share
from benchlib.core.text import counted


class ServingConfig(BaseConfig):
    """Workers, the load on them and the limits that it has to meet."""

    ASIDE: ClassVar[tuple[str, ...]] = ("project_samples",)
    ONE_PROCESS: ClassVar[bool] = True
    FOLLOWS: ClassVar[dict[str, str]] = {**BaseConfig.FOLLOWS, "recovery": "workers"}

    benchmark: Literal["serving"] = "serving"

    workers: Annotated[list[str], AfterValidator(addresses.workers)] = Field(
        [], description="servers, http://HOST:PORT; dns+http://NAME:PORT: each address of the name; empty: started here"
    )
    mode: Literal["single", "distributed", "both"] = Field("both", description="each alone, all together, or both")
    engine: Literal["sim", "static", "continuous"] = Field("sim", description="of workers that are started here")
    model: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="of these: hub name, folder, tiny, or llama3-8b-random; of others: whose tokenizer counts where they give no token ids",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of these")
    worker_count: int = Field(2, ge=1, le=64, description="how many are started here")
    worker_slots: int = Field(8, ge=1, le=4096, description="queries that each of these works on at once")
    sim_step_ms: list[PositiveFloat] = Field([15, 25], min_length=1, description="sim: ms for a token, by worker")

    prompt_tokens: int = Field(100, ge=4, le=100_000, description="mean tokens of a prompt; each 0.5 to 1.5 times that")
    max_new: int = Field(16, ge=2, le=8192, description="most new tokens of an answer")
    concurrency: int = Field(16, ge=1, le=4096, description="queries that a worker has at once, alone as together")
    queries: int = Field(32, ge=8, le=1_000_000, description="queries per worker in a run that measures a rate")
    rounds: int = Field(2, ge=1, le=50, description="repetitions of these runs, interleaved")

    arrivals: Literal["poisson", "constant"] = Field("poisson", description="of the queries of open loops")
    loads: list[Annotated[float, Field(ge=0.01, le=10)]] = Field(
        [0.4, 0.8, 2.0], min_length=1, description="sweep: shares of the joint rate"
    )
    point_s: Seconds = Field(0.5, gt=0, le=3600, description="seconds for which a rate is sent; thrice to confirm")
    refine: int = Field(1, ge=0, le=10, description="further rates between the last that met and the first that missed")
    concurrencies: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1, 16], description="closed loops: queries at once, in all"
    )
    ttft_ms: float = Field(500, gt=0, description="limit of the time to the first token, in ms")
    tpot_ms: float = Field(100, gt=0, description="limit of the time per further token, in ms")
    percentile: float = Field(99, ge=50, le=99.9, description="of both times, to be within its limit")

    deadline_s: Seconds = Field(60, gt=0, description="seconds from a query's first sending until it has failed")
    stall_s: Seconds = Field(20, gt=0, description="seconds without a byte until a query is given to another worker")
    gone_s: Seconds = Field(5, gt=0, description="seconds without any worker until what is left has failed")
    recovery: bool = Field(True, description="kill a worker during a run and start it again; only those started here")

    target_efficiency: Share | None = Field(None, gt=0, le=1, description="least joint rate / sum of each alone")
    project_samples: int = Field(13368, ge=1, description="samples of the projection: MLPerf's full set")

    @model_validator(mode="before")
    @classmethod
    def _other_machines_are_left_alone(cls, values: Any) -> Any:
        return {"recovery": False, **values} if isinstance(values, dict) and values.get("workers") else values

    @model_validator(mode="after")
    def _parts_fit(self) -> "ServingConfig":
        if self.recovery and self.workers:
            raise ValueError(
                "recovery = true kills a worker: only those that are started here; leave workers or recovery out"
            )
        # In a run of three points a service that lags by a third of the load has its last query wait for one.
        if self.mode != "single" and self.point_s < (least := self.limits_s["ttft"]):
            raise ValueError(
                f"point_s = {self.point_s:g} with ttft_ms = {self.ttft_ms:g}: before the limit of the first token has passed no "
                f"queue that grows can miss it; set point_s={least:g} or more"
            )
        return self

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits in seconds."""
        return {"ttft": self.ttft_ms / 1e3, "tpot": self.tpot_ms / 1e3}

    def expected_work(self) -> str:
        """Say what will be sent to whom."""
        count = len(self.workers) or self.worker_count
        who = counted(count, "server") if self.workers else f"{counted(count, 'worker')} ({self.engine}) started here"
        runs = {"single": "each alone, ", "distributed": "all together, ", "both": "each alone and all together, "}
        work = f"{who}: {counted(self.rounds, 'round')} of {self.queries} queries per worker, "
        work += f"{runs[self.mode] if count > 1 else ''}{self.concurrency} at once per worker"
        if self.mode != "single":
            loads = ", ".join(f"{load:g}" for load in self.loads)
            work += (
                f"; open loops of {self.point_s:g} s at {loads} of the joint rate, closed loops at {self.concurrencies}"
            )
        return work + ("; a worker is killed and started again" if self.recovery and self.mode != "single" else "")
