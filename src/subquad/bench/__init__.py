"""Measurements on this machine: what each mechanism saves and costs, by length."""

from subquad.bench.advise import Advice, advise
from subquad.bench.compare import compare
from subquad.bench.plan import Plan, Progress
from subquad.bench.results import Results, ResultsError, Setting, load, save

__all__ = ["Advice", "Plan", "Progress", "Results", "ResultsError", "Setting", "advise", "compare", "load", "save"]
