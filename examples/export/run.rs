//! run FOLDER: run an exported product for 1, 16 and 300 tokens. No crates: the C code and the CUDA driver by FFI.
//!
//! `python examples/13_export_to_c.py FOLDER` writes FOLDER. Exits 1 if a bit of a result differs, 2 if something fails.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::{env, fs, process::exit, ptr};

/// sparse24_export.h.
mod sys {
    use super::*;

    #[repr(C)]
    pub struct Error {
        pub code: c_int,
        pub text: [c_char; 248],
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct Plan {
        pub library: *mut c_void,
        pub plan: *const c_void,
        pub row: *const i64,
        pub n: i64,
    }
    #[repr(C)]
    pub struct Operand {
        pub address: u64,
        pub stride: i64,
    }
    extern "C" {
        pub fn s24_open(folder: *const c_char, library: *mut *mut c_void, error: *mut Error) -> c_int;
        pub fn s24_close(library: *mut c_void);
        pub fn s24_find(library: *mut c_void, problem: *const c_char, n: i64, plan: *mut Plan, error: *mut Error) -> c_int;
        pub fn s24_workspace(plan: *const Plan, alignment: *mut u32) -> u64;
        pub fn s24_run(
            plan: *const Plan, operands: *const Operand, workspace: u64, workspace_bytes: u64, stream: *mut c_void,
            error: *mut Error,
        ) -> c_int;

        pub fn cuInit(flags: c_uint) -> c_int;
        pub fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int;
        pub fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
        pub fn cuCtxSetCurrent(context: *mut c_void) -> c_int;
        pub fn cuMemAlloc_v2(address: *mut u64, nbytes: usize) -> c_int;
        pub fn cuMemFree_v2(address: u64) -> c_int;
        pub fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, nbytes: usize) -> c_int;
        pub fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, nbytes: usize) -> c_int;
        pub fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> c_int;
        pub fn cuStreamSynchronize(stream: *mut c_void) -> c_int;
        pub fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int;
    }
}

type Result<T> = std::result::Result<T, String>;

fn cuda(status: c_int, call: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: CUDA error {status}")) }
}

/// Make a call that fills in an error.
fn checked(call: impl FnOnce(*mut sys::Error) -> c_int) -> Result<()> {
    let mut error = sys::Error { code: 0, text: [0; 248] };
    match call(&mut error) {
        0 => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(error.text.as_ptr()) }.to_string_lossy().into_owned()),
    }
}

/// Memory of the GPU.
struct Buffer(u64);

impl Buffer {
    fn new(nbytes: usize) -> Result<Self> {
        let mut address = 0;
        if nbytes > 0 {
            cuda(unsafe { sys::cuMemAlloc_v2(&mut address, nbytes) }, "cuMemAlloc")?;
        }
        Ok(Self(address))
    }
    fn of(content: &[u8]) -> Result<Self> {
        let made = Self::new(content.len())?;
        cuda(unsafe { sys::cuMemcpyHtoD_v2(made.0, content.as_ptr().cast(), content.len()) }, "cuMemcpyHtoD")?;
        Ok(made)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.0 != 0 {
            unsafe { sys::cuMemFree_v2(self.0) };
        }
    }
}

struct Library(*mut c_void);

impl Library {
    fn open(folder: &str) -> Result<Self> {
        let (folder, mut opened) = (text(folder)?, ptr::null_mut());
        checked(|error| unsafe { sys::s24_open(folder.as_ptr(), &mut opened, error) })?;
        Ok(Self(opened))
    }
    fn find(&self, problem: &str, n: i64) -> Result<sys::Plan> {
        let (problem, mut plan) = (text(problem)?, sys::Plan { library: self.0, plan: ptr::null(), row: ptr::null(), n });
        checked(|error| unsafe { sys::s24_find(self.0, problem.as_ptr(), n, &mut plan, error) })?;
        Ok(plan)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        unsafe { sys::s24_close(self.0) };
    }
}

fn text(given: &str) -> Result<CString> {
    CString::new(given).map_err(|error| error.to_string())
}

fn read(folder: &str, name: &str) -> Result<Vec<u8>> {
    fs::read(format!("{folder}/{name}")).map_err(|error| format!("{folder}/{name}: {error}"))
}

fn run(folder: &str, stream: *mut c_void) -> Result<bool> {
    let library = Library::open(&format!("{folder}/plans"))?;
    let weight = Buffer::of(&read(folder, "weight.packed")?)?;
    let mut same = true;
    for n in [1, 16, 300] {
        let (x, expected) = (Buffer::of(&read(folder, &format!("x.{n}"))?)?, read(folder, &format!("y.{n}"))?);
        let plan = library.find("gemm_sparse24_forward-f16-256x512", n)?;
        let nbytes = unsafe { sys::s24_workspace(&plan, ptr::null_mut()) };
        let (mut found, workspace) = (vec![0xff; expected.len()], Buffer::new(nbytes as usize)?);
        let y = Buffer::of(&found)?;
        let operand = |one: &Buffer, stride| sys::Operand { address: one.0, stride };
        let operands = [operand(&weight, 0), operand(&x, 512), operand(&y, 256)];
        checked(|error| unsafe { sys::s24_run(&plan, operands.as_ptr(), workspace.0, nbytes, stream, error) })?;
        cuda(unsafe { sys::cuStreamSynchronize(stream) }, "cuStreamSynchronize")?;
        cuda(unsafe { sys::cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), y.0, found.len()) }, "cuMemcpyDtoH")?;
        println!("{n} tokens: {}", if found == expected { "as expected" } else { "DIFFERENT" });
        same &= found == expected;
    }
    Ok(same)
}

fn on_device(folder: &str) -> Result<bool> {
    let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
    unsafe {
        cuda(sys::cuInit(0), "cuInit")?;
        cuda(sys::cuDevicePrimaryCtxRetain(&mut context, 0), "cuDevicePrimaryCtxRetain")?;
        cuda(sys::cuCtxSetCurrent(context), "cuCtxSetCurrent")?;
        // The stream waits for the copies, which run on the default stream, and they for it.
        cuda(sys::cuStreamCreate(&mut stream, 0), "cuStreamCreate")?;
        let found = run(folder, stream);
        cuda(sys::cuStreamDestroy_v2(stream), "cuStreamDestroy")?;
        cuda(sys::cuDevicePrimaryCtxRelease_v2(0), "cuDevicePrimaryCtxRelease")?;
        found
    }
}

fn main() {
    let Some(folder) = env::args().nth(1) else {
        eprintln!("usage: run FOLDER");
        exit(2);
    };
    match on_device(&folder) {
        Ok(same) => exit(if same { 0 } else { 1 }),
        Err(error) => {
            eprintln!("{error}");
            exit(2)
        }
    }
}
