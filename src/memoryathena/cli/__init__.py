"""`athena`: parse, call one function, print. Each module registers its commands on the one application."""

from memoryathena.cli import analysis, baselines, bench, core, corpus, evaluation, report, studies, training
from memoryathena.cli.application import console, main

__all__ = [
    "analysis",
    "baselines",
    "bench",
    "console",
    "core",
    "corpus",
    "evaluation",
    "main",
    "report",
    "studies",
    "training",
]
