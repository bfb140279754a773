"""``benchlib inspect`` on a program of one product, and on what is none."""

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
    result = CliRunner().invoke(main, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    for words in ("dot_general", "48 FLOPs", "72 bytes", "32 bytes"):  # 2*2*4*3; 4*(12+6); 4*8
        assert words in result.output
    path.write_text(TEXT.replace("2x4xf32> {", "2x5xf32> {"))
    result = CliRunner().invoke(main, ["inspect", str(path)])
    assert result.exit_code != 0 and "m.mlir:3:" in result.output + result.stderr
