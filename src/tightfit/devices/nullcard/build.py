"""Compiles the null card's libraries for the PyTorch that is installed, once."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tightfit.errors import DeviceError


@dataclass(frozen=True)
class Library:
    """One of NVIDIA's libraries: which symbols are its own, and what generated functions answer.

    - `symbols`: the beginning of its functions' names.
    - `kernels`: functions that only compute or set something. They succeed and do nothing.
    - `refusal`: the status that all others return, which no source models. Each such call is counted.
    """

    source: str | None
    symbols: str
    kernels: str = r"(?!)"
    refusal: int = 801


# Keys: a library's name as torch's libraries name it, without what stands behind ".so"
LIBRARIES = {
    "libcuda": Library("driver.c", r"cu(?!da|blas|dnn|sparse|fft|rand|pti|solver|File)[A-Z]"),
    "libcudart": Library("runtime.c", r"(__)?cuda[A-Z]"),
    "libcublas": Library("cublas.c", r"cublas(?!Lt)", r"cublas(Set|\w*([Gg]emm|gemv|[Dd]ot|trsm))", 15),
    "libcublasLt": Library("cublasLt.c", r"cublasLt", r"cublasLtMatmul($|\w*SetAttribute)|cublasLtMatrixLayoutSet", 15),
    "libcudnn": Library(
        "cudnn.c",
        r"cudnn",
        r"cudnn(Set|Restore|BatchNormalization|Convolution(Forward|Backward|Bias)|RNN(Forward|Backward)|Pooling|CTCLoss|SpatialTf)",
        3000,
    ),
    "libnccl": Library("nccl.c", r"p?nccl", refusal=5),
    "libnvidia-ml": Library("nvml.c", r"nvml", refusal=3),
    "libnvrtc": Library("nvrtc.c", r"nvrtc", refusal=11),
    "libcupti": Library("cupti.c", r"cupti", r"cupti"),
    "libcufft": Library("cufft.c", r"cufft", refusal=16),
    "libcurand": Library(None, r"curand", refusal=999),
    "libcusparse": Library(
        "cusparse.c",
        r"cusparse(?!Lt)",
        r"cusparse(\w*Set|SpM[MV]$|SDDMM(_preprocess)?$|Xcoo|Xcsrsort$|CreateIdentityPermutation)",
        10,
    ),
    "libcusparseLt": Library(None, r"cusparseLt", refusal=10),
    "libcusolver": Library("cusolver.c", r"cusolver", refusal=9),
    "libcufile": Library(None, r"cuFile"),
    "libnvshmem_host": Library(None, r"nvshmem"),
    "libnvJitLink": Library(None, r"_*nvJitLink"),
    "libnvToolsExt": Library(None, r"nvtx", r"nvtx"),
}
CUDNN = "9.20.0"  # where PyTorch does not say
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")  # opened by name, whoever links them
_OTHER_PACKAGES = {"bitsandbytes": "libbitsandbytes_cuda*.so"}  # whose libraries ask for more functions than PyTorch's


@dataclass(frozen=True)
class Torch:
    """An installed PyTorch: its folder, version, and the CUDA (`"13.0"`) and cuDNN (`"9.20.0"`) it was built for."""

    folder: Path
    version: str
    cuda: str
    cudnn: str

    @property
    def cuda_version(self) -> int:
        """As CUDA writes it: 13000 for 13.0, 12080 for 12.8."""
        major, minor = self.cuda.split(".")[:2]
        return int(major) * 1000 + int(minor) * 10

    @property
    def cudnn_version(self) -> int:
        """As cuDNN writes it: 92000 for 9.20.0."""
        major, minor, patch = self.cudnn.split(".")[:3]
        return int(major) * 10000 + int(minor) * 100 + int(patch)


def installed_torch() -> Torch:
    """The PyTorch of this environment, which is not imported.

    Raises:
        DeviceError: there is none, or it is built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DeviceError("the null card needs PyTorch: pip install torch")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    said = dict(re.findall(r"^(\w+)(?::[^=]+)? = '([^']*)'$", text, re.MULTILINE))
    if "cuda" not in said:
        raise DeviceError(
            f"the null card needs PyTorch's CUDA build, and this is {said.get('__version__', 'another one')}: "
            "install the ordinary Linux wheel (pip install torch), or ask `tightfit estimate`, which needs no card"
        )
    return Torch(folder, said["__version__"], said["cuda"], _cudnn_of_torch())


def _cudnn_of_torch() -> str:
    """The version of cuDNN that the installed PyTorch asks for: it refuses an older one than it was built with."""
    try:
        asked = " ".join(importlib.metadata.requires("torch") or ())
    except importlib.metadata.PackageNotFoundError:  # PyTorch from a folder of its sources
        return CUDNN
    found = re.search(r"nvidia-cudnn-cu\d+\s*==\s*(\d+\.\d+\.\d+)", asked)
    return found.group(1) if found else CUDNN


