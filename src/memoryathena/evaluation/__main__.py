"""`python -m memoryathena.evaluation …` is `lm_eval …` that also knows the model `athena` and the tasks `athena_*`."""

import sys

from memoryathena.evaluation.tasks import FOLDER


def main() -> None:
    """Register, add our tasks, hand over to the harness."""
    import lm_eval.__main__ as harness

    import memoryathena.evaluation.lm  # noqa: F401 - registers the model

    if "--tasks" in sys.argv and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(FOLDER)]
    harness.cli_evaluate()


if __name__ == "__main__":
    main()
