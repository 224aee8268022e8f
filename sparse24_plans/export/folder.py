"""``export_plans``: selects, records and compiles plans, and writes them to a folder."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..blocksparse.descriptor import BlockSparseDescriptor, BlockSparseMatmulDescriptor
from ..device.devices import PlaceLike, described
from ..device.files import StrPath, new_folder, new_folder_at, path_of, storage_errors, written_whole
from ..device.jit.cache import cubin
from ..device.jit.launcher import KernelCode
from ..device.tensors import wrong
from ..errors import InvalidProblemError, UnsupportedError, refusing, shown
from ..gemm.descriptor import GemmSparse24Descriptor, of_places
from ..plan.descriptor import Descriptor
from ..plan.families import plan_of
from ..plan.guarantee import FLAGS
from ..plan.plan import Plan, PreferenceLike
from ..plan.preference import PlanPreference
from ..prepare.descriptor import PrepareDescriptor
from ..vocab import BlockSparseOp, EpilogueKind
from .recording import Fill, Launch, MapPlace, OperandUse, Place, Recipe, record
from .tables import NO_PLAN, WALK, Number, Record, Tables, no_place

CODE = "sparse24_export.h", "sparse24_export.c"
"""The C code that runs plans. Every exported folder contains it."""
Row = tuple[int, ...]
Problem: TypeAlias = "GemmSparse24Descriptor | PrepareDescriptor | BlockSparseDescriptor"


class Exported(NamedTuple):
    """The result of ``export_plans``: what it wrote."""

    folder: str
    """Path of the folder."""
    problems: tuple[str, ...]
    """Names of the exported problems, by which ``s24_find`` finds them."""
    plans: int
    """Number of plans: kernels with a recipe of their launches."""
    cubins: int
    """Number of compiled kernels, which plans share."""
    nbytes: int
    """Bytes of all files."""


def export_plans(
    descriptors: Mapping[str, Descriptor] | Iterable[Descriptor],
    folder: StrPath,
    *,
    preference: PreferenceLike = None,
    device: PlaceLike = "h200",
    on_steps: Callable[[int], None] = lambda steps: None,
) -> Exported:
    """Write all that a program without Python needs to run plans: see docs/export.md.

    Parameters
    ----------
    descriptors
        Problems by their names, or named by :func:`name_of`. A product is exported for 1 to as many tokens as
        its descriptor has as n, with the kernels that ``select`` chooses under the same preference. Some n of
        a block-sparse product may have no kernel; programs then can't find these n. For ``sdd`` n is fixed;
        with counts of groups it is a multiple of the groups. ``x_rows`` and ``y_rows`` are those of the
        descriptor for every n. Batches of row-major X, Y and C begin the descriptor's n rows apart for every
        n; column-major ones follow each other, as those of other operands do.
    folder
        New or empty.
    preference
        The preference for ``select``; ``exportable`` is set.
    device
        The GPU that will run the plans, as ``select`` takes it; it needn't be present.
    on_steps
        Called with the number of selections and compilations that have just ended.

    Needs NVRTC, and neither CuPy nor a GPU. Raises InvalidProblemError for descriptors of one name and for a
    folder with files in it, UnsupportedError where a library alone serves, what ``select`` raises, and
    StorageError.
    """
    wishes = PlanPreference.of(preference).model_copy(update={"exportable": True})
    properties, _ = described(device)
    if properties.kind != "cuda":
        raise UnsupportedError(f"device: expected a CUDA device, got {properties}")
    named, path = _named(descriptors), new_folder_at(path_of("folder", folder), "folder")
    if not callable(on_steps):
        raise wrong("on_steps", "a function", on_steps)
    tables = Tables(properties.compute_capability, properties.multiprocessors)
    writer = _Writer(tables, on_steps)
    for name, descriptor in named.items():
        writer.add(name, descriptor, wishes, properties)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(path, "folder") as temporary:
        written = writer.write(temporary)
    records = tables.records
    return Exported(str(path), tuple(named), len(records["plans"]), len(records["cubins"]), written)


def name_of(descriptor: Problem) -> str:
    """The name of a problem: its op, element, sizes, and its epilogue unless that is identity.

    Behind the element stand what a quantized weight stores and the columns of a scale. The sizes are M x K,
    groups x M x K, "b" and batches x M x K, or heads x rows x columns and the blocks' side of a layout.
    """
    if isinstance(descriptor, BlockSparseDescriptor):
        one = descriptor.layout
        sizes = f"{one.heads}x{one.rows}x{one.cols}-{one.block}"
    else:
        groups, batches = getattr(descriptor, "groups", 0), getattr(descriptor, "batches", None)
        several = f"{groups}x" if groups else "" if batches is None else f"b{batches}x"
        sizes = f"{several}{descriptor.m}x{descriptor.k}"
    by = getattr(descriptor, "quantization", None)
    stored = f"-{by.element}_{by.group}" if by else ""
    name = f"{descriptor.op_name}-{descriptor.element}{stored}-{sizes}"
    epilogue = getattr(descriptor, "epilogue", EpilogueKind.IDENTITY)
    return name if epilogue is EpilogueKind.IDENTITY else f"{name}-{epilogue}"


def _named(descriptors: Mapping[str, Descriptor] | Iterable[Descriptor]) -> dict[str, Problem]:
    # One at a time, because an iterable of other objects may have no end.
    with refusing("descriptors", "descriptors or a mapping of them", descriptors):
        if isinstance(descriptors, Mapping):
            pairs = [(name, _exportable(one)) for name, one in descriptors.items()]
        else:
            pairs = [(name_of(problem), problem) for problem in map(_exportable, descriptors)]
    named: dict[str, Problem] = {}
    for name, descriptor in pairs:
        if type(name) is not str or not _is_text(name):
            raise InvalidProblemError(f"descriptors: expected names that are text, got {shown(name)}")
        if name in named:
            raise InvalidProblemError(
                f"descriptors: expected one problem of each name, got {shown(name)} twice; "
                "give them names in a mapping"
            )
        named[name] = descriptor
    if not named:
        raise InvalidProblemError("descriptors: expected at least one, got none")
    return named


def _is_text(name: str) -> bool:
    """Whether C can have the name: UTF-8 encodes no lone surrogate, and a zero byte ends a text."""
    try:
        return b"\0" not in name.encode() and name != ""
    except UnicodeEncodeError:
        return False


def _exportable(descriptor: Descriptor) -> Problem:
    plan_of(descriptor)  # raises for anything else
    if not isinstance(descriptor, (GemmSparse24Descriptor, PrepareDescriptor, BlockSparseDescriptor)):
        raise UnsupportedError(
            f"descriptors: expected problems of this package, got {type(descriptor).__name__}"
        )
    return descriptor


def tokens_of(descriptor: Problem) -> range:
    """The numbers of tokens that a problem is exported for; 0 alone: it has no number of tokens."""
    if isinstance(descriptor, GemmSparse24Descriptor):
        return range(descriptor.step, descriptor.n + 1, descriptor.step)
    if isinstance(descriptor, BlockSparseMatmulDescriptor) and descriptor.op is not BlockSparseOp.SDD:
        return range(1, descriptor.n + 1)
    return range(1)


class _Writer:
    def __init__(self, tables: Tables, on_steps: Callable[[int], None]) -> None:
        self._tables, self._on_steps = tables, on_steps
        self._codes: dict[KernelCode, int] = {}
        self._cubins: dict[str, bytes] = {}

    def add(self, name: str, descriptor: Problem, preference: PlanPreference, device: Any) -> None:
        """Select and record the plans of a problem."""
        ns = tokens_of(descriptor)
        if not ns:
            raise InvalidProblemError(f"{name}: expected the most tokens, from 1, as n, got 0")
        found: dict[Recipe, dict[int, Row]] = {}
        for n in ns:
            if (plan := self._selected(name, descriptor, n, preference, device)) is not None:
                recipe, numbers = record(plan, ns[-1])
                found.setdefault(recipe, {})[n] = numbers
            self._on_steps(1)
        every_n = range(ns[0], ns[-1] + 1)
        at: dict[int, tuple[int, Row]] = dict.fromkeys(every_n, (NO_PLAN, ()))
        for recipe, rows in found.items():
            index, columns = self._add_plan(recipe, rows)
            at |= {n: (index, tuple(row[slot] for slot in columns)) for n, row in rows.items()}
        ranges = []
        for key, group in itertools.groupby(every_n, at.__getitem__):
            row = self._tables.add("numbers", [{"number": number} for number in key[1]])
            ranges.append({"first_n": next(group), "plan": key[0], "row": row})
        problem_record = {
            "name": name,
            "descriptor": descriptor.model_dump_json(),
            "first_range": self._tables.add("ranges", ranges),
            "ranges": len(ranges),
            "least_n": ns[0],
            "most_n": ns[-1],
        }
        self._tables.add("problems", [problem_record])

    def _selected(
        self, name: str, descriptor: Problem, n: int, preference: PlanPreference, device: Any
    ) -> Plan | None:
        """The plan for n tokens, or None if a block-sparse product has one for more tokens alone."""
        problem = descriptor
        if n:
            if isinstance(descriptor, GemmSparse24Descriptor):
                problem = of_places(descriptor, n)
            else:
                problem = descriptor.model_copy(update={"n": n})
        try:
            plan: Plan = plan_of(descriptor).select(problem, preference=preference, device=device)
        except UnsupportedError as error:
            if isinstance(descriptor, BlockSparseMatmulDescriptor) and 0 < n < descriptor.n:
                return None
            raise UnsupportedError(f"{name}, {n} tokens: {error}" if n else f"{name}: {error}") from error
        return plan

    def _add_plan(self, recipe: Recipe, rows: dict[int, Row]) -> tuple[int, list[int]]:
        """Add a plan; return its index and the slots whose numbers stand in the rows of its ranges."""
        numbers, columns = _numbers(rows)
        guarantee = json.loads(recipe.guarantee)
        operands = [_operand_record(one, numbers) for one in recipe.operands]
        launches = [self._launch_record(one, numbers) for one in recipe.launches]
        plan = {
            "kernel": recipe.kernel,
            "guarantee": recipe.guarantee,
            "promises": sum(bool(guarantee[flag]) << bit for bit, flag in enumerate(FLAGS)),
            "workspace_alignment": recipe.workspace_alignment,
            "workspace": numbers[recipe.workspace],
            "first_operand": self._tables.add("operands", operands),
            "operands": len(operands),
            "first_launch": self._tables.add("launches", launches),
            "launches": len(launches),
        }
        return self._tables.add("plans", [plan]), columns

    def _launch_record(self, launch: Launch | Fill, numbers: list[Number]) -> Record:
        if isinstance(launch, Fill):
            places, maps = [_place_record(launch.address, numbers)], []
            rest: Record = {"fill": 1, "symbol": "", "byte": launch.byte, "size": numbers[launch.nbytes]}
            rest |= dict.fromkeys(("cubin", "threads", "shared_bytes", "overlapping", "parameter_bytes"), 0)
        else:
            code = launch.code
            places = [_place_record(one, numbers) for one in launch.places]
            maps = [_map_record(one, numbers) for one in launch.maps]
            rest = {
                "fill": 0,
                "cubin": self._cubin(code),
                "symbol": code.name,
                "threads": code.threads,
                "shared_bytes": code.shared_bytes,
                "overlapping": int(launch.overlapping),
                "parameter_bytes": launch.nbytes,
                "byte": 0,
                "size": numbers[launch.grid],
            }
        first_place, first_map = self._tables.add("places", places), self._tables.add("maps", maps)
        counts = {"places": len(places), "maps": len(maps)}
        return rest | {"first_place": first_place, "first_map": first_map} | counts

    def _cubin(self, code: KernelCode) -> int:
        """The index of a kernel's cubin, compiled now if the cache hasn't it."""
        code = code._replace(name="", threads=0, shared_bytes=0)
        if code not in self._codes:
            content = cubin(code.source, code.arch, dict(code.defines))
            digest = hashlib.sha256(content).hexdigest()
            file = f"{Path(code.source).stem}-{digest[:16]}.cubin"
            if file not in self._cubins:
                record = {"file": file, "zero": 0, "nbytes": len(content), "sha256": digest}
                self._tables.add("cubins", [record])
                self._cubins[file] = content
            self._codes[code] = list(self._cubins).index(file)
            self._on_steps(1)
        return self._codes[code]

    def write(self, folder: Path) -> int:
        """Write all files to the folder. Returns their bytes."""
        manifest = "".join(_manifest(self._tables.document())).encode()
        code = {name: (files("sparse24_plans.export") / "c" / name).read_bytes() for name in CODE}
        written = {**self._cubins, **code, "manifest.json": manifest, "plans.bin": self._tables.to_bytes()}
        for name, content in written.items():
            with written_whole(folder / name) as file:
                file.write(content)
        return sum(map(len, written.values()))


def _manifest(document: dict[str, Any]) -> Iterator[str]:
    """JSON with a line for each record. An indented one has a line for each number, and takes longer."""
    tables = document.pop("tables")
    yield json.dumps(document)[:-1] + ', "tables": {'
    for at, (name, records) in enumerate(tables.items()):
        lines = ",\n".join(map(json.dumps, records))
        yield f"{',' if at else ''}\n{json.dumps(name)}: [\n{lines}]"
    yield "}}\n"


def _numbers(rows: dict[int, Row]) -> tuple[list[Number], list[int]]:
    """The slots' numbers as functions of n, each checked for every n, and the slots that need a column."""
    ns = list(rows)
    numbers, columns = [], []
    for slot in range(len(rows[ns[0]])):
        values = [rows[n][slot] for n in ns]
        by_n = 0
        if len(ns) > 1 and (values[1] - values[0]) % (ns[1] - ns[0]) == 0:
            by_n = (values[1] - values[0]) // (ns[1] - ns[0])
        constant = values[0] - by_n * ns[0]
        if all(value == constant + by_n * n for n, value in zip(ns, values, strict=True)):
            numbers.append(Number(constant, by_n))
        else:
            columns.append(slot)
            numbers.append(Number(0, 0, len(columns)))
    return numbers, columns


