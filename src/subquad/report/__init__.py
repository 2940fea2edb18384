"""Pages, charts, and pictures of which tokens attend to which."""

from subquad.report.attention_map import AttentionMap, HeadGroup, attention_map
from subquad.report.charts import save_charts
from subquad.report.page import write_page
from subquad.report.pictures import render, save

__all__ = ["AttentionMap", "HeadGroup", "attention_map", "render", "save", "save_charts", "write_page"]
