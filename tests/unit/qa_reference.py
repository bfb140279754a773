"""The usual question answering recipe of transformers, window by window, to compare the vectorised one with."""

import string

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchlib.example import Example


def bert_tokenizer(texts, size=400):
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        initial_alphabet=list(string.ascii_lowercase),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    marks = [("[CLS]", core.token_to_id("[CLS]")), ("[SEP]", core.token_to_id("[SEP]"))]
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    names = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    )


def byte_level_tokenizer(texts, size=400):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    ends = [("</s>", core.token_to_id("</s>")), ("<s>", core.token_to_id("<s>"))]
    core.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=["input_ids", "attention_mask"], **names)


def recipe(examples: list[Example], tokenizer, max_length, doc_stride):
    """One dict for each window: what the usual preparation functions for training and validation give."""
    encoded = tokenizer(
        [example.question.lstrip() for example in examples],
        [example.context for example in examples],
        truncation="only_second",
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=False,
    )
    rows = []
    for i, example_index in enumerate(encoded["overflow_to_sample_mapping"]):
        ids, offsets, parts = encoded["input_ids"][i], encoded["offset_mapping"][i], encoded.sequence_ids(i)
        text, begin = examples[example_index].answers[0]
        end = begin + len(text)
        cls = ids.index(tokenizer.cls_token_id)
        context = [k for k, part in enumerate(parts) if part == 1]
        row = {
            "ids": ids,
            "types": encoded["token_type_ids"][i] if "token_type_ids" in encoded else [0] * len(ids),
            "example": example_index,
            "offsets": [offsets[k] if parts[k] == 1 else None for k in range(len(ids))],
            "start": cls,
            "end": cls,
        }
        if offsets[context[0]][0] <= begin and offsets[context[-1]][1] >= end:
            k = context[0]
            while k < len(offsets) and offsets[k][0] <= begin:
                k += 1
            row["start"] = k - 1
            k = context[-1]
            while offsets[k][1] >= end:
                k -= 1
            row["end"] = k + 1
        rows.append(row)
    return rows


def best_answers(examples, rows, start_logits, end_logits, n_best, max_answer_tokens):
    """The usual choice of answers: all pairs of the best starts and ends of all windows, the highest sum first."""
    answers = {}
    for index, example in enumerate(examples):
        candidates = []
        for row, starts, ends in zip(rows, start_logits, end_logits, strict=True):
            if row["example"] != index:
                continue
            for s in np.argsort(-starts, kind="stable")[:n_best]:
                for e in np.argsort(-ends, kind="stable")[:n_best]:
                    if row["offsets"][s] is None or row["offsets"][e] is None:
                        continue
                    if e < s or e - s + 1 > max_answer_tokens:
                        continue
                    candidates.append(
                        (starts[s] + ends[e], example.context[row["offsets"][s][0] : row["offsets"][e][1]])
                    )
        candidates.sort(key=lambda pair: pair[0], reverse=True)
        answers[example.id] = candidates[0][1] if candidates else "empty"
    return answers
