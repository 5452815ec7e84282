"""Compiles device/module.cpp, where there is a compiler, into build/simulated_device. One build for each content."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "simulated_device_C"
SOURCES = sorted(Path(__file__).with_name("device").iterdir())
BUILT = Path(__file__).resolve().parents[2] / "build" / "simulated_device"


def why_not() -> str | None:
    """Why the device can't be built here, or None."""
    if os.uname().sysname != "Linux":
        return "the simulated device maps its memory twice by memfd_create, which is Linux's"
    if _compiler() is None:
        return "the simulated device is compiled, and there is no C++ compiler (CXX, or g++ on the path)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated device is compiled, and Python's headers are not installed"
    return None


def load() -> ModuleType:
    """The compiled module. Raises RuntimeError with the compiler's words where they say anything."""
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build() -> Path:
    """The compiled file, some 50 seconds where this content was not compiled before."""
    command = _command()
    content = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(content + " ".join(command).encode()).hexdigest()[:16]
    path = BUILT / f"torch-{torch.__version__}-{key}" / f"{NAME}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not path.exists():
            making = path.with_suffix(".making")
            done = subprocess.run([*command, "-o", str(making)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulated device does not compile\n{done.stderr[-6000:]}")
            making.rename(path)
    return path


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _command() -> list[str]:
    """NDEBUG as torch's own builds: its headers and its library must agree on what a debug build has."""
    compiler = _compiler()
    assert compiler is not None, why_not()
    standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "c++17"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    abi = int(torch.compiled_with_cxx11_abi())
    source = Path(__file__).with_name("device") / "module.cpp"
    return [
        compiler, str(source), "-shared", "-fPIC", "-O1", "-w", "-DNDEBUG", f"-std={standard}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
        *(f"-isystem{path}" for path in includes),
        *(f"-L{path}" for path in libraries), *(f"-Wl,-rpath,{path}" for path in libraries),
        "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
