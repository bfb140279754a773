"""``benchlib inspect`` on a program of two layers, and on what is none."""

import json

import pytest
from click.testing import CliRunner

from benchlib.cli import main

TEXT = """func.func @main(%w: tensor<3x4xf32>, %x: tensor<2x3xf32>) -> tensor<2x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<3x4xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}
"""


def test_a_program_is_counted(tmp_path):
    pytest.importorskip("jax", reason="pip install -e '.[compiled]'")
    path = tmp_path / "m.mlir"
    path.write_text(TEXT)
    arguments = [{"name": "[/red].head.weight", "role": "parameter"}, {"name": "x", "role": "input"}]
    (tmp_path / "m.mlir.json").write_text(json.dumps({"arguments": arguments}))
    made = CliRunner().invoke(main, ["inspect", str(path)])
    assert made.exit_code == 0, made.output
    for words in ("dot_general", "48 FLOPs", "72 bytes", "32 bytes", "[/red].head"):  # 2*2*4*3; 4*(12+6); 4*8
        assert words in made.output
    path.write_text(TEXT.replace("2x4xf32> {", "2x5xf32> {"))
    made = CliRunner().invoke(main, ["inspect", str(path)])
    assert made.exit_code != 0 and "m.mlir:3:" in made.output + made.stderr


ARGUMENT = "func.func @main(%a: {}) {{ return }}"
HOSTILE = {
    "tuples in tuples": (ARGUMENT.format("tuple<" * 100_000), None, "nested deeper than 256"),
    "a dimension of 5,000 digits": (ARGUMENT.format(f"tensor<{'9' * 5000}xf32>"), None, "invalid dimension"),
    "5,000 digits of bytes": (ARGUMENT.format(f"tensor<{f'{2**63 - 1}x' * 500}f32>"), None, "cannot be counted"),
    "no shape": (ARGUMENT.format("tensor<*xf32>"), None, "cannot be counted"),
    "no tensor": (ARGUMENT.format("f32"), None, "cannot be counted"),
    "no body": ("func.func private @main(tensor<2xf32>)", None, "no function with a body"),
    "nothing": ("", None, "no function with a body"),
    "an argument that is a number": (TEXT, '{"arguments": [1]}', "no name or role"),
    "names that are numbers": (TEXT, '{"arguments": [{"name": 1, "role": 2}]}', "no name or role"),
    "a number of 5,000 digits": (TEXT, f'{{"arguments": [{"9" * 5000}]}}', "number out of range"),
    "lists in a manifest": (TEXT, '{"arguments": ' + "[" * 100_000, "recursion limit exceeded"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_program_is_refused_in_one_sentence(tmp_path, case):
    pytest.importorskip("jax", reason="pip install -e '.[compiled]'")
    text, manifest, words = HOSTILE[case]
    (tmp_path / "m.mlir").write_text(text)
    if manifest:
        (tmp_path / "m.mlir.json").write_text(manifest)
    refused = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.mlir")])
    assert refused.exit_code == 2
    assert words in refused.stderr and "fault of benchlib" not in refused.stderr
    assert refused.stderr.startswith("error: ") and len(refused.stderr) < 1000
