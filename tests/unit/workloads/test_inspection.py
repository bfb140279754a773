"""What `benchlib inspect` counts, against hand counts and the cost analysis of XLA."""

import textwrap

import pytest
from click.testing import CliRunner

from benchlib.benchmarks.compiled.command import command
from benchlib.core.errors import UserError
from benchlib.workloads.stablehlo import mlir
from benchlib.workloads.stablehlo.inspection import inspect

jax = pytest.importorskip("jax")
X, W = (8, 16), (16, 16)
PRODUCT = 2 * 8 * 16 * 16  # FLOPs of x @ w
T = "tensor<8x16xf32>, tensor<16x16xf32>"
DOT = f"stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : ({T}) -> tensor<8x16xf32>"


def lowered(function):
    return jax.jit(function).lower(jax.numpy.ones(X), jax.numpy.ones(W))


def loop(holds, change, start=0):
    """Multiply by w as long as ``holds`` of a counter."""
    return lambda x, w: jax.lax.while_loop(
        lambda state: holds(state[0]), lambda state: (change(state[0]), state[1] @ w), (start, x)
    )[1]


def nested(x, w):
    return jax.lax.fori_loop(0, 4, lambda i, y: jax.lax.fori_loop(0, 3, lambda j, z: z @ w, y), x)


def limit_in_the_state(x, w):
    return jax.lax.while_loop(
        lambda state: state[0] < state[2], lambda state: (state[0] + 1, state[1] @ w, state[2]), (0, x, 6)
    )[1]


LOOPS = {  # with the rounds of each, by hand
    "for": (lambda x, w: jax.lax.fori_loop(0, 5, lambda i, y: y @ w, x), 5),
    "nested": (nested, 12),
    "scan": (lambda x, w: jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=3)[0], 3),
    "below, by 2": (loop(lambda i: i < 7, lambda i: i + 2), 4),  # 0 2 4 6
    "at most, turned around": (loop(lambda i: jax.numpy.greater_equal(6, i), lambda i: 2 + i), 4),
    "downwards": (loop(lambda i: i > 0, lambda i: i - 3, start=10), 4),  # 10 7 4 1
    "down to": (loop(lambda i: i >= 1, lambda i: i + -3, start=10), 4),
    "unlike": (loop(lambda i: i != 6, lambda i: i + 2), 3),
    "never": (loop(lambda i: i < 0, lambda i: i + 1), 0),
    "limit in the state": (limit_in_the_state, 6),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_with_a_constant_count_counts_each_round_as_xla_does_where_it_is_written_out(case):
    function, rounds = LOOPS[case]

    def written_out(x, w):
        for _ in range(rounds):
            x = x @ w
        return x

    found = inspect(lowered(function).as_text())
    assert found.operations["dot_general"] == rounds and not found.uncounted
    assert found.dot_flops == rounds * PRODUCT
    if rounds:
        assert found.dot_flops == lowered(written_out).compile().cost_analysis()["flops"]
        assert found.dot_flops == inspect(lowered(written_out).as_text()).dot_flops


@pytest.mark.parametrize(
    ("function", "products", "words"),
    [
        (
            lambda x, w: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ w, x),
            1,
            "a loop without a constant count",
        ),
        (loop(lambda i: i < 9, lambda i: i * 2, start=1), 1, "a loop without a constant count"),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), 2, "branches of case but the one"),
        (lambda x, w: jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME"), 0, "FLOPs of convolution"),
    ],
    ids=["loop by a sum", "loop by a factor", "branches", "convolution"],
)
def test_what_depends_on_values_or_is_not_counted_is_named(function, products, words):
    found = inspect(lowered(function).as_text())
    assert found.dot_flops == products * PRODUCT
    (named,) = found.uncounted
    assert words in named


