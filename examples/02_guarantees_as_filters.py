"""Ask for guarantees at selection, and read why a kernel was chosen or refused.

This example needs no GPU: `explain` also answers for the properties of a GPU that is not present.
"""

from sparse24_plans import (
    DeviceProperties,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    PlanPreference,
    UnsupportedError,
    explain,
)

desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element="bf16", epilogue="bias_gelu")
h200 = DeviceProperties(
    kind="cuda",
    name="NVIDIA H200",
    compute_capability=(9, 0),
    multiprocessors=132,
    cublaslt="assumed",
)


def show(title: str, preference: PlanPreference, device: DeviceProperties | str) -> None:
    print(f"--- {title}\n{explain(desc, preference=preference, device=device)}\n")


show("no wishes, on an NVIDIA H200", PlanPreference(), h200)

same_bits_in_any_batch = PlanPreference(require=GuaranteeRequirement(batch_invariant=True))
show("batch invariant, on an NVIDIA H200", same_bits_in_any_batch, h200)

show("no workspace to give, on an NVIDIA H200", PlanPreference(max_workspace_bytes=0), h200)

# A plan on the host shows the numbers behind the promise.
for preference in (PlanPreference(), same_bits_in_any_batch):
    plan = GemmSparse24Plan.select(desc, preference=preference, device="host")
    print(f"{plan.explain().chosen}: error_bound({desc.k}) = {plan.guarantee.error_bound(desc.k):.3g}")
    print(f"  {plan.guarantee.model_dump_json()}")

# A requirement that no kernel meets is an error with every kernel's reason, never a silent fallback.
impossible = PlanPreference(require=GuaranteeRequirement(max_error_bound=1e-9))
try:
    GemmSparse24Plan.select(desc, preference=impossible, device="host")
except UnsupportedError as error:
    print(f"\nmax_error_bound=1e-9:\n  {error}")
else:
    raise AssertionError("an impossible requirement was accepted")
