"""Both engines against each other, the closed form of FLOPs against torch's own count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.workloads import encdec
from benchlib.workloads.encdec import Plain, Tuned

SHAPE = {"d_model": 16, "nhead": 2, "encoder_layers": 2, "decoder_layers": 3, "dim_feedforward": 24}
SHAPE |= {"vocabulary": 40, "sequence": 6}


def pair(dtype=torch.float64):
    torch.manual_seed(3)
    plain, tuned = Plain(**SHAPE).to(dtype), Tuned(**SHAPE).to(dtype)
    tuned.load_state_dict(plain.state_dict())
    return plain, tuned, torch.randint(40, (5, 6)), torch.randint(40, (5, 6))


@pytest.mark.parametrize("longest", [0, 6])
def test_plain_and_tuned_have_the_same_loss_and_gradients(monkeypatch, longest):
    monkeypatch.setitem(encdec._PLAIN_PRODUCTS, "cpu", longest)  # the fused kernel, and plain products
    monkeypatch.setitem(encdec._CHUNK, "cpu", 40 * 7)  # 7 of the 30 rows at a time: the last chunk is shorter
    plain, tuned, source, target = pair()
    losses = [model(source, target) for model in (plain, tuned)]
    for loss in losses:
        (loss / 30).backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-13)
    for (name, one), other in zip(plain.named_parameters(), tuned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", [Plain, Tuned])
def test_no_place_sees_what_it_has_to_predict(kind):
    torch.manual_seed(3)
    model, source, target = kind(**SHAPE).double(), torch.randint(40, (1, 6)), torch.randint(40, (1, 6))
    states = model.hidden(source, encdec.shifted_right(target))
    changed = target.clone()
    changed[0, 3] = (target[0, 3] + 1) % 40
    moved = (model.hidden(source, encdec.shifted_right(changed)) - states).abs().amax(2)[0] > 1e-9
    assert moved.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("kind", [Plain, Tuned])
def test_flops_are_those_that_torch_counts(kind):
    model, source = kind(**SHAPE), torch.randint(40, (5, 6))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the counter does not know a CPU's fused kernel
        model(source, source).backward()
    assert counter.get_total_flops() == 5 * Seq2seqConfig(**SHAPE).sample_flops
