"""The code in docs/export.md compiles as C99 and as C++, and runs plans that the command exports."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest
from typer.testing import CliRunner

from sparse24_plans.cli.app import app
from sparse24_plans.device.devices import absent_gpu
from tests.documents import ROOT
from tests.export.c_library import FLAGS, SOURCES, RefusedError

HEAD = '#include "sparse24_export.h"\n#include <stdio.h>\n'


def test_the_example_runs_what_the_command_exports(c, tmp_path, named_cubins):
    text = (ROOT / "docs" / "export.md").read_text()
    command = re.search(r"```bash\nsparse24 (.*?)\n```", text)
    code = re.search(r"```c\n(.*?)```", text, re.DOTALL)
    assert command is not None
    assert code is not None
    arguments = command[1].replace("-o plans", f"-o {tmp_path}/plans").replace("--n 4096", "--n 20").split()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "plans").glob("*.[ch]")) == [
        "sparse24_export.c",
        "sparse24_export.h",
    ]
    (tmp_path / "example.c").write_text(HEAD + code[1])
    include = f"-I{SOURCES}"
    cxx = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-fsyntax-only", include]
    subprocess.run([*cxx, str(tmp_path / "example.c")], check=True)
    built = tmp_path / "example.so"
    shared = ["cc", "-shared", "-fPIC", *FLAGS, include, str(tmp_path / "example.c"), "-o", str(built)]
    subprocess.run([*shared, c.library._name], check=True)
    product = ctypes.CDLL(str(built)).product
    opened = c.open(tmp_path / "plans")
    at = [ctypes.c_uint64(1 << 40 + i) for i in range(5)]
    count = ctypes.c_uint.in_dll(c.stub, "stub_count")
    for n, code_expected in ((1, 0), (20, 0), (21, 2)):
        count.value = 0
        found = product(opened, ctypes.c_int64(n), *at, ctypes.c_uint64(1 << 20), None)
        assert (found, count.value > 0) == (code_expected, code_expected == 0)
    c.library.s24_close(opened)


@pytest.mark.parametrize("name", ["gpu.json", "gpu"])
def test_command_takes_properties_of_gpu_from_file(c, tmp_path, named_cubins, name):
    properties = absent_gpu("h100").model_copy(update={"multiprocessors": 114})
    (tmp_path / name).write_text(properties.model_dump_json())
    words = ["export", "-o", str(tmp_path / "plans"), "--shape", "64x64", "--n", "1"]
    done = CliRunner().invoke(app, [*words, "--device", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    with pytest.raises(RefusedError, match=r"with 114 multiprocessors, as exported, got 9\.0 with 132"):
        c.open(tmp_path / "plans")


@pytest.mark.parametrize("content", [None, "", "[]", '{"kind": "gpu"}', "x" * (1 << 20)])
@pytest.mark.parametrize("name", ["gpu.json", "gpu"])
def test_the_command_refuses_another_file(tmp_path, name, content):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    words = ["export", "-o", str(tmp_path / "plans"), "--shape", "64x64", "--n", "1", "--device", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "expected a file of DeviceProperties" in " ".join(done.output.split())
    assert len(done.output) < 1000


def test_the_command_reads_no_device_and_suggests_a_gpu(tmp_path):
    words = ["export", "-o", str(tmp_path / "plans"), "--shape", "64x64", "--n", "1", "--device"]
    for device, said in (("/dev/zero", "not a regular file"), ("h10", "did you mean h100?")):
        done = CliRunner().invoke(app, [*words, device])
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())


def test_the_command_refuses_a_folder_with_files(tmp_path, named_cubins):
    (tmp_path / "mine").write_text("")
    arguments = ["export", "-o", str(tmp_path), "--shape", "64x64", "--n", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
