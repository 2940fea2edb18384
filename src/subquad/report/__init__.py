"""What can be looked at: pictures of who attends to whom."""

from subquad.report.attention_map import AttentionMap, HeadGroup, attention_map
from subquad.report.pictures import render, save

__all__ = ["AttentionMap", "HeadGroup", "attention_map", "render", "save"]
