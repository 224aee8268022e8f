"""Output of commands in a terminal of 80 columns, as docs/command-line.md shows it.

``python -m tests.cli.page`` writes it anew; test_page.py holds the page to it.
"""

from __future__ import annotations

import io
import os
import platform
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import safetensors.numpy

from sparse24_plans import (
    BackendUnavailableError,
    DeviceProperties,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    Sparse24Weight,
    _version,
    save_run,
)
from sparse24_plans.checkpoints import recorded_run
from sparse24_plans.checkpoints.weights_file import load_weight
from sparse24_plans.cli import explaining
from sparse24_plans.cli.app import app
from sparse24_plans.weights import host_code

from ..sample_devices import H200

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
COLUMNS = 80
_NO_GPU = "no usable CUDA device: cudaErrorNoDevice: no CUDA-capable device is detected"
_H200 = H200.model_copy(update={"driver": "580.159.04", "cublaslt": "130100"})
_BLOCK = re.compile(r"(?ms)^```console\n\$ sparse24 (?P<words>[^\n]*)\n(?P<text>.*?)^```$")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def blocks(page: str) -> dict[str, str]:
    """The commands that a page shows, with the output that it gives of each."""
    return {match["words"]: match["text"] for match in _BLOCK.finditer(page)}


def output(words: str, folder: Path) -> str:
    """Return what the command, run in the folder, prints. A comment names the machine of ``info``."""
    command, _, place = words.partition("  # ")
    terminal, errors = _Terminal(), io.StringIO()
    with (
        _inside(folder),
        _on(place),
        mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "TERM": "dumb"}),
        redirect_stdout(terminal),
        redirect_stderr(errors),
        suppress(SystemExit),
    ):
        app(shlex.split(command), prog_name="sparse24")
    assert errors.getvalue() == ""
    return terminal.getvalue()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _on(place: str) -> Iterator[None]:
    """A machine that needn't be this one, for what ``info`` says of it."""
    if not place:
        yield
        return
    gpus = {"a machine with an H200": [_H200], "a machine without a GPU": []}[place]

    def properties(ordinal: int) -> DeviceProperties:
        if not gpus:
            raise BackendUnavailableError(_NO_GPU)
        return gpus[ordinal]

    with ExitStack() as stack:
        for owner, name, value in (
            (_version, "__version__", "0.1.0"),
            (platform, "python_version", lambda: "3.12.8"),
            (np, "__version__", "2.3.5"),
            (explaining, "import_cupy", lambda: SimpleNamespace(__version__="14.2.0")),
            (host_code, "versions", lambda: {"numba": "0.63.1", "no_numba": None}),
            (explaining, "cuda_device_count", lambda: len(gpus)),
            (explaining, "cuda_properties", properties),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def write_models(folder: Path) -> None:
    """A dense model, compressed in ``sparse.safetensors``, flawed in ``broken.safetensors``; and runs."""
    rng = np.random.default_rng(13)
    arrays = {"model.embed_tokens.weight": rng.standard_normal((512, 64), np.float32)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            arrays[f"{name}.self_attn.{part}.weight"] = rng.standard_normal((64, 64), np.float32)
        arrays[f"{name}.mlp.gate_proj.weight"] = rng.standard_normal((176, 64), np.float32)
        arrays[f"{name}.mlp.up_proj.weight"] = rng.standard_normal((176, 64), np.float32)
        arrays[f"{name}.mlp.down_proj.weight"] = rng.standard_normal((64, 176), np.float32)
        arrays[f"{name}.input_layernorm.weight"] = rng.standard_normal(64, np.float32)
    bf16 = ElementKind.BF16.dtype
    safetensors.numpy.save_file(
        {name: array.astype(bf16) for name, array in arrays.items()}, folder / "model.safetensors"
    )
    output("compress model.safetensors -o sparse.safetensors", folder)
    content = bytearray((folder / "sparse.safetensors").read_bytes())
    values = load_weight(folder / "sparse.safetensors", "model.layers.1.mlp.up_proj.weight").values.tobytes()
    content[content.index(values) + 101] ^= 0x40
    norm = arrays["model.layers.0.input_layernorm.weight"].astype(bf16).tobytes()
    content[content.index(norm)] ^= 1
    (folder / "broken.safetensors").write_bytes(content)
    write_runs(folder)


def write_runs(folder: Path) -> None:
    """``run.safetensors``, and ``changed.safetensors``, which has one wrong bit."""
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element="bf16", epilogue="bias_relu")
    arithmetic = {"require": {"arithmetic": "hopper_tc/slices=4"}}
    plan = GemmSparse24Plan.select(desc, preference=arithmetic, device="host")
    rng, bf16 = np.random.default_rng(5), ElementKind.BF16.dtype
    dense, x, bias = (
        rng.standard_normal(shape, np.float32).astype(bf16) for shape in ((256, 512), (16, 512), (256,))
    )
    y = np.zeros((16, 256), bf16)
    args = GemmSparse24Args(plan.pack(Sparse24Weight.prune_compress(dense)), x, y, bias)
    plan.run(args)
    with mock.patch.object(recorded_run, "__version__", "0.1.0"):
        save_run(folder / "run.safetensors", plan, args)
        y.view(np.uint16)[3, 77] ^= 1
        save_run(folder / "changed.safetensors", plan, args)


def rewritten(page: str, folder: Path) -> str:
    """The page with the output of today; commands run in the folder, in the page's order."""
    write_models(folder)
    return _BLOCK.sub(
        lambda match: f"```console\n$ sparse24 {match['words']}\n{output(match['words'], folder)}```", page
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(rewritten(PAGE.read_text(), Path(scratch)))
