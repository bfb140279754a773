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


def test_a_program_is_counted_and_drawn(tmp_path):
    pytest.importorskip("jax", reason="pip install 'benchlib[compiled]'")
    path, picture = tmp_path / "m.mlir", tmp_path / "m.png"
    path.write_text(TEXT)
    arguments = [{"name": "head.weight", "role": "parameter"}, {"name": "x", "role": "input"}]
    (tmp_path / "m.mlir.json").write_text(json.dumps({"arguments": arguments}))
    made = CliRunner().invoke(main, ["inspect", str(path), "--picture", str(picture)])
    assert made.exit_code == 0, made.output
    for words in ("dot_general", "48 FLOPs", "72 bytes", "32 bytes", "head"):  # 2*2*4*3; 4*(12+6); 4*8
        assert words in made.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    path.write_text(TEXT.replace("2x4xf32> {", "2x5xf32> {"))
    made = CliRunner().invoke(main, ["inspect", str(path)])
    assert made.exit_code != 0 and "m.mlir:3:" in made.output + made.stderr


def test_a_file_that_is_not_there(tmp_path):
    made = CliRunner().invoke(main, ["inspect", str(tmp_path / "no.mlir")])
    assert made.exit_code != 0 and "there is no such file" in made.output + made.stderr
