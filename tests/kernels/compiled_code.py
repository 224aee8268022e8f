"""Machine code of the tested compilations of this tree: ``python -m tests.kernels.compiled_code``.

Prints a JSON document: for each compilation its kernel file, a hash of its source text, and, unless the
source text stands in the file after ``--known``, a hash of the machine code. Comments and layout leave both
hashes alone; names of macros and functions leave the second alone. Cubins come from the cache.
``benchmarks.record_tests`` runs this file also in trees of other commits, so it needs little of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparse24_plans.device.jit import cache, compiler

from . import covering

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_SAY_EVERY_S = 20.0


def machine_code(cubin: bytes) -> str:
    """A hash of the ``.text.*`` sections of a cubin, whatever their order and names."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = []
    for index in range(count):
        name, _, _, _, offset, size = struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size)
        sections.append((name, offset, size))
    _, names, _ = sections[names_at]
    code = [
        hashlib.sha256(cubin[offset : offset + size]).digest()
        for name, offset, size in sections
        if cubin[names + name :].startswith(b".text.")
    ]
    if not code:
        raise ValueError("expected a cubin with machine code")
    return hashlib.sha256(b"".join(sorted(code))).hexdigest()


def source_text(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> str:
    """A hash of the files and macros of a compilation, without comments and layout."""
    found = hashlib.sha256(repr((source, arch, defines)).encode())
    for name, text in compiler.closure(source).items():
        bare = _STRING_OR_COMMENT.sub(lambda one: one[0] if one[0][0] == '"' else " ", text.decode())
        found.update(name.encode() + b"\0" + " ".join(bare.split()).encode() + b"\0")
    return found.hexdigest()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compiled_code")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--known", type=Path, help="JSON list of source texts that need no compilation")
    parser.add_argument("--texts", action="store_true", help="print the source texts alone")
    options = parser.parse_args(arguments)
    known = set(json.loads(options.known.read_text())) if options.known else set()
    # The default set of earlier trees has every pair.
    requests = covering.every_pair() if hasattr(covering, "every_pair") else covering.REQUESTS
    wanted = dict.fromkeys(
        (one.source, one.arch, one.defines) for one in requests if one.arch == options.arch
    )
    texts = {one: source_text(*one) for one in wanted}
    compiled = [] if options.texts else [one for one in wanted if texts[one] not in known]
    begin = said = time.monotonic()
    codes = {}
    if compiled:
        compiler.load_nvrtc()  # earlier trees load it in several threads at once, which fails
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda one: cache.cubin(one[0], one[1], dict(one[2])), compiled)
        for one, cubin in zip(compiled, found, strict=True):
            codes[one] = machine_code(cubin)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                about = f"{said - begin:4.0f} s, {len(codes)} of {len(compiled)}: {one[0]}"
                print(about, file=sys.stderr, flush=True)
    rows = [{"source": one[0], "text": texts[one], "code": codes.get(one)} for one in wanted]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
