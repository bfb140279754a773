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
    load_config,
    parse_overrides,
    read_params,
    resolve,
    save_config,
    tier_names,
)
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.core.machine import BACKENDS


def squad(**values):
    return build("squad", {"benchmark": "squad", **values})


def test_later_layers_win_and_are_named():
    resolved = resolve("squad", "nightly", "cpu", {"epochs": "3"}).detected(nproc=2, epochs=5)
    assert resolved.config.epochs == 3  # over the tier's 2
    assert resolved.config.target_allreduce_gbps is None  # the backend takes the tier's 30 back
    assert (resolved.config.nproc, resolved.origins["nproc"]) == (2, "this machine")
    assert resolved.origins["epochs"] == "set by hand"
    assert resolved.origins["target_allreduce_gbps"] == "params/backends/cpu.yaml"
    assert resolved.origins["model"] == "params/tiers/nightly.yaml"


@pytest.mark.parametrize(
    ("benchmark", "given", "name", "origin"),
    [
        ("squad", {}, "learning_rate", "set by model=tiny"),
        ("squad", {"learning_rate": "1e-3"}, "learning_rate", "set by hand"),
        ("squad", {"model": "bert-base-uncased"}, "learning_rate", None),
        (
            "squad",
            {"train_file": "/a/t.json", "eval_file": "/a/e.json", "data": "squad"},
            "data",
            "set by train_file=t.json",
        ),
        ("squad", {"collective": "mpi"}, "launcher", "set by collective=mpi"),
        ("squad", {"collective": "mpi", "launcher": "slurm"}, "launcher", "set by hand"),
        ("parity", {"dev_file": "/a/dev.json"}, "data", "set by dev_file=dev.json"),
        ("collectives", {"collective": "hierarchical"}, "variants", "set by collective=hierarchical"),
    ],
)
def test_a_value_that_another_field_sets_says_which(benchmark, given, name, origin):
    assert resolve(benchmark, "smoke", "cpu", given).origins.get(name) == origin


def test_whatever_a_validator_adds_has_its_cause():
    """A validator that sets a field without a row in FOLLOWS would leave its value to the default."""
    for benchmark in BENCHMARKS:
        for given in (
            {},
            {"collective": "mpi"},
            {"collective": "hierarchical"},
            {"train_file": "t", "eval_file": "e"},
            {"dev_file": "d"},
        ):
            if given.keys() <= config_class(benchmark).model_fields.keys():
                resolved = resolve(benchmark, "smoke", "cpu", given)
                assert resolved.config.model_fields_set - {"benchmark", "tier", "backend"} <= resolved.origins.keys()


def test_a_number_written_as_text_is_read_right():
    assert yaml.safe_load("learning_rate: 1e-3") == {"learning_rate": "1e-3"}  # YAML 1.1 leaves it a text
    assert squad(learning_rate="1e-3").learning_rate == 0.001
    assert squad(max_steps="50").max_steps == 50


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rat": 1}, "did you mean learning_rate"),
        ({"x=1;print('INJECTED')#": 1}, "unknown parameter"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast': Input should be a valid number"),
        ({"batch_size": 0}, "batch_size = 0: Input should be greater than or equal to 1"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"batch_size": True}, "batch_size: got True"),
        ({"epochs": float("nan")}, "epochs = nan"),
        ({"precision": "fp8"}, "precision = 'fp8': Input should be 'fp32', 'bf16' or 'fp16'"),
        ({"compile": "perhaps"}, "compile = 'perhaps': Input should be a valid boolean"),
        ({"train_file": "a.json"}, "set both"),
        ({"doc_stride": 500}, "windows never advance"),
        ({"nnodes": 2}, "need launcher=torchrun"),
        ({"exchange_groups": "a"}, "exchange_groups = 'a' are groups of collective=hierarchical: set it"),
        (
            {"collective": "hierarchical", "nproc": 3, "exchange_groups": "a,b"},
            "groups of 2 ranks, and nproc(3) × nnodes(1)",
        ),
        (
            {"collective": "hierarchical", "nproc": 2, "exchange_groups": "a, "},
            "rank 1 has no group: give a name for each",
        ),
        ({"data": "files"}, "train_file"),
    ],
)
def test_wrong_values_are_refused_with_the_constraint(values, words):
    with pytest.raises(UserError) as caught:
        squad(**values)
    assert words in str(caught.value)


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(UserError) as caught:
        squad(precision="fp8", nproc=0)
    assert "precision" in str(caught.value)
    assert "nproc" in str(caught.value)


def test_unknown_benchmark_tier_and_backend_name_the_nearest():
    for arguments, words in (
        (("sqad",), "squad"),
        (("squad", "nightli"), "nightly"),
        (("squad", "quick", "cudaa"), "cuda"),
    ):
        with pytest.raises(UserError, match=f"did you mean {words}"):
            resolve(*arguments)


def test_an_override_cannot_contradict_the_tier():
    with pytest.raises(UserError, match="use --tier"):
        resolve("squad", "quick", "cpu", {"tier": "nightly"})


def test_files_are_meant_from_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text("{}")
    (tmp_path / "encoder").mkdir()
    found = absolute_paths("squad", {"train_file": "train.json", "model": "encoder", "epochs": 1})
    assert found == {"train_file": str(tmp_path / "train.json"), "model": str(tmp_path / "encoder"), "epochs": 1}
    assert absolute_paths("squad", {"model": "bert-base-uncased"}) == {"model": "bert-base-uncased"}  # a hub name
    for values in ({"eval_file": "missing.json"}, {"resume": "outputs/none"}, {"model": "./missing"}):
        with pytest.raises(UserError, match="no such file or folder"):
            absolute_paths("squad", values)
    os.mkfifo(tmp_path / "pipe")
    for name, value in (("train_file", "/dev/zero"), ("eval_file", "pipe")):
        with pytest.raises(UserError, match=f"{name} = '{value}': a device, a pipe"):
            absolute_paths("squad", {name: value})


