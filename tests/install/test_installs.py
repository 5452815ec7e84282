"""Each way to install: zc, zc.passes and zc.kernels are there, and beside them Zope's zc.lockfile, of the same name.

pip installs copies of the repository into environments that are made for it, without dependencies: torch and setuptools
come from the environment of the tests, by a line in a .pth file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import torch
from tiers import FULL

import zc

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"zc": ROOT / "zc", "zc/passes": ROOT / "passes", "zc/kernels": ROOT / "kernels"}
BESIDE = ("tests", "docs", "bench", ".ci")  # what an sdist has and a wheel has not
KINDS = ("wheel", "sdist", "editable", "checkout") if FULL else ("wheel", "editable")
IMPORTS = """
import sys
try:
    import kernels
except ImportError:
    pass
assert "zc" not in sys.modules, "transformers looks for a package kernels, and would get zc with it"
import zc.lockfile, zc.passes.verify, zc.kernels
assert callable(zc.compile) and callable(zc.kernels.flatten_cast) and callable(zc.lockfile.LockFile)
print(zc.__file__, zc.passes.__file__, zc.kernels.__file__, zc.lockfile.__file__, sep="\\n")
"""


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_TARGET", "ZC_URL", "MAKE"))} | more
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def pip_install(folder: Path, python: Path, *args: str | Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    run(sys.executable, "-m", "pip", "--python", python, *quiet, "install", "--no-deps", *args, cwd=folder)


def copy_of_the_repository(to: Path) -> Path:
    """What git would check out, links as links."""
    to.mkdir(parents=True)
    for name in ("zc", "passes", "kernels", *BESIDE):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*cache"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "Makefile", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, to / name)
    return to


def sdist_of(source: Path, **env: str) -> Path:
    code = "from setuptools.build_meta import build_sdist as build; build('made')"
    run(sys.executable, "-c", code, cwd=source, **env)
    (archive,) = (source / "made").iterdir()
    return archive


@pytest.fixture(scope="module")
def lockfile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real zc.lockfile; before 4.0 its .pth file makes the module `zc`, and it stays that."""
    folder = tmp_path_factory.mktemp("lockfile")
    try:
        pip_install(folder, Path(sys.executable), "--target", folder / "site", "zc.lockfile>=4")
    except AssertionError as error:
        pytest.skip(f"zc.lockfile can't be had, no package index is reached: {str(error).strip().splitlines()[-1]}")
    return folder / "site"


@pytest.fixture(scope="module")
def installed(lockfile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What each kind of install prints, all four at once."""

    def install(kind: str) -> list[str]:
        folder = tmp_path_factory.mktemp(kind)
        source = copy_of_the_repository(folder / "source")
        venv.create(folder / "env", symlinks=True)
        python = folder / "env" / "bin" / "python"
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        (site / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        shutil.copytree(lockfile, site, dirs_exist_ok=True)
        (folder / "elsewhere").mkdir()
        if kind == "editable":
            pip_install(folder, python, "--no-build-isolation", "-e", source)
        elif kind != "checkout":
            origin = source if kind == "wheel" else sdist_of(source)
            pip_install(folder, python, "--no-build-isolation", origin)
        return run(python, "-c", IMPORTS, cwd=source if kind == "checkout" else folder / "elsewhere").split()

    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(KINDS, pool.map(install, KINDS), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_zc_and_zc_lockfile_are_both_there(kind: str, installed: dict[str, list[str]]) -> None:
    ours, theirs = installed[kind][:3], installed[kind][3]
    where = "site-packages" if kind in ("wheel", "sdist") else "source"
    assert all(where in Path(file).parts for file in ours), ours
    assert theirs.endswith("site-packages/zc/lockfile/__init__.py")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sdist_of(copy_of_the_repository(tmp_path_factory.mktemp("sdist") / "source"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    """Its folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "there")
    (folder,) = (sdist.parent / "there").iterdir()
    return folder


