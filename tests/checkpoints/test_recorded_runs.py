"""Records of runs: what is saved replays elsewhere; what is broken is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans import (
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
    StorageError,
    UnsupportedError,
    load_run,
    save_run,
)
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader, SafetensorsWriter

from ..gemm.grouped_cases import Routing, grouped_case
from ..gemm.test_replay import EACH, ran
from ..support import case_of, make_case, plan_of_row, random_data, same_bits


@pytest.mark.parametrize(("element", "name"), EACH)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"epilogue": "bias_relu", "scale_x": "row", "scale_w": "tensor"},
        {"epilogue": "relu", "beta": -0.5, "c_element": "f32", "relu_upper_bound": 2.0},
    ],
)
def test_a_saved_run_replays(tmp_path, element, name, more):
    plan, args, _ = ran(name, element=element, **more)
    save_run(tmp_path / "run", plan, args)
    run = load_run(tmp_path / "run")
    assert (run.descriptor, run.arithmetic, run.device) == (plan.descriptor, name, "host")
    assert run.kernel == plan.explain().chosen
    for field in ("x", "y", "bias", "scale_x", "scale_w", "c"):
        there, here = getattr(run.args, field), getattr(args, field)
        assert (there is None) == (here is None)
        assert here is None or same_bits(there, here)
    assert same_bits(run.args.weight.values, args.weight.values)
    assert same_bits(run.args.weight.metadata, args.weight.metadata)
    assert run.replay().equal
    assert run.replay(17, seed=3).compared == 17


def test_c_upon_y_is_gone_after_the_run(tmp_path):
    plan = plan_of_row("host_strict").select(
        GemmSparse24Descriptor(n=3, m=16, k=8, element="f32", beta=1.0), device="host"
    )
    case = case_of(plan, random_data(np.random.default_rng(0), plan.descriptor), in_place=True)
    case.run()
    canonical = replace(case.args, weight=Sparse24Weight(*case.args.weight.buffers))
    for use in (lambda: save_run(tmp_path / "run", plan, canonical), lambda: plan.replay(canonical)):
        with pytest.raises(InvalidProblemError, match="c: expected C as it was before the run, got y"):
            use()
    assert not (tmp_path / "run").exists()


def test_a_gradient_and_integers_of_32_bits_are_saved_too(tmp_path):
    for element, more in (("bf16", {"op": "dgrad"}), ("s8", {})):
        plan, args, _ = ran("exact_sum" if element == "s8" else "fma32_in_order", element=element, **more)
        save_run(tmp_path / element, plan, args)
        assert load_run(tmp_path / element).replay().equal


def test_column_major_and_strided_operands_are_saved_by_value(tmp_path):
    desc = GemmSparse24Descriptor(n=6, m=16, k=40, element="f16", x_order="column", y_order="column")
    case = make_case(desc, row="host_strict", pad=3)
    want = case.run()
    save_run(tmp_path / "run", case.plan, case.args)
    run = load_run(tmp_path / "run")
    assert same_bits(np.ascontiguousarray(run.args.y), np.ascontiguousarray(want))
    assert run.replay().equal


@pytest.mark.parametrize("weights", [None, np.full((3, 2), 0.3, np.float32)], ids=["sums", "weighted"])
def test_routed_runs_are_saved_with_and_without_weights(tmp_path, weights):
    desc = GemmSparse24Descriptor(n=6, m=16, k=32, element="f32", groups=2, x_rows=3, y_rows=3, top_k=2)
    plan = plan_of_row("host_strict").select(desc, device="host")
    x_index = np.array([0, 2, 1, 0, 1, 2], np.int32)
    case = grouped_case(plan, [0, 3, 6], routing=Routing(x_index, x_index.reshape(3, 2), weights))
    case.run()
    save_run(tmp_path / "run", plan, case.args)
    run = load_run(tmp_path / "run")
    assert same_bits(run.args.x_index, x_index)
    assert (run.args.y_weights is None) == (weights is None)
    assert run.replay().equal


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["wgmma_sp", "mma_sp", "inflate_strict"])
def test_run_on_gpu_is_saved_with_its_weight_unpacked(tmp_path, row):
    case = make_case(GemmSparse24Descriptor(n=16, m=200, k=520, element="bf16", epilogue="bias"), row=row)
    case.run()
    save_run(tmp_path / "run", case.plan, case.args)
    run = load_run(tmp_path / "run")
    assert (run.kernel, run.device) == (row, case.plan.device.name)
    assert same_bits(run.args.y, case.fetch())
    assert run.replay().equal


def test_a_wrong_bit_in_a_record_is_found(tmp_path):
    plan, args, bits = ran("hopper_tc/slices=4", element="bf16")
    bits[4, 20] ^= 1 << 9
    save_run(tmp_path / "run", plan, args)
    found = load_run(tmp_path / "run").replay()
    assert (found.differing, found.first.token, found.first.output) == (1, 4, 20)


# Refusals -------------------------------------------------------------------------------------------


def test_what_cant_be_saved_is_refused(tmp_path):
    plan, args, _ = ran("hopper_tc/slices=4", element="bf16")
    with pytest.raises(InvalidProblemError, match="plan: expected GemmSparse24Plan, got str"):
        save_run(tmp_path / "run", "plan", args)
    fast = GemmSparse24Plan.select(plan.descriptor, device="host")
    with pytest.raises(
        UnsupportedError, match="a kernel that names its arithmetic, got host_blas, which names none"
    ):
        save_run(tmp_path / "run", fast, args)
    with pytest.raises(InvalidProblemError, match="args: expected GemmSparse24Args, got int"):
        save_run(tmp_path / "run", plan, 3)
    with pytest.raises(StorageError):
        save_run(tmp_path / "nowhere" / "run", plan, args)
    assert list(tmp_path.iterdir()) == []


def altered(path, change) -> None:
    """Writes the record anew, its tensors and metadata as ``change`` leaves them."""
    with SafetensorsReader(path) as reader:
        tensors = {name: (info, reader.read(name)) for name, info in reader.tensors.items()}
        metadata = dict(reader.metadata)
    change(tensors, metadata)
    with SafetensorsWriter(path, [info for info, _ in tensors.values()], metadata) as writer:
        for name, (_, data) in tensors.items():
            writer.write(name, data)


def descriptor(**fields):
    def change(tensors, metadata):
        metadata["descriptor"] = json.dumps({**json.loads(metadata["descriptor"]), **fields})

    return change


ELEMENT_FIELDS = (
    *("element", "x_element", "out_element", "bias_element", "c_element"),
    *("weight_element", "weight_scale_element"),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.pop("sparse24_run"), "expected the record of a run, .*got None"),
        (lambda tensors, metadata: metadata.update(sparse24_run="2"), "sparse24_run = '1', got '2'"),
        (lambda tensors, metadata: metadata.pop("arithmetic"), "expected the metadata arithmetic, got none"),
        (lambda tensors, metadata: metadata.pop("kernel"), "expected the metadata kernel, got none"),
        (lambda tensors, metadata: metadata.update(descriptor="{"), "GemmSparse24Descriptor: Invalid JSON"),
        (descriptor(k=3), "GemmSparse24Descriptor: k: "),
        (lambda tensors, metadata: metadata.update(arithmetic="fast"), "arithmetic: expected one of fma32"),
        (lambda tensors, metadata: metadata.update(arithmetic="exact_sum"), "no kernel can serve"),
        (lambda tensors, metadata: tensors.pop("y"), r"y: expected BF16\[5, 24\], .* got none"),
        (descriptor(n=6), r"x: expected BF16\[6, 520\], like the descriptor, got BF16\[5, 520\]"),
        (
            descriptor(**dict.fromkeys(ELEMENT_FIELDS, "f16")),
            r"x: expected F16\[5, 520\]",
        ),
        (descriptor(epilogue="bias"), r"bias: expected BF16\[24\], like the descriptor, got none"),
        (descriptor(m=2**50), r"y: expected BF16\[5, 1125899906842624\]"),
        (
            lambda tensors, metadata: metadata.pop("sparse24.weight"),
            "compressed tensor weight, got none|weight",
        ),
        (lambda tensors, metadata: tensors.pop("weight.values24"), "weight"),
    ],
)
def test_a_broken_record_is_refused(tmp_path, change, message):
    plan, args, _ = ran("hopper_tc/slices=4", element="bf16")
    path = tmp_path / "run"
    save_run(path, plan, args)
    altered(path, change)
    with pytest.raises(FormatError, match=message) as caught:
        load_run(path)
    assert str(path) in str(caught.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no record")
    with pytest.raises(FormatError, match="expected a safetensors file"):
        load_run(tmp_path / "text")
    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "plain")
    with pytest.raises(FormatError, match="expected the record of a run"):
        load_run(tmp_path / "plain")
    with pytest.raises(StorageError):
        load_run(tmp_path / "nothing")
    with pytest.raises(InvalidProblemError, match="path: "):
        load_run(3)
