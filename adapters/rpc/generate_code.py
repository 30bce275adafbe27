"""Regenerates the Python code of every protocol: `X_pb2.py`, `X_pb2.pyi` and, where it has a service, `X_pb2_grpc.py`.

    python -m pagedkv.adapters.rpc.generate_code           write them
    python -m pagedkv.adapters.rpc.generate_code --check   compare, exit 1 where they differ

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

ADAPTERS = Path(__file__).parents[1]
PROTOS = (ADAPTERS / "smg" / "engine.proto", ADAPTERS / "tgi" / "generate.proto")

_VERSION_LINES = re.compile(
    r"^(# Protobuf Python Version: .*|GRPC_GENERATED_VERSION = .*|    \d+,|from (typing|collections\.abc) import .*)\n",
    re.MULTILINE,
)


def generate(folder: Path, proto: Path) -> dict[str, str]:
    """Compiles `proto` below `folder`, which should be empty. Returns text by file name.

    The compiler gets the file under its package's path, `pagedkv/adapters/FOLDER_OF_PROTO`. The generated imports
    depend on that path, and it keeps the name in protobuf's process-wide table different from other projects' files.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    package = f"pagedkv/adapters/{proto.parent.name}"
    (folder / package).mkdir(parents=True)
    shutil.copy(proto, folder / package / proto.name)
    includes = str(files("grpc_tools") / "_proto")
    has_service = re.search(r"^service ", proto.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = ["python", "pyi", *(["grpc_python"] if has_service else [])]
    outputs = [f"--{kind}_out={folder}" for kind in kinds]
    status = protoc.main(["protoc", f"-I{folder}", f"-I{includes}", *outputs, f"{package}/{proto.name}"])
    if status != 0:
        raise RuntimeError(f"the protobuf compiler failed with status {status}")
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / package).glob("*.py*"))}


def normalize(code: str) -> str:
    """Removes what depends only on the compiler's version from generated code: numbers and spellings of types."""
    code = _VERSION_LINES.sub("", code)
    return code.replace("_Optional[bool]", "bool").replace("(object):", ":").replace("+ f' but", "+ ' but")


def find_differences(folder: Path, proto: Path) -> list[str]:
    """Names of the committed files beside `proto` that it would not generate. `folder` should be empty."""
    return [
        name
        for name, code in generate(folder, proto).items()
        if not (proto.parent / name).is_file()
        or normalize(code) != normalize((proto.parent / name).read_text(encoding="utf-8"))
    ]


def main(arguments: list[str]) -> int:
    differing = []
    for proto in PROTOS:
        with tempfile.TemporaryDirectory() as folder:
            if arguments == ["--check"]:
                differing += [
                    f"{name} is not what {proto.name} generates" for name in find_differences(Path(folder), proto)
                ]
                continue
            for name, code in generate(Path(folder), proto).items():
                (proto.parent / name).write_text(code, encoding="utf-8")
    print("\n".join(differing), file=sys.stderr, end="\n" if differing else "")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
