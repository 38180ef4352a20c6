//! A node's CPU kernel: created once per session, run at every call.

use crate::api::Api;
use crate::context::{KernelContext, KernelInfo, MAX_RANK, TensorPtr};
use crate::failure::Failure;
use crate::host::SessionHost;
use crate::infer;
use crate::objects::{CpuMemory, made};
use crate::op::NodeKernel;
use crate::pages;
use crate::settings::{PackWeights, Settings};
use crate::threads::SessionThreads;
use half::{bf16, f16};
use moh_cpu::{Packed, Packing, Precision};
use moh_operators::{Attributes, DType, Data, DataMut, Error, Operator, Scalar, Tensor};
use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;

/// A node's checked attributes and packed weights.
pub(crate) struct Kernel {
    api: Api,
    attributes: Attributes,
    memory: CpuMemory,
    threads: SessionThreads,
    /// The packed form of each input, if any; empty if nothing is packed.
    packed: Vec<Option<Packed>>,
    precision: Precision,
}

/// Reads and checks a node's attributes, and the shapes of its inputs as far as they are known.
///
/// Some host versions ignore errors of shape inference, but none ignores errors when a kernel is created.
pub(crate) fn read_node(operator: &'static Operator, info: &KernelInfo<'_>) -> Result<Attributes, Failure> {
    let attributes = Attributes::read(operator, |def| info.attribute(def))?;
    infer::check(&attributes, &info.input_sizes()?)?;
    Ok(attributes)
}

impl NodeKernel for Kernel {
    const PROVIDER: Option<&'static CStr> = None;

    fn new(
        api: Api,
        operator: &'static Operator,
        _: DType,
        settings: Settings,
        info: &KernelInfo<'_>,
    ) -> Result<Kernel, Failure> {
        let attributes = read_node(operator, info)?;
        let packed = pack_weights(&attributes, info, settings)?;
        let (memory, threads) = (CpuMemory::new(api)?, SessionThreads::new());
        Ok(Kernel { api, attributes, memory, threads, packed, precision: settings.precision })
    }

    fn api(&self) -> Api {
        self.api
    }

    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure> {
        let operator = self.attributes.operator();
        if let Some(index) = operator.in_place {
            return self.compute_in_place(context, index);
        }
        let read = |index: usize| {
            let Some(tensor) = context.input(index)? else { return Ok(None) };
            // SAFETY: the tensor is an input of this context.
            let given = unsafe { Given::new(operator, index, tensor)? };
            Ok(Some(match self.packed.get(index).and_then(Option::as_ref) {
                Some(packed) => Input::Both(given, packed),
                None => Input::Given(given),
            }))
        };
        let inputs: Vec<Option<Input<'_>>> = (0..context.input_count()?).map(read).collect::<Result<_, Failure>>()?;
        let borrowed: Vec<Option<moh_cpu::Input<'_>>> =
            inputs.iter().map(|input| input.as_ref().map(Input::borrow)).collect();
        let host = SessionHost::new(context, &self.memory, &self.threads, self.precision);
        moh_cpu::run_into(&self.attributes, &borrowed, &host, |dtype, dims| {
            let data = context.output(dims)?;
            let len = dims.iter().product();
            // SAFETY: the host created an output of the registered element type, which is the operator's for these
            // inputs, with these dimensions. Nothing else refers to it: the operators declare no aliases, so it does
            // not share memory with an input.
            unsafe { output_of(dtype, data, len) }
        })?;
        Ok(())
    }
}

