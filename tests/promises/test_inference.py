"""LLM inference, serving, clusters"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import mistune
import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from promised import promise, skip_rest
from scipy.stats import hmean
from series import STEADY, place, speed

from benchlib.core.files import home
from benchlib.results.run import Run

FULL_SET = 13_368  # validation articles of CNN/DailyMail 3.0.0, which MLPerf uses for Llama-3.1-8B
START = 1_790_000_000


@pytest.fixture(scope="module")
def copy(recorded, tmp_path_factory):
    """Copy a recorded run, changing its config; return its folder."""

    def make(benchmark, **config):
        folder = tmp_path_factory.mktemp("copy") / "smoke-20261126" / f"{benchmark}-cpu-101500-aaaaaa"
        shutil.copytree(recorded(benchmark), folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | config))
        return folder

    return make


@pytest.fixture(scope="module")
def reported(copy, program):
    """Return the folder of a recorded run with its reports; of `serving` with a target that is met."""
    targets = {"serving": {"target_efficiency": 0.5}, "inference": {}}

    @functools.cache
    def folder(benchmark):
        run = copy(benchmark, **targets[benchmark])
        program("report", run, "--format", "markdown")
        return run

    return folder


def checks_of(folder):
    return {check["name"]: check for check in json.loads((folder / "verdict.json").read_text())["checks"]}


def metrics_of(folder):
    return {metric["name"]: metric for metric in json.loads((folder / "result.json").read_text())["metrics"]}


def documents(text):
    return [item for item in yaml.safe_load_all(text) if item]


def container(item):
    """Return the first container of a Job or Deployment."""
    return item["spec"]["template"]["spec"]["containers"][0]


OVERLOAD = ("scenarios=Server", "server_qps=2000", "samples=16", "min_duration_s=0.02", "ttft_limit_s=0.05")


@pytest.fixture(scope="module")
def overloaded(ran):
    """The run of a Server test that sends more than any engine of this size can answer."""
    return ran("inference", *OVERLOAD, "target_rouge_l=0.23", code=1)


@promise(
    "P104",
    "Run the Server scenario of MLPerf with Poisson arrivals and latency from arrival, and see overload as INVALID",
    "benchlib run inference --set scenarios=Server --set server_qps=2000",
)
def test_p104_overload_is_invalid_and_latency_counts_from_arrival(overloaded):
    assert checks_of(overloaded.path)["valid Server"]["status"] == "FAIL"
    (row,) = overloaded.result.tables["tests"]
    assert (row["loadgen"], row["valid"]) == ("INVALID", False)
    queries = pd.read_parquet(overloaded.path / "queries.parquet").query("test == 'Server'")
    # Gaps of a Poisson process are exponential: mean 1 / rate, and the deviation is as large as the mean.
    gaps = np.diff(np.sort(queries["scheduled_s"]))
    assert len(gaps) >= 63
    assert gaps.mean() == pytest.approx(1 / 2000, rel=0.4)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.4)
    since_arrival = (queries["first_s"] - queries["scheduled_s"]).sort_values()
    stated = [values for name, values in overloaded.row_samples.items() if name == "times[0].seconds"]
    assert sorted(stated[0]) == pytest.approx(since_arrival.tolist())


@promise(
    "P105",
    "Run Llama-3.1-8B on 13,368 samples with accuracy",
    "benchlib run inference --tier weekend --backend cuda",
    needs="a GPU with 24 GB, the weights, CNN/DailyMail",
)
def test_p105_the_weekend_run_is_the_whole_of_mlperfs_set(program):
    text = " ".join(program("run", "inference", "--tier", "weekend", "--backend", "cuda", "--dry-run").split())
    for words in ("meta-llama/Llama-3.1-8B-Instruct (bf16)", "mlperf rules: Offline, Server, accuracy", "all samples"):
        assert words in text
    assert f"Offline {FULL_SET:,} queries" in text
    skip_rest("the run needs a GPU with 24 GB, the weights of Llama-3.1-8B and CNN/DailyMail")


@promise(
    "P106",
    "Choose the number of samples and ask for ROUGE",
    "benchlib run inference --set samples=100 --set accuracy=true",
)
def test_p106_so_many_samples_are_answered_and_scored(overloaded, program):
    (row,) = overloaded.result.tables["accuracy"]
    assert (row["samples"], row["answered"]) == (16, 16)
    queries = pd.read_parquet(overloaded.path / "queries.parquet").query("test == 'accuracy'")
    assert sorted(queries["sample"]) == list(range(16))
    # ROUGE-2 and ROUGE-L count longer matches than ROUGE-1; other articles' summaries match less.
    assert 100 >= row["rouge1"] >= row["rougeL"] >= row["rouge2"] > 0 and row["rouge1"] > row["rouge1_shuffled"]
    without = program("run", "inference", "--set", "samples=100", "--set", "accuracy=false", "--dry-run")
    assert "on 100 samples" in " ".join(without.split()) and "Server, accuracy" not in without


@promise(
    "P107",
    "Have ROUGE judged by MLCommons' limits on the full set, and by ROUGE-L > 0.23 where the document's target is meant",
    "benchlib run inference --set target_rouge_l=0.23",
)
def test_p107_rouge_has_mlcommons_limits_and_the_documents_target(overloaded, copy, program):
    checks = checks_of(overloaded.path)
    target = checks["target ROUGE-L"]
    assert (target["status"], target["limit"]) == ("PASS", "> 0.23") and "0.23" in target["source"]
    assert (
        checks["reference rougeL"]["status"] == "SKIPPED"
        and "full validation set" in checks["reference rougeL"]["reason"]
    )

    whole = copy("inference", rules="mlperf", data="cnn_dailymail", samples=0, target_rouge_l=0.99)
    program("report", whole)
    checks = checks_of(whole)
    assert checks["target ROUGE-L"]["status"] == "FAIL"
    # mlcommons/inference, submission checker, Llama-3.1-8B, datacenter: 99% of each, and 90% to 110% of the length.
    for kind, score in {"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793}.items():
        limit = float(re.search(r"[\d.]+", checks[f"reference {kind}"]["limit"])[0])
        assert limit == pytest.approx(0.99 * score, rel=1e-3)
    assert checks["reference rougeL"]["status"] == "PASS" and checks["reference length"]["status"] == "FAIL"


@promise(
    "P108",
    "Read that a result is MLPerf-style and not an official one",
    "benchlib report RUN",
)
def test_p108_reports_and_the_notebook_say_that_a_result_is_not_official(reported):
    folder = reported("inference")
    for text in ((folder / "report.html").read_text(), (home() / "notebooks/50_inference.ipynb").read_text()):
        assert "MLPerf-style" in text and "not an official MLPerf result" in text.replace(
            "not official", "not an official"
        )


SERVER = ("serve", "--engine", "sim", "--step-ms", "15", "--slots", "8", "--port", "0")
BOTH = {
    "mode": "both", "queries": 32, "rounds": 2, "loads": 0.4, "refine": 0, "concurrencies": 1, "point_s": 0.5,
    "percentile": 50, "tpot_ms": 1000, "gone_s": 0.5,
}  # fmt: skip


# Before both are measured together the second server answers 34 to 38 queries: the first one of three connections, up to 4
# to warm up, 32 alone. The third connection's first query is the 35th to 39th, so the 40th is one of the joint measurement.
LAST_ANSWER = 40
DYING_SERVER = f"""
import itertools, os, signal, sys
from benchlib.workloads.llm import server

