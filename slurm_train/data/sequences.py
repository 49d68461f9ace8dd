"""How a stream of tokens is cut into sequences, and which of them are for test; needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from slurm_train.errors import DataError


class Sequences(NamedTuple):
    """The number of sequences of each split; those for test are the last of the stream."""

    train: int
    test: int

    def bounds(self, split: str) -> tuple[int, int]:
        """First and one past the last sequence of a split.

        Raises:
            DataError: there is no such split.
        """
        if split not in ("train", "test"):
            raise DataError(f"there is no split {split!r}", "data.split", "take train or test")
        return (0, self.train) if split == "train" else (self.train, self.train + self.test)


def cut(tokens: int, length: Any, test: Any, source: str) -> Sequences:
    """The number of sequences in a stream.

    Sequence i has the tokens from i * length on as inputs, and those one further as targets: so `length` + 1 tokens, of
    which it shares one with the next sequence. What is left at the end is not used.

    Args:
        tokens: tokens of the stream.
        length: tokens of a sequence.
        test: the part of the sequences that is held for test, 0 <= test < 1; if not 0, at least one sequence.
        source: where the tokens are from, in words, for errors.

    Returns:
        how many sequences there are for each split.

    Raises:
        DataError: `length` or `test` is no such number, or there is no sequence to train on.
    """
    if type(length) is not int or length < 1:
        raise DataError("must be a whole number of at least 1", f"data.length={length}")
    if type(test) not in (int, float) or not 0 <= test < 1:
        raise DataError("must be a fraction, from 0 to below 1", f"data.test={test}")
    whole = max(0, tokens - 1) // length
    held = max(1, round(whole * test)) if test else 0
    if whole <= held:
        message = f"the {tokens:,} tokens of {source} leave no sequence to train on"
        raise DataError(message, f"data.length={length}", "take shorter sequences, more text, or a smaller data.test")
    return Sequences(whole - held, held)
