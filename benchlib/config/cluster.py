"""A profile of machines beyond this one: what their links claim, and how jobs get there. Facts, read from YAML.

    profile = load("h100")              # params/clusters/h100.yaml
    profile = load("~/mine.yaml")       # a file of one's own
    profile = load("")                  # nothing claimed, every setting at its default

Bandwidths are Gbit/s of one direction, as a data sheet states them. They are claims: each needs its source.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchlib.core.errors import UserError, explained, nearest
from benchlib.core.files import home, read_yaml

ELSEWHERE = ("slurm", "kubernetes", "torchx", "groups")  # launchers whose ranks are not on this machine


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} has to be one line, without characters that cannot be seen")
    return text


# Texts that become words of a script or of a manifest; whoever reads them says what else is wrong with them.
Line = Annotated[str, AfterValidator(_one_line)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Links(_Section):
    """What the fabric claims, Gbit/s of one direction; None: nothing is claimed. A source is a document or a person."""

    intra_node_gbps: float | None = Field(None, gt=0)  # of one device to its peers on the node (NVLink, Xe Link, PCIe)
    intra_node_source: str = ""
    inter_node_gbps: float | None = Field(None, gt=0)  # of all network adapters of one node together
    inter_node_source: str = ""
    inter_node_rdma: bool = (
        False  # the adapters move data themselves (InfiniBand, RoCE, EFA): sockets are a fault there
    )

    @model_validator(mode="after")
    def _claims_have_sources(self) -> "Links":
        for name in ("intra_node", "inter_node"):
            if getattr(self, f"{name}_gbps") is not None and not getattr(self, f"{name}_source").strip():
                raise ValueError(f"{name}_gbps needs {name}_source: a claim without its source is a guess")
        return self

    def claimed(self, one_node: bool) -> tuple[float | None, str]:
        """Return the claim that bounds a run of one node, or of several, with its source."""
        if one_node:
            return self.intra_node_gbps, self.intra_node_source
        return self.inter_node_gbps, self.inter_node_source


class Kubernetes(_Section):
    """How a run becomes a job of a Kubernetes cluster, and what its pods ask for."""

    image: Line = Field("benchlib:cpu", min_length=1)  # container image with benchlib, see deploy/Dockerfile
    resource: Line = ""  # of devices: nvidia.com/gpu, amd.com/gpu, gpu.intel.com/xe; '': none
    resources: dict[Line, Line] = {}  # further ones of a pod, as in rdma/hca_shared_devices_a: "1"
    capabilities: tuple[Line, ...] = ()  # that the container keeps, as in IPC_LOCK, which adapters of InfiniBand need
    annotations: dict[Line, Line] = {}  # of the pods, as in k8s.v1.cni.cncf.io/networks: ib-net, a network of Multus
    cpu: Line = ""  # CPUs that a pod asks for, as in 8 or 500m
    memory: Line = ""  # that a pod asks for and may use, as in 64Gi
    shm: Line = "1Gi"  # size of /dev/shm, which collective libraries and loaders use
    node_selector: dict[Line, Line] = {}  # labels that the node must have
    tolerations: tuple[dict[Line, Line], ...] = ()  # taints that the pods accept, as in key: nvidia.com/gpu
    env: dict[Line, Line] = {}  # environment of the ranks, as in NCCL_SOCKET_IFNAME: eth0
    namespace: Line = Field("benchlib", min_length=1)
    service_account: Line = Field("benchlib-run", min_length=1)  # account of the pods; it needs no permission
    context: Line = ""  # of kubectl; '': the current one
    queue: Line = ""  # of Kueue (label kueue.x-k8s.io/queue-name); '': none
    claim: Line = ""  # volume claim that all pods share for their run folder; '': folders of their own
    claim_path: Line = "/outputs"  # where pods mount the claim
    data_claim: Line = ""  # volume claim with data sets and models; '': none
    data_path: Line = "/data"  # where pods mount the data claim; HF_HOME lies there
    token_secret: Line = ""  # secret whose key `token` the workers of a service ask for; '': serving has none


class Slurm(_Section):
    partition: Line = ""
    account: Line = ""
    gres: Line = ""  # devices of a node, as in gpu:8; {nproc} stands for the ranks on a node
    cpus_per_rank: int = Field(0, ge=0, le=4096)  # 0: the cluster's default
    memory: Line = ""  # of a node, as in 64G; 0: all of it; '': the cluster's default
    exclusive: bool = False  # have the nodes to oneself: others' jobs are noise in the measurement
    python: Line = ""  # interpreter on the nodes; '': this one, which has to be on a shared folder
    setup: tuple[Line, ...] = ()  # shell lines before the ranks start, as in: module load cuda
    sbatch: tuple[Line, ...] = ()  # further options of sbatch, as in --reservation=x
    srun: tuple[Line, ...] = ()  # further options of srun, as in --container-image=x


class Torchx(_Section):
    scheduler: str = Field("local_cwd", pattern=r"^\w+$")  # local_cwd, slurm, kubernetes, aws_batch, ...
    cfg: dict[Line, Line] = {}  # options of the scheduler, as in queue: default
    image: Line = ""  # container image where the scheduler takes one
    mounts: tuple[Line, ...] = ()  # as in type=volume, src=benchlib-outputs, dst=/outputs: a text each
    python: Line = ""  # interpreter on the nodes; '': this one
    cpu: int = Field(0, ge=0)  # of a node's role, as the next two; 0: the scheduler's default
    gpu: int = Field(0, ge=0)
    memory_mb: int = Field(0, ge=0)


class Group(_Section):
    """Nodes of one kind, and how a command gets there (launcher=groups)."""

    hosts: tuple[Line, ...] = Field(min_length=1)  # by which the nodes reach each other; all meet at the first of all
    backend: Literal["cpu", "cuda", "rocm", "xpu"]
    devices: int = Field(1, ge=1, le=1024)  # ranks on each host, the same number in all groups
    command: Line = "ssh -o BatchMode=yes {host}"  # that runs the words behind it on a host; '': this machine
    python: Line = ""  # interpreter there, with benchlib; '': the path of this one
    folder: Line = "/tmp/benchlib"  # for what the ranks write there, before it is fetched
    env: dict[Line, Line] = {}  # environment of the ranks, as in NCCL_SOCKET_IFNAME: eth0


class Cluster(_Section):
    description: str = ""  # which machines these are, in a sentence
    queue_s: float = Field(3600.0, ge=0)  # that a job may wait until its first rank starts; 0: any time
    port: int = Field(29400, ge=1024, le=65535)  # of the rendezvous on the first node
    links: Links = Links()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    torchx: Torchx = Torchx()
    groups: tuple[Group, ...] = ()  # of unlike nodes that one command starts

    @model_validator(mode="after")
    def _groups_are_alike(self) -> "Cluster":
        devices = sorted({group.devices for group in self.groups})
        if devices[1:]:
            raise ValueError(f"groups have {devices[0]} and {devices[-1]} devices a host: give all the smaller number")
        return self

    @property
    def start(self) -> dict[str, Any]:
        """Return the parameters of a run that groups decide; {} without them."""
        if not self.groups:
            return {}
        counts = {"nnodes": sum(len(group.hosts) for group in self.groups), "nproc": self.groups[0].devices}
        return {"launcher": "groups", "collective": "hierarchical", **counts}


def names() -> dict[str, Path]:
    return {path.stem: path for path in sorted((home() / "params" / "clusters").glob("*.yaml"))}


def resolved(name: str) -> str:
    """Return a shipped profile's name, or the absolute path of a file of one's own. Raises ``UserError`` for neither."""
    if name in names():
        return name
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"cluster = {name!r}: no such profile or file (in {Path.cwd()}): {nearest(name, names())}")
    return str(path.resolve())


def load(name: str) -> Cluster:
    """Read and check a profile, by name or path; '' is the profile that claims nothing. Raises ``UserError``."""
    if not name:
        return Cluster()
    path = names().get(name) or Path(resolved(name))
    try:
        return Cluster.model_validate(read_yaml(path) or {})
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error, Cluster)}") from None
