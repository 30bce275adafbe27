"""Which text-generation-server wins in the image: its paths laid out in a folder, its entrypoints run there.

Of the published image: /tgi-entrypoint.sh activates /usr/src/.venv, which holds the stock command, and starts the
launcher, whatever an image built on it has put on PATH.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedkv.integration.serve.child_process import command_path
from pagedkv.integration.serve.launcher_shim import SHIM_NAME, write_shim

DEPLOY = Path(__file__).resolve().parents[3] / "integration" / "deploy"
PUBLISHED_ENTRYPOINT = """#!/bin/bash
source /usr/src/.venv/bin/activate
exec text-generation-launcher $@
"""
LAUNCHER = f"""#!/bin/bash
[[ $1 == --env ]] && env
printf 'arguments:'; printf ' [%s]' "$@"; echo
pwd
command -v {SHIM_NAME}
"""


class Image:
    """The files of an image below a folder. Absolute paths in scripts are those of the image."""

    def __init__(self, root: Path) -> None:
        self.root = root
        venv.create(root / "usr/src/.venv", with_pip=False)
        self.stock = self._write("usr/src/.venv/bin/text-generation-server", "#!/bin/sh\necho stock\n")
        self._write("usr/local/bin/text-generation-launcher", LAUNCHER)
        self._write("opt/pagedkv/bin/pagedkv", f'#!/bin/sh\nexec {shlex.quote(command_path())} "$@"\n')
        self.published = self._write("tgi-entrypoint.sh", self._in_root(PUBLISHED_ENTRYPOINT))
        text = (DEPLOY / "entrypoint.sh").read_text(encoding="utf-8")
        self.ours = self._write("opt/pagedkv/entrypoint.sh", self._in_root(text))

    def install_shim(self) -> Path:
        return write_shim(self.root / "opt/pagedkv/launcher", sys.executable)

    def run(self, entrypoint: Path, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Runs an entrypoint with the PATH that the Containerfile leaves behind."""
        (own,) = re.findall(r"^ENV PATH=(\S+):\$PATH$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
        return subprocess.run(
            [*prefix, entrypoint, *arguments],
            env={"PATH": f"{self._in_root(own)}:{self.root}/usr/local/bin:/usr/bin:/bin"},
            cwd=self.root / "usr/src",
            capture_output=True,
            text=True,
        )

    def _in_root(self, text: str) -> str:
        return re.sub(r"(?<![\w/])/(usr/src|opt/pagedkv)\b", rf"{self.root}/\1", text)

    def _write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
        return file


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_published_entrypoint_starts_the_stock_server_whatever_is_on_path(image: Image) -> None:
    image.install_shim()
    assert image.run(image.published).stdout.splitlines()[-1] == str(image.stock)


def test_our_entrypoint_starts_ours_and_keeps_the_stock_environment_for_the_router(image: Image) -> None:
    shim = image.install_shim()
    done = image.run(image.ours, "--env", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-3:] == ["arguments: [--env] [a b]", str(image.root / "usr/src"), str(shim)]
    assert f"VIRTUAL_ENV={image.root}/usr/src/.venv" in lines
    (path,) = [line.removeprefix("PATH=") for line in lines if line.startswith("PATH=")]
    assert path.split(":")[:2] == [str(shim.parent), str(image.stock.parent)]


def test_an_image_without_our_command_does_not_start(image: Image) -> None:
    done = image.run(image.ours)
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        f"{image.stock} is the text-generation-server that a launcher would start, and is not pagedkv's" in done.stderr
    )


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root can write everywhere")
def test_router_gets_a_folder_that_it_can_write_to(image: Image) -> None:
    """The image's own are read-only to a user without rights."""
    image.install_shim()
    (image.root / "usr/src").chmod(0o555)
    without_rights = ["--bounding-set", "-dac_override", "--inh-caps", "-dac_override"]
    done = image.run(image.ours, prefix=["setpriv", *without_rights] if os.geteuid() == 0 else [])
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-2])
    assert folder != image.root / "usr/src"
    folder.rmdir()
