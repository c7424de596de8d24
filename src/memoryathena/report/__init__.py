"""Results as pages and tables for people."""

from memoryathena.report.demo import headline, perplexity_table, write_demo_report
from memoryathena.report.results import results_markdown

__all__ = ["headline", "perplexity_table", "results_markdown", "write_demo_report"]
