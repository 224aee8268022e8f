"""A kernel and the host take each parameter from the same bytes: both sides come from one declaration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from sparse24_plans import DriverError
from sparse24_plans.device.jit import compiler
from sparse24_plans.device.jit.structs import KernelParams, field, kernel_params

from .covering import SOURCES, cheapest, every_source
from .parameter_headers import declared_structs, headers

every_struct = pytest.mark.parametrize("struct", declared_structs(), ids=lambda one: one.__name__)
FIELD = re.compile(r"^  (?:const )?\w[\w*]* (\w+)(?:\[\d+\])?;$", re.MULTILINE)


def struct_of(source: str) -> type[KernelParams]:
    """The struct that every kernel of a source takes, and takes alone."""
    text = (compiler.KERNEL_FOLDER / source).read_text() + "".join(
        (compiler.KERNEL_FOLDER / name).read_text() for name in compiler.closure(source) if name != source
    )
    (name,) = set(re.findall(r"__global__[^{]*?\((?:const )?(?:__grid_constant__ )?(\w+) p\)", text))
    (found,) = [one for one in declared_structs() if one.__name__ == name]
    assert found.header in compiler.closure(source)
    return found


def swapped(text: str, first: str, second: str) -> str:
    """The header with two fields of a struct in each other's place, each with its type."""
    lines = {match[1]: match[0] for match in FIELD.finditer(text)}
    there = {lines[first]: lines[second], lines[second]: lines[first]}
    return "\n".join(there.get(line, line) for line in text.split("\n"))


def test_headers_are_those_of_the_declarations():
    found = {
        path.relative_to(compiler.KERNEL_FOLDER).as_posix(): path.read_text()
        for path in compiler.KERNEL_FOLDER.glob("*/params/*")
    }
    assert found == headers(), "run python -m tests.kernels.parameter_headers"


@every_source
def test_swapped_fields_do_not_compile(source, monkeypatch):
    struct, closure, asked = struct_of(source), compiler.closure, cheapest(source)
    first, second = next(
        (a, b)
        for a, b in combinations(struct.declared, 2)
        if struct.declared[a].ctype is struct.declared[b].ctype
    )
    header = swapped(closure(source)[struct.header].decode(), first, second).encode()
    assert header != closure(source)[struct.header]
    monkeypatch.setattr(compiler, "closure", lambda name: {**closure(name), struct.header: header})
    with pytest.raises(DriverError, match="static assertion failed"):
        compiler.compile_cubin(source, asked.arch, dict(asked.defines))


def swaps_of(struct: type[KernelParams]) -> Iterator[list[tuple[str, str]]]:
    """Pairs of neighbours, in lists of those that may be swapped at once: they move no other field."""
    pairs = list(pairwise(struct.declared))
    sizes = {name: getattr(struct, name).size for name in struct.declared}
    alike = [sizes[first] == sizes[second] for first, second in pairs]
    for start in (0, 1):
        even = [pair for pair, same in list(zip(pairs, alike, strict=True))[start::2] if same]
        for at in range(0, len(even), 12):  # NVRTC reports 30 errors, of which a pair makes two
            yield even[at : at + 12]
    yield from ([pair] for pair, same in zip(pairs, alike, strict=True) if not same)


@every_struct
def test_any_two_swapped_fields_are_found(struct):
    """Every assertion that a swap breaks is reported; the header alone is compiled."""
    path, closure = struct.header, compiler.closure(struct.header)
    for pairs in swaps_of(struct):
        text = headers()[path]
        for pair in pairs:
            text = swapped(text, *pair)
        with pytest.raises(DriverError) as caught:
            compiler._compile(
                {**closure, path: text.encode()}, compiler.options("sm_80", {}), "getCUBIN", path
            )
        for first, second in pairs:
            assert re.search(rf"S24_OFFSET\({struct.__name__}, ({first}|{second})\)", str(caught.value))


@every_struct
def test_each_field_is_described_by_sentences_of_its_own(struct):
    for name, one in struct.declared.items():
        assert one.about.endswith("."), name
        assert not re.match(r"Of|Those|What|Where|As|The same|And\b", one.about), name


def test_every_struct_of_a_kernel_is_declared():
    for source in SOURCES:
        struct_of(source)
    texts = [
        path.read_text() for path in compiler.KERNEL_FOLDER.rglob("*.cu*") if path.parent.name != "params"
    ]
    assert [name for text in texts for name in re.findall(r"^struct (\w+Params)\b", text, re.MULTILINE)] == []


def test_struct_takes_declared_names_alone_and_pads_its_tensor_maps():
    @kernel_params("")
    class One(KernelParams):
        box = field("TensorMap", "A map.")
        counts = field("u32", "Two numbers.", 2)

    assert (One.counts.offset, One.counts.size, One.__dict__["padding"].size) == (128, 8, 56)
    one = One(counts=(1, 2))
    assert one.counts[:] == [1, 2]
    with pytest.raises(AttributeError):
        one.count = 3
    with pytest.raises(AttributeError):
        One(count=3)
    with pytest.raises(TypeError):
        One(b"", (1, 2))
