"""Serving of language models: engines, raw samples of queries, data."""
