"""Train the embedded decoder, `benchlib/assets/tiny-llama`.

It answers the prompt of MLPerf with a summary whose length depends on the article. Method: a byte-level BPE learnt from generated articles, and Llama (grouped-query attention, rotary positions, tied
embeddings) on endless articles of the split "train" of `benchlib.workloads.llm.mininews`: next tokens of the summary, and of
the article with a tenth of the weight. The facts of an article grow from one to four when 85% of the summaries' tokens are
right. Some sentences are noise of random letters, so that no piece of the vocabulary stays untrained: the test sentences
have words that the training never saw. Weights are stored as bf16.

    OMP_NUM_THREADS=1 python scripts/pretrain_news.py --out benchlib/assets/tiny-llama

takes 8 minutes of one core (1,204 s beside other work). One thread on one kind of CPU gives the same weights again.
"""

from __future__ import annotations

import argparse
import copy
import string
import time
from random import Random

import torch
from pretraining import Steps, options_for
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchlib.workloads.llm.mininews import FACTS, PROMPT, Article, article, generate

BOS, EOS, PAD = range(3)
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
IGNORE = -100
LEARNT = 0.85  # share of right tokens at which articles grow
BODY = 0.1  # weight of the article's own tokens


def build_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Learn the pieces from articles of the training split."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        text
        for each in generate(6000, seed=0, split="train")
        for text in (PROMPT.format(input=each.text), " " + each.summary)
    ]
    core.train_from_iterator(texts, trainer)
    core.post_processor = TemplateProcessing(single=f"{SPECIALS[BOS]} $A", special_tokens=[(SPECIALS[BOS], BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        pad_token=SPECIALS[PAD],
        model_max_length=512,
    )


def scrambled(random: Random, source: Article) -> str:
    """Return the text with a sentence of random words somewhere, and random words within sentences."""
    word = lambda: "".join(random.choices(string.ascii_lowercase, k=random.randint(2, 8)))  # noqa: E731
    sentences = [sentence for sentence in source.text.split(". ") if sentence]
    if random.random() < 0.5:
        noise = [word() for _ in range(random.randint(2, 6))]
        sentences.insert(random.randint(0, len(sentences) - 1), " ".join(noise).capitalize())
    for _ in range(random.randint(0, 3)):
        place = random.randrange(len(sentences))
        words = sentences[place].split(" ")
        words.insert(random.randint(0, len(words) - 1), word())
        sentences[place] = " ".join(words)
    return ". ".join(sentences)


def batch(
    random: Random, tokenizer: PreTrainedTokenizerFast, size: int, facts: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and weights, (size, length) each."""
    articles = [article(random, "train", facts) for _ in range(size)]
    prompts = tokenizer([PROMPT.format(input=scrambled(random, each)) for each in articles])["input_ids"]
    answers = tokenizer([" " + each.summary for each in articles], add_special_tokens=False)["input_ids"]
    rows = [prompt + answer + [EOS] for prompt, answer in zip(prompts, answers, strict=True)]
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    weights = torch.tensor(
        [
            [BODY] * len(prompt) + [1.0] * (len(row) - len(prompt)) + [0.0] * (length - len(row))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
    )
    return ids, ids.masked_fill(weights == 0, IGNORE), weights


def pretrain(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    random, tokenizer = Random(args.seed), build_tokenizer(args.vocabulary)
    tokenizer.save_pretrained(args.out)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}, vocabulary {len(tokenizer)}", flush=True)
    update = Steps(model, args.lr, 1e-8)
    began, max_facts, right_share = time.perf_counter(), 1, 0.0
    for step in range(1, args.steps + 1):
        ids, labels, weights = batch(random, tokenizer, args.batch, (FACTS[0], max_facts))
        logits = model(input_ids=ids).logits[:, :-1]
        target, weight = labels[:, 1:], weights[:, 1:]
        losses = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none")
        loss = (losses * weight.flatten()).sum() / weight.sum()
        update(loss, step / 100, (1 - step / args.steps) / 0.4)
        right = ((logits.argmax(-1) == target) & (weight == 1)).sum() / (weight == 1).sum()
        right_share = 0.97 * right_share + 0.03 * right.item()
        if right_share > LEARNT and max_facts < FACTS[1]:
            max_facts, right_share = max_facts + 1, 0.5
        if step % 50 == 0:
            print(f"{time.perf_counter() - began:6.0f} s  step {step}  facts {max_facts}  loss {loss.item():.3f}  "
                  f"right {right_share:.3f}", flush=True)  # fmt: skip
        if step % 250 == 0 or step == args.steps:
            copy.deepcopy(model).bfloat16().save_pretrained(args.out)


def main() -> None:
    parser = options_for(__doc__, steps=1600, lr=2e-3, layers=3)
    parser.add_argument("--batch", type=int, default=24, help="articles a step")
    parser.add_argument("--vocabulary", type=int, default=1024)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pretrain(args)


if __name__ == "__main__":
    main()
