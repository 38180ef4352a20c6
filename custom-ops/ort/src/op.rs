//! The host's callback table for one (operator, element type) pair.

use crate::API_VERSION;
use crate::api::Api;
use crate::context::{KernelContext, KernelInfo, ShapeContext};
use crate::element::onnx_type;
use crate::failure::Failure;
use crate::guard::guard;
use crate::infer;
use crate::notice;
use crate::settings::Settings;
use moh_operators::{DType, ElementType, Operator};
use ort_sys::{
    ONNXTensorElementDataType, OrtApi, OrtCustomOp, OrtCustomOpInputOutputCharacteristic, OrtKernelContext,
    OrtKernelInfo, OrtMemType, OrtShapeInferContext, OrtStatusPtr,
};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// A node's kernel on one provider: created once per session, run at every call, also concurrently.
pub(crate) trait NodeKernel: Sized + Send + Sync {
    /// The provider's name; `None` for the CPU.
    const PROVIDER: Option<&'static CStr>;

    /// Reads and checks the node's attributes and known shapes.
    fn new(
        api: Api,
        operator: &'static Operator,
        dtype: DType,
        settings: Settings,
        info: &KernelInfo<'_>,
    ) -> Result<Self, Failure>;

    /// The API of the session's host.
    fn api(&self) -> Api;

    /// Runs the operator on the node's inputs.
    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure>;
}

/// An operator for one element type on one provider. Among the registrations of a name, hosts select by the types of a
/// node's inputs.
#[repr(C)]
pub(crate) struct CustomOp {
    /// First, so that the host's pointer to the table is also a pointer to the whole struct.
    table: OrtCustomOp,
    /// Hosts pass the API only to the callback `CreateKernelV2`.
    api: Api,
    operator: &'static Operator,
    dtype: DType,
    settings: Settings,
    name: CString,
    /// Why the operator has no CUDA kernel, for the warning if it runs on the CPU while the CUDA provider is loaded.
    without_cuda: Option<String>,
}

impl CustomOp {
    pub(crate) fn new<K: NodeKernel>(
        api: Api,
        operator: &'static Operator,
        dtype: DType,
        settings: Settings,
        without_cuda: Option<String>,
    ) -> CustomOp {
        // SAFETY: the struct has a number and optional function pointers, for which zeros mean 0 and None.
        let empty: OrtCustomOp = unsafe { std::mem::zeroed() };
        let table = OrtCustomOp {
            version: API_VERSION,
            GetName: Some(name),
            GetExecutionProviderType: Some(execution_provider::<K>),
            GetInputType: Some(input_type),
            GetInputTypeCount: Some(input_count),
            GetOutputType: Some(output_type),
            GetOutputTypeCount: Some(output_count),
            GetInputCharacteristic: Some(input_characteristic),
            GetOutputCharacteristic: Some(output_characteristic),
            GetInputMemoryType: Some(input_memory),
            GetVariadicInputMinArity: Some(no_variadic),
            GetVariadicInputHomogeneity: Some(no_variadic),
            GetVariadicOutputMinArity: Some(no_variadic),
            GetVariadicOutputHomogeneity: Some(no_variadic),
            CreateKernelV2: Some(create_kernel::<K>),
            KernelComputeV2: Some(compute::<K>),
            KernelDestroy: Some(destroy::<K>),
            InferOutputShapeFn: Some(infer_output_shape),
            GetStartVersion: Some(start_version),
            // Null: callbacks without a status, which the V2 callbacks above replace, and callbacks of later API
            // versions.
            ..empty
        };
        let name = CString::new(operator.name).unwrap_or_default();
        CustomOp { table, api, operator, dtype, settings, name, without_cuda }
    }

    /// The table for the host; valid as long as self.
    pub(crate) fn as_ptr(&self) -> *const OrtCustomOp {
        ptr::from_ref(self).cast()
    }

    /// # Safety
    /// `op` was returned by `as_ptr`, and the operator is alive.
    unsafe fn from_ptr<'a>(op: *const OrtCustomOp) -> &'a CustomOp {
        // SAFETY: the table is the first field of a CustomOp, and the pointer was made from the whole struct.
        unsafe { &*op.cast() }
    }

