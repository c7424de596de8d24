"""Results as pages and tables for people."""

from memoryathena.report.demo import headline, perplexity_table, write_demo_report

__all__ = ["headline", "perplexity_table", "write_demo_report"]
