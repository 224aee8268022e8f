"""``sparse24 explain``: the choice and every reason, for every field, and for GPUs that are absent."""

from __future__ import annotations

import pytest

from sparse24_plans.gemm import kernel_table

from .commands import PROBLEM, run, run_json


def test_explain_gives_the_choice_and_every_reason():
    answer = run_json("explain", *PROBLEM, "--device", "host", "--element", "f16")
    assert answer["chosen"] == "host_blas"
    assert answer["descriptor"]["element"] == "f16"
    assert (answer["workspace_size"], answer["workspace_is_exact"]) == (0, True)
    assert answer["guarantee"]["math_precision"] == "f32"
    assert answer["error_bound"] > 0
    rows = {row["kernel"]: row["reason"] for row in answer["rows"]}
    assert list(rows) == [spec.name for spec in kernel_table.ENTRIES]
    assert rows["inflate_strict"] == "runs on a CUDA device, the plan is for host"


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90a", "sm100", "sm120"])
def test_explain_knows_gpus_that_are_absent(arch):
    answer = run_json("explain", *PROBLEM, "--arch", arch, "--require", "bit_stable_across_hardware")
    assert answer["chosen"] == "inflate_strict"
    assert "assumed" in answer["device"]
    assert (answer["workspace_size"], answer["workspace_is_exact"]) == (0, True)
    assert answer["guarantee"]["bit_stable_across_hardware"]


def test_explain_as_tables():
    out = run("explain", *PROBLEM, "--arch", "sm90a", "--backend", "inflate_cublas").stdout
    for text in (
        "inflate_cublas",
        "chosen",
        "prefer_backend is inflate_cublas",
        "batch_invariant",
        " bytes at most: the plan on the GPU itself says",
    ):
        assert text in out


@pytest.mark.parametrize("options", [["--op", "dgrad"], ["--epilogue", "bias_gelu"]])
def test_explain_takes_ops_and_epilogues(options):
    answer = run_json("explain", *PROBLEM, "--device", "host", *options)
    assert answer["descriptor"][options[0][2:]] == options[1]


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"weight_element": "s4", "weight_group": 32}, "wgmma_sp"),
        ({"x_element": "fp8_e5m2", "scale_y": "tensor", "amax": True}, "wgmma_sp_fp8"),
        ({"batches": 4, "shared_weight": True}, "wgmma_sp"),
        ({"x_rows": 16, "y_rows": 8, "top_k": 2, "group_tokens": "counts"}, "wgmma_sp_grouped"),
    ],
)
def test_explain_takes_every_field(fields, chosen):
    others = {"x_element": ("--element", "fp8_e4m3", "--out-element", "fp8_e4m3"), "x_rows": ("--groups", 2)}
    given = [word for name, value in fields.items() for word in ("--field", f"{name}={value}".lower())]
    answer = run_json("explain", *PROBLEM, "--arch", "h100", *others.get(next(iter(fields)), ()), *given)
    assert answer["chosen"] == chosen
    assert {name: answer["descriptor"][name] for name in fields} == fields
    forced = run_json("explain", *PROBLEM, "--arch", "h100", "--field", "prefer_kernel=mma_sp")
    assert forced["chosen"] == "mma_sp"
    wrong = run_json("explain", *PROBLEM, "--field", "batches=x", exit_code=2)["error"]
    assert "GemmSparse24Descriptor: batches: " in wrong["message"]


def test_explain_where_nothing_can_serve():
    options = (*PROBLEM, "--device", "host", "--backend", "mma_sp")
    answer = run_json("explain", *options, exit_code=1)
    assert answer["chosen"] is None
    assert all(
        row["reason"] == "prefer_backend is mma_sp" for row in answer["rows"] if "host" in row["kernel"]
    )
    assert "no kernel can serve" in run("explain", *options, exit_code=1).stdout


def test_an_element_may_have_numpys_name():
    words = ("explain", "--n", 1, "--m", 8, "--k", 8, "--device", "host", "--element")
    assert run(*words, "float16").stdout == run(*words, "f16").stdout


def test_explain_takes_the_name_of_a_card():
    sizes = ("--n", 16, "--m", 4096, "--k", 4096, "--json")
    by_card, by_arch = (run_json("explain", *sizes[:-1], "--arch", arch) for arch in ("h100", "sm90a"))
    assert by_card == by_arch
