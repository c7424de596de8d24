"""The one error a user meets: a single line that names what was wrong and what would be right."""


class AthenaError(ValueError):
    """Bad input, said in one line. The CLI prints the line and exits with its code; a library caller may catch it."""

    exit_code = 2
