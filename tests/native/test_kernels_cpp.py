"""Builds and runs the kernels' tests in C++ (tests/native/cpp): plain, under sanitizers, and on an emulated ARM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynaexq.native import instruction_sets

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/dynaexq/native"
TESTS = ROOT / "tests/native/cpp"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NEON_FLAGS = ("-O2", "-march=armv8.2-a+dotprod")


def tool(name: str) -> str | None:
    """A program beside the running Python, else one on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def run(*command: str | Path, seconds: float, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-20000:]}"
    return done.stdout


@pytest.mark.parametrize(
    ("optimise", "sanitize", "parts"),
    [
        ("-O1", "", ()),
        # checks written out in line would take minutes to compile
        ("-Og;--param=asan-instrumentation-with-call-threshold=0", "address,undefined", ("--quick",)),
        ("-Og", "thread", ("--quick", "experts", "linear")),  # tiles by themselves start no threads
    ],
    ids=["plain", "address", "thread"],
)
def test_kernels(tmp_path: Path, optimise: str, sanitize: str, parts: tuple[str, ...]) -> None:
    cmake, compiler = tool("cmake"), os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if cmake is None or compiler is None:
        pytest.skip("no C++ compiler or no cmake")
    ninja = tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    vnni = not sanitize and any("vnni" in name for name in instruction_sets())  # else nothing would run it
    run(
        cmake,
        *generator,
        *("-S", ROOT, "-B", tmp_path, f"-DCMAKE_CXX_COMPILER={compiler}", "-DDYNAEXQ_PYTHON=OFF"),
        *("-DDYNAEXQ_TESTS=ON", f"-DDYNAEXQ_OPTIMISE={optimise}", f"-DDYNAEXQ_SANITIZE={sanitize}"),
        f"-DDYNAEXQ_VNNI={'ON' if vnni else 'OFF'}",
        seconds=60,
    )
    run(cmake, "--build", tmp_path, "--parallel", "2", "--target", "kernel_tests", seconds=900)
    print(run(tmp_path / "kernel_tests", *parts, seconds=600, TSAN_OPTIONS="halt_on_error=1"))


def test_neon_under_emulation(tmp_path: Path) -> None:
    compiler, emulator = shutil.which(ARM_COMPILER), shutil.which(ARM_EMULATOR)
    if compiler is None or emulator is None:
        pytest.skip(f"{ARM_COMPILER} and {ARM_EMULATOR} are not both on PATH")
    kernels = NATIVE / "kernels"
    names = ("attention", "decoder", "dispatch", "experts", "linear", "model", "rows")
    sources = [NATIVE / "team.cpp", *(kernels / f"{name}.cpp" for name in names)]
    sources += [kernels / "tiles_scalar.cpp", kernels / "tiles_neon.cpp", *TESTS.glob("*.cpp")]

    def build(source: Path) -> Path:
        target = tmp_path / f"{source.stem}.o"
        special = NEON_FLAGS if source.stem == "tiles_neon" else ("-O1",)
        options = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{NATIVE}", f"-I{kernels}")
        run(compiler, *options, *special, "-c", source, "-o", target, seconds=600)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, sources))
    program = tmp_path / "kernel_tests"
    run(compiler, "-static", *objects, "-o", program, "-pthread", "-ldl", seconds=60)
    output = run(emulator, "-cpu", "max", program, "--quick", seconds=900)
    print(output)
    assert "neon-dotprod: tiles" in output
