"""The wheel, built as a user gets it, from the sdist, with what pyproject.toml names; and the locked files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = {"trtllm_lora", "reference_engine", "peft_to_trtllm", "adapter_slots", "lora_slots"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built from the checkout without a network."""
    return _build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return _build(source, tmp_path_factory.mktemp("wheel"), "wheel")


def _build(source: Path, target: Path, kind: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (made,) = target.iterdir()
    return made


def _names(wheel: Path) -> list[PurePosixPath]:
    with zipfile.ZipFile(wheel) as archive:
        return [PurePosixPath(name) for name in archive.namelist()]


def test_top_level_is_the_five_packages(wheel: Path) -> None:
    """The wheel claims the five packages and no other name."""
    top = {name.parts[0] for name in _names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_packages_are_typed(wheel: Path) -> None:
    """Each package tells type checkers that it is typed."""
    names = _names(wheel)
    assert all(PurePosixPath(package, "py.typed") in names for package in PACKAGES)


def test_wheel_has_every_module_of_the_checkout(wheel: Path) -> None:
    """No module is lost on the way through the source archive."""
    folders = (ROOT / folder for folder in ("engines", "converters", "slot_manager", "clients"))
    modules = {
        PurePosixPath(path.relative_to(folder))
        for folder in folders
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] in PACKAGES
    }
    assert modules <= set(_names(wheel))


def test_wheel_has_the_model_repository_and_the_examples(wheel: Path) -> None:
    """What a running stack reads besides code is in the wheel, file by file as in the checkout."""
    packed = set(_names(wheel))
    for source, target in (
        (ROOT / "triton_repo", "_triton_repo"),
        (ROOT / "examples" / "adapters", "_examples/adapters"),
    ):
        files = [path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert files
        assert {PurePosixPath("lora_slots", target, *path.parts) for path in files} <= packed
    assert {PurePosixPath("lora_slots/_examples", name) for name in ("styles.py", "client.py")} <= packed


def test_wheel_has_no_litter(wheel: Path) -> None:
    """No cache, test or hidden file is shipped."""
    for name in _names(wheel):
        assert not name.name.startswith(".") or name.name == ".gitkeep"  # an empty version folder of a model
        assert name.suffix != ".pyc"
        assert "tests" not in name.parts


def _locked(name: str) -> dict[str, str]:
    """Package -> version in a file of requirements/; every one of them by hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("--hash=sha256:" in line for line in lines)
    pins = (Requirement(line.split(" --hash")[0].strip()) for line in lines)
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


def test_locked_files_hold_what_the_project_asks_for() -> None:
    """Each dependency is locked, within its range: `make lock` was not forgotten."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    wanted = {
        "runtime": project["project"]["dependencies"] + project["project"]["optional-dependencies"]["embedded"],
        "dev": groups["test"] + groups["lint"],
        "oracle": groups["oracle"],
    }
    for name, requirements in wanted.items():
        locked = _locked(name)
        for requirement in map(Requirement, requirements):
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is not in requirements/{name}.txt: make lock"
            assert requirement.specifier.contains(version), f"{requirement}, but {version} is locked: make lock"


def test_locked_files_agree() -> None:
    """No package is locked in two versions, and nothing of CUDA is locked at all."""
    versions: dict[str, str] = {}
    for name in ("build", "runtime", "embedded", "dev", "oracle", "torch"):
        for package, version in _locked(name).items():
            assert versions.setdefault(package, version) == version
            assert not package.startswith(("cuda", "triton-")) and "-cu1" not in package
    assert versions["torch"].endswith("+cpu")
