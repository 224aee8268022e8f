"""Workers that a script plays."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from sparse24_plans.tuning import search

from .cases import H200

PLAYED = """
import json, os, sys, time
state = sys.argv[1]
# Algorithm 0 is wrong, 2 and 4 end the process, 5 is the best. With n=32 the final timing ends it, too.
# A second argument makes 4 hang instead.
def say(**m): print(json.dumps(m), flush=True)
with open(state, "a") as log:
    log.write("started\\n")
for line in sys.stdin:
    r = json.loads(line)
    tried = [k["configuration"] for k in r.get("known", [])]
    with open(state, "a") as log:
        log.write(json.dumps([r["do"], r["problem"]["n"], tried]) + "\\n")
    if r["problem"]["n"] == 48:
        say(event="failed", error="ValueError: played")
        continue
    if r["do"] == "self_test":
        say(event="trying", configuration=r["configuration"])
        drift = r["problem"]["n"] == 64 and not r["repeat"]
        say(event="done", sound=r["problem"]["n"] != 24, digest=1 + drift)
        continue
    known = {json.dumps(k["configuration"]): k["us"] for k in r["known"]}
    for c in [{}] + [{"algorithm": i} for i in range(6)]:
        if json.dumps(c) in known:
            continue
        say(event="trying", configuration=c)
        if c.get("algorithm") == 2:
            os._exit(70)
        if c.get("algorithm") == 4:
            time.sleep(60 if sys.argv[2:] else 0)
            os._exit(70)
        us = None if c.get("algorithm") == 0 else 9.0 - c.get("algorithm", 0)
        known[json.dumps(c)] = us
        say(event="tried", configuration=c, us=us)
    say(event="trying", configuration=None)
    if r["problem"]["n"] == 32:
        os._exit(70)
    say(event="done", times=[[json.loads(k), us] for k, us in known.items() if us is not None])
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """``tune`` with played workers, for an H200; the requests that they got."""
    script, log = tmp_path / "worker.py", tmp_path / "log"
    script.write_text(PLAYED)
    monkeypatch.setattr(search, "resolve", lambda device: H200)
    command = [sys.executable, str(script), str(log)]
    monkeypatch.setattr(search, "Worker", partial(search.Worker, command=command))

    def requests() -> list:
        return [line if line == "started" else json.loads(line) for line in log.read_text().splitlines()]

    return requests


@pytest.fixture
def hanging(played, monkeypatch):
    """``played``, whose workers hang where they otherwise end for the second time."""
    monkeypatch.setattr(search, "_SILENCE_S", 2.0)
    command = [*search.Worker.keywords["command"], "hang"]
    monkeypatch.setattr(search, "Worker", partial(search.Worker, command=command))
    return played