def libraries(cache: Path) -> list[Path]:
    """The compiled libraries, in the order in which they are to be loaded.

    They lie in a folder of `cache` whose name is a hash of their sources, of this file and of what is installed. A
    missing folder is made beside and renamed, so that two processes that begin at once do not disturb each other.

    Raises:
        DeviceError: this is not Linux, PyTorch has no CUDA, or there is no C compiler, or it fails.
    """
    if sys.platform != "linux":
        raise DeviceError(f"the null card runs on Linux only, and this is {sys.platform}: ask `tightfit estimate`")
    torch = installed_torch()
    sources = sorted(
        resources.files("tightfit.devices.nullcard").joinpath("csrc").iterdir(), key=lambda file: file.name
    )
    content = [file.read_bytes() for file in sources if file.name.endswith((".c", ".h"))]
    users = [*sorted((torch.folder / "lib").glob("lib*.so*")), *_other_users()]
    sizes = " ".join(f"{path.name} {path.stat().st_size}" for path in users)
    named = [*content, Path(__file__).read_bytes(), torch.version.encode(), sizes.encode()]
    key = hashlib.sha256(b"\0".join(named)).hexdigest()[:16]
    folder = cache / "nullcard" / f"{torch.version}-{key}"
    if re.search(r"[\s:]", str(folder)):
        raise DeviceError(
            f"{folder}: the loader of libraries takes no path with spaces or colons: set TIGHTFIT_CACHE to another"
        )
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            texts = {file.name: file.read_text(encoding="utf-8") for file in sources}
            _compile(torch, users, texts, Path(beside) / "made")
            try:
                os.rename(Path(beside) / "made", folder)
            except OSError:
                if not folder.is_dir():
                    raise
    order = (folder / "order").read_text(encoding="utf-8").split()
    return [folder / name for name in order]


def _other_users() -> list[Path]:
    """Libraries of other packages that are linked with CUDA's."""
    found: list[Path] = []
    for package, pattern in _OTHER_PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += sorted(Path(spec.origin).parent.glob(pattern))
    return found


def _compile(torch: Torch, users: list[Path], sources: dict[str, str], into: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise DeviceError("the null card is compiled once and needs a C compiler: apt-get install gcc, or set CC")
    if shutil.which("readelf") is None:
        raise DeviceError("the null card reads PyTorch's symbols with readelf: apt-get install binutils")
    into.mkdir()
    for name, text in sources.items():
        (into / name).write_text(text, encoding="utf-8")
    needed, symbols = _wanted(torch.folder / "lib", users)
    order = []
    for soname in sorted({*needed, *_ALWAYS}, key=lambda name: (not name.startswith("libcuda.so"), name)):
        library = LIBRARIES.get(soname.partition(".so")[0])
        if library is None:
            continue
        own = {name: version for name, version in symbols.items() if re.match(library.symbols, name)}
        _library(compiler, into, soname, library, own)
        order.append(soname)
    (into / "order").write_text("\n".join(order) + "\n", encoding="utf-8")


def _library(compiler: str, folder: Path, soname: str, library: Library, symbols: dict[str, str]) -> None:
    lines = [
        '#include "card.h"',
        "#define ANSWER EXPORT __attribute__((weak))  // what the library's source has comes first",
    ]
    for name in sorted(symbols):
        result = 0 if re.match(library.kernels, name) else library.refusal
        body = "return 0;" if result == 0 else f'return card_unmodelled("{name}", {result});'
        lines.append(f"ANSWER int {name}(void) {{ {body} }}")
    generated = folder / f"{soname}.c"
    generated.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-O2", "-w", f"-I{folder}", f"-Wl,-soname,{soname}", "-o", folder / soname]
    command += [generated, *([folder / library.source] if library.source else [])]
    if soname.startswith("libcuda.so"):
        command += [folder / "card.c"]
    else:
        command += [f"-L{folder}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
    versions = {version for version in symbols.values() if version}
    if versions:  # of each of NVIDIA's libraries, one
        script = folder / f"{soname}.map"
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in sorted(versions)), encoding="utf-8")
        command.append(f"-Wl,--version-script={script}")
    result = subprocess.run([str(part) for part in [*command, "-ldl", "-lpthread"]], capture_output=True, text=True)
    if result.returncode:
        raise DeviceError(f"the null card: {compiler} could not make {soname}: {result.stderr.strip()[-500:]}")


def _wanted(folder: Path, users: list[Path]) -> tuple[set[str], dict[str, str]]:
    """The libraries that torch's own need, and the symbols that `users` leave undefined, with their versions."""
    needed: set[str] = set()
    symbols: dict[str, str] = {}
    prefixes = re.compile("|".join(f"(?:{library.symbols})" for library in LIBRARIES.values()))
    for path in users:
        listed = subprocess.run(
            ["readelf", "--dynamic", "--dyn-syms", "--wide", str(path)],
            capture_output=True,
            text=True,
            errors="replace",
        )
        for line in listed.stdout.splitlines():
            if found := re.search(r"\(NEEDED\).*\[(.+)\]", line):
                needed |= {found[1]} if path.parent == folder else set()
            elif (found := re.search(r" UND (\w+)(?:@+(\S+))?", line)) and prefixes.match(found[1]):
                symbols.setdefault(found[1], found[2] or "")
    # The driver's functions are asked for by their names.
    for name in _texts(folder / "libc10_cuda.so", rb"\0(cu(?:[A-Z][a-z0-9]+)+)(?=\0)"):
        if re.match(LIBRARIES["libcuda"].symbols, name):
            symbols.setdefault(name, "")
    return needed, symbols


def _texts(path: Path, pattern: bytes) -> Iterator[str]:
    found: Iterable[bytes] = re.findall(pattern, path.read_bytes()) if path.exists() else ()
    return (text.decode() for text in found)
