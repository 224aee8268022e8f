import sys
sys.argv=sys.argv[:1]+sys.argv[1:]
args=[int(a) for a in sys.argv[1:]]; sys.argv=sys.argv[:1]
from benchmarks.tune_mma_sp import *
m,k,n,sl,ms=args
mat=Matrix(m,k,E_); w=[packing.pack(x) for x in mat.weights[:2]]
cell=Cell(mat,n); desc=GemmSparse24Descriptor(n=n,m=m,k=k,element=E_)
s=B.shape_of(n,m,132,sl,ms); print(s)
f=[make(desc,s,x,cell._x,cell._y) for x in w]
for g in f+f: g(0)
cupy.cuda.Device().synchronize()