def _operand_record(use: OperandUse, numbers: list[Number]) -> Record:
    record = {name: int(value) if type(value) is bool else value for name, value in use._asdict().items()}
    return record | {"lines": numbers[use.lines], "width": numbers[use.width]}


def _place_record(place: Place, numbers: list[Number]) -> Record:
    record: Record = place._asdict()
    number = numbers[record.pop("slot")]
    return {**record, "kind": int(place.kind), "number": number}


def _map_record(place: MapPlace, numbers: list[Number]) -> Record:
    record: Record = {
        "at": place.at,
        "data_type": place.data_type,
        "rank": len(place.sizes),
        "swizzle": place.swizzle,
        "promotion": place.promotion,
        "only_if_aligned": place.only_if_aligned,
        "im2col": int(bool(place.walk)),
        **{f"walk{at}": number for at, number in enumerate(place.walk or (0,) * WALK)},
        "zero": 0,
        "address": _place_record(place.address, numbers),
    }
    none = Number(0)
    for at in range(4):
        pitch = _place_record(place.pitches[at], numbers) if at < len(place.pitches) else no_place()
        record[f"pitch{at}"] = pitch
    for part, slots in (("size", place.sizes), ("box", place.box)):
        record |= {f"{part}{at}": numbers[slots[at]] if at < len(slots) else none for at in range(5)}
    return record