impl Kernel {
    /// Runs an operator whose input `index` may be in the memory of its output, as a caller arranges that binds both.
    fn compute_in_place(&self, context: &KernelContext<'_>, index: usize) -> Result<(), Failure> {
        let operator = self.attributes.operator();
        let read = |input: usize| {
            let tensor = context.input(input)?;
            tensor.map(|tensor| Ok((check_input(operator, input, &tensor)?, tensor))).transpose()
        };
        let tensors: Vec<Option<(DType, TensorPtr)>> =
            (0..context.input_count()?).map(read).collect::<Result<_, Failure>>()?;
        let described: Vec<Option<(&[usize], DType)>> =
            tensors.iter().map(|tensor| tensor.as_ref().map(|(dtype, tensor)| (tensor.dims(), *dtype))).collect();
        let (dtype, shape) = operator.validate(&self.attributes, &described)?;
        let dtype = operator.output_dtype(dtype);
        let data = context.output(&shape)?;
        let output = range(data, &shape, dtype);
        let mut inputs: Vec<Option<Input<'_>>> = Vec::with_capacity(tensors.len());
        for (input, tensor) in tensors.iter().enumerate() {
            inputs.push(match tensor {
                None => None,
                Some((dtype, tensor)) if input == index && tensor.data == data && tensor.dims() == shape => {
                    Some(Input::InPlace(tensor.dims(), *dtype))
                }
                Some((dtype, tensor)) => {
                    let found = range(tensor.data, tensor.dims(), *dtype);
                    let apart = found.end <= output.start || output.end <= found.start;
                    // SAFETY: the tensor is an input of this context. What overlaps the output is copied before that is
                    // written.
                    Some(Input::Given(unsafe { Given::read(operator, input, tensor, !apart)? }))
                }
            });
        }
        let borrowed: Vec<Option<moh_cpu::Input<'_>>> =
            inputs.iter().map(|input| input.as_ref().map(Input::borrow)).collect();
        let host = SessionHost::new(context, &self.memory, &self.threads, self.precision);
        // SAFETY: as in `compute`; no input that is borrowed overlaps the output.
        let output = unsafe { output_of(dtype, data, shape.iter().product())? };
        moh_cpu::run(&self.attributes, &borrowed, output, &host)?;
        Ok(())
    }
}

/// The addresses of a tensor's elements.
fn range(data: *mut c_void, dims: &[usize], dtype: DType) -> Range<usize> {
    data.addr()..data.addr().saturating_add(bytes_of(dtype, dims))
}

/// What so many elements take.
fn bytes_of(dtype: DType, dims: &[usize]) -> usize {
    let size = match dtype {
        DType::U8 => 1,
        DType::F16 | DType::BF16 => 2,
        DType::F32 => 4,
        DType::I64 => 8,
    };
    dims.iter().fold(size, |bytes: usize, &dim| bytes.saturating_mul(dim))
}

/// The output's elements.
///
/// # Safety
/// As [`elements_mut`], for elements of this type.
unsafe fn output_of<'c>(dtype: DType, data: *mut c_void, len: usize) -> Result<DataMut<'c>, Failure> {
    // SAFETY: the caller's contract.
    unsafe {
        Ok(match dtype {
            DType::F32 => DataMut::F32(elements_mut(data, len)?),
            DType::F16 => DataMut::F16(elements_mut(data, len)?),
            DType::BF16 => DataMut::BF16(elements_mut(data, len)?),
            DType::U8 => DataMut::U8(elements_mut(data, len)?),
            DType::I64 => DataMut::I64(elements_mut(data, len)?),
        })
    }
}

/// Packs the node's constant inputs, if its kernel supports it and the session wants it.
fn pack_weights(
    attributes: &Attributes,
    info: &KernelInfo<'_>,
    settings: Settings,
) -> Result<Vec<Option<Packed>>, Failure> {
    let all = match settings.pack_weights {
        PackWeights::Never => return Ok(Vec::new()),
        PackWeights::OfFiles => false,
        PackWeights::Always => true,
    };
    let pack = |index| {
        let Some(tensor) = info.constant(index)? else { return Ok(None) };
        let (data, bytes) =
            (tensor.data.cast_const(), bytes_of(check_input(attributes.operator(), index, &tensor)?, tensor.dims()));
        // SAFETY: the tensor is a constant of the node, which is alive.
        if !all && !unsafe { pages::in_file(data, bytes) } {
            return Ok(None);
        }
        // SAFETY: as above.
        let input = unsafe { Given::new(attributes.operator(), index, tensor)? };
        let packing = Packing { precision: settings.precision, beside: true, all };
        let packed = match moh_cpu::pack(attributes, index, input.tensor(), packing) {
            // Nobody asked for it.
            Err(Error::OutOfMemory { .. }) if !all => None,
            packed => packed?,
        };
        if packed.is_some() {
            // SAFETY: as above; nobody writes to a constant.
            unsafe { pages::give_back(data, bytes) };
        }
        Ok(packed)
    };
    (0..info.input_count()?).map(pack).collect()
}

