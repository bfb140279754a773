"""Logits of a real encoder: a question answering head that was drawn anew is not taken for the trained one."""

import make_recordings
import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from benchlib.benchmarks.parity.compare import compare
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.workloads.encoders import TINY


@pytest.fixture(scope="module")
def encoded():
    """Return the trained head, hidden states (B, S, hidden) of the embedded model, and the mask of 4 ragged inputs."""
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_pretrained(TINY, attn_implementation="eager").eval()
    ids = torch.randint(5, model.config.vocab_size, (4, 32))
    mask = (torch.arange(32) < torch.tensor([[32], [20], [11], [5]])).long()
    with torch.no_grad():
        hidden = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
    return model.qa_outputs, hidden, mask


def logits(head, hidden):
    with torch.no_grad():
        found = head(hidden).numpy()
    return {
        f"len32-batch4/{name}": np.ascontiguousarray(found[..., number]) for number, name in enumerate(("start", "end"))
    }


def test_a_reinitialised_head_fails_at_any_tolerance(encoded, tmp_path):
    trained, hidden, mask = encoded
    reference = make_recordings.write(tmp_path / "reference", outputs=logits(trained, hidden))
    inputs = {"len32-batch4/attention_mask": mask.numpy()}
    cosines = []
    for seed in range(5):
        torch.manual_seed(seed)
        head = torch.nn.Linear(hidden.shape[-1], 2)
        facts = make_recordings.meta("own", backend="tpu")
        own = make_recordings.write(tmp_path / str(seed), facts, outputs=logits(head, hidden))
        for member in (MEMBERS["exact"], MEMBERS["bf16"]):
            found = compare(reference, own, None, inputs, member)
            rows = {row.quantity: row for row in found.rows}
            assert found.outcome == "FAIL"
            assert rows["logits max difference"].status == rows["logits cosine"].status == "FAIL"
        cosines.append(1 - rows["logits cosine"].value)
    # The worse head's; what two heads have in common is chance, since the states of all tokens share a direction.
    assert max(cosines) < 0.9 and min(cosines) < 0
