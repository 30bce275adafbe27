"""Regenerates `generate_pb2.py`, `generate_pb2.pyi` and `generate_pb2_grpc.py` from `generate.proto`.

    python -m pagedkv.adapters.tgi.generate_code           write them
    python -m pagedkv.adapters.tgi.generate_code --check   compare, exit 1 where they differ

Write with grpcio-tools 1.70: its code runs under protobuf 5.29 and every later release, while code from a newer
compiler refuses older runtimes. The check runs with any version: it ignores what differs between compiler versions.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

PROTO = "generate.proto"
GENERATED = ("generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py")

_VERSION_LINES = re.compile(
    r"^(# Protobuf Python Version: .*|GRPC_GENERATED_VERSION = .*|    \d+,|from (typing|collections\.abc) import .*)\n",
    re.MULTILINE,
)


def generate(folder: Path, proto: Path) -> dict[str, str]:
    """Compiles `proto` below `folder`, which should be empty. Returns text by file name.

    The compiler gets the file under its package's path. The generated imports depend on that path, and it keeps the
    name in protobuf's process-wide table different from other projects' `generate.proto`.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    package = "pagedkv/adapters/tgi"
    (folder / package).mkdir(parents=True)
    shutil.copy(proto, folder / package / PROTO)
    includes = str(files("grpc_tools") / "_proto")
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{folder}", f"-I{includes}", *outputs, f"{package}/{PROTO}"])
    if status != 0:
        raise RuntimeError(f"the protobuf compiler failed with status {status}")
    return {name: (folder / package / name).read_text(encoding="utf-8") for name in GENERATED}


def normalize(code: str) -> str:
    """Removes from generated code what depends only on the compiler's version: numbers, spellings of the same type."""
    code = _VERSION_LINES.sub("", code)
    return code.replace("_Optional[bool]", "bool").replace("(object):", ":").replace("+ f' but", "+ ' but")


def find_differences(folder: Path, package: Path) -> list[str]:
    """Names of committed files in `package` that differ from what `generate.proto` gives. `folder` should be empty."""
    generated = generate(folder, package / PROTO)
    return [
        name
        for name, code in generated.items()
        if normalize(code) != normalize((package / name).read_text(encoding="utf-8"))
    ]


def main(arguments: list[str]) -> int:
    package = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        if arguments == ["--check"]:
            differing = find_differences(Path(folder), package)
            for name in differing:
                print(f"{name} is not what {PROTO} generates", file=sys.stderr)
            return 1 if differing else 0
        for name, code in generate(Path(folder), package / PROTO).items():
            (package / name).write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
