"""The method's tasks as tasks of lm-evaluation-harness: `--include_path FOLDER`, names `athena_*`.

Each YAML file names a class of this folder and what sets the task apart: its file, its hub dataset, cue and labels.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TASKS = tuple(sorted(path.stem for path in FOLDER.glob("athena_*.yaml")))