def test_sdist_and_wheel_hold_each_file_once_and_no_other(sdist: Path, unpacked: Path, tmp_path: Path) -> None:
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")  # follows no link
        if not any((folder / part).is_symlink() for part in path.relative_to(folder).parts)
    } | {"zc/py.typed"}
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if not m.isdir()]
    assert all(m.isreg() for m in members), "links would be broken, or files twice"
    names = ["/".join(Path(m.name).parts[1:]) for m in members]
    ours = {n for n in names if n.startswith("zc/")}
    assert len(names) == len(set(names)) and ours == wanted
    for folder in (copy_of_the_repository(tmp_path / "source"), shutil.copytree(unpacked, tmp_path / "unpacked")):
        target = tmp_path / f"wheel of the {folder.name}"
        target.mkdir()
        code = f"from setuptools.build_meta import build_wheel as build; build({str(target)!r})"
        run(sys.executable, "-c", code, cwd=folder)
        (wheel,) = target.iterdir()
        files = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
        assert sorted(files) == sorted(wanted)


def test_an_sdist_has_what_its_makefile_and_its_documents_name(unpacked: Path) -> None:
    wanted = {p.relative_to(ROOT) for top in BESIDE for p in (ROOT / top).rglob("*") if p.is_file()}
    wanted = {p for p in wanted if p.suffix != ".pyc" and not any(part.endswith("cache") for part in p.parts)}
    wanted |= {Path(name) for name in ("Makefile", "README.md", "LICENSE", "pyproject.toml", "setup.py")}
    assert len(wanted) > 200 and not [str(p) for p in sorted(wanted) if not (unpacked / p).is_file()]
    run("make", "passes", "kernels", cwd=unpacked)  # what every target does first
    files = ("tests/install/test_documents.py", "tests/plan/test_layout.py")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "links or layout")
    assert " passed" in run(sys.executable, *command, cwd=unpacked, PYTHONPATH=str(unpacked))


def metadata(sdist: Path) -> tuple[Message, str]:
    """An sdist's metadata, and the description in them."""
    with tarfile.open(sdist) as archive:
        (name,) = [n for n in archive.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO")]
        member = archive.extractfile(name)
        assert member is not None
        message = message_from_bytes(member.read())
    return message, str(message.get_payload())


def test_on_an_index_page_no_link_is_dead(sdist: Path, tmp_path: Path) -> None:
    """Those into the repository lead to where ZC_URL says that it is, or are the paths that they show."""
    plain, text = metadata(sdist)
    assert "](" not in text and "docs/design.md follows one gradient" in text
    assert plain.get_all("Project-URL") is None, "nobody has said where"
    source = copy_of_the_repository(tmp_path / "source")
    named, linked = metadata(sdist_of(source, ZC_URL="https://example.org/own/zc/"))
    at = f"https://example.org/own/zc/blob/v{zc.__version__}"
    assert f"[docs/design.md]({at}/docs/design.md) follows one gradient" in linked
    for page in (text, linked):
        assert not re.search(r"\]\((?!https://)", page)
    assert any(url.endswith(", https://example.org/own/zc") for url in named.get_all("Project-URL") or ())
    with pytest.raises(AssertionError, match="ZC_URL is 'own/zc', expected https://"):
        sdist_of(source, ZC_URL="own/zc")


def test_metadata_say_what_runs_it_and_ask_for_no_triton(sdist: Path) -> None:
    """A CPU has no use for it, and a GPU's torch brings its own: only who asks for the extra gets one from us."""
    message, _ = metadata(sdist)
    required = message.get_all("Requires-Dist") or []
    assert [r for r in required if "extra ==" not in r] == ["torch>=2.11", "einops", "numpy"]
    assert [r for r in required if r.startswith("triton") and 'extra == "triton"' in r]
    classifiers = message.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)} <= set(classifiers)
