//! The CUDA kernels as one C function, for programs with their own tensors and streams. `ci/gpu/kernels.py` calls it
//! with PyTorch's.
//!
//! `cargo build --release -p moh-cuda --features kernels --example moh_cuda` makes `target/release/examples/libmoh_cuda.so`.

use moh_cuda::{Arena, DeviceTensor, Driver, Stream};
use moh_operators::{AttributeKind, Attributes, DType, Value};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::catch_unwind;
use std::slice;

/// A contiguous tensor in device memory; an absent input has `rank < 0`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MohTensor {
    /// Address of the first element.
    pub data: u64,
    /// 0: float32, 1: float16, 2: bfloat16.
    pub dtype: c_int,
    /// Number of dimensions, at most 8.
    pub rank: c_int,
    /// The dimensions, outermost first.
    pub dims: [u64; 8],
}

/// Launches an operator on a stream. `attributes` has the form `num_heads=8 scale=0.125`; the workspace is device
/// memory.
///
/// Returns the size of the required workspace in bytes, or -1 and a message of at most `room` bytes in `error`.
///
/// # Safety
/// Strings are NUL-terminated; pointers are valid for the stated number of elements; device memory stays valid until
/// the stream has finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moh_cuda_run(
    operator: *const c_char,
    attributes: *const c_char,
    inputs: *const MohTensor,
    count: usize,
    output: *const MohTensor,
    stream: *mut c_void,
    workspace: u64,
    workspace_bytes: usize,
    error: *mut c_char,
    room: usize,
) -> i64 {
    let run = || {
        // SAFETY: as the caller promises.
        unsafe {
            let (operator, attributes) = (text(operator)?, text(attributes)?);
            let inputs = slice::from_raw_parts(inputs, count);
            let arena = Arena::new(workspace, workspace_bytes);
            let stream = Stream::borrow(driver()?, stream.cast()).map_err(|e| e.to_string())?;
            call(operator, attributes, inputs, &*output, &stream, &arena)?;
            i64::try_from(arena.used()).map_err(|e| e.to_string())
        }
    };
    match catch_unwind(run).unwrap_or_else(|_| Err("a panic in the launcher".to_owned())) {
        Ok(used) => used,
        Err(message) => {
            let length = message.len().min(room.saturating_sub(1));
            if room > 0 {
                // SAFETY: at most `room` bytes including the terminator.
                unsafe {
                    error.copy_from_nonoverlapping(message.as_ptr().cast(), length);
                    error.add(length).write(0);
                }
            }
            -1
        }
    }
}

/// # Safety
/// The string is NUL-terminated.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, String> {
    // SAFETY: as promised.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|e| e.to_string())
}

fn driver() -> Result<Driver, String> {
    Driver::get().map_err(|e| e.to_string())
}

/// # Safety
/// As [`moh_cuda::run`].
unsafe fn call(
    name: &str,
    text: &str,
    inputs: &[MohTensor],
    output: &MohTensor,
    stream: &Stream<'_>,
    arena: &Arena,
) -> Result<(), String> {
    let operator = moh_operators::operator(name).ok_or_else(|| format!("there is no operator {name}"))?;
    let find = |name: &str| text.split_whitespace().find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let attributes = Attributes::read(operator, |def| match def.kind {
        AttributeKind::Int => find(def.name)?.parse().ok().map(Value::Int),
        AttributeKind::Float => find(def.name)?.parse().ok().map(Value::Float),
        AttributeKind::Ints => {
            let list = find(def.name)?.split(',').filter(|number| !number.is_empty());
            list.map(|number| number.parse().ok()).collect::<Option<_>>().map(Value::Ints)
        }
    });
    let attributes = attributes.map_err(|e| e.to_string())?;
    let shapes: Vec<Vec<usize>> = inputs.iter().chain([output]).map(shape).collect();
    let inputs: Vec<Option<DeviceTensor<'_>>> = inputs
        .iter()
        .zip(&shapes)
        .map(|(tensor, shape)| (tensor.rank >= 0).then(|| describe(tensor, shape)).transpose())
        .collect::<Result<_, String>>()?;
    let output = describe(output, &shapes[shapes.len() - 1])?;
    // SAFETY: as promised.
    unsafe { moh_cuda::run(&attributes, &inputs, output, stream, arena) }.map_err(|e| e.to_string())
}

fn shape(tensor: &MohTensor) -> Vec<usize> {
    let rank = usize::try_from(tensor.rank).unwrap_or(0).min(tensor.dims.len());
    tensor.dims[..rank].iter().map(|&dim| dim as usize).collect()
}

fn describe<'a>(tensor: &MohTensor, shape: &'a [usize]) -> Result<DeviceTensor<'a>, String> {
    let dtype = match tensor.dtype {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::BF16,
        3 => DType::U8,
        4 => DType::I64,
        other => return Err(format!("there is no element type {other}")),
    };
    Ok(DeviceTensor { shape, dtype, ptr: tensor.data })
}
