"""A kernel's struct of parameters is as long as the host's: whoever changes one has to change the other.

That they agree is part of every compilation: the launcher passes the bytes of the host's struct.
"""

from __future__ import annotations

import re

import pytest

from sparse24_plans import DriverError
from sparse24_plans.device.jit import compiler

from .covering import SOURCES, cheapest, every_source


@every_source
@pytest.mark.parametrize("change", [-8, 8])
def test_another_length_is_refused(source, change):
    asked = cheapest(source)
    defines = dict(asked.defines)
    defines["PARAMETER_BYTES"] += change
    with pytest.raises(DriverError, match=r"the host has another \w+Params"):
        compiler.compile_cubin(source, asked.arch, defines)


@every_source
def test_the_length_must_be_given(source):
    asked = cheapest(source)
    defines = {name: value for name, value in asked.defines if name != "PARAMETER_BYTES"}
    with pytest.raises(DriverError, match="S24_PARAMETER_BYTES"):
        compiler.compile_cubin(source, asked.arch, defines)


@pytest.mark.parametrize("source", SOURCES)
def test_every_struct_of_parameters_is_checked(source):
    text = "\n".join((compiler.KERNEL_FOLDER / name).read_text() for name in compiler.closure(source))
    declared = re.findall(r"^struct (\w+Params)\b", text, re.MULTILINE)
    assert declared
    assert re.findall(r"^static_assert\(matches_host<(\w+)>\(\)", text, re.MULTILINE) == declared
