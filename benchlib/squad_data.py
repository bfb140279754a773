"""Question answering data in the SQuAD v1.1 shape: read, check, write and load it."""

from benchlib.example import Example

__all__ = ["Example"]
