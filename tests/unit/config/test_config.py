"""The way from parameters to a config: layers, names, types, ranges."""

import os
import re

import pytest
import yaml

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import (
    absolute_paths,
    build,
    check_params,
    config_class,
    parse_overrides,
    read_params,
    resolve,
    tier_names,
)
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.core.machine import BACKENDS


def squad(**values):
    return build("squad", {"benchmark": "squad", **values})


def test_later_layers_win_and_are_named():
    resolved = resolve("squad", "nightly", "cpu", {"epochs": "3"}).detected(nproc=2, epochs=5)
    config, origins = resolved.config, resolved.origins
    assert (config.epochs, origins["epochs"]) == (3, "set by hand"), "over the tier's 2, and the machine's"
    assert (config.target_allreduce_gbps, origins["target_allreduce_gbps"]) == (None, "params/backends/cpu.yaml")
    assert (config.nproc, origins["nproc"]) == (2, "this machine")
    assert origins["model"] == "params/tiers/nightly.yaml"


FILES = {"train_file": "/a/t.json", "eval_file": "/a/e.json", "data": "squad"}


@pytest.mark.parametrize(
    ("benchmark", "overrides", "name", "origin"),
    [
        ("squad", {}, "learning_rate", "set by model=tiny"),
        ("squad", {"learning_rate": "1e-3"}, "learning_rate", "set by hand"),
        ("squad", {"model": "bert-base-uncased"}, "learning_rate", None),
        ("squad", FILES, "data", "set by train_file=t.json"),
        ("squad", {"collective": "mpi"}, "launcher", "set by collective=mpi"),
        ("squad", {"collective": "mpi", "launcher": "slurm"}, "launcher", "set by hand"),
        ("parity", {"dev_file": "/a/dev.json"}, "data", "set by dev_file=dev.json"),
        ("collectives", {"collective": "hierarchical"}, "variants", "set by collective=hierarchical"),
    ],
)
def test_a_value_that_another_field_sets_says_which(benchmark, overrides, name, origin):
    """A validator that sets a field without a row in FOLLOWS would leave its value to the default."""
    resolved = resolve(benchmark, "smoke", "cpu", overrides)
    assert resolved.origins.get(name) == origin
    assert resolved.config.model_fields_set - {"benchmark", "tier", "backend"} <= resolved.origins.keys()


MIXED = {"collective": "hierarchical"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rat": 1}, "did you mean learning_rate"),
        ({"x=1;print('INJECTED')#": 1}, "unknown parameter"),
        ({"batch_size": 0}, "batch_size = 0: Input should be greater than or equal to 1"),
        ({"batch_size": True}, "batch_size: got True"),
        ({"epochs": float("nan")}, "epochs = nan"),
        ({"precision": "fp8", "nproc": 0}, "nproc = 0"),  # all wrong values are named at once
        ({"train_file": "a.json"}, "set both"),
        ({"doc_stride": 500}, "windows never advance"),
        ({"nnodes": 2}, "need launcher=torchrun"),
        ({"collective": "mpi", "launcher": "local"}, "collective = mpi with launcher = local"),
        ({"exchange_groups": "a"}, "exchange_groups = 'a': with collective=hierarchical give a name for each"),
        ({**MIXED, "nproc": 3, "exchange_groups": "a,b"}, "each of the 3 ranks (nproc(3) × nnodes(1)), as in a,a,b"),
        ({**MIXED, "nproc": 2, "exchange_groups": "a, "}, "exchange_groups = 'a, '"),
        ({"data": "files"}, "train_file"),
        ({"precisions": "fp32,fp8"}, "precisions.1 = 'fp8': Input should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
        ({"allreduce_mib": ""}, "allreduce_mib: List should have at least 1 item"),
        ({"precisions": "fp32,fp32"}, "precisions: fp32,fp32: name each once"),
    ],
)
def test_wrong_values_are_refused_with_the_constraint(values, words):
    with pytest.raises(UserError) as caught:
        build("machine" if values.keys() & {"precisions", "allreduce_mib"} else "squad", values)
    assert words in str(caught.value)


