"""The layers of the package: who may import whom, that nobody is left out, and that there are no cycles."""

import graphlib
import subprocess
import sys

import grimp
import pytest

FACTS, RECORDS, PLUMBING, BENCHMARKS, WORKER, FRONT = "facts", "records", "plumbing", "benchmarks", "worker", "front"
MAY_IMPORT = {
    FACTS: {FACTS},
    RECORDS: {FACTS, RECORDS},
    PLUMBING: {FACTS, PLUMBING},
    BENCHMARKS: {FACTS, RECORDS, PLUMBING, BENCHMARKS},
    WORKER: {FACTS, RECORDS, PLUMBING, BENCHMARKS, WORKER},
    FRONT: {FACTS, RECORDS, FRONT},
}
MODULES = {
    FACTS: "agreement backends bandwidth change changepoints clock cluster collectives collectives.config collectives.fits collectives.sizes config diagnosis drivers early_stopping errors events files hardware hardware.config limits machine manifest mpi_program network parity parity.config parity.golden parity.members parity.pace parity.recorded parity.rows parity.tolerances paths peers planted processes progress ranks references registry rerun run_lock sensors shared_memory spelling squad squad.config stacks stats vendor_peaks",
    RECORDS: "baselines calibration checks circumstances collective_series collective_tables collectives.checks collectives.published collectives.reading comparison curves digest embedded flops foreign foreign.calibration_file foreign.claim_file foreign.json_file foreign.loadgen_summary foreign.nccl foreign.nccl_json foreign.nccl_series foreign.nccl_text foreign.own_files foreign.readers foreign.throughput_table hardware.checks hardware.published hardware.reading history history_cache impossible impossible.claim impossible.collectives impossible.compute impossible.finding impossible.learning impossible.loadgen impossible.names impossible.numbers impossible.own impossible.own_series impossible.restated impossible.restated_parity impossible.restated_series impossible.rules impossible.serving impossible.speed impossible.statements judge labels metrics parity.checks parity.reading parity_matrix parity_results parity_series parity_tables past placing postmortem power published record regression repeats results run_reader sides snapshot squad.checks squad.published squad.reading stored stored_run trends",
    PLUMBING: "algorithms allreduce array_file batches checkpoint collective_libraries collectives.bounds collectives.cases collectives.exercise collectives.measure collectives.ops collectives.patterns collectives.support devices direct dropout example features fsdp_comm gradients minisquad models mpi_buffers mpi_collectives mpi_group mpi_work overlap p2p parity.aotinductor parity.attention parity.cases parity.compare parity.compiled parity.depth parity.eager parity.executor parity.exercise parity.exporting parity.fingerprint parity.isolated parity.layers parity.logits parity.member parity.numbers parity.masked_rows parity.onnx_file parity.onnx_runtime parity.openvino_runtime parity.prepare parity.recording parity.room parity.scalars parity.sides parity.switches parity.warm parity.weights peaks process_group scoring shared_checkpoint spans squad_data squad_format squad_metric squad_metric.squad_metric timing ucc ucc.library",
    BENCHMARKS: "collectives.bench collectives.extras collectives.limits collectives.outcome collectives.run hardware.run parity.bench parity.outcome parity.run squad.checkpoints squad.evaluate squad.native squad.outcome squad.plan squad.run squad.steplog squad.trainer squad.training",
    WORKER: "worker",
    FRONT: "agent agents agents.intake agents.kubernetes agents.pod agents.submit algorithm_plots attempts attention_plots byte_axis calibrate children cli collective_plots comparing depth_plots difference_plots doctor explorer exports exports.formats exports.github exports.junit exports.mlflow_store exports.nccl_tests exports.openmetrics exports.parity exports.place exports.tabular exports.tensorboard_log history_page history_session index judging lanes latency_plots launch launchers launchers.job launchers.kubernetes launchers.local launchers.mpirun launchers.pods launchers.rendezvous launchers.slurm launchers.torchrun launchers.torchx lifeline listing lost markup neighbours notebook pair_plots parity_axes parity_command parity_plots peak_plots picture planning plots rank_plots rank_table reference_listing rejudge report runner session skew_plots sparkline summary supervise terminal trend_plots widgets",
}
LAYER = {"benchlib": FACTS, **{f"benchlib.{name}": layer for layer, names in MODULES.items() for name in names.split()}}
HEAVY = {"torch", "transformers", "datasets", "evaluate", "tokenizers", "accelerate", "safetensors"}
JUPYTER = {"IPython", "ipywidgets", "ipykernel", "jupyter_client", "nbclient", "nbconvert", "nbformat", "papermill"}
FORBIDDEN = {
    FACTS: HEAVY | JUPYTER | {"pandas"},
    RECORDS: HEAVY | JUPYTER,
    PLUMBING: JUPYTER,
    BENCHMARKS: JUPYTER,
    WORKER: JUPYTER,
    FRONT: HEAVY,
}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("benchlib", include_external_packages=True, cache_dir=None)


def own(graph):
    return sorted(name for name in graph.modules if name.split(".")[0] == "benchlib")


def test_every_module_has_a_layer(graph):
    assert set(own(graph)) == set(LAYER)


def test_imports_keep_to_the_layers(graph):
    wrong = [
        f"{name} ({LAYER[name]}) imports {other}"
        for name in own(graph)
        for other in graph.find_modules_directly_imported_by(name)
        if (other in LAYER and LAYER[other] not in MAY_IMPORT[LAYER[name]])
        or other.split(".")[0] in FORBIDDEN[LAYER[name]]
    ]
    assert wrong == []


def test_there_are_no_cycles(graph):
    graphlib.TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in own(graph)}).prepare()


@pytest.mark.parametrize(
    "statement",
    ["import benchlib", "import benchlib.cli, benchlib.commands.run, benchlib.session, benchlib.launch.supervise"],
)
def test_the_front_loads_no_torch(statement):
    code = f"{statement}; import sys; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