complete, numbers = server.Server._answer, itertools.count(1)

async def answer(*parts):
    response = await complete(*parts)
    if next(numbers) == {LAST_ANSWER}:
        os.kill(os.getpid(), signal.SIGKILL)
    return response

server.Server._answer = answer
sys.exit(server.main('{{"engine": "sim", "step_ms": 15, "slots": 8, "port": 0}}'))
"""


def started(*words):
    """Start a server by a command of Python."""
    command = [sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"BENCHLIB_TOKEN": ""})


@pytest.fixture(scope="module")
def two_nodes(program, tmp_path_factory):
    """A run over two servers of which the second one is killed right after its ``LAST_ANSWER``, while both answer; the run and their addresses."""
    out = tmp_path_factory.mktemp("nodes")
    servers = [started("-m", "benchlib", *SERVER), started("-c", DYING_SERVER)]
    urls = [server.stdout.readline().split()[-1] for server in servers]  # "sim serves on URL"
    settings = BOTH | {"workers": ",".join(urls)}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    try:
        program("run", "serving", "--backend", "cpu", "--out", out, *words)
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()
    (config,) = out.glob("*/*/config.json")
    return Run(config.parent), urls


def queries_of(run, worker):
    return pd.read_parquet(run.path / "workers" / f"worker-{worker}" / "queries.parquet")


@promise(
    "P109",
    "Run on one named node, on all at once or both",
    "benchlib run serving --set mode=both --set workers=http://jw2:8000,http://jw3:8000",
)
def test_p109_each_node_is_measured_alone_and_all_together(two_nodes, program):
    run, _ = two_nodes
    names = [set(queries_of(run, worker)["measurement"]) for worker in (0, 1)]
    assert {"alone 0", "together 0 1"} <= names[0] and {"alone 1", "together 0 1"} <= names[1]
    assert "alone 1" not in names[0] and "alone 0" not in names[1]
    one = program("run", "serving", "--set", "mode=single", "--set", "workers=http://jw2:8000", "--dry-run")
    said = " ".join(one.split()).partition("1 server: ")[2]
    assert said and "open loops" not in said


@promise(
    "P110",
    "See joint rate, rate of each worker, efficiency and speed-up with its denominator, and set a target for efficiency",
    "benchlib run serving --set target_efficiency=0.8",
)
def test_p110_efficiency_is_the_joint_rate_over_the_sum_of_each_alone(recorded, reported, copy, program):
    run = Run(recorded("serving"))
    alone = [np.array(run.row_samples[f"workers[{number}].alone_per_s"]) for number in (0, 1)]
    joint = np.array(run.row_samples["scaling[1].samples_per_s"])
    metric = metrics_of(run.path)["scaling_efficiency_sim"]
    assert metric["value"] == pytest.approx(hmean(joint / sum(alone)))
    assert "over the sum of each alone" in metric["reason"]
    unmet = copy("serving", target_efficiency=1.0)
    program("report", unmet)
    checks = [checks_of(folder)["target efficiency"] for folder in (reported("serving"), unmet)]
    assert [check["status"] for check in checks] == ["PASS", "FAIL"]
    text = (unmet / "report.html").read_text()
    assert all(
        words in text for words in ("Workers", "alone", "Scaling", "together", "sum of each alone", "efficiency")
    )


@promise(
    "P111",
    "Get the hours for 13,368 samples from the measured rate, start-up apart",
    "benchlib run serving --set project_samples=13368",
)
def test_p111_hours_are_samples_over_rate_without_the_start(recorded):
    run = Run(recorded("serving"))
    metrics, joint = metrics_of(run.path), hmean(run.row_samples["scaling[1].samples_per_s"])
    assert metrics["projected_hours_sim"]["value"] == pytest.approx(FULL_SET / joint / 3600)
    assert metrics["startup_s"]["value"] > 0 and "start-up is apart" in metrics["projected_hours_sim"]["reason"]


@promise(
    "P112",
    "Predict an equal and a weighted split of two nodes from their single rates",
    "benchlib predict 0.18 0.29 --samples 13368",
)
def test_p112_two_splits_are_predicted_from_single_rates(recorded, reported, program):
    equal, weighted = program("predict", "0.18", "0.29", "--samples", FULL_SET).splitlines()[1:3]
    # Equal shares: 2 x 0.18/s, 13,368 / 0.36 / 3600 = 10.3 h, 0.36 / 0.47 = 76.6%. Weighted: 0.18 + 0.29, 7.9 h.
    assert re.search(r"equal shares \(predicted\) +0\.36 samples/s +10\.3\d? h +76\.6%", equal)
    assert re.search(r"weighted shares \(predicted\) +0\.47 samples/s +7\.9\d? h +100\.0%", weighted)
    assert "6,684, 6,684" in equal and "5,120, 8,248" in weighted
    assert "above 0" in program("predict", "0.18", "nan", code=2)
    lines = (reported("serving") / "report.md").read_text().partition("## Predicted from each alone")[2].splitlines()
    rates = {line.split("|")[1].strip(): float(line.split("|")[2].split()[0]) for line in lines[4:7]}
    run = Run(recorded("serving"))
    alone = [hmean(run.row_samples[f"workers[{number}].alone_per_s"]) for number in (0, 1)]
    assert rates["equal shares (predicted)"] == pytest.approx(2 * min(alone), rel=0.01)
    assert rates["weighted shares (predicted)"] == pytest.approx(sum(alone), rel=0.01)
    assert rates["as dispatched (measured)"] == pytest.approx(
        hmean(run.row_samples["scaling[1].samples_per_s"]), rel=0.01
    )


@promise(
    "P113",
    "Lose a worker during a run without losing a query, and be told which",
    "benchlib run serving --set workers=http://jw2:8000,http://jw3:8000",
)
def test_p113_the_second_of_two_workers_is_lost_and_named(two_nodes):
    run, urls = two_nodes
    losses, facts = run.result.tables["losses"], run.result.facts
    assert facts["failed"] == 0 and facts["repeated"] == 0
    assert {row["worker"] for row in losses} == {1} and {"down", "requeued"} <= {row["event"] for row in losses}
    # Later it was measured alone, as the first and only worker of that measurement.
    late = [row["because"] for row in losses if row["event"] == "down"]
    assert len(late) >= 2 and all(urls[1] in because for because in late)
    page = (run.path / "report.html").read_text()
    assert "Worker 1 was lost" in page and "Worker 0 was lost" not in page


@promise(
    "P114",
    "Name controller and workers of one's own cluster",
    "benchlib run squad --backend cpu --set launcher=kubernetes --set cluster=FILE --manifest",
)
def test_p114_nodes_and_cluster_are_those_that_are_named(two_nodes, program, in_folder):
    run, urls = two_nodes
    stated = [json.loads((run.path / "workers" / f"worker-{number}" / "worker.json").read_text()) for number in (0, 1)]
    assert [worker["url"] for worker in stated] == urls
    (in_folder / "mine.yaml").write_text(
        "kubernetes: {image: registry.example.com/mine:1, namespace: lab, context: jw1}\n"
    )
    words = ("--set", "launcher=kubernetes", "--set", "cluster=mine.yaml")
    job = next(
        item
        for item in documents(program("run", "squad", "--backend", "cpu", *words, "--manifest"))
        if item["kind"] == "Job"
    )
    assert (container(job)["image"], job["metadata"]["namespace"]) == ("registry.example.com/mine:1", "lab")


KUBERNETES = home() / "deploy" / "kubernetes"


@promise(
    "P115",
    "Apply manifests for namespace, RBAC, network policy, one-GPU and distributed jobs",
    "kubectl apply -f deploy/kubernetes; benchlib run squad --set launcher=kubernetes --set cluster=gpu --manifest",
)
def test_p115_manifests_hold_against_the_published_schemas(program):
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
    words = ("run", "squad", "--backend", "cuda", "--set", "launcher=kubernetes", "--set", "cluster=gpu", "--manifest")
    one, two = (documents(program(*words, *more)) for more in ((), ("--set", "nnodes=2")))
    stored = [item for path in sorted(KUBERNETES.glob("*.yaml")) for item in documents(path.read_text())]
    for item in (*stored, *one, *two):
        schemas.validate(item, "1.34", strict=True)
    assert {"Namespace", "Role", "NetworkPolicy", "Job", "CronJob"} <= {item["kind"] for item in stored}
    jobs = [next(item for item in made if item["kind"] == "Job") for made in (one, two)]
    assert [job["spec"]["completions"] for job in jobs] == [1, 2]
    assert all(container(job)["resources"]["limits"]["nvidia.com/gpu"] in (1, "1") for job in jobs)


@promise("P116", "Launch by TorchX or SLURM", "benchlib run squad --set launcher=slurm --set cluster=slurm --manifest")
def test_p116_torchx_and_slurm_get_their_jobs(program):
    nodes = ("--backend", "cpu", "--set", "nnodes=2", "--set", "nproc=2", "--manifest")
    script = program("run", "squad", "--set", "launcher=slurm", "--set", "cluster=slurm", *nodes)
    assert script.startswith("#!") and re.search(r"^#SBATCH --nodes=2$", script, re.MULTILINE)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    component = program("run", "squad", "--set", "launcher=torchx", "--set", "cluster=torchx", *nodes)
    compile(component, "app.py", "exec")
    assert "num_replicas=2" in component and "torchrun" in component


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
for word in "$@"; do case "$word" in */torchx) mkdir -p "$word/bin" && cp "$0" "$word/bin/pip";; esac; done
"""


