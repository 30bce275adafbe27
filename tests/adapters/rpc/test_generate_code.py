"""The committed code of every protocol is what its file generates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagedkv.adapters.rpc.generate_code import ADAPTERS, PROTOS, find_differences


def test_every_protocol_is_known() -> None:
    assert sorted(ADAPTERS.rglob("*.proto")) == sorted(PROTOS)


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_the_committed_code_is_what_the_proto_file_generates(proto: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    assert find_differences(tmp_path, proto) == []


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_the_check_sees_a_changed_proto_file(proto: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    package = tmp_path / proto.parent.name
    shutil.copytree(proto.parent, package)
    changed = package / proto.name
    changed.write_text(proto.read_text(encoding="utf-8").replace(" = 5;", " = 55;", 1), encoding="utf-8")
    assert proto.stem + "_pb2.py" in find_differences(tmp_path / "build", changed)
