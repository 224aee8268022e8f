"""Compressions that fail leave nothing behind, and their memory is bounded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sparse24_plans import (
    BackendUnavailableError,
    InvalidProblemError,
    StorageError,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint

from .models import (
    dense_file,
    random_array,
    run_python,
)


def test_a_device_that_is_not_here(files):
    source, out = files
    dense_file(source, {"a.weight": random_array((8, 16), "f32")})
    with pytest.raises(BackendUnavailableError):
        compress_checkpoint(source, out, device=99)
    with pytest.raises(InvalidProblemError, match="device"):
        compress_checkpoint(source, out, device="gpu")
    assert not out.exists()


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_a_checkpoint_is_not_compressed_onto_itself(files, link):
    source, out = files
    dense_file(source, {"w": random_array((8, 8))})
    before = source.read_bytes()
    if link is not None:
        link(source, out)
    with pytest.raises(InvalidProblemError, match="destination: expected another path than the source"):
        compress_checkpoint(source, out if link else source)
    assert source.read_bytes() == before


def test_a_compressed_checkpoint_is_not_compressed_again(files):
    source, out = files
    dense_file(source, {"w": random_array((4, 16)), "norm": random_array((4,))})
    compress_checkpoint(source, out)
    with pytest.raises(InvalidProblemError, match="compressed already"):
        compress_checkpoint(out, out.with_name("again"))
    assert sorted(out.parent.iterdir()) == sorted(files)


def test_a_name_that_is_taken(files):
    source, out = files
    dense_file(source, {"w": random_array((8, 8)), "w.meta24": random_array((3,))})
    with pytest.raises(InvalidProblemError, match=r"w\.meta24: expected names that occur once"):
        compress_checkpoint(source, out)


def test_missing_files_and_folders(files):
    source, out = files
    with pytest.raises(StorageError) as caught:
        compress_checkpoint(source, out)
    assert caught.value.filename == str(source)
    dense_file(source, {"w": random_array((8, 8))})
    with pytest.raises(StorageError) as caught:
        compress_checkpoint(source, source.parent / "no" / "folder")
    assert caught.value.filename.endswith("no/folder")


def test_a_run_that_is_interrupted_leaves_nothing(files):
    source, out = files
    dense_file(source, {"a": random_array((8, 8)), "b": random_array((8, 8))})
    out.write_bytes(b"precious")

    def interrupt(report: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(source, out, on_tensor=interrupt)
    assert sorted(source.parent.iterdir()) == sorted(files)
    assert out.read_bytes() == b"precious"


def test_a_full_disk_leaves_no_half_file(files):
    source, out = files
    dense_file(source, {"w": random_array((256, 512))})
    out.write_bytes(b"precious")
    code = """
        import resource, signal, sys
        from sparse24_plans import StorageError
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            compress_checkpoint(sys.argv[1], sys.argv[2])
        except StorageError as error:
            import errno
            print(errno.errorcode[error.errno], error.filename)
    """
    assert run_python(code, source, out) == f"EFBIG {out}"
    assert sorted(source.parent.iterdir()) == sorted(files)
    assert out.read_bytes() == b"precious"


def sparse_file(path: Path, count: int, nbytes: int) -> None:
    """A checkpoint of ``count`` bf16 tensors of zeros, which takes no room on the disk."""
    entries = {
        f"w{i}": {
            "dtype": "BF16",
            "shape": [nbytes // 8192, 4096],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + count * nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_file(files):
    source, out = files
    tensor, count = 16 << 20, 8
    sparse_file(source, count, tensor)
    code = """
        import re, sys, numpy
        from sparse24_plans import Sparse24Weight
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        Sparse24Weight.prune_compress(numpy.zeros((256, 4096), "f2"))  # where numba is, its compiler's memory
        # Not ru_maxrss: that starts from what the parent process had.
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
        before = peak()
        compress_checkpoint(sys.argv[1], sys.argv[2], device="host")
        print(peak() - before)
    """
    grown = int(run_python(code, source, out)) << 10
    assert grown < 2 * tensor, f"of {count} tensors"
