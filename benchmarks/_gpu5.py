import time

t0 = time.time()
from benchmarks.prepare import *
from benchmarks.prepare import _copies
from sparse24_plans import *
from sparse24_plans import prepare
from sparse24_plans.backends import tile_prune as tp

B = ElementKind("bf16")
for shape in ((8192, 8192), (28672, 4096)):
    js = {j.op: j for j in jobs(*shape, B)}
    j = js["tile_prune"]
    sets = [j.make() for _ in range(2)]
    cs = [_copies(sum(b.nbytes for b in sets[0][1]), 2)]
    for a in (0, 132, 264, 528, 1056, 0):
        orig = tp._defines
        tp._defines = lambda d: {**orig(d), "AHEAD": a}
        prepare._select.cache_clear()
        plan = type(j.plan).select(j.plan.descriptor, device=0)
        tp._defines = orig
        cs.append(Contender(f"{len(cs)}: ahead {a}", [plan.bind(x).launch for x, _ in sets]))
    prepare._select.cache_clear()
    j = js["compress"]
    csets = [j.make() for _ in range(2)]
    for i in range(3):
        cs.append(Contender(f"compress {i}", [j.plan.bind(x).launch for x, _ in csets]))
    cs.append(_copies(sum(b.nbytes for b in csets[0][1]), 2))
    cs[-1].name = "copy compress"
    for i in range(2):
        cs.append(Contender(f"compress again {i}", [j.plan.bind(x).launch for x, _ in csets]))
    for k_, v_ in time_contenders(cs, rounds=15).items():
        print(shape, k_, f"{v_:.2f}", flush=True)
print(f"{time.time() - t0:.1f}s")