def test_command_line_pairs():
    assert parse_overrides(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(UserError, match="NAME=VALUE"):
        parse_overrides(["epochs"])


def test_every_parameter_file_resolves_for_every_benchmark_and_backend():
    for tier in tier_names():
        for benchmark in BENCHMARKS:
            for backend in BACKENDS:
                config = resolve(benchmark, tier, backend).config
                assert config.budget_s > 0
                assert config.expected_work() and not re.search(r"\b1 \w+s\b", config.expected_work())
    assert set(tier_names()) == {"smoke", "quick", "nightly", "weekend"}
    assert {path.stem for path in (home() / "params" / "backends").glob("*.yaml")} == set(BACKENDS)


def test_tiers_state_only_what_differs():
    for tier in tier_names():
        content = read_params("tiers", tier)
        for benchmark in BENCHMARKS:
            fields = config_class(benchmark).model_fields
            before = {name: field.default for name, field in fields.items()} | content["all"]
            same = [name for name, value in content.get(benchmark, {}).items() if value == before[name]]
            assert not same, f"{tier}: {benchmark} repeats the default of {same}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("squad: {epoch: 1}", "did you mean epochs"),
        ("sqad: {}", "did you mean squad"),
        ("- 1", "sections"),
        ("all: {epochs: 1}", "not every benchmark"),
        ("a: [", "YAML"),
        ("description: .nan", "description = nan: expected a sentence"),
        ("all: {budget_s: long}", "budget_s = long: expected seconds"),
        ("all: {budget_s: .inf}", "budget_s = inf: expected seconds"),
        ("all: {budget_s: true}", "budget_s = True: expected seconds"),
    ],
)
def test_wrong_parameter_files_are_refused(tmp_path, text, words):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        check_params(path)


def test_a_config_survives_the_disk_and_a_cut_one_is_named(tmp_path):
    config = squad(epochs=2, target_f1=88.0)
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    path = tmp_path / "config.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(UserError, match="may be cut"):
        load_config(tmp_path)


def test_names_say_what_stands_in_for_squad():
    assert squad().quality_scope() == "_minisquad_tiny"
    assert squad(data="squad", model="bert-base-uncased", train_questions=0, eval_questions=0).quality_scope() == ""
    assert squad(data="squad", model="bert-base-uncased", train_questions=99).quality_scope() == "_subset"
    assert squad(train_file="a", eval_file="b", model="m", init="random").quality_scope() == "_files_random"


def test_lists_are_read_from_the_command_line():
    config = build("machine", {"precisions": "fp32, bf16", "matmul_sizes": "[256,512]", "allreduce_mib": "0.5"})
    assert (config.precisions, config.matmul_sizes, config.allreduce_mib) == (["fp32", "bf16"], [256, 512], [0.5])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("precisions", "fp32,fp8", "precisions.1 = 'fp8': Input should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
        ("matmul_sizes", "0", "matmul_sizes.0 = '0': Input should be greater than 0"),
        ("allreduce_mib", "", "allreduce_mib: List should have at least 1 item"),
    ],
)
def test_a_wrong_list_says_what_it_takes(name, value, said):
    with pytest.raises(UserError, match=said):
        build("machine", {name: value})


@pytest.mark.parametrize("endpoint", ["node1:29400", "10.0.0.1:1", "[fe80::1]:65535", "node-1.example:29400"])
def test_an_endpoint_is_kept_as_it_is(endpoint):
    config = resolve("squad", overrides={"launcher": "torchrun", "nnodes": 2, "rdzv_endpoint": endpoint}).config
    assert config.rdzv_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["node1", "node1:", ":29400", "node1:0", "node1:65536", "node1:-1", "node1:x", "node1:²", "fe80::1:29400", "fe80::1",
     "[node1]:29400", "[fe80::1]", "[fe80::1:29400", "a b:1", "http://node1:29400"],
)  # fmt: skip
def test_an_endpoint_without_host_or_port_is_refused(endpoint):
    with pytest.raises(UserError, match=r"rdzv_endpoint: .* is not HOST:PORT with a port from 1 to 65535"):
        resolve("squad", overrides={"launcher": "torchrun", "nnodes": 2, "rdzv_endpoint": endpoint})


def test_a_library_that_does_not_move_the_tensors_of_the_backend_is_refused_before_any_rank():
    config = build("collectives", {"benchmark": "collectives", "collective": "nccl"})
    with pytest.raises(
        UserError, match=r"collective = nccl moves tensors of cuda, not of cpu .*: take gloo, mpi, ucc, hierarchical$"
    ):
        config.check_whole()
    build("collectives", {"benchmark": "collectives", "collective": "nccl", "backend": "rocm"}).check_whole()


@pytest.mark.parametrize(
    ("benchmark", "values"),
    [("machine", {"precisions": "fp32,fp32"}), ("parity", {"members": "compile,compile"}), ("collectives", {"operations": "all_reduce,all_reduce"}), ("parallel", {"strategies": "data,data"})],
)  # fmt: skip
def test_a_list_names_each_once(benchmark, values):
    with pytest.raises(UserError, match="name each once"):
        build(benchmark, values)