/// An input of a call.
enum Input<'c> {
    Given(Given<'c>),
    /// A constant, which was packed when the kernel was created.
    Both(Given<'c>, &'c Packed),
    /// The output's own memory.
    InPlace(&'c [usize], DType),
}

impl Input<'_> {
    fn borrow(&self) -> moh_cpu::Input<'_> {
        match self {
            Input::Given(given) => given.tensor().into(),
            Input::Both(given, packed) => moh_cpu::Input::Both(given.tensor(), packed),
            Input::InPlace(dims, dtype) => moh_cpu::Input::InPlace(dims, *dtype),
        }
    }
}

/// A tensor provided by the host.
struct Given<'c> {
    rank: usize,
    dims: [usize; MAX_RANK],
    data: Elements<'c>,
}

/// Elements in the host's memory, or an aligned copy.
enum Elements<'c> {
    F32(Cow<'c, [f32]>),
    F16(Cow<'c, [f16]>),
    BF16(Cow<'c, [bf16]>),
    U8(Cow<'c, [u8]>),
    I64(Cow<'c, [i64]>),
}

impl<'c> Given<'c> {
    /// # Safety
    /// `tensor` is input `index` of a context that lives for `'c`.
    unsafe fn new(operator: &'static Operator, index: usize, tensor: TensorPtr) -> Result<Given<'c>, Failure> {
        // SAFETY: the caller's contract.
        unsafe { Given::read(operator, index, &tensor, false) }
    }

    /// As [`Given::new`]; a copy on request.
    ///
    /// # Safety
    /// As [`Given::new`]. What is copied may be written to afterwards.
    unsafe fn read(
        operator: &'static Operator,
        index: usize,
        tensor: &TensorPtr,
        copy: bool,
    ) -> Result<Given<'c>, Failure> {
        let TensorPtr { rank, dims, data, .. } = *tensor;
        let dtype = check_input(operator, index, tensor)?;
        let name = input_name(operator, index);
        let len = dims[..rank].iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).filter(|&n| n <= MAX_ELEMENTS);
        let len = len.ok_or_else(|| Failure::Host(format!("input {name} has too many elements")))?;
        // SAFETY: the host's tensor of this type has as many elements as the product of its dimensions, and nothing
        // writes to it while the node runs.
        let data = unsafe {
            match dtype {
                DType::F32 => Elements::F32(elements(data, len, copy)?),
                DType::F16 => Elements::F16(elements(data, len, copy)?),
                DType::BF16 => Elements::BF16(elements(data, len, copy)?),
                DType::U8 => Elements::U8(elements(data, len, copy)?),
                DType::I64 => Elements::I64(elements(data, len, copy)?),
            }
        };
        Ok(Given { rank, dims, data })
    }

    fn tensor(&self) -> Tensor<'_> {
        let data = match &self.data {
            Elements::F32(data) => Data::F32(data),
            Elements::F16(data) => Data::F16(data),
            Elements::BF16(data) => Data::BF16(data),
            Elements::U8(data) => Data::U8(data),
            Elements::I64(data) => Data::I64(data),
        };
        Tensor { shape: &self.dims[..self.rank], data }
    }
}

fn input_name(operator: &Operator, index: usize) -> &'static str {
    operator.inputs.get(index).map_or("beyond the last", |operand| operand.name)
}

/// The element type of input `index`. Fails if rank or type are not supported by any operator.
pub(crate) fn check_input(operator: &Operator, index: usize, tensor: &TensorPtr) -> Result<DType, Failure> {
    let name = input_name(operator, index);
    if tensor.rank > MAX_RANK {
        let (expected, found) = (format!("at most {MAX_RANK} dimensions"), tensor.rank.to_string());
        return Err(Error::Shape { operator: operator.name, input: name, expected, found }.into());
    }
    let unknown = || Failure::Host(format!("input {name} has ONNX element type {}", tensor.element_type.0));
    tensor.element_type.dtype().ok_or_else(unknown)
}

/// A larger count could overflow the address space.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<i64>();

/// The elements at `data`; copied only on request or if misaligned, since an initializer in a memory-mapped file can have any
/// alignment.
///
/// # Safety
/// `data` points to `len` elements, at most [`MAX_ELEMENTS`], which are not written to during `'c` unless they are copied.
unsafe fn elements<'c, T: Scalar>(data: *mut c_void, len: usize, copy: bool) -> Result<Cow<'c, [T]>, Failure> {
    if len == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    let data = made(data, "input data")?.cast::<T>();
    if data.is_aligned() && !copy {
        // SAFETY: the caller's contract; the pointer is aligned.
        return Ok(Cow::Borrowed(unsafe { slice::from_raw_parts(data.as_ptr(), len) }));
    }
    let mut copy: Vec<T> = Vec::new();
    copy.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: len * size_of::<T>() })?;
    // SAFETY: the vector has room for `len` elements, all of which are copied bytewise, which needs no alignment.
    unsafe {
        ptr::copy_nonoverlapping(data.cast::<u8>().as_ptr(), copy.as_mut_ptr().cast::<u8>(), len * size_of::<T>());
        copy.set_len(len);
    }
    Ok(Cow::Owned(copy))
}