PROGRAMS = {  # text; FLOPs, bytes of arguments, results and temporaries
    "calls": (f"""
        func.func @main(%x: tensor<8x16xf32>, %w: tensor<16x16xf32>) -> tensor<8x16xf32> {{
          %0 = call @layer(%x, %w) : ({T}) -> tensor<8x16xf32>
          %1 = call @layer(%0, %w) : ({T}) -> tensor<8x16xf32>
          return %1 : tensor<8x16xf32>
        }}
        func.func private @layer(%x: tensor<8x16xf32>, %w: tensor<16x16xf32>) -> tensor<8x16xf32> {{
          %0 = {DOT}
          return %0 : tensor<8x16xf32>
        }}""", (2 * PRODUCT, 4 * (128 + 256), 4 * 128, 2 * 4 * 128)),
    "private first": (f"""
        func.func private @same(%x: tensor<4xf32>) -> tensor<4xf32> {{
          return %x : tensor<4xf32>
        }}
        func.func public @entry(%x: tensor<8x16xf32>, %w: tensor<16x16xf32>) -> tensor<8x16xf32> {{
          %0 = {DOT}
          return %0 : tensor<8x16xf32>
        }}""", (PRODUCT, 4 * (128 + 256), 4 * 128, 4 * 128)),
    "dot": (f"""
        func.func @main(%x: tensor<8x16xf32>, %w: tensor<16x16xf32>) -> tensor<8x16xf32> {{
          %0 = stablehlo.dot %x, %w : ({T}) -> tensor<8x16xf32>
          return %0 : tensor<8x16xf32>
        }}""", (PRODUCT, 4 * (128 + 256), 4 * 128, 4 * 128)),
    "dot of vectors": ("""
        func.func @main(%x: tensor<16xf32>) -> tensor<f32> {
          %0 = stablehlo.dot %x, %x : (tensor<16xf32>, tensor<16xf32>) -> tensor<f32>
          return %0 : tensor<f32>
        }""", (2 * 16, 64, 4, 4)),
    "outer product": ("""
        func.func @main(%x: tensor<3xf32>) -> tensor<3x3xf32> {
          %0 = stablehlo.dot_general %x, %x, contracting_dims = [] x [] : (tensor<3xf32>, tensor<3xf32>) -> tensor<3x3xf32>
          return %0 : tensor<3x3xf32>
        }""", (2 * 9, 12, 36, 36)),
    "mhlo": ("""
        func.func @main(%x: tensor<2x8x16xf32>, %w: tensor<2x16x4xf32>) -> tensor<2x8x4xf32> {
          %0 = "mhlo.dot_general"(%x, %w) {dot_dimension_numbers = #mhlo.dot<lhs_batching_dimensions = [0], rhs_batching_dimensions = [0],
            lhs_contracting_dimensions = [2], rhs_contracting_dimensions = [1]>} : (tensor<2x8x16xf32>, tensor<2x16x4xf32>) -> tensor<2x8x4xf32>
          %1 = mhlo.add %0, %0 : tensor<2x8x4xf32>
          return %1 : tensor<2x8x4xf32>
        }""", (2 * 2 * 8 * 16 * 4, 4 * (256 + 128), 256, 512)),
    "dynamic": ("""
        func.func @main(%x: tensor<?x4xf32>, %w: tensor<4x4xf32>) -> tensor<?x4xf32> {
          %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<?x4xf32>, tensor<4x4xf32>) -> tensor<?x4xf32>
          return %0 : tensor<?x4xf32>
        }""", (None, None, None, None)),
    "dynamic inside": ("""
        func.func @main(%x: tensor<4xcomplex<f32>>) -> tensor<4xi1> {
          %n = stablehlo.constant dense<0> : tensor<4xi32>
          %0 = stablehlo.custom_call @f(%x) : (tensor<4xcomplex<f32>>) -> tensor<?xf32>
          %1 = stablehlo.constant dense<true> : tensor<4xi1>
          return %1 : tensor<4xi1>
        }""", (0, 32, 4, None)),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_is_counted_as_by_hand(case):
    text, numbers = PROGRAMS[case]
    found = inspect(textwrap.dedent(text))
    assert (found.dot_flops, found.argument_bytes, found.result_bytes, found.temporary_bytes) == numbers


def test_a_private_function_before_the_program_is_not_what_the_interpreter_takes():
    import numpy as np

    x, w = np.ones(X, np.float32), np.ones(W, np.float32)
    text = PROGRAMS["private first"][0].replace("@entry", "@main")
    (result,) = mlir.evaluate(mlir.parse(text), [x, w])
    np.testing.assert_array_equal(result, x @ w)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("module {}", "no public function with a body"),
        ("func.func @main() {\n call @main() : () -> ()\n return\n}", "@main calls itself"),
    ],
)
def test_a_text_without_a_program_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        inspect(text)


def test_the_command_says_dynamic_and_what_it_did_not_count(tmp_path):
    file = tmp_path / "m.mlir"
    for case, said in (
        ("dynamic", "arguments    dynamic\n"),
        ("dynamic inside", "not counted  FLOPs of custom_call, 1 time\n"),
    ):
        file.write_text(PROGRAMS[case][0], encoding="utf-8-sig")
        answer = CliRunner().invoke(command, [str(file)])
        assert answer.exit_code == 0 and said in answer.output and "-" not in answer.output
