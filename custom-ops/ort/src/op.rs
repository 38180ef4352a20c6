//! One (operator, element type) as the host's table of callbacks.

use crate::API_VERSION;
use crate::api::Api;
use crate::context::{KernelContext, KernelInfo, ShapeContext};
use crate::element::onnx_type;
use crate::failure::Failure;
use crate::guard::guard;
use crate::infer;
use crate::notice;
use crate::settings::Settings;
use moh_operators::{DType, ElementType, Operator, VERSION};
use ort_sys::{
    ONNXTensorElementDataType, OrtApi, OrtCustomOp, OrtCustomOpInputOutputCharacteristic, OrtKernelContext,
    OrtKernelInfo, OrtMemType, OrtShapeInferContext, OrtStatusPtr,
};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// A node's kernel on one provider: made once a session, run at every call, also by several threads at a time.
pub(crate) trait NodeKernel: Sized + Send + Sync {
    /// The provider's name; `None` is the CPU.
    const PROVIDER: Option<&'static CStr>;

    /// Reads and checks what is known of the node.
    fn new(
        api: Api,
        operator: &'static Operator,
        dtype: DType,
        settings: Settings,
        info: &KernelInfo<'_>,
    ) -> Result<Self, Failure>;

    /// The functions of the session's host.
    fn api(&self) -> Api;

    /// Runs the operator on the node's inputs.
    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure>;
}

/// An operator for one element type on one provider. Hosts pick among the registrations of a name by the types of a node's inputs.
#[repr(C)]
pub(crate) struct CustomOp {
    /// First, so that the host's pointer to the table is a pointer to the whole.
    table: OrtCustomOp,
    /// Hosts hand the API to no callback but `CreateKernelV2`.
    api: Api,
    operator: &'static Operator,
    dtype: DType,
    settings: Settings,
    name: CString,
    /// Why the operator has no CUDA kernel: said where it runs on the CPU beside a CUDA provider.
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
        // SAFETY: a number and optional function pointers, for which zeros are the values 0 and None.
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
            // Null: the callbacks without a status, which V2 replaces, the last version, and what later API versions added.
            ..empty
        };
        let name = CString::new(operator.name).unwrap_or_default();
        CustomOp { table, api, operator, dtype, settings, name, without_cuda }
    }

    /// The table, for the host; valid as long as self.
    pub(crate) fn as_ptr(&self) -> *const OrtCustomOp {
        ptr::from_ref(self).cast()
    }

    /// # Safety
    /// `op` is what `as_ptr` returned, and the operator is alive.
    unsafe fn from_ptr<'a>(op: *const OrtCustomOp) -> &'a CustomOp {
        // SAFETY: the table is the first field of a CustomOp, and the pointer was made from the whole.
        unsafe { &*op.cast() }
    }

    fn input_type(&self, index: usize) -> ONNXTensorElementDataType {
        let operand = self.operator.inputs.get(index);
        operand.map_or(ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, |o| self.element_type(o.ty))
    }

    fn element_type(&self, ty: ElementType) -> ONNXTensorElementDataType {
        onnx_type(match ty {
            ElementType::T => self.dtype,
            ElementType::Float32 => DType::F32,
        })
    }
}

// The host passes to each callback an operator that it got from `as_ptr`, which lives for good.

unsafe extern "system" fn name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: see above.
    unsafe { CustomOp::from_ptr(op) }.name.as_ptr()
}

/// Null is the CPU provider.
unsafe extern "system" fn execution_provider<K: NodeKernel>(_: *const OrtCustomOp) -> *const c_char {
    K::PROVIDER.map_or(ptr::null(), CStr::as_ptr)
}

unsafe extern "system" fn input_type(op: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    // SAFETY: see above.
    unsafe { CustomOp::from_ptr(op) }.input_type(index)
}

unsafe extern "system" fn input_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: see above.
    unsafe { CustomOp::from_ptr(op) }.operator.inputs.len()
}

unsafe extern "system" fn output_type(op: *const OrtCustomOp, _: usize) -> ONNXTensorElementDataType {
    // SAFETY: see above.
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
    // SAFETY: see above.
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

unsafe extern "system" fn start_version(_: *const OrtCustomOp) -> c_int {
    VERSION as c_int
}

unsafe extern "system" fn create_kernel<K: NodeKernel>(
    op: *const OrtCustomOp,
    _: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: see above.
    let op = unsafe { CustomOp::from_ptr(op) };
    guard(op.api, || {
        // SAFETY: the host's node, alive during this call.
        let info = unsafe { KernelInfo::new(op.api, info) };
        let made = K::new(op.api, op.operator, op.dtype, op.settings, &info)?;
        if let Some(reason) = &op.without_cuda {
            notice::runs_on_cpu(&info, reason);
        }
        // SAFETY: the host passes a place for the pointer.
        unsafe { kernel.write(Box::into_raw(Box::new(made)).cast()) };
        Ok(())
    })
}

/// Called for several runs of a session at the same time.
unsafe extern "system" fn compute<K: NodeKernel>(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: made by `create_kernel`, shared by concurrent calls, and destroyed by the host after the last one.
    let kernel = unsafe { &*kernel.cast::<K>() };
    guard(kernel.api(), || {
        // SAFETY: the host's context, alive during this call.
        kernel.compute(&unsafe { KernelContext::new(kernel.api(), context) })
    })
}

unsafe extern "system" fn destroy<K: NodeKernel>(kernel: *mut c_void) {
    // SAFETY: made by `create_kernel` and destroyed once.
    let kernel = unsafe { Box::from_raw(kernel.cast::<K>()) };
    // The host has no way to hear of a failure here.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(kernel)));
}

unsafe extern "system" fn infer_output_shape(
    op: *const OrtCustomOp,
    context: *mut OrtShapeInferContext,
) -> OrtStatusPtr {
    // SAFETY: see above.
    let op = unsafe { CustomOp::from_ptr(op) };
    guard(op.api, || {
        // SAFETY: the host's context, alive during this call.
        infer::infer(op.operator, &unsafe { ShapeContext::new(op.api, context) })
    })
}
