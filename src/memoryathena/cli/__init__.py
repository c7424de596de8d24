"""`athena`: parse, call one function, print. Each module registers its commands on the one application."""

from memoryathena.cli import baselines, core, corpus, evaluation, training
from memoryathena.cli.application import console, main

__all__ = ["baselines", "console", "core", "corpus", "evaluation", "main", "training"]