    fn input_type(&self, index: usize) -> ONNXTensorElementDataType {
        let operand = self.operator.inputs.get(index);
        operand.map_or(ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, |o| self.element_type(o.ty))
    }

    fn element_type(&self, ty: ElementType) -> ONNXTensorElementDataType {
        onnx_type(ty.dtype(self.dtype))
    }
}

// The host passes to each callback an operator from `as_ptr`, which is never freed.

unsafe extern "system" fn name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: see the comment at the start of the callbacks.
    unsafe { CustomOp::from_ptr(op) }.name.as_ptr()
}

/// Null selects the CPU provider.
unsafe extern "system" fn execution_provider<K: NodeKernel>(_: *const OrtCustomOp) -> *const c_char {
    K::PROVIDER.map_or(ptr::null(), CStr::as_ptr)
}

unsafe extern "system" fn input_type(op: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    // SAFETY: as above.
    unsafe { CustomOp::from_ptr(op) }.input_type(index)
}

unsafe extern "system" fn input_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: as above.
    unsafe { CustomOp::from_ptr(op) }.operator.inputs.len()
}

unsafe extern "system" fn output_type(op: *const OrtCustomOp, _: usize) -> ONNXTensorElementDataType {
    // SAFETY: as above.
    let op = unsafe { CustomOp::from_ptr(op) };
    op.element_type(op.operator.output.ty)
}

unsafe extern "system" fn output_count(_: *const OrtCustomOp) -> usize {
    1
}

unsafe extern "system" fn input_characteristic(
    op: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    // SAFETY: as above.
    let operator = unsafe { CustomOp::from_ptr(op) }.operator;
    match operator.inputs.get(index).is_some_and(|input| input.optional) {
        true => OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL,
        false => OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED,
    }
}

unsafe extern "system" fn output_characteristic(
    _: *const OrtCustomOp,
    _: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED
}

unsafe extern "system" fn input_memory(_: *const OrtCustomOp, _: usize) -> OrtMemType {
    OrtMemType::OrtMemTypeDefault
}

unsafe extern "system" fn no_variadic(_: *const OrtCustomOp) -> c_int {
    0
}

unsafe extern "system" fn start_version(op: *const OrtCustomOp) -> c_int {
    // SAFETY: as above.
    unsafe { CustomOp::from_ptr(op) }.operator.since as c_int
}

unsafe extern "system" fn create_kernel<K: NodeKernel>(
    op: *const OrtCustomOp,
    _: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: as above.
    let op = unsafe { CustomOp::from_ptr(op) };
    guard(op.api, || {
        // SAFETY: the node belongs to the host and is alive during this call.
        let info = unsafe { KernelInfo::new(op.api, info) };
        let made = K::new(op.api, op.operator, op.dtype, op.settings, &info)?;
        if let Some(reason) = &op.without_cuda {
            notice::runs_on_cpu(&info, reason);
        }
        // SAFETY: the host passes a valid pointer to write to.
        unsafe { kernel.write(Box::into_raw(Box::new(made)).cast()) };
        Ok(())
    })
}

/// May be called concurrently for several runs of a session.
unsafe extern "system" fn compute<K: NodeKernel>(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: created by `create_kernel`, shared by concurrent calls, and destroyed by the host after the last one.
    let kernel = unsafe { &*kernel.cast::<K>() };
    guard(kernel.api(), || {
        // SAFETY: the context belongs to the host and is alive during this call.
        kernel.compute(&unsafe { KernelContext::new(kernel.api(), context) })
    })
}

unsafe extern "system" fn destroy<K: NodeKernel>(kernel: *mut c_void) {
    // SAFETY: created by `create_kernel` and destroyed once.
    let kernel = unsafe { Box::from_raw(kernel.cast::<K>()) };
    // This callback cannot report an error.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(kernel)));
}

unsafe extern "system" fn infer_output_shape(
    op: *const OrtCustomOp,
    context: *mut OrtShapeInferContext,
) -> OrtStatusPtr {
    // SAFETY: as above.
    let op = unsafe { CustomOp::from_ptr(op) };
    guard(op.api, || {
        // SAFETY: the context belongs to the host and is alive during this call.
        infer::infer(op.operator, &unsafe { ShapeContext::new(op.api, context) })
    })
}
