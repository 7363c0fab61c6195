"""Build of ``reshard._C``: csrc/ compiled by ninja, the C++ part always, the CUDA part where nvcc is found.

Environment variables:
    RESHARD_CUDA        ``auto`` (default: CUDA kernels when nvcc is found), ``on`` (required) or ``off``.
    RESHARD_CUDA_ARCHS  Targets such as ``90a`` or ``80;90a;100+PTX``. Default: those of 80, 90a and 100 that the
                        installed nvcc knows, with PTX of the newest.
    CUDA_HOME           Toolkit to take nvcc from, before PATH and /usr/local/cuda.
    CXX, CXXFLAGS       Host compiler (default g++, then clang++, then c++) and extra flags for it.
    MAX_JOBS            Number of parallel compile jobs.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
DEFAULT_ARCHS = ("80", "90a", "100")


class BuildError(SystemExit):
    """Ends the build with one line that says what is missing and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(f"reshard: {message}")


@dataclass(frozen=True, slots=True)
class CudaToolkit:
    """An nvcc, the targets to compile for, and the folders that its own link step searches."""

    nvcc: str
    gencode: tuple[str, ...]
    library_dirs: tuple[str, ...]


def find_host_compiler() -> str:
    """Return the C++ compiler: ``CXX`` when set, else the first of g++, clang++ and c++ on PATH."""
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        if path := shutil.which(shlex.split(name)[0]):
            return " ".join([path, *shlex.split(name)[1:]])
    what = f"CXX={chosen} is not on PATH" if chosen else "no C++ compiler (g++, clang++ or c++) on PATH"
    raise BuildError(f"{what}; install one (Debian, Ubuntu: apt-get install g++) or set CXX.")


def find_ninja() -> str:
    """Return ninja's path: the one installed beside this Python, else the one on PATH."""
    if path := shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja"):
        return path
    raise BuildError("ninja is missing; install it with: pip install ninja")


def find_nvcc() -> str | None:
    """Return nvcc's path, or None: from CUDA_HOME, then PATH, then /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def gencode_flags(nvcc: str) -> tuple[str, ...]:
    """Return nvcc's -gencode flags for ``RESHARD_CUDA_ARCHS``, or for the default targets that this nvcc knows."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"sm_(\w+)", listed))
    wanted = [arch for arch in re.split(r"[;, ]+", os.environ.get("RESHARD_CUDA_ARCHS", "")) if arch]
    if not wanted:
        wanted = [arch for arch in DEFAULT_ARCHS if arch.rstrip("a") in known]
        wanted[-1] += "+PTX"
    flags = []
    for arch in wanted:
        number = arch.removesuffix("+PTX")
        if number.rstrip("af") not in known:
            names = ", ".join(sorted(known, key=int))
            raise BuildError(f"RESHARD_CUDA_ARCHS names sm_{number}, which {nvcc} can't compile for; it knows {names}.")
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
        flags.append(f"-gencode=arch=compute_{number},code=[{','.join(codes)}]")
    return tuple(flags)


