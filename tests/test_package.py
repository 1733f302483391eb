"""The package that users install: its files, and that it runs with its requirements and nothing else.

Each environment contains the wheel and the requirements of its metadata, direct and indirect. For the Python
of the tests they are links to the installed packages. For other Pythons pip downloads them, except
llama-cpp-python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from shutil import which

import httpx
import pytest
from packaging.requirements import Requirement

from command import Answer, answer_of, environment, invoke, python
from hatch_build import FOLDER, LIBRARY, NotBuiltError, build, find_compiler, platform_of
from patience import PATIENCE
from serving import process

ROOT = Path(__file__).parent.parent
SOURCES = (".cpp", ".hpp")  # of the kernels
FILES = (  # beside modules
    "demo/README.md",
    "demo/target.gguf",
    "demo/draft.gguf",
    "demo/eagle3.gguf",
    "cli/timeline.html",
    "measure/tasks.yaml",
    "serve/page/page.js",
    "serve/page/vendor/markdown-it.umd.min.js",
    "serve/page/vendor/LICENSES",
    "py.typed",
)
NAMES = "from llamaspec.catalog import read_catalog; print(*read_catalog().entries)"
PROMPT = ("generate", "If the file cannot be opened,", "-n", "12", "--seed", "7", "--threads", "1", "--json")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    from hatchling.builders.sdist import SdistBuilder

    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(sdist, folder / "source")  # the build writes the kernels' library into it
    (built,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    return folder


def required(requirements: Iterable[str], extra: str = "") -> Iterator[str]:
    """Yield the distributions that requirements need, directly and indirectly."""
    waiting, seen = [(Requirement(text), extra) for text in requirements], set[tuple[str, str]]()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                yield requirement.name
                waiting += [
                    (Requirement(text), wanted) for text in distribution(requirement.name).requires or []
                ]


class Environment:
    """An empty virtual environment."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.folder = folder
        self.packages = next(folder.glob("lib/python3.*/site-packages"))

    def link(self, names: Iterable[str]) -> None:
        """Link distributions that are installed for the tests."""
        for name in names:
            found = distribution(name)
            for top in {
                path.parts[0] for path in found.files or [] if path.parts[0] not in ("..", "__pycache__")
            }:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(str(found.locate_file(top)))

    def pip(self, *arguments: str | Path) -> None:
        """Run pip for this environment."""
        answer = answer_of([sys.executable, "-m", "pip", "--python", self.folder, *arguments])
        assert answer.code == 0, answer

    def run(self, *command: str) -> Answer:
        """Run a program of this environment."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder, env=environment({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}),
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("extra", ["", "serve"])
def test_an_empty_environment_answers_its_first_prompt(
    wheel: Path, unpacked: Path, demo_files: tuple[Path, Path], tmp_path: Path, extra: str
) -> None:
    here = Environment(tmp_path / "environment")
    here.pip("install", "--quiet", "--no-index", "--no-deps", wheel)
    metadata = next(unpacked.glob("*.dist-info"))
    needs = [
        line.partition(": ")[2]
        for line in (metadata / "METADATA").read_text().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    here.link(required(needs, extra))
    here.pip("check")
    answer = here.run("llamaspec", *PROMPT)
    assert answer.json["text"] == invoke(*PROMPT).json["text"]
    if extra:
        with process(entry=[str(here.folder / "bin" / "llamaspec")]) as server:
            assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    else:
        refused = here.run("llamaspec", "serve")
        assert (refused.code, refused.stderr.count("\n")) == (1, 1)
        assert 'pip install "llamaspec[serve]"' in refused.stderr


def interpreters() -> list[str]:
    """Return the oldest and the newest Python here that can run llamaspec, except the tests' own."""
    found = {}
    for minor in range(10, 20):
        name = f"python3.{minor}"
        for path in [which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")]:
            if (
                path is not None
                and subprocess.run([str(path), "-c", ""], capture_output=True, check=False).returncode == 0
            ):
                found[minor] = str(path)
    others = [path for minor, path in sorted(found.items()) if minor != sys.version_info.minor]
    return sorted({*others[:1], *others[-1:]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "python",
    interpreters() or [pytest.param("", marks=pytest.mark.skip("no other Python is here"))],
    ids=lambda path: Path(path).name,
)
def test_another_python_answers_its_first_prompt(
    wheel: Path, demo_files: tuple[Path, Path], tmp_path: Path, python: str
) -> None:
    options = ["--quiet", "--no-deps", "--retries", "0", "-d", str(tmp_path)]
    if answer_of([sys.executable, "-m", "pip", "download", *options, "click"]).code != 0:
        pytest.skip("no package index can be reached")
    there = Environment(tmp_path / "environment", python)
    there.link(["llama-cpp-python"])  # calls a library of C: the same files for every Python
    there.pip("install", "--quiet", "--no-compile", "--only-binary", ":all:", f"{wheel}[serve]")
    assert "Usage: llamaspec" in there.run("llamaspec", "--help").stdout
    assert there.run("llamaspec", *PROMPT).json["text"] == invoke(*PROMPT).json["text"]


def test_the_installed_package_finds_the_list_of_models(unpacked: Path, tmp_path: Path) -> None:
    assert (unpacked / "llamaspec" / "models.yaml").read_bytes() == (ROOT / "models.yaml").read_bytes()
    assert names(unpacked, tmp_path) == names(ROOT, tmp_path)
    (unpacked / "llamaspec" / "models.yaml").write_text("only: {path: x.gguf}")
    assert names(unpacked, tmp_path) == ["only"]


def names(package: Path, folder: Path) -> list[str]:
    """Return the names in the list of models of a package in a folder."""
    code = f"import os; os.chdir({str(folder)!r}); {NAMES}"
    return python(code, env={"PYTHONPATH": str(package), "LLAMASPEC_CONFIG": str(folder)}).stdout.split()


def test_the_wheel_has_every_file_of_the_package_and_the_licence(wheel: Path, unpacked: Path) -> None:
    package = ROOT / "llamaspec"
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so", *SOURCES)
    }
    assert files_of(wheel) - {LIBRARY} == {*ours, "llamaspec/models.yaml"}
    for name in FILES:
        assert (unpacked / "llamaspec" / name).read_bytes() == (package / name).read_bytes()
    assert next(unpacked.glob("*.dist-info/licenses/LICENSE")).read_bytes() == (ROOT / "LICENSE").read_bytes()


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as content:
        return {name for name in content.namelist() if name.startswith("llamaspec/")}


@pytest.fixture
def small(sdist: Path, tmp_path: Path) -> Path:
    """The source distribution with small kernels, which are built in a second; skipped without a compiler."""
    root = tmp_path / "small"
    shutil.copytree(sdist, root)
    for path in (root / FOLDER).iterdir():
        if path.suffix in SOURCES:
            path.unlink()
    shutil.copy(ROOT / "tests" / "kernels" / "stand_in.cpp", root / FOLDER / "hooks.cpp")
    try:
        build(root)
    except NotBuiltError as reason:
        pytest.skip(str(reason))
    (root / LIBRARY).unlink()
    return root


def built(root: Path, folder: Path) -> Path:
    """Return the wheel of a source distribution."""
    from hatchling.builders.wheel import WheelBuilder

    return Path(next(iter(WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"]))))


def test_a_wheel_with_kernels_is_for_one_platform_and_any_python(small: Path, tmp_path: Path) -> None:
    made = built(small, tmp_path)
    platform = platform_of(find_compiler()).replace("-", "_")
    assert made.name.endswith(f"-py3-none-{platform}.whl")
    assert LIBRARY in files_of(made)
    assert not [name for name in files_of(made) if name.endswith(SOURCES)]
    with zipfile.ZipFile(made) as content:
        metadata = next(name for name in content.namelist() if name.endswith(".dist-info/WHEEL"))
        assert b"Root-Is-Purelib: false" in content.read(metadata)


@pytest.mark.skipif(which("aarch64-linux-gnu-g++") is None, reason="needs a cross-compiler")
def test_a_wheel_for_another_platform_leaves_nothing_in_the_checkout(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    made = built(small, tmp_path)
    assert made.name.endswith("-py3-none-linux_aarch64.whl")
    assert LIBRARY in files_of(made)
    assert not (small / LIBRARY).exists()


def test_without_a_compiler_the_wheel_is_for_every_platform(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library that an earlier build has left is not in the wheel."""
    (small / LIBRARY).write_text("earlier")
    monkeypatch.setenv("CXX", "false")
    made = built(small, tmp_path)
    assert made.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in files_of(made)
    said = [line for line in "".join(capfd.readouterr()).splitlines() if line]
    assert said == ["llamaspec is installed without kernels of its own: false failed: exit code 1"]


@pytest.mark.parametrize("how", [["."], ["--editable", "."]], ids=["installed", "editable"])
def test_an_installation_has_kernels(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    there = Environment(tmp_path / "environment")
    there.link(required(["hatchling"]))
    with (small / "pyproject.toml").open("a") as project:
        project.write('[tool.hatch.build]\ndev-mode-dirs = ["."]\n')  # otherwise it needs one more package
    monkeypatch.chdir(small)
    there.pip("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", *how)
    code = "import llamaspec.kernels as k; k.library.load(); print(k.library.path, k.library.facts.reason)"
    path, _, reason = there.run("python", "-c", code).stdout.strip().partition(" ")
    assert Path(path).is_relative_to(small if "--editable" in how else there.packages)
    assert reason == "no model has been opened"


def test_the_source_distribution_has_the_sources_of_the_kernels_and_nothing_built(sdist: Path) -> None:
    theirs = {path.name for path in (sdist / FOLDER).iterdir()}
    ours = {path.name for path in (ROOT / FOLDER).iterdir() if path.suffix in (".py", *SOURCES)}
    assert theirs == ours


def test_the_source_distribution_can_be_tested(sdist: Path) -> None:
    for name in (
        "Makefile",
        "CHANGELOG.md",
        "pyproject.toml",
        "hatch_build.py",
        "tests/command.py",
        "tests/kernels/stand_in.cpp",
        "scripts/llama_cpp_build.cmake",
    ):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()
