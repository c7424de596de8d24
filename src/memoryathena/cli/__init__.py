"""`athena`: parse, call one function, print. Each module registers its commands on the one application."""

from memoryathena.cli import baselines, core, corpus, training
from memoryathena.cli.application import console, main

__all__ = ["baselines", "console", "core", "corpus", "main", "training"]
