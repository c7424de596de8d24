"""Measuring: tasks and runner on lm-evaluation-harness, pure scorers, pure analysis of the records."""
