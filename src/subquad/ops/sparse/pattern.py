"""A sparse pattern: which keys each query sees, for any length. It consists of numbers, so that an operator can take it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice

from subquad.errors import InputError
from subquad.ops.sparse.global_tokens import EndBlocks, FirstTokens
from subquad.ops.sparse.key_sets import BlockEnds, Blocks, KeySet, Window
from subquad.ops.sparse.random_blocks import RandomBlocks
from subquad.ops.sparse.segment_means import SegmentMeans

Heads = tuple[int, ...] | None  # query heads; None: all
# Their order is that of the codes in `Pattern.numbers`.
_KEY_SETS: tuple[type[KeySet], ...] = (Window, Blocks, BlockEnds, RandomBlocks, SegmentMeans)
_COUNTS = tuple(sum(field.compare for field in fields(key_set)) for key_set in _KEY_SETS)  # type: ignore[arg-type]
_ALL = -1


@dataclass(frozen=True)
class Pattern:
    """The disjoint union of a few sets of keys, for each group of query heads. Positions count real tokens only.

    Args:
        head_groups: groups of query heads, and the sets of keys that their queries see.
        global_rule: which tokens are global, unless a mask says it.
    """

    head_groups: tuple[tuple[Heads, tuple[KeySet, ...]], ...]
    global_rule: FirstTokens | EndBlocks | None = None

    @property
    def numbers(self) -> list[int]:
        """The pattern as integers: how many numbers the rule of global tokens has, these, and then for each group of heads how
        many there are (-1: all), which, how many sets of keys, and for each its code and its numbers."""
        rule = [] if self.global_rule is None else self.global_rule.numbers
        found = [len(rule), *rule]
        for heads, key_sets in self.head_groups:
            found += [_ALL] if heads is None else [len(heads), *heads]
            found.append(len(key_sets))
            for key_set in key_sets:
                found += [_KEY_SETS.index(type(key_set)), *key_set.numbers]
        return found

    @staticmethod
    def of(numbers: Sequence[int]) -> Pattern:
        """The pattern with these `numbers`."""
        return _read(tuple(numbers))

    def at_length(self, length: int) -> Pattern:
        """With the square root of this length where a set asks for it."""
        groups = tuple((heads, tuple(s.at_length(length) for s in key_sets)) for heads, key_sets in self.head_groups)
        return Pattern(groups, self.global_rule)

    @property
    def is_random(self) -> bool:
        """Whether random blocks are drawn."""
        return any(isinstance(key_set, RandomBlocks) for _, key_sets in self.head_groups for key_set in key_sets)

    def fits_heads(self, heads: int) -> bool:
        """Whether every one of `heads` query heads is in one group; random blocks are drawn for all."""
        groups = [found for found, _ in self.head_groups]
        if None in groups:
            return len(groups) == 1
        return not self.is_random and sorted(head for found in groups for head in found or ()) == list(range(heads))


@lru_cache(maxsize=256)
def _read(numbers: tuple[int, ...]) -> Pattern:
    left, groups, rule = iter(numbers), [], None
    try:
        rule = _read_rule(_take(left, next(left)))
        while (heads := next(left, None)) is not None:
            members = None if heads == _ALL else tuple(_take(left, heads))
            key_sets = tuple(_read_key_set(left) for _ in range(_at_least_one(next(left))))
            groups.append((members, key_sets))
        _at_least_one(len(groups))
    except (StopIteration, ValueError, RuntimeError):  # a StopIteration inside a generator is a RuntimeError
        raise InputError(
            f"a sparse pattern must be the numbers of a subquad.ops.sparse.pattern.Pattern; got {list(numbers)}."
        ) from None
    return Pattern(tuple(groups), rule)


def _read_rule(numbers: list[int]) -> FirstTokens | EndBlocks | None:
    if not numbers:
        return None
    first, *others = numbers
    rule = EndBlocks(first, *_take(iter(others), 2)) if others else FirstTokens(first)
    if not rule.is_valid or len(others) > 2:
        raise ValueError
    return rule


def _read_key_set(left: Iterator[int]) -> KeySet:
    code = next(left)
    if not 0 <= code < len(_KEY_SETS):
        raise ValueError
    found = _KEY_SETS[code].of(_take(left, _COUNTS[code]))
    if not found.is_valid:
        raise ValueError
    return found


def _take(left: Iterator[int], count: int) -> list[int]:
    found = list(islice(left, count))
    if len(found) != count:
        raise ValueError
    return found


def _at_least_one(count: int) -> int:
    if count < 1:
        raise ValueError
    return count