def test_files_are_meant_from_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text("{}")
    (tmp_path / "encoder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    absolute = absolute_paths("squad", {"train_file": "train.json", "model": "encoder", "epochs": 1})
    assert absolute == {"train_file": str(tmp_path / "train.json"), "model": str(tmp_path / "encoder"), "epochs": 1}
    assert absolute_paths("squad", {"model": "bert-base-uncased"}) == {"model": "bert-base-uncased"}  # a hub name
    wrong = (("eval_file", "missing.json"), ("eval_file", "pipe"), ("resume", "outputs/none"), ("model", "./missing"))
    for name, value in wrong:
        with pytest.raises(UserError, match=f"{name} = '{value}': no such file or folder"):
            absolute_paths("squad", {name: value})


def test_every_parameter_file_resolves_for_every_benchmark_and_backend():
    """Tiers state only what differs from the defaults of a benchmark and from what they say of all."""
    assert set(tier_names()) == {"smoke", "quick", "nightly", "weekend"}
    assert {path.stem for path in (home() / "params" / "backends").glob("*.yaml")} == set(BACKENDS)
    for tier in tier_names():
        content = read_params("tiers", tier)
        for benchmark in BENCHMARKS:
            for backend in BACKENDS:
                config = resolve(benchmark, tier, backend).config
                assert config.budget_s > 0
                assert config.expected_work() and not re.search(r"\b1 \w+s\b", config.expected_work())
            fields = config_class(benchmark).model_fields
            before = {name: field.default for name, field in fields.items()} | content["all"]
            same = [name for name, value in content.get(benchmark, {}).items() if value == before[name]]
            assert not same, f"{tier}: {benchmark} repeats the default of {same}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("squad: {epoch: 1}", "did you mean epochs"),
        ("sqad: {}", "did you mean squad"),
        ("- 1", "expected sections by benchmark"),
        ("all: {epochs: 1}", "all.epochs: no such field"),
        ("all: {budget_s: .inf}", "all.budget_s = inf: Input should be a finite number"),
        ("all: {budget_s: true}", "all.budget_s: got True, and only switches are true or false"),
    ],
)
def test_wrong_parameter_files_are_refused(tmp_path, text, words):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        check_params(path)


def test_texts_of_a_command_line_become_values():
    assert parse_overrides(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(UserError, match="NAME=VALUE"):
        parse_overrides(["epochs"])
    assert yaml.safe_load("learning_rate: 1e-3") == {"learning_rate": "1e-3"}  # YAML 1.1 leaves it a text
    config = squad(learning_rate="1e-3", max_steps="50", target_f1="null")
    assert (config.learning_rate, config.max_steps, config.target_f1) == (0.001, 50, None)
    lists = {"precisions": "fp32, bf16", "matmul_sizes": "[256,512]", "allreduce_mib": "0.5"}
    config = build("machine", lists)
    assert (config.precisions, config.matmul_sizes, config.allreduce_mib) == (["fp32", "bf16"], [256, 512], [0.5])


RIGHT = "node1:29400 10.0.0.1:1 [fe80::1]:65535"
WRONG = "node1 node1: :29400 node1:0 node1:65536 node1:x node1:² fe80::1:29400 [fe80::1] http://a:1"


def test_an_endpoint_is_a_host_and_a_port():
    nodes = {"launcher": "torchrun", "nnodes": 2}
    for endpoint in RIGHT.split():
        assert squad(**nodes, rdzv_endpoint=endpoint).rdzv_endpoint == endpoint
    for endpoint in WRONG.split():
        with pytest.raises(UserError, match="is not HOST:PORT with a port from 1 to 65535"):
            squad(**nodes, rdzv_endpoint=endpoint)


def test_a_library_that_does_not_move_the_tensors_of_the_backend_is_refused_before_any_rank():
    config = build("collectives", {"benchmark": "collectives", "collective": "nccl"})
    with pytest.raises(UserError, match=r"nccl moves tensors of cuda, not of cpu .*: take gloo, mpi"):
        config.check_whole()
    config.model_copy(update={"backend": "rocm"}).check_whole()


@pytest.mark.parametrize(
    ("benchmark", "name", "text", "value"),
    [
        ("squad", "wall_limit_s", "8h", 8 * 3600),
        ("squad", "budget_s", "5min", 300),
        ("squad", "budget_s", "1.5 h", 5400),
        ("squad", "budget_s", "90", 90),
        ("serving", "point_s", "2s", 2),
        ("squad", "warmup_ratio", "10%", 0.1),
        ("squad", "limits", {"train_samples_per_s": "12.5%"}, {"train_samples_per_s": 0.125}),
    ],
)
def test_durations_and_shares_are_read_as_people_write_them(benchmark, name, text, value):
    assert getattr(resolve(benchmark, "smoke", "cpu", {name: text}).config, name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("budget_s", "5 lightyears"), ("budget_s", "10%"), ("budget_s", "1.2.3h"), ("learning_rate", "1h")],
)
def test_other_units_are_refused_with_the_name_of_the_parameter(name, text):
    with pytest.raises(UserError, match=f"{name} = '{text}'"):
        resolve("squad", "smoke", "cpu", {name: text})


def test_a_slow_down_on_purpose_gets_the_time_that_it_takes():
    """Else the run that should show a FAIL of the gate is ended at its limit on a slow machine."""
    config = squad(budget_s=60, startup_timeout_s=120, planted_slowdown=3)
    assert (config.allowed_s, config.hard_limit_s) == (240, 600)
    assert squad(budget_s=60, startup_timeout_s=120).hard_limit_s == 240