@promise(
    "P117",
    "Build a CUDA image with torch, and DeepSpeed, TorchX and SSH on request; serve by vLLM in its image",
    "docker build -f deploy/Dockerfile --build-arg DEEPSPEED=0.19.8 --build-arg TORCHX=0.7.0 --build-arg SSH=1 .",
    needs="a Docker daemon",
)
def test_p117_the_image_installs_what_the_build_arguments_ask_for(tmp_path):
    """Execute the conditional steps of the Dockerfile with programs that only note how they were called."""
    text = (home() / "deploy" / "Dockerfile").read_text()
    steps = [
        step
        for step in re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
        if step.startswith(("if ", "lacking="))
    ]
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("venv/bin/pip", "python3", "apt-get", "rm", "gcc", "g++"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)

    def called(**arguments):
        log = tmp_path / "log"
        log.write_text("")
        of_build = {"DEEPSPEED": "", "TORCHX": "", "SSH": "", "TORCH_INDEX": "https://index"} | arguments
        env = {**os.environ, **of_build, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
        for step in steps:
            subprocess.run(["sh", "-ec", step.replace("/opt/venv", str(tmp_path / "venv"))], env=env, check=True)
        return log.read_text()

    assert len(steps) == 3 and called() == ""
    assert called(DEEPSPEED="0.19.8").split()[-1] == "deepspeed==0.19.8"
    assert "torchx==0.7.0" in called(TORCHX="0.7.0") and (tmp_path / "venv/bin/torchx").is_symlink()
    assert "apt-get install --yes --no-install-recommends openssh-client openssh-server" in called(SSH="1")
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cu" in text
    vllm = next(
        item for item in documents((KUBERNETES / "serving-vllm.yaml").read_text()) if item["kind"] == "Deployment"
    )
    assert container(vllm)["image"].startswith("vllm/vllm-openai:")
    skip_rest("building the image needs a Docker daemon and a network")


@promise(
    "P118",
    "Run on a real Kubernetes cluster with A30 GPUs",
    "benchlib run serving --backend cpu --set workers=dns+http://benchlib-engine:8000",
    needs="a Kubernetes cluster with GPUs",
)
def test_p118_workers_in_pods_with_a_gpu_are_measured_by_a_client_without_one():
    engine = documents((KUBERNETES / "serving-engine.yaml").read_text())
    deployment = next(item for item in engine if item["kind"] == "Deployment")
    service = next(item for item in engine if item["kind"] == "Service")
    client = documents((KUBERNETES / "serving-client.yaml").read_text())[-1]
    assert container(deployment)["resources"]["limits"]["nvidia.com/gpu"] in (1, "1")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert service["spec"]["clusterIP"] == "None"
    assert f"workers=dns+http://{name}:{port}" in shlex.join(container(client)["command"])
    assert "nvidia.com/gpu" not in str(container(client)["resources"])
    skip_rest("the run needs a Kubernetes cluster with GPUs")


@pytest.fixture(scope="module")
def past(program, tmp_path_factory):
    """A past of 14 days in which the last four runs were slower and took longer; what is printed, and the page."""
    store = tmp_path_factory.mktemp("past")
    for day, rate in enumerate([*STEADY, *(0.7 * rate for rate in STEADY[:4])]):
        total = speed(6000 / rate)[0] | {"name": "total_s", "unit": "s", "direction": "lower"}
        place(store, START + 86_400 * day, metrics=[*speed(rate), total])
    text = program("history", "--store", store, code=1)
    return text, (store / "history.html").read_text()


@promise(
    "P119",
    "Get plots of throughput and scaling efficiency, and of duration over time",
    "benchlib export --to pictures RUN; benchlib history",
)
def test_p119_throughput_scaling_and_duration_are_drawn(recorded, past, program, tmp_path):
    program("export", "--to", "pictures", recorded("serving"), "--output", tmp_path)
    (folder,) = tmp_path.iterdir()
    for name in ("concurrency", "scaling", "load-ttft"):
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.size[0] > 300 and len(picture.convert("RGB").getcolors(2**24)) > 2, "not blank"
    (duration,) = re.findall(r'alt="(Whole run: [^"]*)"', past[1])
    assert "14 runs" in duration and "142.6 s" in duration, "6,000 / 42.07 samples/s"


@promise(
    "P120",
    "Get a plot of GPU, CPU and memory utilisation of an inference run",
    "benchlib run inference; benchlib export --to pictures RUN",
)
def test_p120_processor_device_and_memory_have_metrics_and_a_picture(recorded, program, tmp_path):
    folder = recorded("inference")
    metrics = {name.split("_")[1]: one for name, one in metrics_of(folder).items() if name.startswith("utilization_")}
    assert metrics.keys() == {"processor", "device", "memory"} and {one["unit"] for one in metrics.values()} == {"%"}
    for name in ("processor", "memory"):
        assert 0 < metrics[name]["value"] < 100 and metrics[name]["n"] > 1
    assert metrics["device"]["value"] is None and "cpu has no device" in metrics["device"]["reason"]
    program("export", "--to", "pictures", folder, "--output", tmp_path)
    with Image.open(next(tmp_path.glob("*/utilisation.png"))) as picture:
        assert picture.size[0] > 300


@promise(
    "P121",
    "Get charts as files and results of each node in a folder",
    "benchlib export --to pictures RUN; RUN/workers/worker-N/",
)
def test_p121_pictures_are_files_and_each_worker_has_its_folder(two_nodes, copy, program):
    folder = copy("inference")
    assert "written into pictures/" in program("export", "--to", "pictures", folder)
    files = sorted((folder / "pictures").glob("*.png"))
    assert len(files) >= 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    run, _ = two_nodes
    tables = [queries_of(run, worker) for worker in (0, 1)]
    ids = pd.concat(tables)["query"]
    assert ids.is_unique and len(ids) == run.result.facts["issued"]
    assert [set(table["worker"]) for table in tables] == [{0}, {1}]
    losses = json.loads((run.path / "workers/worker-1/worker.json").read_text())["losses"]
    assert losses and all(row["worker"] == 1 for row in losses)


@promise("P122", "Read summary, infrastructure, breakdown and advice in each report", "benchlib report RUN")
def test_p122_a_report_has_verdict_machine_breakdown_and_what_to_do(reported):
    folder = reported("serving")
    page = (folder / "report.html").read_text()
    headings = [text.strip() for text in re.findall(r"<h[12][^>]*>([^<]*)", page)]
    assert headings[0] == "PASS"
    for heading in ("Results", "Checks", "Workers", "Scaling", "The machine", "Run it again"):
        assert heading in headings
    cpu = json.loads((folder / "machine.json").read_text())["cpu"]["model"]
    assert cpu in page and "benchlib run serving" in page
    assert "Set point_s higher" in page or "computes nothing" in page


@promise("P123", "Get a report in Markdown, too", "benchlib report RUN --format markdown")
def test_p123_a_report_in_markdown_has_verdict_checks_tables_and_pictures(reported):
    folder = reported("inference")
    page = mistune.create_markdown(plugins=["table"])((folder / "report.md").read_text())
    verdict = json.loads((folder / "verdict.json").read_text())
    assert f"<h1>inference: {verdict['verdict']}</h1>" in page
    rows = re.findall(r"<tr>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", page)
    shown = dict(rows)
    for check in verdict["checks"]:
        if check["name"] in shown and check["status"] in ("PASS", "FAIL", "SKIPPED"):
            assert shown[check["name"]] == check["status"]
    assert {check["name"] for check in verdict["checks"]} <= shown.keys()
    assert "<h2>Latency</h2>" in page and "<h2>ROUGE and its controls</h2>" in page
    pictures = re.findall(r'<img src="([^"]+)" alt="([^"]+)"', page)
    assert len(pictures) >= 4 and all((folder / path).is_file() and len(alt) > 20 for path, alt in pictures)
    assert (folder / "report.html").is_file()


@promise(
    "P124",
    "Read results from JSON, monitor them by Prometheus, follow trends and changes of level over months",
    "benchlib export --to openmetrics; benchlib history",
)
def test_p124_json_prometheus_and_history_have_the_same_numbers(recorded, past, program, tmp_path):
    folder = recorded("serving")
    value = metrics_of(folder)["samples_per_s_all_sim"]["value"]
    program("export", "--to", "openmetrics", folder, "--output", tmp_path / "metrics.txt")
    families = text_string_to_metric_families((tmp_path / "metrics.txt").read_text())
    samples = [
        sample for family in families for sample in family.samples if "samples_per_s_all_sim" in str(sample.labels)
    ]
    assert value in [sample.value for sample in samples]
    assert "FAIL  level of squad quick" in past[0] and "to 42.07 samples/s" in past[0]


@promise(
    "P125",
    "Find help for GPU, SSH, Kubernetes rights and Docker, and hints for tuning",
    "docs/nodes.md, docs/serving.md, deploy/README.md",
)
def test_p125_the_documents_help_with_nodes_containers_and_devices(program):
    hints = (home() / "docs" / "nodes.md").read_text().partition("## Hints")[2]
    for symptom, remedy in {
        "SSH": "ssh-copy-id",
        "publickey": "mode 600",
        "InfiniBand": "NCCL_IB_DISABLE",
        "/dev/shm": "--shm-size",
        "GPU": "--gpus all",
        "tuning": "benchlib compare",
    }.items():
        assert symptom in hints and remedy in hints
    deploy = (home() / "deploy" / "README.md").read_text()
    assert "rolebinding" in deploy and "docker build" in deploy
    # What the hint says of shared memory on Kubernetes is so.
    words = ("--set", "launcher=kubernetes", "--set", "cluster=gpu", "--manifest")
    job = next(
        item for item in documents(program("run", "squad", "--backend", "cuda", *words)) if item["kind"] == "Job"
    )
    shm = next(volume for volume in job["spec"]["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "/dev/shm" in [mount["mountPath"] for mount in container(job)["volumeMounts"]]
