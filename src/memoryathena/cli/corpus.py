"""Commands of text: prepare."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from memoryathena.cli.application import AsJson, app, console, notes
from memoryathena.config import merge, parse_overrides
from memoryathena.corpus.config import CorpusFile, PrepareConfig
from memoryathena.errors import AthenaError


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="The corpus's folder; an interrupted run in it goes on.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCES]... [FIELD=VALUE]...",
            help="Files (.txt .jsonl .jsonl.gz .parquet), folders of text or code, hub datasets; and overrides such as "
            "max_tokens=1000000 split.router=0.2.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A fetched model's name, a directory, or a hub id.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with sources or mix, tokenizer, options.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that tokenise; by default one a core.")] = None,
    overlap: Annotated[
        list[Path] | None, typer.Option(help="Evaluation file (.jsonl .txt): which n-grams has the corpus of it?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Text to token shards in parts that share no document; with --overlap, what they share with an evaluation file."""
    from memoryathena.backbone.load import load_tokenizer
    from memoryathena.corpus.overlap import Evaluation
    from memoryathena.corpus.overlap import overlap as compare
    from memoryathena.corpus.prepare import prepare as make
    from memoryathena.corpus.shards import MANIFEST, open_corpus

    wanted = read_corpus_file(config, arguments or [], tokenizer)
    only_overlap = bool(overlap) and not (wanted.sources or wanted.mix) and (out / MANIFEST).exists()
    name = wanted.tokenizer or (open_corpus(out)["tokenizer"]["name"] if only_overlap else None)
    if name is None:
        raise AthenaError("give --tokenizer NAME: the model's that shall read the corpus")
    evaluations = [Evaluation(file) for file in overlap or []]  # a bad file is said before hours of reading
    tokens = load_tokenizer(name)
    if only_overlap:
        manifest = open_corpus(out)
    else:
        manifest = make(
            out, wanted.mix or wanted.sources, tokens, PrepareConfig.build(wanted.options()), workers, notes
        )
    reports = [compare(out, one, tokens, console=notes) for one in evaluations]
    if as_json:
        print(json.dumps({"folder": str(out), **manifest, "overlap": reports}, indent=2))
        return
    _print_corpus(out, manifest)
    for report in reports:
        _print_overlap(report)


def read_corpus_file(file: Path | None, arguments: Sequence[str], tokenizer: str | None = None) -> CorpusFile:
    """What to prepare: a YAML file, with what the command line says laid over it."""
    values: Any = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise AthenaError(f"cannot read {file}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
        except yaml.YAMLError as error:
            raise AthenaError(f"{file} is not valid YAML ({str(error).splitlines()[0]})") from None
        if not isinstance(values, dict):
            raise AthenaError(f"{file} must be a mapping of fields, found {type(values).__name__}")
    overrides = [argument for argument in arguments if is_override(argument)]
    sources = [argument for argument in arguments if not is_override(argument)]
    values = merge(values, parse_overrides(overrides))
    if sources:
        values = {**values, "sources": sources}
    if tokenizer is not None:
        values = {**values, "tokenizer": tokenizer}
    wanted = CorpusFile.build(values, str(file or ""))
    if wanted.sources and wanted.mix:
        raise AthenaError("give sources or mix, not both: mix holds the sources with their shares")
    return wanted


def is_override(argument: str) -> bool:
    """FIELD=VALUE with a field that is known, or at least no file; ./FIELD=VALUE is always a file."""
    key, sign, _ = argument.partition("=")
    field = key.partition(".")[0]
    return bool(sign) and field.isidentifier() and (field in CorpusFile.model_fields or not Path(argument).exists())


def _print_corpus(out: Path, manifest: dict[str, Any]) -> None:
    total = sum(entry["tokens"] for entry in manifest["parts"].values())
    table = Table(title=f"{out}: {total:,} tokens of {manifest['tokenizer']['name']}", title_justify="left")
    table.add_column("part")
    for column in ("documents", "tokens", "share of tokens"):
        table.add_column(column, justify="right")
    for name, entry in manifest["parts"].items():
        table.add_row(name, f"{entry['documents']:,}", f"{entry['tokens']:,}", f"{entry['tokens'] / total:.1%}")
    console.print(table)
    for reason, entry in manifest["skipped"].items():
        line = f"left out, {reason}: {entry['documents']:,} documents, such as {', '.join(entry['examples'])}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_overlap(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['file']}: {report['examples']:,} examples", title_justify="left")
    table.add_column("words in a row")
    table.add_column("part")
    for column in ("examples that have one", "long enough", "share"):
        table.add_column(column, justify="right")
    for order, rows in report["ngrams"].items():
        for part, row in rows.items():
            share = "" if row["share"] is None else f"{row['share']:.2%}"
            table.add_row(order, part, f"{row['examples']:,}", f"{row['comparable']:,}", share)
    console.print(table)
