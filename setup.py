"""Build `asyncrl._C` with CMake and Ninja; CMakeLists.txt is the only list of sources and flags.

Run by `pip install -e . --no-build-isolation` (`make env`) or `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD_DIR = ROOT / "build" / "cmake"


class CMakeBuild(build_ext):
    """Configure and build once; CMake puts the library where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(BUILD_DIR),
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DASYNCRL_LIBRARY_DIR={library.parent}",
            f"-DASYNCRL_LIBRARY_NAME={library.name}",
        ]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(BUILD_DIR), "--target", "_C", "-j", jobs], check=True)


setup(ext_modules=[Extension("asyncrl._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
