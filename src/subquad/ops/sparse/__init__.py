"""Softmax attention over sparse patterns.

A `pattern` is made of `key_sets` (`random_blocks` and `segment_means` are two more of them) and a rule for `global_tokens`, all
of them numbers. A `plan` turns it into tile groups for the tokens of a call, and the `operator` computes them.
"""
