"""Kernel sources agree with each other and with the host, and keep to the rules of style."""

from __future__ import annotations

import re
import shutil

import numpy as np

from sparse24_plans import EpilogueKind
from sparse24_plans.arithmetic import epilogue
from sparse24_plans.bench.record import code_of
from sparse24_plans.device.jit import compiler, enum_codes

from .covering import SOURCES, every_source, every_value
from .gemm_requests import GEMM_ENTRIES

FILES = sorted(path for path in compiler.KERNEL_FOLDER.rglob("*") if path.is_file())


def behind_config(code: str) -> str:
    """The code behind the closing brace of ``struct Config``."""
    depth, begin = 0, code.index("struct Config")
    for at, character in enumerate(code[begin:], begin):
        depth += (character == "{") - (character == "}")
        if character == "}" and depth == 0:
            return code[at:]
    raise AssertionError("struct Config has no end")


def words_of(header: str, name: str) -> dict[str, int]:
    """Return the members of an enum and their values."""
    text = (compiler.KERNEL_FOLDER / header).read_text()
    (body,) = re.findall(rf"^enum class {name} {{(.*?)}};", text, re.MULTILINE | re.DOTALL)
    return {word: int(code) for word, code in re.findall(r"(\w+) = (\d+)", body)}


def test_codes_are_those_of_the_headers():
    elements = {kind.name: code for kind, code in enum_codes.ELEMENT_CODES.items()}
    assert words_of("common/element.cuh", "ElementKind") == elements
    codes = enum_codes.EPILOGUE_CODES
    with_a_bias = (kind for kind in codes if kind.has_bias or kind == "identity")
    assert words_of("common/epilogue.cuh", "EpilogueKind") == {kind.name: codes[kind] for kind in with_a_bias}
    assert all(codes[kind.activation] == code for kind, code in codes.items() if kind != "bias")
    ungated = {kind for kind in codes if not kind.is_gated}
    assert all(set(row.epilogues) in (set(codes), ungated) for row in GEMM_ENTRIES)
    masks = {kind.name: code for kind, code in enum_codes.MASK_CODES.items()}
    assert words_of("blocksparse/softmax.cu", "AttentionMask") == masks


def test_every_kernel_file_belongs_to_some_kernel():
    reached = {name for source in SOURCES for name in compiler.closure(source)}
    assert {path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in FILES} == reached


def test_the_hosts_strict_constants_are_read_from_the_kernels_file(monkeypatch, tmp_path):
    v = np.linspace(-4, 4, 1000, dtype=np.float32)
    kinds = (EpilogueKind.BIAS_GELU, EpilogueKind.BIAS_SILU)
    before = {kind: epilogue.apply_epilogue(v, 1.0, None, kind) for kind in kinds}
    text = (compiler.KERNEL_FOLDER / "common/strict_math.inc").read_text()
    # 1/3! becomes 1/4, in the exponential that both activations use.
    changed = text.replace("0x1.5555555555555p-3", "0x1.0000000000000p-2")
    assert changed != text
    (tmp_path / "common").mkdir()
    (tmp_path / "common/strict_math.inc").write_text(changed)
    monkeypatch.setattr(epilogue, "KERNEL_FOLDER", tmp_path)
    epilogue._constants.cache_clear()
    try:
        for kind, values in before.items():
            assert (epilogue.apply_epilogue(v, 1.0, None, kind) != values).any()
    finally:
        epilogue._constants.cache_clear()


# Includes -----------------------------------------------------------------------------------------


def test_closure_follows_includes(monkeypatch, tmp_path):
    kernels = tmp_path / "kernels"
    shutil.copytree(compiler.KERNEL_FOLDER, kernels)
    monkeypatch.setattr(compiler, "KERNEL_FOLDER", kernels)
    (kernels / "a.cu").write_text(
        '#include "b.cuh"\n  #  include   "c.inc"\n// #include "not.this"\n#include <nor.this>\n'
    )
    (kernels / "b.cuh").write_text('#pragma once\n#include "d.cuh"\n')
    (kernels / "c.inc").write_text('#include "d.cuh"\n')
    (kernels / "d.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    found = compiler.closure("a.cu")
    assert list(found) == ["a.cu", "b.cuh", "c.inc", "d.cuh"]
    assert all(found[name] == (kernels / name).read_bytes() for name in found)


@every_source
def test_every_kernel_shares_the_types_and_every_epilogue_the_constants(source):
    reached = set(compiler.closure(source))
    assert {source, "common/types.cuh"} <= reached
    assert ("common/epilogue.cuh" in reached) == ("common/strict_math.inc" in reached)


# How they are written -----------------------------------------------------------------------------


def test_no_line_is_longer_than_120_columns():
    lines = [(path.name, line) for path in FILES for line in path.read_text().splitlines()]
    assert [one for one in lines if len(one[1]) > 120] == []


@every_source
def test_a_kernel_opens_with_its_roles(source):
    opening = (compiler.KERNEL_FOLDER / source).read_text().split("\n#", 1)[0]
    assert code_of(opening) == ""
    for word in ("role", "barriers", "registers"):
        assert word in opening


@every_source
def test_the_hosts_macros_are_read_in_one_place(source):
    """In the kernel's Config, or before it where the preprocessor needs them; bodies ask Config."""
    given = {f"S24_{name}" for one in every_value() if one.source == source for name, _ in one.defines}
    texts = [code_of((compiler.KERNEL_FOLDER / name).read_text()) for name in compiler.closure(source)]
    (config,) = [text for text in texts if "struct Config" in text]
    assert config.count("struct Config") == 1
    bodies = [behind_config(config)]
    bodies += [text for text in texts if text is not config]
    assert {word for body in bodies for word in re.findall(r"\bS24_\w+", body)} & given == set()
