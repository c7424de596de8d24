"""What our tasks share: rows from a local file first, else from the hub; bad rows set aside by name, never dropped."""

import abc
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig
from lm_eval.filters import build_filter_ensemble

from memoryathena.errors import AthenaError

DATA = "MEMORYATHENA_DATA"
"""Environment variable with the folder of the local files, where the harness's own command line runs the tasks."""

Doc = dict[str, Any]


class BadRowError(ValueError):
    """A row that cannot be scored, and why."""


class AthenaTask(Task):
    """A zero-shot task over rows. A subclass says what a row must hold, its prompt, its requests and its scores."""

    VERSION = 1
    METRICS: Mapping[str, Any] = {}  # metric -> how its values over the examples become one
    LOWER_IS_BETTER: frozenset[str] = frozenset()

    def __init__(self, config: dict[str, Any]) -> None:  # not the parent's, which asks the hub before anything else
        self.facts: dict[str, Any] = config.get("metadata") or {}
        name = config["task"]
        self._config = TaskConfig(task=name, metadata=self.facts, num_fewshot=0, output_type="loglikelihood")
        self._instances: list[Instance] | None = None
        self._filters = [build_filter_ensemble("none", [["take_first", None]])]
        self.fewshot_rnd = None
        self.malformed: list[dict[str, Any]] = []
        self.source, self.digest, rows = open_rows(name, self.facts)
        self.docs: list[Doc] = []
        self.rows = 0
        for number, row in enumerate(rows, 1):
            if row is None:
                continue
            self.rows += 1
            try:
                if isinstance(row, BadRowError):
                    raise row
                self.docs += [{**doc, "row": number} for doc in self.examples(row)]
            except BadRowError as error:
                self.malformed.append({"row": number, "reason": str(error)})
        if not self.docs:
            first = "".join(f", row {bad['row']}: {bad['reason']}" for bad in self.malformed[:1])
            why = f": all {self.rows} are malformed{first}" if first else ""
            raise AthenaError(f"{name}: {self.source} has no row that can be scored{why}")

    # -- what a subclass says -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def examples(self, row: Doc) -> list[Doc]:
        """The examples of a row, in the task's own fields; BadRowError says why there are none."""

    @abc.abstractmethod
    def output(self, doc: Doc, results: Sequence[Any]) -> Any:
        """What the model answered, for the record."""

    # -- what the harness asks ------------------------------------------------------------------------------------

    def has_training_docs(self) -> bool:
        """None: zero-shot."""
        return False

    def has_validation_docs(self) -> bool:
        """None: one set."""
        return False

    def has_test_docs(self) -> bool:
        """The set."""
        return True

    def test_docs(self) -> list[Doc]:
        """The rows that can be scored."""
        return self.docs

    def fewshot_context(self, doc: Doc, num_fewshot: int = 0, *args: Any, **kwargs: Any) -> str:
        """The prompt as the protocol has it."""
        if num_fewshot:
            raise AthenaError(f"{self.task_name} is zero-shot: its prompt is fixed by the protocol")
        return self.doc_to_text(doc)

    def aggregation(self) -> Mapping[str, Any]:
        """How a metric's values become one."""
        return self.METRICS

    def higher_is_better(self) -> dict[str, bool]:
        """By metric."""
        return {name: name not in self.LOWER_IS_BETTER for name in self.METRICS}


def request(kind: str, doc: Doc, arguments: tuple[Any, ...], index: int, given: Mapping[str, Any]) -> Instance:
    """One request; `given` is what the harness passed for all of this example's."""
    return Instance(request_type=kind, doc=doc, arguments=arguments, idx=index, metadata=given["metadata"])


def text_of(row: Doc, *names: str) -> str:
    """The first of these fields that the row has, as text that says something."""
    for name in names:
        if name in row:
            if isinstance(row[name], str) and row[name].strip():
                return row[name]
            raise BadRowError(f"{name} is not a text with something in it: {str(row[name])[:40]!r}")
    raise BadRowError(f"no field {' or '.join(names)}")


def label_of(row: Doc, count: int, names: Sequence[str]) -> int:
    """A label from 0 to count - 1."""
    value = next((row[name] for name in names if name in row), None)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise BadRowError(f"{names[0]} is none of 0 to {count - 1}: {value!r}")
    return value


# -- rows ---------------------------------------------------------------------------------------------------------


def open_rows(name: str, facts: Mapping[str, Any]) -> tuple[str, str, Iterable[Any]]:
    """Where the rows come from, their digest, the rows. A file that was asked for must be there; else the hub."""
    given = (facts.get("files") or {}).get(name)
    folder = facts.get("data") or os.environ.get(DATA)
    path = Path(given) if given else Path(folder) / facts["file"] if folder and "file" in facts else None
    if path is not None and (given or path.is_file()):
        content = _bytes(path)
        return str(path), hashlib.sha256(content).hexdigest(), _rows(path, content)
    if "hub" not in facts:
        where = f"{path} is missing" if path else "no folder of data is given"
        raise AthenaError(f"{name}: {where} and the hub has no copy: give --data FOLDER or --file {name}=PATH")
    return _from_hub(name, facts["hub"], path)


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise AthenaError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _rows(path: Path, content: bytes) -> list[Any]:
    """Lines of JSON; a text file is one row. A line that cannot be read is a bad row, a blank one is None."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "txt":
        return [{"text": content.decode("utf-8", errors="replace")}]
    if kind not in ("jsonl", "json"):
        raise AthenaError(f"{path} is no file that can be read; known: .jsonl .json (a row a line) .txt, also .gz")
    return [_parsed(line) if line.strip() else None for line in content.split(b"\n")]


def _parsed(line: bytes) -> Any:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        return BadRowError("the line is not JSON")
    return row if isinstance(row, dict) else BadRowError(f"the line is no object but {type(row).__name__}")


def _from_hub(name: str, hub: Mapping[str, str], missing: Path | None) -> tuple[str, str, Iterable[Any]]:
    import datasets

    where = f"{hub['path']} ({hub['split']})"
    try:
        rows = datasets.load_dataset(hub["path"], hub.get("name"), split=hub["split"])
    except Exception as error:  # the hub's client raises everything from OSError to its own kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        beside = f"{missing} is missing and " if missing else "no folder of data is given (--data FOLDER) and "
        raise AthenaError(f"{name}: {beside}{where} cannot be loaded from the hub: {first}") from None
    return where, str(rows._fingerprint), rows
