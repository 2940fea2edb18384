"""Which keys of its bucket a query sees.

In each round every query and every key is in a bucket. Keys are sorted by (bucket, position); the *rank* of a query is the
number of keys that are sorted before its own (bucket, position). It sees the keys of its bucket

    bidirectional   in the chunk of C sorted keys that contains its rank, and in the chunk before
    causal          among the C sorted keys before its rank: the last C earlier tokens of the bucket

and, over several rounds, the union of what it sees in each: a pair is masked in all rounds but the first that shows it. A query
also sees its own key; if queries and keys are the same vectors (`shared`), only if it sees no other. Pads are in no bucket.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """The number of buckets and rounds, and how many keys of its bucket a query sees."""

    buckets: int
    rounds: int
    chunk: int  # C, tokens
    shared: bool  # queries and keys are the same vectors
    is_causal: bool