def find_cuda() -> CudaToolkit | None:
    """Return the toolkit to build CUDA kernels with, or None where they are off or nvcc is not found."""
    mode = os.environ.get("RESHARD_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise BuildError(f"RESHARD_CUDA must be auto, on or off, but is {mode!r}.")
    nvcc = find_nvcc() if mode != "off" else None
    if nvcc is None:
        if mode == "on":
            raise BuildError(
                "RESHARD_CUDA=on, but nvcc was not found in CUDA_HOME, on PATH or in /usr/local/cuda; "
                "install the CUDA toolkit (12.4 or newer), set CUDA_HOME, or use RESHARD_CUDA=auto."
            )
        return None
    dry_run = subprocess.run([nvcc, "--dryrun", "-c", "probe.cu"], capture_output=True, text=True, check=False).stderr
    library_dirs = re.findall(r'"-L([^"]+)"', dry_run)
    return CudaToolkit(nvcc=nvcc, gencode=gencode_flags(nvcc), library_dirs=tuple(library_dirs))


def escape(text: str) -> str:
    """Return ``text`` as ninja reads it literally inside a path."""
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(target: Path, cuda: CudaToolkit | None) -> str:
    """Return the build.ninja text that compiles every source in csrc/ and links ``target``."""
    compiler = find_host_compiler()
    includes = [f"-I{CSRC}", f"-isystem {pybind11.get_include()}", f"-isystem {sysconfig.get_path('include')}"]
    common = ["-std=c++20", "-O3", *includes] + (["-DRESHARD_CUDA_KERNELS"] if cuda else [])
    host = [*common, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread", os.environ.get("CXXFLAGS", "")]
    link = ["-shared", "-pthread", "-ldl"]
    lines = ["ninja_required_version = 1.5"]
    lines += ["rule cxx", "  depfile = $out.d", "  deps = gcc", "  description = c++ $in"]
    lines += [
        f"  command = {compiler} -MMD -MF $out.d {' '.join(host)} {os.environ.get('CXXFLAGS', '')} -c $in -o $out"
    ]
    sources = sorted(CSRC.glob("*.cpp"))
    if cuda:
        device = [*common, *cuda.gencode, "-lineinfo", "--threads=0"]
        device += [f"-ccbin {shlex.split(compiler)[0]}", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
        lines += ["rule nvcc", "  depfile = $out.d", "  deps = gcc", "  description = nvcc $in"]
        lines += [f"  command = {cuda.nvcc} -MMD -MF $out.d {' '.join(device)} -c $in -o $out"]
        sources += sorted(CSRC.glob("*.cu"))
        link = [f"-L{folder}" for folder in cuda.library_dirs] + ["-lcudart_static", "-lrt", *link]
    lines += ["rule link", "  description = link $out", f"  command = {compiler} $in -o $out {' '.join(link)}"]
    objects = []
    for source in sources:
        objects.append(f"{source.name}.o")
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        lines.append(f"build {objects[-1]}: {rule} {escape(str(source))}")
    lines.append(f"build {escape(str(target))}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuildExt(build_ext):
    """setuptools' build_ext with ninja underneath: incremental, parallel, and replacing the module atomically."""

    def build_extensions(self) -> None:
        """Compile and link every extension; setuptools' own compiler set-up is not used."""
        for extension in self.extensions:
            self.build_extension(extension)

    def build_extension(self, ext: Extension) -> None:
        """Write build.ninja into the build folder and run ninja there."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        cuda = find_cuda()
        kind = "cuda" if cuda else "host"
        folder = ROOT / "build" / f"ninja-{sys.implementation.cache_tag}-{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        linked = folder / target.name
        (folder / "build.ninja").write_text(ninja_file(linked, cuda))
        print(f"reshard: building _C {'with CUDA kernels: ' + cuda.nvcc if cuda else 'for the host only'}", flush=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        if subprocess.run([find_ninja(), *jobs], cwd=folder, check=False).returncode:
            raise BuildError("compilation failed; the compiler's message is above.")
        replace_file(linked, target)

    def copy_extensions_to_source(self) -> None:
        """Put the built modules beside the Python files (``--inplace``, ``pip install -e``)."""
        build_py = self.get_finalized_command("build_py")
        for extension in self.extensions:
            inplace, regular = self._get_inplace_equivalent(build_py, extension)
            replace_file(Path(regular), Path(inplace))


def replace_file(source: Path, target: Path) -> None:
    """Copy ``source`` over ``target`` by a rename, so that a process which has ``target`` loaded keeps its own."""
    if source.resolve() == target.resolve():
        return
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)


def sources(*patterns: str) -> list[str]:
    """Return the files of csrc/ that match, relative to this folder, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in CSRC.glob(pattern))


setup(
    ext_modules=[Extension("reshard._C", sources("*.cpp", "*.cu"), depends=sources("*.h"))],
    cmdclass={"build_ext": NinjaBuildExt},
)