/// The elements of an output.
///
/// # Safety
/// `data` points to writable memory for `len` elements, to which nothing else refers during `'c`.
unsafe fn elements_mut<'c, T: Scalar>(data: *mut c_void, len: usize) -> Result<&'c mut [T], Failure> {
    let data = match len {
        0 => NonNull::dangling(),
        _ => made(data, "output data")?.cast::<T>(),
    };
    if !data.is_aligned() {
        return Err(Failure::Host("onnxruntime returned a misaligned output".to_owned()));
    }
    // SAFETY: the caller's contract; the pointer is aligned. An empty slice may have any aligned pointer.
    Ok(unsafe { slice::from_raw_parts_mut(data.as_ptr(), len) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_copied_only_if_misaligned() {
        let numbers = [1.0f32, 2.0, 3.0, 4.0];
        let start = (&raw const numbers).cast_mut().cast::<c_void>();
        for offset in 0..4 {
            // SAFETY: three elements inside an array of four, at byte offsets 0 to 3.
            let found = unsafe { elements::<f32>(start.byte_add(offset), 3, false) };
            match found {
                Ok(Cow::Borrowed(found)) => assert_eq!((offset, found), (0, &numbers[..3])),
                Ok(Cow::Owned(found)) => {
                    let bytes = numbers.map(f32::to_ne_bytes).concat();
                    let expected =
                        bytes[offset..].chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
                    assert!(offset != 0 && found.iter().copied().eq(expected.take(3)));
                }
                Err(error) => assert_eq!(error.to_string(), ""),
            }
        }
    }

    #[test]
    fn null_data_is_an_error() {
        // SAFETY: null is refused, and zero elements need no memory.
        unsafe {
            assert!(elements::<f32>(ptr::null_mut(), 1, false).is_err());
            assert!(elements::<f32>(ptr::null_mut(), 0, false).is_ok_and(|e| e.is_empty()));
            assert!(elements_mut::<f32>(ptr::null_mut(), 1).is_err());
            assert!(elements_mut::<f32>(ptr::null_mut(), 0).is_ok_and(|e| e.is_empty()));
            assert!(elements_mut::<f32>(ptr::without_provenance_mut(2), 1).is_err());
        }
    }
}
