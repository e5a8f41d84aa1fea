"""The wheel: the linked folders arrive as real files under ``fedlight``, and nowhere else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import importlib.util, pathlib, fedlight, fedlight.modules, fedlight.datamodules, fedlight.callbacks, fedlight.conf
assert pathlib.Path(fedlight.__file__).parent == pathlib.Path({target!r}) / "fedlight", fedlight.__file__
assert fedlight.modules.__name__ == "fedlight.modules"
bare = [n for n in ("modules", "datamodules", "callbacks", "conf", "tests") if importlib.util.find_spec(n)]
assert not bare, bare
print(fedlight.__version__)
"""


def run(*command: str, cwd: Path, **env: str) -> str:
    """Standard output of a command, which must succeed."""
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module", params=["links", "texts"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network and without a trace in the checkout.

    Once as it is, and once as ``git -c core.symlinks=false clone`` leaves it, where links are texts with their targets.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    source = folder / "checkout"
    source.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in {".git", ".venv", "build", "dist", "runs"} and entry.suffix != ".egg-info":
            (source / entry.name).symlink_to(entry)
    if request.param == "texts":
        (source / "fedlight").unlink()
        shutil.copytree(ROOT / "fedlight", source / "fedlight", symlinks=True)
        for link in [path for path in (source / "fedlight").iterdir() if path.is_symlink()]:
            target = os.readlink(link)
            link.unlink()
            link.write_text(target)
    run(sys.executable, "-c", build, str(folder), cwd=source)
    (found,) = folder.glob("*.whl")
    return found


def files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_holds_every_file_the_embedded_model_and_nothing_else(wheel):
    expected = {
        str(Path("fedlight") / path.relative_to(ROOT / "fedlight" if folder == "fedlight" else ROOT))
        for folder in ("fedlight", "modules", "datamodules", "callbacks", "conf")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml"}
    }
    assert expected == {name for name in files(wheel) if name.endswith((".py", ".yaml"))}
    assert any(name.startswith("fedlight/conf/") and name.endswith(".yaml") for name in files(wheel))
    assert {name.split("/")[0].split("-")[0] for name in files(wheel)} == {"fedlight"}
    assert not [name for name in files(wheel) if "__pycache__" in name or "/tests/" in name]
    assert {f"fedlight/toy/model/{name}" for name in ("model.safetensors", "config.json")} <= files(wheel)
    size = sum(info.file_size for info in zipfile.ZipFile(wheel).infolist() if "/toy/model/" in info.filename)
    assert 0 < size < 5e6


def test_installs_and_is_imported_under_its_own_name_only(wheel, tmp_path):
    target = tmp_path / "site"
    quiet = ("-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, *quiet, "--target", str(target), str(wheel), cwd=tmp_path)
    code = LOOK.format(target=str(target))
    version = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    assert f"fedlight-{version.strip()}-" in wheel.name
    (entry_points,) = target.glob("*.dist-info/entry_points.txt")
    assert "fedlight = fedlight.cli.main:main" in entry_points.read_text()
