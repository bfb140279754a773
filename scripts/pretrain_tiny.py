"""Pretrain the embedded tiny BERT, `benchlib/assets/tiny`.

Question: which small encoder learns to match a question with its sentence within a quick tier? From random weights a tiny
BERT does not: attention that finds the same name elsewhere takes it longer to form than the whole tier.

Method: BERT (post-norm, learned positions, no dropout) on endless generated text (`pretrain_text.py`) with two losses at
once: the span that answers a question, and masked words. Relations and names are others than those of the benchmark.
Paragraphs grow from two facts to eight, one at a time, when 80% of the questions are answered exactly. The weights are
random at the start, but not shapeless: words and positions begin in subspaces of their own, positions as sinusoids, and some
heads begin by looking for equal words, others at a neighbour (HEADS). So 61% of the two-fact questions are right after 400
steps; with sinusoids and equal queries and keys alone it was 16% after 500. All of it is trained. The shape alone does not
replace the training: without it the quick tier ends at F1 21. The vocabulary holds the words of the generated text, all
ASCII characters and all pairs of letters and of digits: any other word is cut into pairs.

    OMP_NUM_THREADS=1 python scripts/pretrain_tiny.py --out benchlib/assets/tiny

takes 21 minutes on one core of a busy machine (1,265 s). One thread on one kind of CPU gives the same weights again.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import time
from pathlib import Path
from random import Random

import pretrain_text
import torch
from pretraining import Steps, options_for
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
IGNORE = -100
POSITIONS = 512
PLACE = 32  # width of the subspace in which positions start
# shift, sharpness
WINDOWS = {"previous": (-1, 1.6), "next": (1, 1.6), "near": (0, 1.0), "left": (-4, 1.0), "right": (4, 1.0)}
HEADS = (
    ("match", "match", "previous", "next"),
    ("match", "alike", "previous", "near"),
    ("match", "alike", "left", "right"),
    ("alike", "alike", "near", "next"),
)


def vocabulary() -> list[str]:
    """Word pieces in the order of their ids; every lower-case ASCII text is covered."""
    lowercase, digits = string.ascii_lowercase, string.digits
    single = [*lowercase, *digits]
    pairs = [a + b for a in lowercase for b in lowercase] + [a + b for a in digits for b in digits]
    extra = "–—‘’“”…°£€§·×"
    words = [word for word in pretrain_text.words() if len(word) > 2]
    return [*SPECIALS, *string.punctuation, *extra, *single, *pairs, *words] + [f"##{p}" for p in (*single, *pairs)]


def build_tokenizer() -> BertTokenizer:
    vocab = {piece: i for i, piece in enumerate(vocabulary())}
    core = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    core.normalizer = BertNormalizer(lowercase=True)
    core.pre_tokenizer = BertPreTokenizer()
    core.decoder = WordPieceDecoder()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    core.add_special_tokens(list(SPECIALS))
    return BertTokenizer(tokenizer_object=core, model_max_length=POSITIONS, do_lower_case=True)


class Pieces:
    """Ids of the pieces of a word, greedily the longest first, as the tokenizer does it (a test compares them)."""

    def __init__(self) -> None:
        self.vocab = {piece: i for i, piece in enumerate(vocabulary())}
        self.known: dict[str, list[int]] = {w: [i] for w, i in self.vocab.items() if not w.startswith("##")}

    def __call__(self, word: str) -> list[int]:
        if word in self.known:
            return self.known[word]
        ids, at = [], 0
        while at < len(word):
            for end in range(len(word), at, -1):
                piece = word[at:end] if at == 0 else f"##{word[at:end]}"
                if piece in self.vocab:
                    break
            ids.append(self.vocab[piece])
            at = end
        return ids


def batch(random: Random, pieces: Pieces, size: int, facts: int, masking: float, positions: int) -> dict[str, Tensor]:
    """Samples as tensors (batch, length): ids, types, mask, position ids, MLM labels (IGNORE elsewhere); start and end (batch)."""
    rows: list[tuple[list[int], list[int], list[int], list[int]]] = []
    spans: list[tuple[int, int]] = []
    for _ in range(size):
        sample = pretrain_text.sample(random, facts)
        share = masking if random.random() < 0.5 else 0.0
        ids = [CLS, *(i for word in sample.question for i in pieces(word)), SEP]
        context_at = len(ids)
        labels = [IGNORE] * context_at
        start = end = 0
        for w, word in enumerate(sample.context):
            word_ids = pieces(word)
            if w == sample.start:
                start = len(ids)
            hidden = random.random() < share and not sample.start <= w <= sample.end
            ids += [MASK] * len(word_ids) if hidden else word_ids
            labels += word_ids if hidden else [IGNORE] * len(word_ids)
            if w == sample.end:
                end = len(ids) - 1
        ids.append(SEP)
        labels.append(IGNORE)
        # some contexts stand further on, so that all positions are trained
        shift = random.randrange(positions - len(ids)) if random.random() < 0.25 else 0
        place = [*range(context_at), *range(context_at + shift, len(ids) + shift)]
        rows.append((ids, [0] * context_at + [1] * (len(ids) - context_at), place, labels))
        spans.append((start, end))
    length = max(len(row[0]) for row in rows)

    def padded(column: int, value: int) -> Tensor:
        return torch.tensor([row[column] + [value] * (length - len(row[column])) for row in rows])

    input_ids = padded(0, PAD)
    return {
        "input_ids": input_ids,
        "token_type_ids": padded(1, 0),
        "attention_mask": input_ids.ne(PAD).long(),
        "position_ids": padded(2, 0),
        "labels": padded(3, IGNORE),
        "start": torch.tensor([start for start, _ in spans]),
        "end": torch.tensor([end for _, end in spans]),
    }


class Pretraining(nn.Module):
    """BERT with the question head, and a masked-word head (tied to the embeddings) that is not shipped."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.qa = BertForQuestionAnswering(config)
        self.transform = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size), nn.GELU(), nn.LayerNorm(config.hidden_size)
        )
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._shape_start(config)

    @torch.no_grad()
    def _shape_start(self, config: BertConfig) -> None:
        """Words and positions start in subspaces of their own; heads start as matchers of equal words or as windows on neighbours."""
        width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        words = width - PLACE
        embeddings = self.qa.bert.embeddings
        embeddings.word_embeddings.weight.normal_(0, 0.1)
        embeddings.word_embeddings.weight[:, words:] = 0
        embeddings.token_type_embeddings.weight.normal_(0, 0.02)
        place = torch.arange(config.max_position_embeddings)[:, None]
        rate = 2 * math.pi / 4 * torch.exp(torch.arange(PLACE // 2) * (-math.log(250.0) / (PLACE // 2 - 1)))
        embeddings.position_embeddings.weight.zero_()
        embeddings.position_embeddings.weight[:, words::2] = 0.2 * torch.sin(place * rate)
        embeddings.position_embeddings.weight[:, words + 1 :: 2] = 0.2 * torch.cos(place * rate)
        for layer, kinds in zip(self.qa.bert.encoder.layer, HEADS, strict=False):
            attention = layer.attention.self
            for linear in (attention.value, layer.attention.output.dense, layer.intermediate.dense, layer.output.dense):
                linear.weight.normal_(0, 0.06)
            for head, kind in enumerate(kinds):
                query = attention.query.weight[head * size : (head + 1) * size]
                key = attention.key.weight[head * size : (head + 1) * size]
                if kind == "match":  # the same random view of words on both sides: equal words attract
                    query.normal_(0, 0.11)
                    query[:, words:] = 0
                    key.copy_(query)
                elif kind == "alike":
                    query.normal_(0, 0.08)
                    key.copy_(query)
                else:  # a window `shift` words away, by turning each pair (sin, cos)
                    shift, gain = WINDOWS[kind]
                    query.normal_(0, 0.02)
                    key.normal_(0, 0.02)
                    for i in range(PLACE // 2):
                        turn = rate[i] * shift
                        pair = torch.tensor([[torch.cos(turn), torch.sin(turn)], [-torch.sin(turn), torch.cos(turn)]])
                        at = slice(words + 2 * i, words + 2 * i + 2)
                        query[2 * i : 2 * i + 2, at] = gain * pair
                        key[2 * i : 2 * i + 2, at] = gain * torch.eye(2)

    def forward(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Question loss, masked-word loss, share of questions whose span is exactly right."""
        inputs = {k: data[k] for k in ("input_ids", "token_type_ids", "attention_mask", "position_ids")}
        states = self.qa.bert(**inputs).last_hidden_state
        logits = self.qa.qa_outputs(states).float().masked_fill(data["token_type_ids"][..., None] == 0, -1e4)
        start, end = logits[..., 0], logits[..., 1]
        question = (cross_entropy(start, data["start"]) + cross_entropy(end, data["end"])) / 2
        right = ((start.argmax(-1) == data["start"]) & (end.argmax(-1) == data["end"])).float().mean()
        chosen = data["labels"] != IGNORE
        if not chosen.any():
            return question, question.detach() * 0, right
        guess = self.transform(states[chosen]) @ self.qa.bert.embeddings.word_embeddings.weight.T + self.bias
        return question, cross_entropy(guess.float(), data["labels"][chosen]), right


def pretrain(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    random = Random(args.seed)
    pieces = Pieces()
    config = BertConfig(
        vocab_size=len(pieces.vocab),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=len(HEADS[0]),
        intermediate_size=2 * args.hidden,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    model = Pretraining(config)
    print(f"parameters: {sum(p.numel() for p in model.qa.parameters()):,}", flush=True)
    update = Steps(model, args.lr, 1e-6)
    began, facts, right_share = time.perf_counter(), 2, 0.0
    seen = {"question": 0.0, "masked": 0.0, "right": 0.0}
    for step in range(args.steps):
        some = random.randint(2, facts) if random.random() < 0.3 else facts
        data = batch(random, pieces, max(16, args.tokens // (18 * some + 14)), some, 0.15, POSITIONS)
        question, masked, right = model(data)
        update(question + 0.5 * masked, (step + 1) / args.warmup, (args.steps - step) / (args.steps * 0.4))
        for name, value in (("question", question), ("masked", masked), ("right", right)):
            seen[name] += value.item() / 100
        right_share = 0.98 * right_share + 0.02 * right.item()
        if right_share > 0.8 and facts < args.facts:  # the paragraphs grow when the shorter ones are answered
            facts, right_share = facts + 1, 0.0
        if step % 100 == 99:
            print(f"{time.perf_counter() - began:6.0f} s  step {step + 1}  facts {facts}  "
                  + "  ".join(f"{k} {v:.3f}" for k, v in seen.items()), flush=True)  # fmt: skip
            seen = dict.fromkeys(seen, 0.0)
        if step % 1000 == 999 or step + 1 == args.steps:
            save(model.qa, args.out)


def save(model: BertForQuestionAnswering, out: Path) -> None:
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    (out / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary()), encoding="utf-8")


def main() -> None:
    parser = options_for(__doc__, steps=4000, lr=1e-3, layers=len(HEADS))
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warm-up")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a batch, about")
    parser.add_argument("--facts", type=int, default=8, help="facts of the longest paragraphs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(vars(args), default=str), flush=True)
    pretrain(args)


if __name__ == "__main__":
    main()
