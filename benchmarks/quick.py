import time, numpy as np, cupy, sys
sys.path.insert(0,'.')
from benchmarks.harness import *
from sparse24_plans import *
from sparse24_plans.backends.inflate import Inflate
from sparse24_plans.devices import cuda_properties
print(environment())
props=cuda_properties(0)
for el,dt in (('bf16','u2'),('f32','u4')):
  for m,k in ((8192,8192),(28672,4096)):
    E=ElementKind(el); inf=Inflate(E,props)
    g=cupy.random.standard_normal((m,k),dtype=cupy.float32)
    d=(g if el=='f32' else g.astype('f2').view('u2'))
    w=Sparse24Weight.prune_compress(d,element=None if el=='f32' else el)
    out=cupy.empty((m,k),dt); n=copies_beyond_l2(w.nbytes)
    ws=[PackedWeight.canonical(w)]+[PackedWeight.canonical(Sparse24Weight(w.values_view.bits().copy() if el!='f32' else w.values.copy(),w.metadata.copy(),element=el,validate=False)) for _ in range(n-1)]
    outs=[cupy.empty((m,k),dt) for _ in ws]
    total=w.nbytes+m*k*E.itemsize
    src=[cupy.empty(total//2,'u1') for _ in ws]; dst=[cupy.empty(total//2,'u1') for _ in ws]
    def cp(s,d): return lambda st: cupy.cuda.runtime.memcpyAsync(d.data.ptr,s.data.ptr,s.nbytes,3,st)
    t=time_contenders([Contender('inflate',[inf.prepare(p,o.data.ptr) for p,o in zip(ws,outs)]),Contender('copy',[cp(s,d) for s,d in zip(src,dst)])])
    assert (outs[0].view(dt)==w.decompress().view(dt)).all()
    print(el,m,k,t,'ratio',t['copy']/t['inflate'],'TB/s',total/t['inflate']/1e6)
    del ws,outs,src,dst
def gemm(el,n,m,k,be,op='forward'):
    E=ElementKind(el)
    g=cupy.random.standard_normal((m,k),dtype=cupy.float32)
    d=(g if el=='f32' else g.astype('f2').view('u2'))
    w=Sparse24Weight.prune_compress(d,element=None if el=='f32' else el)
    p=GemmSparse24Plan.select(GemmSparse24Descriptor(n=n,m=m,k=k,element=el,op=op),device=0,preference=PlanPreference(prefer_backend=be))
    a,b=(k,m) if op=='forward' else (m,k)
    x=cupy.random.standard_normal((n,a),dtype=cupy.float32); x=x if el=='f32' else x.astype('f2').view('u2')
    y=cupy.empty((n,b),f'u{E.itemsize}') if el!='f32' else cupy.empty((n,b),'f4')
    vx=TensorView.of(x,element=None if el=='f32' else E); vy=TensorView.of(y,element=None if el=='f32' else E)
    ws=cupy.empty(max(p.workspace_size(),1),'u1')
    args=GemmSparse24Args(p.pack(w),vx,vy) if op=='forward' else DgradSparse24Args(p.pack(w),vx,vy)
    return p,args,ws
for el,n,m,k,op in (('f32',4096,4096,4096,'forward'),('f32',4096,4096,4096,'dgrad'),('bf16',4096,4096,4096,'forward'),('bf16',8192,8192,8192,'forward'),('bf16',512,4096,4096,'forward'),('bf16',16,4096,4096,'forward'),('bf16',1,4096,4096,'forward'),('bf16',64,28672,4096,'forward')):
    r={}
    cs=[]
    for be in ('inflate_strict','inflate_cublas'):
        p,a,ws=gemm(el,n,m,k,be,op); bd=p.bind(a,workspace=ws); cs.append(Contender(be,[bd.launch]))
    t=time_contenders(cs,rounds=5)
    print(el,n,m,k,op,t,'strict dense-equiv TFLOP/s',2*n*m*k/t['inflate_strict']/1e6)
def host(f,reps=200,rounds=15):
    ts=[]
    for _ in range(rounds):
        cupy.cuda.Device().synchronize(); t=time.perf_counter()
        for _ in range(reps): f()
        ts.append((time.perf_counter()-t)/reps*1e6)
    return sorted(ts)[len(ts)//2]
for be in ('inflate_strict','inflate_cublas'):
  for ep in ('identity','bias'):
    p,a,ws=gemm('bf16',1,64,64,be); d=p.descriptor
    bd=p.bind(a,workspace=ws); s=cupy.cuda.Stream(non_blocking=True); h=s.ptr
    print(be,'launch',host(lambda:bd.launch(h)),'launch(None)',host(bd.launch),'run views',host(lambda:p.run(a,workspace=ws,stream=h)))
    x=cupy.zeros((1,64),'f4');y=cupy.zeros((1,64),'f4')
  p2,a2,ws2=gemm('f32',1,64,64,be); a3=GemmSparse24Args(a2.weight,x,y)
  print(be,'run cupy arrays',host(lambda:p2.run(a3,workspace=ws2,stream=h)))
  import torch
  tx=torch.zeros(1,64,device='cuda'); ty=torch.zeros(1,64,device='cuda'); a4=GemmSparse24Args(a2.weight,tx,ty)
  print(be,'run torch tensors',host(lambda:p2.run(a4,workspace=ws2,stream=h)))
d=p.descriptor
print('select cached',host(lambda:GemmSparse24Plan.select(d,device=0,preference=p.preference)))
print('select fresh descriptor',host(lambda:GemmSparse24Plan.select(GemmSparse24Descriptor(n=1,m=64,k=64,element='bf16'),device=0)))
import subprocess
for _ in range(3): print(subprocess.run([sys.executable,'-c','import time;t=time.perf_counter();import sparse24_plans;print(time.perf_counter()-t)'],capture_output=True,text=True).stdout)
