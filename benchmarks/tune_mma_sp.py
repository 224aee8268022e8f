"""Development: cuts of the decode kernel beside dense cuBLAS."""
import sys, ctypes
import cupy, numpy as np
from sparse24_plans import *
from sparse24_plans import packing, jit
from sparse24_plans.backends import mma_sp as B
from benchmarks.harness import *
from benchmarks.problems import *
def make(desc, shape, w, x, y):
    f = jit.load("sm80_gemm_mma_sp.cu","gemm_mma_sp",256,"sm_90a",0,B.defines(desc,shape),shared_bytes=shape.shared_bytes)
    p = B._Parameters(w.buffers[0].address,x.data.ptr,0,y.data.ptr,desc.n,desc.m,desc.k,desc.k,desc.m,-(-desc.m//64),-(-desc.k//128),1.0)
    return f.bind(shape.blocks,p)
E_=ElementKind("bf16")
if __name__!="__main__": SHAPES=()
shapes=SHAPES if len(sys.argv)<2 else [SHAPES[int(i)] for i in sys.argv[1].split(',')]
for m,k in shapes:
    mat=Matrix(m,k,E_); packed=[packing.pack(w) for w in mat.weights]
    for n in (1,16,32,64,128):
        cell=Cell(mat,n); desc=GemmSparse24Descriptor(n=n,m=m,k=k,element=E_)
        cs=[cell.dense()]; info={}
        for sl in (4,8):
            for ms in (2,3,4,8):
                s=B.shape_of(n,m,132,sl,ms)
                if s in info.values(): continue
                name=f"s{sl}st{s.stages}b{s.blocks}"
                ls=[make(desc,s,w,cell._x,cell._y) for w in packed]
                e=cell.rel_error(ls[0])
                if not e<5e-3: print("WRONG",m,k,n,s,e); continue
                info[name]=s; cs.append(Contender(name,ls))
        t=time_contenders(cs,rounds=9,round_ms=1.5)
        gb=packed[0].nbytes
        print(m,k,n,' '.join(f"{a}:{b:.1f}({gb/b/1e6:.2f}T)" if a!='dense' else f"dense:{b:.1f}" for a,b in t.items()), 'best x%.2f'%(t['dense']/min(v for a,v in t.items() if a!='dense')),flush=True)
    del mat,packed; cupy.get_default_memory_pool().free_all_blocks()
