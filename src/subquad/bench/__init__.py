"""Measurements on this machine: the time, memory and error of each mechanism by length."""

from subquad.bench.advise import Advice, advise
from subquad.bench.compare import compare
from subquad.bench.plan import Plan
from subquad.bench.results import Results, Setting, load, save
from subquad.runs.results_file import ResultsError

__all__ = ["Advice", "Plan", "Results", "ResultsError", "Setting", "advise", "compare", "load", "save"]
