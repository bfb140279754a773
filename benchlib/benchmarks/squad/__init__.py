"""Does BERT fine-tuning on SQuAD learn what it should, as fast as it should?"""
